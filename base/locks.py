"""Lock files of calls. Each file stands for a thing that one call at a time may use.

The kernel releases a lock when its holder dies. This module has its own lock objects, because the
objects of `filelock` would double the cost of an address (docs/developers/design.md).
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor, unlock_descriptor

from base import files, interrupts
from base.interrupts import wait_until

TIMEOUT = 60.0  # seconds; no call holds a lock for longer
_PAUSE, _LONGEST_PAUSE = 0.01, 0.05  # seconds between two attempts
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Busy(Exception):
    """Another call or process holds the lock."""


class LockFile:
    """A lock file. A `with` block holds its lock. Not reentrant.

    Args:
        path: the file. Missing directories above it are created (0700).
        what: names the locked thing in error texts.
        timeout: seconds to wait while another call holds the lock. With 0 there is one attempt.
        keep: keep the file. Otherwise the holder removes the file at the end.
        stay_open: keep the file open between two uses, until `close`. Only one thread at a time
            may use the object.
        pause: seconds between the first two attempts. Pauses double up to `longest_pause`.

    `with` raises Busy after `timeout`, OSError if the file cannot be used, and Terminated if the
    call is interrupted. While the lock is held, `descriptor` is the descriptor of the file.
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
        self.descriptor = -1

    def acquire(self, timeout: float | None = None) -> None:
        """Wait for the lock up to `timeout` seconds. Raises Busy, OSError, Terminated."""
        interrupts.checkpoint()
        seconds = self._timeout if timeout is None else timeout
        locked = self._attempt()
        if not locked and seconds > 0:
            locked = wait_until(self._attempt, seconds, *self._pauses)
        if not locked:
            wait = f" after a wait of {seconds:g} s" if seconds > 0 else ""
            raise Busy(
                f"another call for {self._what} still holds {self._path}{wait}: try again later"
            )

    def release(self) -> None:
        try:
            if not self._keep:
                with suppress(FileNotFoundError):
                    os.unlink(self._path)  # noqa: PTH108 - a Path costs more than the call
            # Closing alone is not enough: a child that was just forked still has the descriptor.
            unlock_descriptor(self.descriptor)
        finally:
            if not self._stay_open:
                self.close()

    def close(self) -> None:
        """Close the file. The lock must not be held."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _attempt(self) -> bool:
        """Open and lock the file. Returns False if another process or thread has the lock."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            descriptor = files.create(self._path, _FLAGS, 0o600)
        try:
            if lock_descriptor(descriptor, blocking=False) and os.path.samestat(
                os.fstat(descriptor),
                os.stat(self._path),  # noqa: PTH116 - cheaper
            ):
                self.descriptor = descriptor
                return True
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        # Another holder has the lock, or the previous holder has removed the file.
        os.close(descriptor)
        return False


locked = LockFile  # for `with`


def remove_abandoned(directory: Path) -> None:
    """Remove the lock files in `directory` whose holders were killed."""
    with suppress(OSError):
        for path in directory.iterdir():
            with suppress(Busy, OSError), locked(path, "an ended call", timeout=0.0):
                pass


@contextmanager
def directory_locked(directory: Path) -> Iterator[None]:
    """Hold a lock on the directory itself in the `with` block. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock_descriptor(descriptor)
        yield
    finally:
        os.close(descriptor)


def shared(path: Path | str) -> int:
    """Take a shared lock. Returns a descriptor. Closing the descriptor releases the lock.

    Raises OSError, and Busy if a process holds an exclusive lock.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # filelock has no shared file locks
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise Busy(f"another process holds {path}") from None
        raise
    return descriptor
