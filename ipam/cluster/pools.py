"""The AddressPools that this node's networks use, as they were last read."""

from collections.abc import Iterable
from contextlib import suppress

from ipam.addresses import Interval, parse_interval
from ipam.cluster import durations, geometry
from ipam.cluster.api import ClusterApi, NotFound
from ipam.cluster.geometry import Geometry
from ipam.cluster.names import pool_name
from ipam.cluster.objects import AddressPool
from ipam.cluster.rails import Rails
from ipam.cluster.wants import Want

SHORTEST_OFFLINE = 1.0  # seconds: a lease is confirmed once a second at most


class Unusable(Exception):
    """A pool from which nothing may be leased now. The text names the pool and says why."""


class NotReadyYet(Unusable):
    """A pool that the controller has just heard of, most likely."""


def pool_of(want: Want) -> str:
    """The name of the AddressPool that has what is wanted."""
    domain, network = want.pool
    name, private, _ = domain.partition(" ")
    return pool_name(name, str(network), shared=not private)


def require_usable(pool: AddressPool) -> Geometry:
    """The pool's blocks, if nodes may lease some. Raises Unusable."""
    name, blocks = pool.metadata.name, geometry.of_pool(pool)
    if pool.status.rail_of:
        raise NotReadyYet(f"AddressPool {name} is a rail of {pool.status.rail_of}")
    if pool.spec.state != "Active":
        raise Unusable(f"AddressPool {name} is being drained: its spec.state is {pool.spec.state}")
    ready = next((each for each in pool.status.conditions if each.type == "Ready"), None)
    if ready is None or blocks is None or not pool.status.space:
        raise NotReadyYet(
            f"podfabric's controller has not made AddressPool {name} ready yet: see that it runs "
            "(kubectl -n podfabric get deploy)"
        )
    if ready.status != "True":
        raise NotReadyYet(f"AddressPool {name} is not ready: {ready.reason}: {ready.message}")
    max_offline(pool)
    return blocks


def max_offline(pool: AddressPool) -> float:
    """For how many seconds after a confirmation its addresses may be handed out. Unusable."""
    where = f"AddressPool {pool.metadata.name}: spec.reclaim.maxOffline"
    try:
        limit = durations.seconds(pool.spec.reclaim.max_offline)
    except ValueError as error:
        raise Unusable(f"{where}: {error}") from None
    if limit < SHORTEST_OFFLINE:  # a block would be over before its first address is used
        raise Unusable(f"{where}: {limit:g} s is shorter than {SHORTEST_OFFLINE:g} s")
    return limit


def kept_out(pool: AddressPool, foreign: Iterable[str] = ()) -> tuple[Interval, ...]:
    """What nobody may hand out of a pool or, with its `foreign` addresses, of a block. Unusable.

    What one rail excludes is kept out on all of them.
    """
    try:
        holes = [parse_interval(written) for written in (*pool.spec.exclude, *foreign)]
        return Rails.of(pool.spec).all_on_main(holes)
    except ValueError as error:
        raise Unusable(f"AddressPool {pool.metadata.name}: spec.exclude: {error}") from None


def is_exhausted(pool: AddressPool) -> bool:
    """Whether nodes are to give back every block that they do not need."""
    return any(
        each.type == "Exhausted" and each.status == "True" for each in pool.status.conditions
    )


class Pools:
    """Reads pools, and remembers them."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._known: dict[str, AddressPool] = {}

    def read(self, name: str) -> AddressPool:
        """The pool as it is now. Raises ApiError, and NotReadyYet if there is none."""
        self._known.pop(name, None)
        try:
            self._known[name] = pool = self._api.get(AddressPool, name)
        except NotFound:
            raise NotReadyYet(
                f"there is no AddressPool {name}: podfabric's controller makes it from the "
                "definition: see that it runs (kubectl -n podfabric get deploy)"
            ) from None
        return pool

    def known(self, name: str) -> AddressPool | None:
        """The pool as it was read last; None if that failed, or never happened."""
        return self._known.get(name)

    def leasing(self, want: Want) -> AddressPool | None:
        """The pool that leases what is wanted, as it is known: another one for a rail."""
        pool = self._known.get(pool_of(want))
        if pool is not None and pool.status.rail_of:
            return self._known.get(pool.status.rail_of)
        return pool

    def recent(self, name: str) -> AddressPool:
        """The same, read now if it is not known, or could not be used then."""
        known = self._known.get(name)
        if known is not None:
            with suppress(Unusable):
                require_usable(known)
                return known
        return self.read(name)
