"""Lock files: one call at a time, on this node, for what a file stands for.

The lock is flock(2)'s, so the kernel releases it when its holder dies.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from base import interrupts
from base.waiting import wait_until

TIMEOUT = 60.0  # seconds; no call holds a lock for longer
_PAUSE, _LONGEST_PAUSE = 0.01, 0.05  # seconds between two attempts
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


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
    interrupts.checkpoint()
    file = wait_until(lambda: _attempt(path), timeout, pause, longest_pause)
    if file is None:
        raise Busy(
            f"another call for {what} is still running after {timeout:g} s "
            f"(it holds {path}): try again later"
        )
    with file:
        try:
            yield
        finally:
            if not keep:
                path.unlink(missing_ok=True)
            # Closing is not enough: a child that was just forked still has the descriptor.
            fcntl.flock(file, fcntl.LOCK_UN)


def remove_abandoned(directory: Path) -> None:
    """Remove the lock files in `directory` that no process holds: of holders that were killed."""
    with suppress(OSError):
        for path in directory.iterdir():
            with suppress(Busy, OSError), locked(path, "an ended call", timeout=0.0):
                pass


def _attempt(path: Path) -> FileIO | None:
    """The file with the lock; None if another process or thread has the lock."""
    file = _open(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):  # noqa: PTH116 - cheaper
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        file.close()
        raise
    file.close()  # another holder, or the previous one has removed the file meanwhile
    return None


def _open(path: Path) -> FileIO:
    try:
        return FileIO(os.open(path, _FLAGS, 0o600), "r+")
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return FileIO(os.open(path, _FLAGS, 0o600), "r+")
