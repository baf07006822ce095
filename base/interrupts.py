"""Interrupts calls, and lets calls wait for a condition.

`Call.end` interrupts a call after a hang-up of the client, a deadline or SIGTERM. Python cannot
interrupt a thread, so the call itself checks for an interruption at each `checkpoint`.

While a call holds its attachment's lock, it asks the kernel twice whether its client is connected.
`require_client` asks before the work, and `hold` asks after the work. A runtime sends a DEL only
after it has seen the end of the ADD's launcher. The kernel closes the launcher's connection before
the runtime sees that the launcher has exited. So if the client is connected at `hold`, the runtime
has not sent a DEL. If the client is gone, the ADD undoes its work. A DEL waits for the lock, and
then reads the journal.
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
    """Sets a context variable for a `with` block.

    contextlib.contextmanager would cost three times as much, in each call.
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
    """The call must end now and undo its work. `except Exception` does not catch this."""


class _Holding:
    """Counts the nested blocks that must not be interrupted. Only the call's thread uses it."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


class Call:
    """A call that a thread serves.

    Args:
        endable: whether the call can be interrupted; False for a DEL.
        gone: asks the kernel whether the client has hung up.

    In a block of `aside`, another call may have this call's place (`agent.serve.workers`).
    """

    def __init__(self, endable: bool, gone: Callable[[], bool] = lambda: False) -> None:
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        self._gone = gone
        self._lock = threading.RLock()  # a signal handler may run while its thread has the lock
        self._settled = not endable  # whether the call can no longer be interrupted
        self._ended = False
        self._holding = _Holding()

    def end(self) -> bool:
        """Interrupt the call, from any thread or signal handler. Returns False if too late."""
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
    """A context in which this thread serves `call`."""
    return Bound(_call, call)


def require_client() -> None:
    """Raise Terminated if the client has gone, also in a DEL.

    Without its client the call is out of date, because the runtime may have sent another ADD.
    """
    call = _call.get()
    if call is not None and call._gone():
        raise Terminated


def hold() -> None:
    """Make the call uninterruptible. The caller must hold its attachment's lock.

    Raises Terminated if the call was interrupted already or its client has gone.
    """
    call = _call.get()
    if call is not None:
        call._settle()


def held() -> AbstractContextManager[None]:
    """A context in which the call is not interrupted."""
    call = _call.get()
    return nullcontext() if call is None else call._holding


def checkpoint() -> None:
    """Raise Terminated if the call was interrupted. Waiting code calls this repeatedly."""
    call = _call.get()
    if call is not None and call._ended and not call._holding.depth:
        raise Terminated


def waiting() -> AbstractContextManager[None]:
    """A context for a wait of more than a few milliseconds. The wait delays no other call."""
    call = _call.get()
    return nullcontext() if call is None else call.aside()


def wait_until(
    condition: Callable[[], T], seconds: float, pause: float = 0.02, longest_pause: float = 0.1
) -> T:
    """Call `condition` until its result is true, for at most `seconds`. Returns the last result.

    Pauses double from `pause` to `longest_pause` seconds. Raises Terminated on an interruption.
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
