"""The AddressPools of this node's networks, as they were last read."""

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from ipam.addresses import Interval, parse_interface, parse_interval
from ipam.leases import block_layout
from ipam.leases.block_layout import Geometry
from ipam.leases.objects import AddressBlock, AddressPool
from ipam.ranges import merged, outside
from kube.client import ClusterApi
from kube.resources import NotFound

SHORTEST_OFFLINE = 1.0  # seconds: a lease is confirmed at most once a second
AT_ONCE = 64  # most pools in one LIST; in a larger cluster, each pool is read alone
ENOUGH = 0.75  # share of a pool's blocks: if more are leased, nodes keep no idle block

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")


class Unusable(Exception):
    """This node may lease no block now. The text has the reason."""


class NotReadyYet(Unusable):
    """The controller has probably not made the pool ready yet."""


def require_usable(pool: AddressPool) -> Geometry:
    """Raises Unusable if nodes may lease no block of the pool."""
    name, blocks = pool.metadata.name, block_layout.of_pool(pool)
    if pool.spec.state != "Active":
        raise Unusable(
            f"AddressPool {name} is being drained: set spec.state to Active, or use another pool"
        )
    ready = next((each for each in pool.status.conditions if each.type == "Ready"), None)
    if ready is None or blocks is None or not pool.status.space:
        raise NotReadyYet(
            f"podfabric's controller has not made AddressPool {name} ready yet: see that the "
            "controller runs (kubectl -n podfabric get deploy)"
        )
    if ready.status != "True":
        raise NotReadyYet(f"AddressPool {name} is not ready ({ready.reason}): {ready.message}")
    max_offline(pool)
    return blocks


def max_offline(pool: AddressPool) -> float:
    """The seconds for which a node may reserve addresses after a confirmation. Raises Unusable."""
    where = f"AddressPool {pool.metadata.name}: spec.reclaim.maxOffline"
    try:
        limit = seconds(pool.spec.reclaim.max_offline)
    except ValueError as error:
        raise Unusable(f"{where}: {error}") from None
    if limit < SHORTEST_OFFLINE:  # a block would expire before its first use
        raise Unusable(f"{where}: {limit:g} s is too short: set {SHORTEST_OFFLINE:g}s or more")
    return limit


def kept_out(pool: AddressPool) -> tuple[Interval, ...]:
    """The pool's addresses that no node may hand out. Raises Unusable."""
    try:
        return merged(map(parse_interval, (*pool.spec.exclude, *pool.status.held)))
    except ValueError as error:
        name = pool.metadata.name
        raise Unusable(
            f"AddressPool {name}: invalid spec.exclude or status.held: {error}"
        ) from None


def not_offered(pool: AddressPool) -> tuple[Interval, ...]:
    """The parts of the pool in which no node may lease a block. Raises Unusable."""
    if pool.status.offered is None:
        return ()
    network = parse_interface(pool.spec.range)[1]
    try:
        offered = merged(map(parse_interval, pool.status.offered))
    except ValueError as error:
        raise Unusable(
            f"AddressPool {pool.metadata.name}: invalid status.offered: {error}"
        ) from None
    return tuple(outside(Interval(network.address, network.last), offered))


def is_scarce(pool: AddressPool) -> bool:
    """Whether few blocks are left. If so, nodes return all unneeded blocks and lease none ahead."""
    blocks = pool.status.blocks
    return blocks.leased > ENOUGH * blocks.total or is_exhausted(pool)


def is_exhausted(pool: AddressPool) -> bool:
    return any(
        each.type == "Exhausted" and each.status == "True" for each in pool.status.conditions
    )


class _ListedMap(NamedTuple):
    """A pool's leased blocks, from a LIST. Valid while the pool's `free_map` equals `before`."""

    before: str
    free_map: str
    leased: int


class Pools:
    """A cache of pools for all threads. In a small cluster, one LIST reads all pools."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._known: dict[str, AddressPool] = {}  # as the API server returned them
        self._listed_maps: dict[str, _ListedMap] = {}
        self._lists = True  # whether one LIST has all pools of this cluster
        self._missing = ""  # the last pool that did not exist

    def read(self, name: str) -> AddressPool:
        """Read one pool. Raises ApiError, and NotReadyYet if the pool does not exist."""
        try:
            self._known[name] = found = self._api.get(AddressPool, name)
        except NotFound:
            self._known.pop(name, None)
            self._missing = name
            raise NotReadyYet(
                f"AddressPool {name} does not exist yet: podfabric's controller makes the pool, "
                "so see that the controller runs (kubectl -n podfabric get deploy)"
            ) from None
        return self._with_newest_map(found)

    def read_all(self, names: Collection[str]) -> None:
        """Read the named pools, if they exist. Raises ApiError."""
        found = self._listed()
        if self._lists:
            self._known = {name: found[name] for name in names if name in found}
            return
        for name in names:
            with suppress(NotReadyYet):
                self.read(name)

    def _listed(self) -> Mapping[str, AddressPool]:
        """All pools by name. Empty if there are too many pools for one LIST. Raises ApiError."""
        if self._lists:
            listing = self._api.list(AddressPool, most=AT_ONCE)
            self._lists = listing.is_whole
        return {pool.metadata.name: pool for pool in listing.items} if self._lists else {}

    def _with_newest_map(self, pool: AddressPool) -> AddressPool:
        listed = self._listed_maps.get(pool.metadata.name)
        if listed is None or listed.before != pool.status.free_map:
            return pool
        blocks = replace(pool.status.blocks, leased=listed.leased)
        return replace(pool, status=replace(pool.status, free_map=listed.free_map, blocks=blocks))

    def learn_leased(
        self, pool: AddressPool, blocks: Geometry, leased: Iterable[AddressBlock]
    ) -> None:
        """Cache the leased blocks from a LIST. The LIST may be newer than the pool's map."""
        known = self._known.get(pool.metadata.name)
        if known is None or blocks.total > block_layout.MOST_MAPPED:
            return
        indexes = {blocks.index(block_layout.interval(block).first) for block in leased}
        indexes = {index for index in indexes if 0 <= index < blocks.total}
        self._listed_maps[pool.metadata.name] = _ListedMap(
            known.status.free_map, block_layout.free_map(indexes, blocks.total), len(indexes)
        )

    def known(self, name: str) -> AddressPool | None:
        """Returns `None` if the pool did not exist or was never read."""
        pool = self._known.get(name)
        return None if pool is None else self._with_newest_map(pool)

    def recent(self, name: str) -> AddressPool:
        """The cached pool. Reads the pool if it is not cached, or was not usable. Prefers one LIST
        of all pools, because a pod may need several pools. Raises ApiError and NotReadyYet."""
        if name not in self._known and name != self._missing:
            self._known |= self._listed()
        known = self.known(name)
        if known is not None:
            with suppress(Unusable):
                require_usable(known)
                return known
        return self.read(name)


def seconds(written: str) -> float:
    """The seconds of a Go duration such as "1h30m". Raises ValueError."""
    if written == "0":
        return 0.0
    if not _WHOLE.fullmatch(written):
        raise ValueError(f'"{written}" is not a duration: write it as "90s", "10m" or "1h30m"')
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(written))
