"""Lock files: one call at a time, on this node, for what a file stands for.

The lock is flock(2)'s, so the kernel releases it when its holder dies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from base import interrupts
from base.waiting import wait_until

TIMEOUT = 60.0  # seconds; no call holds a lock for longer
_PAUSE, _LONGEST_PAUSE = 0.01, 0.05  # seconds between two attempts


class Busy(Exception):
    """Another call did not end in time."""


@contextmanager
def locked(
    path: Path,
    what: str,
    timeout: float = TIMEOUT,
    *,
    keep: bool = False,
    pause: float = _PAUSE,
    longest_pause: float = _LONGEST_PAUSE,
) -> Iterator[None]:
    """Hold the lock file `path` for the block. Not reentrant.

    Args:
        path: the lock file; missing directories above it are created (0700).
        what: what the file stands for, for the error text.
        timeout: seconds to wait for another holder; with 0 there is one attempt.
        keep: keep the file and its inode. Otherwise the holder removes the file at the end, so
            that no files accumulate, and a waiter opens a new one.
        pause: seconds between two attempts at first; they double up to `longest_pause`.

    Raises Busy after `timeout`, OSError if the file cannot be used, Terminated if the call ends.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    interrupts.checkpoint()
    lock = FileLock(path, mode=0o600, thread_local=False)
    if not wait_until(lambda: _acquired(lock), timeout, pause, longest_pause):
        raise Busy(
            f"another call for {what} is still running after {timeout:g} s "
            f"(it holds {path}): try again later"
        )
    try:
        yield
    finally:
        if not keep:
            path.unlink(missing_ok=True)
        lock.release()


def _acquired(lock: FileLock) -> bool:
    """Whether one attempt succeeds. filelock makes sure that the file still has its name."""
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True
