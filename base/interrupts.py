"""How a call is interrupted, and where that may happen.

In a process that serves one call, SIGTERM raises Terminated wherever the call is. In an agent
another thread ends the call (`Call.end`, when the client has hung up or the deadline is over).
Python cannot interrupt a thread, so the call checks for this at each `checkpoint`. Plugins work
the same way in both.

A call asks the kernel whether its client is still connected, under the attachment's lock: with
`require_client` before the work and with `hold` after it. A runtime sends DEL only after the
ADD's launcher has ended. The kernel closes the launcher's connection before the runtime sees that
end, and the DEL waits for the same lock. So if an ADD still has its client at `hold`, no DEL has
followed it; if it has lost its client, it is undone before the DEL reads the journal.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType

from base.context import Bound

_armed = False


class Terminated(BaseException):
    """The call must end now and undo its work.

    Not an Exception, so that no handler takes it for a failure of one step.
    """


class _Holding:
    """Blocks that must not be interrupted; used by the call's own thread only."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


class Call:
    """One call in an agent.

    Args:
        endable: the call can be interrupted; False for a DEL.
        gone: asks the kernel whether the client has hung up.

    `aside` returns a context manager: in its block other calls may use this call's worker.
    """

    def __init__(self, endable: bool, gone: Callable[[], bool] = lambda: False) -> None:
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        self._gone = gone
        self._lock = threading.Lock()
        self._settled = not endable  # it can no longer be interrupted
        self._ended = False
        self._holding = _Holding()

    def end(self) -> bool:
        """Interrupt the call, from any thread. False if it can no longer be interrupted."""
        with self._lock:
            if self._settled:
                return False
            self._ended = True
            return True

    def _checkpoint(self) -> None:
        if self._ended and not self._holding.depth:
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


_call: ContextVar[Call | None] = ContextVar("call", default=None)


def serving(call: Call) -> Bound[None, Call]:
    """This thread serves that call in the block."""
    return Bound(_call, call)


def arm() -> None:
    """Let SIGTERM raise Terminated from now on, in a process that serves one call."""
    global _armed
    signal.signal(signal.SIGTERM, _terminate)
    _armed = True


def require_client() -> None:
    """Raise Terminated if the client has gone, also in a DEL. Call this before any work.

    The runtime may already have gone on, for example with another ADD.
    """
    call = _call.get()
    if call is not None:
        call._require_client()


def hold() -> None:
    """From here the call can no longer be interrupted.

    Raises Terminated if it was interrupted already or its client has gone; an ADD then undoes its
    work. The caller must hold its attachment's lock.
    """
    call = _call.get()
    if call is not None:
        call._settle()
    elif _armed:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def held() -> AbstractContextManager[None]:
    """Do not interrupt the block. In a process, a pending SIGTERM is delivered at its end."""
    call = _call.get()
    return call._holding if call is not None else _without_sigterm()


@contextmanager
def _without_sigterm() -> Iterator[None]:
    if not _armed:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def checkpoint() -> None:
    """Raise Terminated if the call was interrupted. Anything that waits calls this repeatedly."""
    call = _call.get()
    if call is not None:
        call._checkpoint()


def waiting() -> AbstractContextManager[None]:
    """The call waits in the block, and delays no other call of its agent meanwhile.

    Code that may wait for longer than some milliseconds waits in such a block.
    """
    call = _call.get()
    return nullcontext() if call is None else call.aside()


def _terminate(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the undo
    raise Terminated
