"""How a call is interrupted, where that may happen, and how it waits for a condition.

Another thread, or a signal handler of a process that serves one call, ends the call (`Call.end`):
its client has hung up, its deadline is over, or SIGTERM came. Python cannot interrupt a thread, so
the call checks for this at each `checkpoint`.

Under the attachment's lock, a call asks the kernel twice whether its client is still connected.
`require_client` does this before the work, `hold` after the work. A runtime sends DEL only after
the ADD's launcher has ended. The kernel closes the launcher's connection before the runtime sees
that end, and the DEL waits for the same lock. So no DEL has followed an ADD that still has its
client at `hold`. An ADD without a client is undone before the DEL reads the journal.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Generic, TypeVar

from base.loop import Backoff

T = TypeVar("T")
V = TypeVar("V")


class Bound(Generic[V, T]):
    """`with` sets a context variable, returns the value, and resets the variable at the end.

    A generator (contextlib) would cost three times as much, and an agent sets three such variables
    in each call.
    """

    def __init__(self, variable: ContextVar[V | T], value: T) -> None:
        self._variable = variable
        self._value = value
        self._token: Token[V | T] | None = None

    def __enter__(self) -> T:
        self._token = self._variable.set(self._value)
        return self._value

    def __exit__(self, *error: object) -> None:
        if self._token is not None:
            self._variable.reset(self._token)


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
    """One call.

    Args:
        endable: the call can be interrupted; False for a DEL.
        gone: asks the kernel whether the client has hung up.

    `aside` returns a context manager: in its block other calls may use this call's worker.
    """

    def __init__(self, endable: bool, gone: Callable[[], bool] = lambda: False) -> None:
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        self._gone = gone
        self._lock = threading.RLock()  # a signal may come while its thread has it
        self._settled = not endable  # it can no longer be interrupted
        self._ended = False
        self._holding = _Holding()

    def end(self) -> bool:
        """Interrupt the call, from any thread or signal handler.

        Returns False if it is too late.
        """
        with self._lock:
            if self._settled:
                return False
            self._ended = True
            return True

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
    """In the block this thread serves that call."""
    return Bound(_call, call)


def require_client() -> None:
    """Raise Terminated if the client has gone, also in a DEL. Call this before any work.

    The runtime may already have gone on, for example with another ADD.
    """
    call = _call.get()
    if call is not None and call._gone():
        raise Terminated


def hold() -> None:
    """From now on the call cannot be interrupted.

    Raises Terminated if it was interrupted already or its client has gone; an ADD then undoes its
    work. The caller must hold its attachment's lock.
    """
    call = _call.get()
    if call is not None:
        call._settle()


def held() -> AbstractContextManager[None]:
    """In the block the call is not interrupted."""
    call = _call.get()
    return nullcontext() if call is None else call._holding


def checkpoint() -> None:
    """Raise Terminated if the call was interrupted. Code that waits calls this repeatedly."""
    call = _call.get()
    if call is not None and call._ended and not call._holding.depth:
        raise Terminated


def waiting() -> AbstractContextManager[None]:
    """Inside `with` the call only waits, so other calls of the agent are not delayed.

    Code that may wait for longer than some milliseconds waits in such a block.
    """
    call = _call.get()
    return nullcontext() if call is None else call.aside()


def wait_until(
    condition: Callable[[], T], seconds: float, pause: float = 0.02, longest_pause: float = 0.1
) -> T:
    """Call `condition` until its answer is true, for at most `seconds`. Returns the last answer.

    The first call is at once. Pauses start at `pause` seconds and double up to `longest_pause`.
    Raises the errors of `condition`, and Terminated if the call is interrupted.
    """
    deadline = time.monotonic() + seconds
    if answer := condition():
        return answer
    backoff = Backoff(pause, longest_pause)
    with waiting():
        while time.monotonic() < deadline:
            checkpoint()
            time.sleep(min(backoff.pause(), max(0.0, deadline - time.monotonic())))
            if answer := condition():
                break
    return answer
