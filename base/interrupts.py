"""What ends a call before its time, and where that may happen.

In a process of its own, SIGTERM raises Terminated wherever the call is. In an agent another
thread ends a call (`Call.end`: its client has gone, its deadline is over). A thread cannot be
interrupted, so there the call looks by itself, at each `checkpoint`. Plugins need not know which
of the two they run in.

Whether a call's client is still there is asked of the kernel, under the lock of the attachment:
by `require_client` before the work, by `hold` behind it. A runtime sends DEL only after the
launcher of the ADD has ended, the kernel closes the launcher's connection before the runtime can
see that end, and the DEL waits for the same lock. So an ADD that still has its client at `hold`
was not followed by a DEL yet, and an ADD that has lost its client is undone before the DEL looks.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

_armed = False


class Terminated(BaseException):
    """The call is to end now: unwind. Not an Exception, so no handler takes it for a failure."""


class Call:
    """One call in an agent. A call that is not `endable` (a DEL) runs to its own end once begun.

    `gone` asks the kernel whether the client has hung up.
    """

    def __init__(self, endable: bool, gone: Callable[[], bool] = lambda: False) -> None:
        self._gone = gone
        self._lock = threading.Lock()
        self._settled = not endable  # from here on it ends as it is going to end
        self._ended = False
        self._held = 0  # only the call's own thread counts here

    def end(self) -> bool:
        """Ask the call to unwind, from any thread. False: it will come to its own end."""
        with self._lock:
            if self._settled:
                return False
            self._ended = True
            return True

    def _checkpoint(self) -> None:
        if self._ended and not self._held:
            raise Terminated

    def _require_client(self) -> None:
        if self._gone():
            raise Terminated

    def _settle(self) -> None:
        with self._lock:
            if self._settled:
                return
            if self._ended or self._gone():
                self._ended = True
                raise Terminated
            self._settled = True

    @contextmanager
    def _hold(self) -> Iterator[None]:
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1


_call: ContextVar[Call | None] = ContextVar("call", default=None)


@contextmanager
def serving(call: Call) -> Iterator[None]:
    """The block is that call, in this thread."""
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


def arm() -> None:
    """From here on SIGTERM raises Terminated: for a process that serves one call."""
    global _armed
    signal.signal(signal.SIGTERM, _terminate)
    _armed = True


def require_client() -> None:
    """Terminated if the client has gone, of a DEL too: for where nothing was begun yet.

    What its runtime does next, another ADD for example, may be done already.
    """
    call = _call.get()
    if call is not None:
        call._require_client()


def hold() -> None:
    """From here on the call ends as it is going to end.

    Terminated if it is to end already, or if its client has gone: then an ADD undoes its work.
    For a call that holds the lock of its attachment.
    """
    call = _call.get()
    if call is not None:
        call._settle()
    elif _armed:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


@contextmanager
def held() -> Iterator[None]:
    """The block is not interrupted; in a process, a signal that came arrives at its end."""
    call = _call.get()
    if call is not None:
        with call._hold():
            yield
        return
    if not _armed:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def checkpoint() -> None:
    """A place where the call may end: wherever it waits, every now and then."""
    call = _call.get()
    if call is not None:
        call._checkpoint()


def _terminate(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the undoing
    raise Terminated
