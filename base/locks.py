"""Locks that need not outlive a boot: a file each, which goes with its lock."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from base import interrupts
from base.waiting import wait_until

TIMEOUT = 60.0  # seconds; no live call holds any of them for longer
_PAUSE, _LONGEST_PAUSE = 0.01, 0.1  # seconds between two tries
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Busy(Exception):
    """Another call did not end in time."""


@contextmanager
def locked(path: Path, whose: str, timeout: float = TIMEOUT) -> Iterator[None]:
    """One call at a time for what `path` stands for, in words `whose`. Raises Busy, OSError.

    The file is removed with the lock, so that none are left over a node's life.
    """
    name = str(path)
    descriptor: int | None = None

    def attempt() -> bool:
        nonlocal descriptor
        descriptor = _taken(name)
        return descriptor is not None

    interrupts.checkpoint()
    if not wait_until(attempt, timeout, _PAUSE, _LONGEST_PAUSE) or descriptor is None:
        raise Busy(
            f"another call for {whose} is still running after {timeout:g} s "
            f"(it holds {path}): try again later"
        )
    try:
        yield
    finally:
        try:
            with suppress(FileNotFoundError):
                os.unlink(name)  # noqa: PTH108 - a Path's own costs more than the call
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was just forked has a copy
        finally:
            os.close(descriptor)


def _taken(name: str) -> int | None:
    """An open descriptor that has the lock; None if another has it."""
    while True:
        descriptor = _opened(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The former holder may have removed this file after we had opened it.
            if os.path.samestat(os.fstat(descriptor), os.stat(name)):  # noqa: PTH116
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(name: str) -> int:
    try:
        return os.open(name, _FLAGS, 0o600)
    except FileNotFoundError:
        Path(name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(name, _FLAGS, 0o600)
