"""The AddressPools that this node's networks use, as they were last read."""

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from ipam.addresses import Interval, parse_interface, parse_interval
from ipam.leases import block_layout
from ipam.leases.block_layout import Geometry, pool_name
from ipam.leases.claim_request import Want
from ipam.leases.objects import AddressBlock, AddressPool
from ipam.ranges import merged, outside
from kube.client import ClusterApi
from kube.resources import NotFound

SHORTEST_OFFLINE = 1.0  # seconds: a lease is confirmed once a second at most
AT_ONCE = 64  # pools in the answer to one LIST; a cluster with more is asked for each pool
ENOUGH = 0.75  # of the blocks of a pool: where more are leased, none is kept in vain

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")


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
    name, blocks = pool.metadata.name, block_layout.of_pool(pool)
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
        limit = seconds(pool.spec.reclaim.max_offline)
    except ValueError as error:
        raise Unusable(f"{where}: {error}") from None
    if limit < SHORTEST_OFFLINE:  # a block would be over before its first address is used
        raise Unusable(f"{where}: {limit:g} s is shorter than {SHORTEST_OFFLINE:g} s")
    return limit


def kept_out(pool: AddressPool) -> tuple[Interval, ...]:
    """What no node may hand out of a pool. Unusable."""
    try:
        return merged(map(parse_interval, (*pool.spec.exclude, *pool.status.held)))
    except ValueError as error:
        name = pool.metadata.name
        raise Unusable(f"AddressPool {name}: spec.exclude or status.held: {error}") from None


def not_offered(pool: AddressPool) -> tuple[Interval, ...]:
    """Where no node may lease a block of a pool. Unusable."""
    if pool.status.offered is None:
        return ()
    network = parse_interface(pool.spec.range)[1]
    try:
        offered = merged(map(parse_interval, pool.status.offered))
    except ValueError as error:
        raise Unusable(f"AddressPool {pool.metadata.name}: status.offered: {error}") from None
    return tuple(outside(Interval(network.address, network.last), offered))


def is_scarce(pool: AddressPool) -> bool:
    """Whether nodes are to give back every block that they do not need, and lease none ahead."""
    blocks = pool.status.blocks
    return blocks.leased > ENOUGH * blocks.total or is_exhausted(pool)


def is_exhausted(pool: AddressPool) -> bool:
    """Whether no block of the pool is free."""
    return any(
        each.type == "Exhausted" and each.status == "True" for each in pool.status.conditions
    )


class _ListedMap(NamedTuple):
    """What a list of blocks has shown: it counts while the map of the pool itself is `before`."""

    before: str
    free_map: str
    leased: int


class Pools:
    """Reads pools, and remembers them. Threads may share it.

    One LIST reads all of them, where they are not too many.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._known: dict[str, AddressPool] = {}  # as they are on the API server
        self._listed_maps: dict[str, _ListedMap] = {}
        self._lists = True  # whether one LIST has all pools of this cluster
        self._missing = ""  # the last one that was not there

    def read(self, name: str) -> AddressPool:
        """The pool as it is now. Raises ApiError, and NotReadyYet if there is none."""
        try:
            self._known[name] = found = self._api.get(AddressPool, name)
        except NotFound:
            self._known.pop(name, None)
            self._missing = name
            raise NotReadyYet(
                f"there is no AddressPool {name}: podfabric's controller makes it from the "
                "definition: see that it runs (kubectl -n podfabric get deploy)"
            ) from None
        return self._used(found)

    def read_all(self, names: Collection[str]) -> None:
        """Those that there are, as they are now. Raises ApiError."""
        found = self._listed()
        if self._lists:
            self._known = {name: found[name] for name in names if name in found}
            return
        for name in names:
            with suppress(NotReadyYet):
                self.read(name)

    def _listed(self) -> Mapping[str, AddressPool]:
        """All pools by name; none if they are too many for one LIST. ApiError."""
        if self._lists:
            listing = self._api.list(AddressPool, most=AT_ONCE)
            self._lists = listing.is_whole
        return {pool.metadata.name: pool for pool in listing.items} if self._lists else {}

    def _used(self, pool: AddressPool) -> AddressPool:
        """The pool with the newest map of its blocks."""
        listed = self._listed_maps.get(pool.metadata.name)
        if listed is None or listed.before != pool.status.free_map:
            return pool
        blocks = replace(pool.status.blocks, leased=listed.leased)
        return replace(pool, status=replace(pool.status, free_map=listed.free_map, blocks=blocks))

    def learn_leased(
        self, pool: AddressPool, blocks: Geometry, leased: Iterable[AddressBlock]
    ) -> None:
        """Note which blocks of the pool a list has shown as leased: its map may be older."""
        known = self._known.get(pool.metadata.name)
        if known is None or blocks.total > block_layout.MOST_MAPPED:
            return
        indexes = {blocks.index(block_layout.interval(block).first) for block in leased}
        indexes = {index for index in indexes if 0 <= index < blocks.total}
        self._listed_maps[pool.metadata.name] = _ListedMap(
            known.status.free_map, block_layout.free_map(indexes, blocks.total), len(indexes)
        )

    def known(self, name: str) -> AddressPool | None:
        """The pool as it was read last; None if there was none, or it was never read."""
        pool = self._known.get(name)
        return None if pool is None else self._used(pool)

    def recent(self, name: str) -> AddressPool:
        """The same, read now if it is not known, or could not be used then. Raises ApiError, and
        NotReadyYet.

        One LIST shows the others, too: the pods of this node have interfaces of several pools.
        """
        if name not in self._known and name != self._missing:
            self._known |= self._listed()
        known = self.known(name)
        if known is not None:
            with suppress(Unusable):
                require_usable(known)
                return known
        return self.read(name)


def seconds(written: str) -> float:
    """The seconds of a duration as Go writes it: "10m", "1h30m". ValueError if it is none."""
    if written == "0":
        return 0.0
    if not _WHOLE.fullmatch(written):
        raise ValueError(f'"{written}" is not a duration: write it as "90s", "10m" or "1h30m"')
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(written))
