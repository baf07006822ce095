"""Lock files: one call at a time, on this node, for what a file stands for.

The lock is flock(2)'s, so the kernel releases it when its holder dies.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from base import interrupts
from base.waiting import wait_until

TIMEOUT = 60.0  # seconds; no call holds a lock for longer
_PAUSE, _LONGEST_PAUSE = 0.01, 0.05  # seconds between two attempts
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Busy(Exception):
    """Another call did not end in time."""


class LockFile:
    """The lock file `path`, to be held by `with`. Not reentrant.

    Args:
        path: the lock file; missing directories above it are created (0700).
        what: what the file stands for, for the error text.
        timeout: seconds to wait for another holder; with 0 there is one attempt.
        keep: keep the file and its inode. Otherwise the holder removes the file at the end, so
            that no files accumulate, and a waiter opens a new one.
        stay_open: keep the file open between two uses, until `close`. It is opened again if
            another file has its path by then. One thread at a time may use the object.
        pause: seconds between two attempts at first; they double up to `longest_pause`.

    `with` raises Busy after `timeout`, OSError if the file cannot be used, Terminated if the call
    ends.
    """

    def __init__(
        self,
        path: Path | str,
        what: str,
        timeout: float = TIMEOUT,
        *,
        keep: bool = False,
        stay_open: bool = False,
        pause: float = _PAUSE,
        longest_pause: float = _LONGEST_PAUSE,
    ) -> None:
        self._path = os.fspath(path)
        self._what = what
        self._timeout = timeout
        self._keep = keep
        self._stay_open = stay_open
        self._pauses = pause, longest_pause
        self._descriptor = -1

    def acquire(self, timeout: float | None = None) -> None:
        """Wait for the lock, if given for another time. Raises Busy, OSError, Terminated."""
        interrupts.checkpoint()
        seconds = self._timeout if timeout is None else timeout
        locked = self._attempt()
        if not locked and seconds > 0:
            locked = wait_until(self._attempt, seconds, *self._pauses)
        if not locked:
            raise Busy(
                f"another call for {self._what} is still running after {seconds:g} s "
                f"(it holds {self._path}): try again later"
            )

    def release(self) -> None:
        """Let others have the lock."""
        try:
            if not self._keep:
                with suppress(FileNotFoundError):
                    os.unlink(self._path)  # noqa: PTH108 - a Path costs more than the call
            # Closing is not enough: a child that was just forked still has the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            if not self._stay_open:
                self.close()

    def close(self) -> None:
        """Close the file of a lock that is not held."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _attempt(self) -> bool:
        """Open the file and lock it; False if another process or thread has the lock."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            descriptor = _open(self._path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):  # noqa: PTH116 - cheaper
                self._descriptor = descriptor
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another holder, or the previous one has removed the file meanwhile
        return False


locked = LockFile  # reads better behind `with`


def remove_abandoned(directory: Path) -> None:
    """Remove the lock files in `directory` that no process holds: of holders that were killed."""
    with suppress(OSError):
        for path in directory.iterdir():
            with suppress(Busy, OSError), locked(path, "an ended call", timeout=0.0):
                pass


def _open(path: str) -> int:
    try:
        return os.open(path, _FLAGS, 0o600)
    except FileNotFoundError:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, _FLAGS, 0o600)
