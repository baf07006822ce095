"""One writer at a time: flock(2) with a deadline.

`filelock` takes the same lock on the same file, but importing it costs 25 ms, a third of a
call; this is all of it that a node needs. The kernel drops the lock when its holder dies.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cni.spec.errors import CNIError, Code

_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.02  # seconds; a transaction takes about 3 ms


@contextmanager
def exclusive(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock file `path`. CNIError 11 if someone else holds it for `timeout` seconds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _acquire(descriptor, path, timeout)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    pause = _SHORTEST_PAUSE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            return
        if time.monotonic() >= deadline:
            raise CNIError(
                Code.TRY_AGAIN,
                f"the lock {path} of the address store has been held by another process for "
                f"{timeout:g} s: nothing was changed; try again, and see who holds it "
                f"(fuser {path})",
            )
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)
