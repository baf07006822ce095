"""SIGTERM ends a call by an exception that unwinds it, where it may, and waits where it must.

Only a process that serves one call arms this: in an agent's threads, and in tests, signals are
somebody else's business and nothing here has any effect.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_armed = False


class Terminated(BaseException):
    """SIGTERM arrived: unwind. Not an Exception, so that no handler takes it for a failure."""


def arm() -> None:
    """From here on SIGTERM raises Terminated."""
    global _armed
    signal.signal(signal.SIGTERM, _terminate)
    _armed = True


def hold() -> None:
    """From here on the call ends as it is going to end."""
    if _armed:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


@contextmanager
def held() -> Iterator[None]:
    """The block is not interrupted; a signal that came meanwhile arrives at its end."""
    if not _armed:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _terminate(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the undoing
    raise Terminated
