"""The AddressPools that this node's networks use, as they were last read."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from ipam.addresses import Interval, parse, parse_interval, text
from ipam.blocks import LeasedBlock
from ipam.cluster import durations, geometry
from ipam.cluster.api import ClusterApi, NotFound, Refused
from ipam.cluster.geometry import Geometry
from ipam.cluster.names import pool_name
from ipam.cluster.objects import AddressBlock, AddressPool, Compat
from ipam.cluster.wants import PoolRange, Want
from ipam.cluster.whereabouts import held
from ipam.cluster.whereabouts.held import Held
from ipam.cluster.whereabouts.overlap import has, strictest
from ipam.ranges import merged

SHORTEST_OFFLINE = 1.0  # seconds: a lease is confirmed once a second at most
AT_ONCE = 64  # pools in the answer to one LIST; a cluster with more is asked for each pool
_ENOUGH = 0.75  # of the blocks of a pool: where more are leased, none is kept in vain
_AHEAD = 30.0  # seconds: a pool that was listed beside others counts as known for so long


class Unusable(Exception):
    """A pool from which nothing may be leased now. The text names the pool and says why."""


class NotReadyYet(Unusable):
    """A pool that the controller has just heard of, most likely."""


def pool_of(want: Want) -> str:
    """The name of the AddressPool that has what is wanted."""
    return name_of(want.pool)


def name_of(pool: PoolRange) -> str:
    """The name of the AddressPool of a range."""
    domain, network = pool
    name, private, _ = domain.partition(" ")
    return pool_name(name, str(network), shared=not private)


def require_usable(pool: AddressPool) -> Geometry:
    """The pool's blocks, if nodes may lease some. Raises Unusable."""
    name, blocks = pool.metadata.name, geometry.of_pool(pool)
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
    """What no node may hand out of a pool or, with `foreign` addresses, of a block. Unusable."""
    try:
        return merged(map(parse_interval, (*pool.spec.exclude, *foreign)))
    except ValueError as error:
        raise Unusable(f"AddressPool {pool.metadata.name}: spec.exclude: {error}") from None


def foreign_within(foreign: Iterable[int], interval: Interval) -> tuple[str, ...]:
    """The foreign addresses of a block, as its `spec.foreign` has them."""
    return tuple(text(each) for each in sorted(foreign) if interval.first <= each <= interval.last)


def is_scarce(pool: AddressPool) -> bool:
    """Whether nodes are to give back every block that they do not need, and lease none ahead."""
    blocks = pool.status.blocks
    return blocks.leased > _ENOUGH * blocks.total or any(
        each.type == "Exhausted" and each.status == "True" for each in pool.status.conditions
    )


class _ListedMap(NamedTuple):
    """What a list of blocks has shown: it counts while the map of the pool itself is `before`."""

    before: str
    free_map: str
    leased: int


class Pools:
    """Reads pools and what whereabouts holds of them, and remembers both. Threads may share it.

    A node that needs several pools lists them: one request for all of them. `clock` is in seconds.
    `compat`: this node looks at whereabouts' objects, by its own configuration.

    The `compat` of a pool that it returns is the strictest of all pools that overlap it: so such a
    node reads all pools wherever it reads one.
    """

    def __init__(
        self,
        api: ClusterApi,
        clock: Callable[[], float] = time.monotonic,
        *,
        compat: bool = True,
    ) -> None:
        self._api = api
        self._clock = clock
        self._compat = compat
        self._known: dict[str, AddressPool] = {}  # as they are on the API server
        self._listed_maps: dict[str, _ListedMap] = {}
        self._sharing: Mapping[str, AddressPool] = {}  # all pools with a compat, by uid
        self.all_pools: Sequence[AddressPool] = ()  # as read last, while one has a compat
        self._compats: dict[tuple[str, Compat], Compat] = {}  # by uid and their own
        self._foreign: dict[str, Mapping[int, Held]] = {}
        self._lists = True  # whether one LIST has all pools of this cluster
        self._ahead: dict[str, AddressPool] = {}  # listed at `_ahead_at`, and not needed yet
        self._ahead_at = -math.inf
        self._missed = "", -math.inf  # the last pool that was not known, and when

    def read(self, name: str) -> AddressPool:
        """The pool as it is now. Raises ApiError, and NotReadyYet if there is none."""
        self._known.pop(name, None)
        found = None
        if self._compat or self._sharing:
            found = self._all().get(name)
        else:
            with suppress(NotFound):
                found = self._api.get(AddressPool, name)
        if found is None:
            raise NotReadyYet(
                f"there is no AddressPool {name}: podfabric's controller makes it from the "
                "definition: see that it runs (kubectl -n podfabric get deploy)"
            )
        self._known[name] = found
        return self._used(found)

    def read_all(self, names: Collection[str]) -> None:
        """Those that there are, as they are now. Raises ApiError."""
        found: Mapping[str, AddressPool] | None = None
        if self._compat or self._sharing:
            found = self._all()
        elif self._lists:
            found = self._listed() or None
        if found is None:
            for name in names:
                with suppress(NotReadyYet):
                    self.read(name)
            return
        for name in names:
            self._known.pop(name, None)
        self._known |= {name: found[name] for name in names if name in found}

    def _listed(self) -> Mapping[str, AddressPool]:
        """All pools; from here on `_lists` is False if these are not all. Raises ApiError."""
        try:
            listing = self._api.list(AddressPool, most=AT_ONCE)
        except Refused:  # the role of this node's agent is that of an earlier version
            self._lists = False
            return {}
        self._lists = listing.is_whole
        return self._learned(listing.items) if listing.is_whole else self._all()

    def _all(self) -> Mapping[str, AddressPool]:
        """All pools, however many. Raises ApiError."""
        return self._learned(self._api.list(AddressPool).items)

    def _learned(self, pools: Iterable[AddressPool]) -> Mapping[str, AddressPool]:
        """All pools by name, after it was noted which of them share with whereabouts."""
        found = {pool.metadata.name: pool for pool in pools}
        self._sharing = {
            pool.metadata.uid: pool for pool in found.values() if pool.spec.compat != "None"
        }
        self.all_pools = tuple(found.values()) if self._sharing else ()
        self._compats = {}  # after that: what a thread adds there goes by these
        return found

    def _used(self, pool: AddressPool) -> AddressPool:
        """The pool with the `compat` that it is used by, and the newest map of its blocks."""
        listed = self._listed_maps.get(pool.metadata.name)
        if listed is not None and listed.before == pool.status.free_map:
            blocks = replace(pool.status.blocks, leased=listed.leased)
            pool = replace(
                pool, status=replace(pool.status, free_map=listed.free_map, blocks=blocks)
            )
        if not self._sharing:
            return pool
        compats, key = self._compats, (pool.metadata.uid, pool.spec.compat)
        if key not in compats:
            compats[key] = strictest(pool, self._sharing.values())
        if compats[key] == pool.spec.compat:
            return pool
        return replace(pool, spec=replace(pool.spec, compat=compats[key]))

    def learn_leased(
        self, pool: AddressPool, blocks: Geometry, leased: Iterable[AddressBlock]
    ) -> None:
        """Note which blocks of the pool a list has shown as leased: its map may be older."""
        known = self._known.get(pool.metadata.name)
        if known is None or blocks.total > geometry.MOST_MAPPED:
            return
        indexes = {blocks.index(parse(block.spec.first)) for block in leased}
        indexes = {index for index in indexes if 0 <= index < blocks.total}
        self._listed_maps[pool.metadata.name] = _ListedMap(
            known.status.free_map, geometry.free_map(indexes, blocks.total), len(indexes)
        )

    def known(self, name: str) -> AddressPool | None:
        """The pool as it was read last; None if that failed, or never happened."""
        pool = self._known.get(name)
        return None if pool is None else self._used(pool)

    def of_block(self, block: AddressBlock) -> AddressPool | None:
        """The pool of a block, as it is known; if it is gone, one that has the block's addresses
        and shares them with whereabouts."""
        spec = block.spec
        return self.known(spec.pool) or self._standing_in(spec.space, parse(spec.first))

    def of_row(self, row: LeasedBlock) -> AddressPool | None:
        """The same of a block in the store. What is not known is read. ApiError."""
        found = self.known(row.pool) or self._standing_in(row.space, row.first)
        if found is None:
            with suppress(NotReadyYet):
                return self.read(row.pool)
            found = self._standing_in(row.space, row.first)
        return found

    def _standing_in(self, space: str, first: int) -> AddressPool | None:
        found = (each for each in self._sharing.values() if has(each, space, first))
        return next(map(self._used, found), None)

    def recent(self, name: str) -> AddressPool:
        """The same, read now if it is not known, or could not be used then.

        The second one that is not known within a short time is read with all others: the pods of
        this node have interfaces of several pools.
        """
        known = self._known.get(name) or self._listed_ahead(name)
        if known is not None:
            with suppress(Unusable):
                require_usable(known)
                self._known[name] = known
                return self._used(known)
        return self.read(name)

    def _listed_ahead(self, name: str) -> AddressPool | None:
        now = self._clock()
        if now - self._ahead_at >= _AHEAD:
            self._ahead.clear()
            (other, at), self._missed = self._missed, (name, now)
            if name == other or now - at >= _AHEAD or not self._lists:
                return None
            self._ahead, self._ahead_at = dict(self._listed()), now
        return self._ahead.pop(name, None)

    def foreign(self, pool: AddressPool) -> Mapping[int, Held]:
        """What whereabouts holds of the pool now, by address: nothing unless the pool's `compat`
        says that it is to be asked. Raises ApiError, Unusable."""
        if pool.spec.compat == "None":
            return {}
        if pool.spec.compat == "Coexist" and not self._compat:
            raise Unusable(
                f"AddressPool {pool.metadata.name} has spec.compat {pool.spec.compat}, and "
                '"ipam.compat" in config.yaml of this node is None: set it too (ipam.compat of '
                "the chart)"
            )
        self._foreign[pool.metadata.name] = found = held.read(self._api, pool, self.all_pools)
        return found

    def may_hand_out(self, pool: AddressPool) -> bool:
        """Whether this node knows all that whereabouts holds of the pool, and tells whereabouts of
        what it hands out, where that still does, too."""
        return self._compat or pool.spec.compat != "Coexist"

    def known_foreign(self, pool: AddressPool) -> Mapping[int, Held]:
        """The same as it was read last; read now if it never was. Raises ApiError."""
        if pool.spec.compat == "None":
            return {}
        known = self._foreign.get(pool.metadata.name)
        return self.foreign(pool) if known is None else known

    def learn(self, pool: AddressPool, address: int, found: Held | None) -> None:
        """Note who has an address with whereabouts; None if no pod has it any more."""
        known = dict(self._foreign.get(pool.metadata.name, {}))
        known.pop(address, None)
        if found is not None:
            known[address] = found
        self._foreign[pool.metadata.name] = known
