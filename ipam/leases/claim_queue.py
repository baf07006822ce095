"""The claims that ADDs wait for. All ADDs with the same want wait for one claim."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from cni.spec.errors import CNIError, Code
from ipam.leases.claim_request import PoolPending, Want

RECENT = 30.0  # seconds
MOST_KNOWN = 256  # ranges and pools: tenants name as many as they like
_LOOK_AT_POOL = 0.4  # seconds between two looks at a pool that is not ready, however many ask

WantKey = tuple[str, object, object, bool, object]
Lease = Callable[[Want, Callable[[], bool]], None]
"""Leases a block for a want, unless the second argument says that it is too late. CNIError."""


def key_of(want: Want) -> WantKey:
    """The same for two wants that one block fulfils."""
    return *want.pool, want.range.parts, want.fixed, want.sticky


class Attempt:
    """A claim, with the time (`time.monotonic`) until which each ADD waits for it.

    `error` is set if the claim is `over` and failed.
    """

    def __init__(self, want: Want) -> None:
        self.want = want
        self.until: list[float] = []
        self.over = threading.Event()
        self.error: CNIError | None = None

    def is_late(self) -> bool:
        """Whether no ADD waits any more."""
        return all(time.monotonic() > each for each in self.until)


class Attempts:
    """The pending claims, for any thread, and why the last claims failed."""

    def __init__(self, lease: Lease, look_at_pool: float = _LOOK_AT_POOL) -> None:
        self.changed = threading.Condition()
        self._lease = lease
        self._look_at_pool = look_at_pool
        self._open: OrderedDict[WantKey, Attempt] = OrderedDict()
        self._refusals: OrderedDict[str, tuple[float, CNIError]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, want: Want, until: float) -> Attempt:
        """The pending attempt at this want, or a new one."""
        with self.changed:
            attempt = self._open.get(key_of(want))
            if attempt is None:
                attempt = self._open[key_of(want)] = Attempt(want)
                self.changed.notify_all()
            attempt.until.append(until)
            return attempt

    def wake(self) -> None:
        """Wake the thread that serves."""
        with self.changed:
            self.changed.notify_all()

    def serve(self) -> None:
        """Make all pending claims. One thread at a time calls this."""
        while True:
            with self.changed:
                if not self._open:
                    return
                key, attempt = next(iter(self._open.items()))
            pool = attempt.want.pool_name
            try:
                self._require_look(pool)
                self._lease(attempt.want, attempt.is_late)
            except CNIError as error:
                attempt.error = error
                for_all = not attempt.want.fixed and attempt.want.sticky is None
                if for_all or isinstance(error, PoolPending):
                    self._remember(pool, error)  # other wants of the pool would fail too
            except BaseException as error:  # or the waiting ADDs would take it for a success
                attempt.error = CNIError(
                    Code.TRY_AGAIN, f"no address could be leased: {error!r}: nothing was reserved"
                )
                raise
            else:
                self._refusals.pop(pool, None)
            finally:
                with self.changed:  # later wants make a new attempt
                    self._open.pop(key, None)
                attempt.over.set()

    def end(self, why: CNIError) -> None:
        """Fail all pending claims."""
        with self.changed:
            ended = list(self._open.values())
            self._open.clear()
        for attempt in ended:
            attempt.error = why
            attempt.over.set()

    def unable(self, wants: Sequence[Want]) -> str | None:
        """Why the last claim for one of the wants failed, if that was a short time ago."""
        told = (self._refusals.get(want.pool_name) for want in wants)
        since = time.monotonic() - RECENT
        texts = (each[1].message for each in told if each and each[0] > since)
        return next((text.partition(": nothing was reserved")[0] for text in texts), None)

    def _require_look(self, pool: str) -> None:
        at, error = self._refusals.get(pool, (0.0, None))
        if isinstance(error, PoolPending) and time.monotonic() - at < self._look_at_pool:
            raise error

    def _remember(self, pool: str, error: CNIError) -> None:
        if self._refusals.get(pool, (0.0, None))[1] is not error:
            self._refusals[pool] = time.monotonic(), error
        while len(self._refusals) > MOST_KNOWN:
            self._refusals.popitem(last=False)
