"""Requests for blocks, and the queue of claims. ADDs wait for these claims."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from cni.spec.errors import CNIError, Code
from ipam.addresses import Network
from ipam.leases.block_layout import pool_name
from ipam.ranges import Range
from ipam.store.reservations import Owner

PATIENCE = 10.0
"""Seconds that an ADD waits for a block. On a slow node, a claim takes some seconds."""

POOL_PATIENCE = 15.0
"""Seconds that an ADD first waits for a pool, because the definition may be as new as the pod. An
agent ends a call after 100 s."""

PoolRange = tuple[str, Network]
"""Domain and network of a range, which determine the name of its AddressPool."""


class PodInterface(NamedTuple):
    """The interface of a pod. The names are the same on every node."""

    namespace: str
    pod: str
    ifname: str


class Want(NamedTuple):
    """A range in which a node needs an address. A `fixed` range is exactly one address. `pool` is
    the range of the AddressPool. Only a fixed `range` may differ from `pool`. If `sticky` is set,
    only the address that is reserved for this pod interface is allowed."""

    range: Range
    pool: PoolRange
    fixed: bool = False
    sticky: PodInterface | None = None

    @property
    def pool_name(self) -> str:
        domain, network = self.pool
        name, private, _ = domain.partition(" ")
        return pool_name(name, str(network), shared=not private)


class PoolPending(CNIError):
    """A range has no pool yet, or its pool is not ready."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.TRY_AGAIN, message)


class LeasesNothing(CNIError):
    """This process cannot lease blocks. Waiting does not help."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.TRY_AGAIN, message)


class NotReserved(CNIError):
    """No AddressReservation exists for the pod. The pod gets any address of the pool."""

    def __init__(self, want: Want) -> None:
        super().__init__(Code.TRY_AGAIN, f"no address of {want.range} is reserved for the pod")
        self.want = want


class Claims(Protocol):
    def claim(self, wants: Sequence[Want], deadline: float) -> None:
        """Wait until this node may have an address for one of the wants. The wait ends at
        `deadline` (`time.monotonic`).

        Raises CNIError 11 if a later try may succeed, and 110 if the pool has no address left.
        Raises AddressTaken if the fixed address is taken. Raises NotReserved if no address is
        reserved for the pod's name.
        """

    def low(self, wants: Sequence[Want]) -> None:
        """Report that this node's blocks have few free addresses of these ranges."""

    def failed(self, owner: Owner, error: CNIError) -> None:
        """Report that a pod got no address, or got an address that was not probed."""

    def unable(self, wants: Sequence[Want]) -> str | None:
        """The reason why `claim` would probably fail, or `None`. Makes no API call."""


def of_agent(claims: Claims | None) -> Claims:
    """Raises LeasesNothing if this process is not the agent."""
    if claims is None:
        raise LeasesNothing(
            "only an agent with ipam.scope cluster in config.yaml reserves cluster-wide addresses: "
            "nothing was reserved; run `podfabric install` if this node has no agent, set this "
            'scope if the agent has another, or set "ipam.scope" of the network to "node"'
        )
    return claims


RECENT = 30.0  # seconds
MOST_KNOWN = 256  # recorded failures; tenants may name any number of pools
_LOOK_AT_POOL = 0.4  # seconds between two reads of a pool that is not ready

WantKey = tuple[str, object, object, bool, object]
Lease = Callable[[Want, Callable[[], bool]], None]
"""Leases a block for a want. Stops if the second argument returns True. Raises CNIError."""


def key_of(want: Want) -> WantKey:
    """Two wants with the same key can share a block."""
    return *want.pool, want.range.parts, want.fixed, want.sticky


class Attempt:
    """A claim. `until` has the deadline (`time.monotonic`) of each ADD that waits. After `over` is
    set, `error` is the failure, or `None` if the claim succeeded."""

    def __init__(self, want: Want) -> None:
        self.want = want
        self.until: list[float] = []
        self.over = threading.Event()
        self.error: CNIError | None = None

    def is_late(self) -> bool:
        return all(time.monotonic() > each for each in self.until)


class Attempts:
    """The pending claims and the last failures. Any thread may use this object."""

    def __init__(self, lease: Lease, look_at_pool: float = _LOOK_AT_POOL) -> None:
        self.changed = threading.Condition()
        self._lease = lease
        self._look_at_pool = look_at_pool
        self._open: OrderedDict[WantKey, Attempt] = OrderedDict()
        self._refusals: OrderedDict[str, tuple[float, CNIError]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, want: Want, until: float) -> Attempt:
        """The pending attempt for this want, or a new attempt."""
        with self.changed:
            attempt = self._open.get(key_of(want))
            if attempt is None:
                attempt = self._open[key_of(want)] = Attempt(want)
                self.changed.notify_all()
            attempt.until.append(until)
            return attempt

    def wake(self) -> None:
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
            except BaseException as error:  # without an error, the waiting ADDs would see a success
                attempt.error = CNIError(
                    Code.TRY_AGAIN,
                    f"the agent failed to lease a block ({error!r}): nothing was reserved",
                )
                raise
            else:
                self._refusals.pop(pool, None)
            finally:
                with self.changed:  # later wants make a new attempt
                    self._open.pop(key, None)
                attempt.over.set()

    def end(self, why: CNIError) -> None:
        with self.changed:
            ended = list(self._open.values())
            self._open.clear()
        for attempt in ended:
            attempt.error = why
            attempt.over.set()

    def unable(self, wants: Sequence[Want]) -> str | None:
        """The text of a recent failure in a pool of `wants`, or `None`."""
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
