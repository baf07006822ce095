"""One writer at a time, with a deadline. The kernel drops the lock when its holder dies."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from cni.spec.errors import CNIError, Code

_PAUSE = 0.005  # seconds between two looks; a transaction takes about 3 ms


@contextmanager
def exclusive(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock file `path`. CNIError 11 if someone else holds it for `timeout` seconds."""
    lock = FileLock(path, timeout=timeout, poll_interval=_PAUSE, mode=0o600, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise CNIError(
            Code.TRY_AGAIN,
            f"the lock {path} of the address store has been held by another process for "
            f"{timeout:.2g} s: nothing was changed; try again, and see who holds it (fuser {path})",
        ) from None
    try:
        yield
    finally:
        lock.release()
