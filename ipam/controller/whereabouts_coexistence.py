"""Decides which addresses our nodes may use beside whereabouts.

In mode `Read`, whereabouts reserves no further address. Our nodes use no address that an IPPool
lists for a pod. Entries of ended pods do not count.

In mode `Coexist`, whereabouts still reserves addresses on other nodes. Our nodes lease only offered
addresses. Before an address is offered, each IPPool that whereabouts may use gets a placeholder. A
placeholder is an entry for the address. An address that an IPPool lists for a pod is `held`, and
gets no placeholder. A patch that adds a placeholder fails if an entry exists. Offered addresses
stay offered until `Coexist` ends, because a node may use an old status.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice, starmap
from typing import Literal

import msgspec
from msgspec.structs import replace

from ipam.addresses import Interval, parse_interface, parse_interval, text
from ipam.controller.block_index import BlockIndex, PlacedBlock
from ipam.controller.steps import Steps
from ipam.controller.whereabouts_objects import (
    NAMESPACE,
    AnnotatedPod,
    IPPool,
    IPPoolSpec,
    NodeSlicePool,
    Operation,
    PoolEntry,
    entries,
    has_address,
    ippool_name,
    may_be_theirs,
    placeholders,
    pools_of,
    removals,
    slicing,
)
from ipam.leases import block_layout
from ipam.leases.block_layout import Geometry, holes_of
from ipam.leases.objects import AddressPool
from ipam.ranges import common, is_within, merged, outside
from kube.client import ClusterApi
from kube.resources import AlreadyExists, AnyResource, Conflict, Meta, NotFound

Mode = Literal["None", "Read", "Coexist"]
"""The mode for whereabouts' objects."""

READ_OFFSETS = 1 << 63
"""whereabouts reads offsets as signed 64-bit numbers, and drops this offset and larger offsets."""

LOOK_EVERY = 15.0  # seconds between two reads of the objects
LOOK_SOON = 1.0  # the same, while a pool offers too few blocks
PODS_EVERY = 120.0  # seconds between two looks for pods that have ended
SPARE = 2  # blocks that are offered but not leased
NODES_PER_SPARE = 4  # nodes for each further block that is offered but not leased
_MOST_AT_ONCE = 2000  # entries of a patch, which may have 10,000 operations
_MOST_LOOKED_AT = 65_536  # blocks of a pool that a search for free blocks reads
_ATTEMPTS = 5
_PAUSE = 0.05  # seconds


class PoolShare(msgspec.Struct, frozen=True):
    """The part of an AddressPool that nodes may use. Pods of whereabouts have the addresses in
    `held`. Nodes lease blocks only within `offered`, or everywhere if `offered` is `None`.
    `conflicts` describes addresses that whereabouts and our nodes gave to two pods. `problem` is
    the reason why no block may be leased, or ""."""

    held: tuple[Interval, ...] = ()
    offered: tuple[Interval, ...] | None = None
    conflicts: tuple[str, ...] = ()
    problem: str = ""


class Unshareable(Exception):
    """whereabouts would ignore our placeholders. The text has the reason."""


class Sharing:
    """The memory of one leader. `clock` is monotonic."""

    def __init__(self, api: ClusterApi, mode: Mode, clock: Callable[[], float]) -> None:
        self._api = api
        self._mode = mode
        self._clock = clock
        self._look_at = self._look_soon_at = clock()
        self._pods_at: float | None = None
        self._ended: frozenset[tuple[str, int]] = frozenset()  # podref and address
        self._shares: dict[str, PoolShare] = {}
        self._used_up: set[str] = set()  # pools without further blocks to offer

    def look(
        self, pools: Mapping[str, AddressPool], index: BlockIndex, nodes: int, steps: Steps
    ) -> Mapping[str, PoolShare]:
        """The share of each pool by name. Before the first look, a new pool offers nothing."""
        shares = dict.fromkeys(pools, PoolShare())
        if self._mode == "None":
            return shares
        pools = {name: pool for name, pool in pools.items() if may_be_theirs(pool)}
        ranged = {name: pool for name, pool in pools.items() if self._may_look_at(pool)}
        if self._is_due(ranged, index, nodes):
            now = self._clock()
            self._look_soon_at, self._look_at = now + LOOK_SOON, now + LOOK_SOON
            before = {name: self._former(pool) for name, pool in ranged.items()}
            self._shares = before | {n: s for n, s in self._shares.items() if n in ranged}

            def work(read: Callable[..., None]) -> None:
                read(ranged, index, nodes, steps)
                self._look_at = now + LOOK_EVERY

            read = self._read if self._mode == "Read" else self._coexist
            steps.each("whereabouts", [("", read)], work)
        return shares | {n: self._shares.get(n) or self._former(pools[n]) for n in pools}

    def _may_look_at(self, pool: AddressPool) -> bool:
        """`Read` needs a valid range, and `Coexist` also a decided block size."""
        try:
            parse_interface(pool.spec.range)
        except ValueError:
            return False
        return self._mode == "Read" or block_layout.of_pool(pool) is not None

    def _former(self, pool: AddressPool) -> PoolShare:
        """The share that an earlier leader wrote into the status. A new pool offers nothing."""
        is_open = self._mode == "Read" and pool.status.block_size and pool.status.offered is None
        try:
            held = merged(map(parse_interval, pool.status.held))
            offered = merged(map(parse_interval, pool.status.offered or ()))
        except ValueError:  # a CRD without rules accepts it
            return PoolShare((), ())
        return PoolShare(held, None if is_open else offered)

    def _is_due(self, pools: Mapping[str, AddressPool], index: BlockIndex, nodes: int) -> bool:
        def lacks_blocks(name: str, pool: AddressPool) -> bool:
            share = self._shares.get(name)
            if share is None:
                return True
            may_lack = self._mode == "Coexist" and name not in self._used_up
            return may_lack and _missing_blocks(pool, share.offered or (), index, nodes) > 0

        now = self._clock()
        is_soon = now >= self._look_soon_at
        return now >= self._look_at or (is_soon and any(starmap(lacks_blocks, pools.items())))

    def _read(
        self, pools: Mapping[str, AddressPool], index: BlockIndex, nodes: int, steps: Steps
    ) -> None:
        ippools = self._listed(IPPool)
        names = _network_names(pools)
        given = {name: _given(pools_of(pool, names, ippools)) for name, pool in pools.items()}
        if self._pods_at is None or self._clock() - self._pods_at >= PODS_EVERY:
            self._pods_at = self._clock()
            steps.each("pods", [("", chain.from_iterable(given.values()))], self._look_for_pods)
        for name, pool in pools.items():
            held = [
                each
                for each in given[name]
                if (each.allocation.podref, each.address) not in self._ended
            ]
            self._shares[name] = _share(pool, held, index, None)
        steps.each("placeholders", [(each.metadata.name, each) for each in ippools], self._clear)

    def _look_for_pods(self, given: Iterable[PoolEntry]) -> None:
        """Find entries of pods that ended or have another address now."""
        theirs = defaultdict[str, set[tuple[str, int]]](set)
        for each in given:
            namespace, slash, _ = each.allocation.podref.partition("/")
            if slash:
                theirs[namespace].add((each.allocation.podref, each.address))
        ended = set[tuple[str, int]]()
        for namespace, known in theirs.items():
            listing = self._api.list(AnnotatedPod, namespace=namespace)
            unreadable = {f"{namespace}/{each.metadata.name}" for each in listing.unreadable}
            pods = {f"{namespace}/{each.metadata.name}": each for each in listing.items}
            ended |= {
                (podref, address)
                for podref, address in known
                if podref not in unreadable and not has_address(pods.get(podref), address)
            }
        self._ended = frozenset(ended)

    def _clear(self, ippool: IPPool) -> None:
        """Remove the placeholders. After a conflict, the next look tries again."""
        with suppress(Conflict, NotFound):
            self._patch(ippool, removals(ippool))

    def _patch(self, ippool: IPPool, changes: Iterable[Sequence[Operation]]) -> None:
        changes = iter(changes)
        while some := list(islice(changes, _MOST_AT_ONCE)):
            self._api.patch(ippool, list(chain.from_iterable(some)))

    def _coexist(
        self, pools: Mapping[str, AddressPool], index: BlockIndex, nodes: int, steps: Steps
    ) -> None:
        spaces = defaultdict[str, dict[str, AddressPool]](dict)
        for name, pool in pools.items():
            spaces[pool.status.space][name] = pool
        self._used_up.clear()

        def share(group: Mapping[str, AddressPool]) -> None:
            try:
                self._shares |= self._shared(group, pools, index, nodes)
            except Unshareable as error:
                self._used_up.update(group)
                for name in group:
                    self._shares[name] = replace(self._shares[name], problem=str(error))

        steps.each("spaces beside whereabouts", spaces.items(), share)

    def _shared(
        self,
        group: Mapping[str, AddressPool],
        pools: Mapping[str, AddressPool],
        index: BlockIndex,
        nodes: int,
    ) -> dict[str, PoolShare]:
        """The shares of the pools of one space. Adds placeholders for more blocks."""
        slices = self._listed(NodeSlicePool)
        for pool in group.values():
            if cut := slicing(pool, slices):
                raise Unshareable(
                    f"NodeSlicePool {cut} splits {pool.spec.range} among nodes of "
                    "whereabouts: set ipam.whereabouts of the chart to Read and move all these "
                    "nodes to podfabric at the same time, or delete the NodeSlicePool when no "
                    "node uses this range"
                )
        names = _network_names(pools)
        for attempt in range(_ATTEMPTS):
            ippools = self._complete(group)
            theirs = {
                each.metadata.name: each
                for pool in group.values()
                for each in pools_of(pool, names, ippools)
            }
            given = _given(theirs.values())
            held = {each.address for each in given}
            offered = self._offers(group, index, held, nodes)
            try:
                for ippool in theirs.values():
                    self._patch(ippool, placeholders(ippool, offered, held))
            except (Conflict, NotFound):  # a node of whereabouts was faster
                time.sleep(random.uniform(0, _PAUSE * (1 + attempt)))
            else:
                return {
                    name: _share(pool, given, index, tuple(common([_whole(pool)], offered)))
                    for name, pool in group.items()
                }
        raise Conflict(
            "could not patch the IPPools, because whereabouts changed the IPPools before each patch"
        )

    def _complete(self, group: Mapping[str, AddressPool]) -> Sequence[IPPool]:
        """All IPPools. Makes the missing IPPools of the group, before whereabouts makes them."""
        listed = list(self._listed(IPPool))
        namespaces = {each.metadata.namespace for each in listed} or {NAMESPACE}
        if len(namespaces) > 1:
            raise Unshareable(
                f"IPPools are in the namespaces {' and '.join(sorted(namespaces))}, but "
                "whereabouts uses only the namespace of its kubeconfig: delete the IPPools in "
                "all other namespaces, when no pod uses these IPPools"
            )
        (namespace,) = namespaces
        for pool in group.values():
            name = ippool_name(pool)
            found = next((each for each in listed if each.metadata.name == name), None)
            if found is None:
                meta = Meta(name=name, namespace=namespace)
                spec = IPPoolSpec(range=pool.spec.range, allocations={})
                try:
                    found = self._api.create(IPPool(metadata=meta, spec=spec))
                except AlreadyExists:
                    found = self._api.get(IPPool, name, namespace)
                listed.append(found)
            if found.spec.range != pool.spec.range:
                raise Unshareable(
                    f"IPPool {name} has spec.range {found.spec.range!r} instead of "
                    f"{pool.spec.range}: correct spec.range"
                )
        return listed

    def _offers(
        self, group: Mapping[str, AddressPool], index: BlockIndex, held: Collection[int], nodes: int
    ) -> tuple[Interval, ...]:
        """The earlier offers, the leased blocks, and further blocks of a space."""
        offered = list[Interval]()
        for name, pool in group.items():
            offered += self._shares[name].offered or ()
            offered += (each.interval for each in _leased(pool, index))
        for name, pool in group.items():
            missing = _missing_blocks(pool, common([_whole(pool)], merged(offered)), index, nodes)
            most = max(1, min(missing, _MOST_AT_ONCE // pool.status.block_size))
            further = _free_blocks(pool, merged(offered), held, most) if missing > 0 else []
            offered += further
            if missing > len(further) and len(further) < most:
                self._used_up.add(name)
        return merged(offered)

    def _listed(self, kind: type[AnyResource]) -> Sequence[AnyResource]:
        try:
            return self._api.list(kind).items
        except NotFound:
            return ()


def _missing_blocks(
    pool: AddressPool, offered: Iterable[Interval], index: BlockIndex, nodes: int
) -> int:
    """How many more blocks to offer, so that enough offered blocks are free."""
    blocks = _blocks(pool)
    leased = {blocks.index(each.interval.first) for each in _leased(pool, index)}
    runs = (range(blocks.index(each.first), blocks.index(each.last) + 1) for each in offered)
    idle = sum(number not in leased for run in runs for number in run)
    return SPARE + nodes // NODES_PER_SPARE - idle


def _free_blocks(
    pool: AddressPool, offered: Sequence[Interval], held: Collection[int], most: int
) -> list[Interval]:
    """Blocks that may be offered. Blocks without an address in `held` come first. Otherwise higher
    blocks come first, because whereabouts fills a range from its lowest address."""
    blocks = _blocks(pool)
    excluded = holes_of(pool.spec, blocks.range)
    top = blocks.index(min(blocks.range.last, blocks.range.address + READ_OFFSETS - 1))
    whole, parts = list[Interval](), list[Interval]()
    for number in range(top, max(-1, top - _MOST_LOOKED_AT), -1):
        block = blocks.block(number)
        if is_within(block.first, offered):
            continue
        usable = [
            address
            for part in outside(block, excluded)
            for address in range(part.first, part.last + 1)
            if address not in held
        ]
        taken = any(address in held for address in range(block.first, block.last + 1))
        if usable:
            (parts if taken else whole).append(block)
        if len(whole) == most:
            break
    return [*whole, *parts][:most]


def _given(ippools: Iterable[IPPool]) -> list[PoolEntry]:
    found = chain.from_iterable(map(entries, ippools))
    return [each for each in found if not each.allocation.is_placeholder]


def _share(
    pool: AddressPool,
    given: Iterable[PoolEntry],
    index: BlockIndex,
    offered: tuple[Interval, ...] | None,
) -> PoolShare:
    """Finds addresses that whereabouts and our nodes gave to two pods."""
    held = {each.address: each.allocation.podref for each in given}
    conflicts = [
        f"whereabouts gave {text(address)} to pod {held[address]}, and node "
        f"{placed.block.spec.holder.node} gave it to pod {pod}: delete one of these pods"
        for placed in _leased(pool, index)
        for offset, pod in placed.block.status.holders.items()
        if offset.isdigit() and (address := placed.interval.first + int(offset)) in held
    ]
    network = parse_interface(pool.spec.range)[1]
    within = merged(Interval(each, each) for each in held if each in network)
    return PoolShare(within, offered, tuple(conflicts))


def _network_names(pools: Mapping[str, AddressPool]) -> set[str]:
    return {pool.spec.network_name for pool in pools.values()}


def _leased(pool: AddressPool, index: BlockIndex) -> Iterator[PlacedBlock]:
    return index.within(pool.status.space, _whole(pool))


def _whole(pool: AddressPool) -> Interval:
    network = parse_interface(pool.spec.range)[1]
    return Interval(network.address, network.last)


def _blocks(pool: AddressPool) -> Geometry:
    blocks = block_layout.of_pool(pool)
    assert blocks is not None
    return blocks
