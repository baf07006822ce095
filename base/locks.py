"""Locks that need not outlive a boot: a file each, gone when nobody holds it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from base import interrupts

TIMEOUT = 60.0  # seconds; no live call holds any of them for longer
_SLICE, _SHORT, _LONG = 0.3, 0.01, 0.1  # seconds of waiting, and between two looks in it


class Busy(Exception):
    """Another call did not end in time."""


@contextmanager
def locked(path: Path, whose: str, timeout: float = TIMEOUT) -> Iterator[None]:
    """One call at a time for what `path` stands for, in words `whose`. Raises Busy.

    The file goes away with the lock: a waiter that finds its file unlinked tries again
    (filelock looks), so nothing accumulates over a node's life.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(path)
    deadline = time.monotonic() + timeout
    pause = _SHORT
    while True:
        interrupts.checkpoint()  # a call that nobody waits for any more waits no longer
        slice_ = min(_SLICE, max(0.0, deadline - time.monotonic()))
        try:
            lock.acquire(timeout=slice_, poll_interval=pause)
            break
        except Timeout:
            pause = _LONG
        if time.monotonic() >= deadline:
            raise Busy(
                f"another call for {whose} is still running after {timeout:g} s "
                f"(it holds {path}): try again later"
            )
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
