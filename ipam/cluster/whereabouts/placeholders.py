"""Placeholders: entries in whereabouts' IPPool by which its nodes leave our blocks alone.

With `compat: Coexist` a block is used only when each of its addresses is either held by a pod of
whereabouts or has a placeholder of ours; and it is deleted only when they are gone. whereabouts'
plugin, reconciler and control loop skip an entry whose `podref` is "".
"""

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ipam.addresses import Interval, parse_interface
from ipam.cluster.api import AlreadyExists, ClusterApi, Conflict, NotFound
from ipam.cluster.objects import AddressPool, Meta
from ipam.cluster.pools import Unusable
from ipam.cluster.whereabouts import held
from ipam.cluster.whereabouts.held import Held
from ipam.cluster.whereabouts.objects import (
    PLACEHOLDER,
    IPAllocation,
    IPPool,
    IPPoolSpec,
    NodeSlicePool,
    PoolEntry,
    entries,
    ippool_name,
    node_of,
    tests_of,
)
from ipam.cluster.whereabouts.slices import GivenSlice
from ipam.cluster.whereabouts.slices import given as slices_given

_ATTEMPTS = 20
_PAUSE = 0.05  # seconds
_MOST_AT_ONCE = 2000  # entries of a patch: an API server takes 10,000 operations, we need up to 3


class PoolReading(NamedTuple):
    """A look at a pool: its IPPool, those of ranges that overlap it, those of slices, by name, and
    who holds what. `given` are the slices that nodes have."""

    own: IPPool
    others: Sequence[IPPool]
    sliced: Mapping[str, IPPool]
    given: Sequence[GivenSlice]
    taken: Mapping[int, Held]


class Block(NamedTuple):
    """A block of ours by its uid. What our pods hold of it is `own`: a reservation alone of that is
    most likely theirs. What is `mirrored` gets the pod's own entry in place of a placeholder."""

    interval: Interval
    uid: str
    own: Collection[int] = ()
    mirrored: Mapping[int, IPAllocation] = {}


def put(
    api: ClusterApi,
    all_pools: Sequence[AddressPool],
    pool: AddressPool,
    block: Block,
    seen: PoolReading | None = None,
) -> tuple[Mapping[int, Held], PoolReading]:
    """Put placeholders on all addresses of a block that no pod of whereabouts holds; who holds the
    others, and all that was read. What was `seen` a moment ago is not read again.

    IPPools of ranges that overlap get some, too: whereabouts' DEL after an ADD that found our
    reservation deletes it. For each of `all_pools` that overlaps one is made, before whereabouts
    makes it without placeholders. Those of slices get some as well, and what is `mirrored`, since
    whereabouts looks nowhere else; without slices that is in the IPPool of the range.
    Raises ApiError, Unusable.
    """
    for attempt in range(_ATTEMPTS):
        if seen is None:
            seen = _look(api, all_pools, pool)
        slices = [each for each in seen.given if meet(each.interval, block.interval)]
        unmade = [each for each in slices if each.ippool not in seen.sliced]
        if unmade:
            for each in unmade:
                _made(api, each.ippool, each.range, (seen.own,))
            seen = None
            continue
        sliced = {each.ippool: seen.sliced[each.ippool] for each in slices}
        bare = block._replace(mirrored={})
        patches = [(each, _missing(block, each, seen)) for each in sliced.values()]
        patches.append((seen.own, _missing(bare if sliced else block, seen.own, seen)))
        patches += [(each, _missing(bare, each, seen)) for each in seen.others]
        if not any(operations for _, operations in patches):
            # Beside a placeholder of ours a reservation is most likely ours too.
            known = {entry.address for entry in entries(seen.own)}
            held = {
                address: seen.taken[address]
                for address in range(block.interval.first, block.interval.last + 1)
                if address in seen.taken and (address not in known or seen.taken[address].place)
            }
            return held, seen
        try:
            for there, operations in patches:
                if operations:
                    api.patch(there, operations)
        except (Conflict, NotFound):
            time.sleep(random.uniform(0, _PAUSE * (1 + attempt)))
        seen = None
    raise Conflict(f"patch IPPool of {pool.metadata.name}: others change it all the time")


def _look(api: ClusterApi, all_pools: Sequence[AddressPool], pool: AddressPool) -> PoolReading:
    slices = held.listed(api, NodeSlicePool)
    given = tuple(slices_given(pool, slices))
    listed = held.listed(api, IPPool)
    own = _made(api, _name(pool), pool.spec.range, listed)
    beside = pools_beside(pool, all_pools)
    shared = {_name(each): each for each in (pool, *beside) if held.is_shared(each)}
    private = {_name(each) for each in beside} - shared.keys()
    found = {each.metadata.name: each for each in listed} | {own.metadata.name: own}
    if held.is_shared(pool):
        for name in shared.keys() - found.keys():
            found[name] = _made(api, name, shared[name].spec.range, (own,))
    pools = held.pools_of(api, pool, all_pools, tuple(found.values()), slices)
    names = {each.ippool for each in given}
    others = [
        each
        for each in pools
        # A private range has blocks of its own, whose placeholders these are.
        if each.metadata.name not in {_name(pool), *names, *private}
        and not node_of(each, pool.spec.network_name)
    ]
    sliced = {name: found[name] for name in names & found.keys()}
    return PoolReading(own, others, sliced, given, held.read(api, pool, all_pools, pools))


def pools_beside(pool: AddressPool, all_pools: Sequence[AddressPool]) -> list[AddressPool]:
    """The pools of its network name that have addresses of a pool."""
    network = parse_interface(pool.spec.range)[1]
    return [
        each
        for each in all_pools
        if each.spec.network_name == pool.spec.network_name and held.meets(each.spec.range, network)
    ]


def _name(pool: AddressPool) -> str:
    """The name of the IPPool that whereabouts has of a pool's range."""
    return ippool_name(pool.spec.network_name, pool.spec.range)


def _missing(block: Block, there: IPPool, seen: PoolReading) -> Sequence[Mapping[str, object]]:
    """What a patch does that puts what is missing; each part tests what is there now."""
    known = {entry.address: entry for entry in entries(there)}
    placeholder = IPAllocation(id=f"{PLACEHOLDER}{block.uid}")
    base, network = parse_interface(there.spec.range)
    first = max(block.interval.first, base)
    operations: list[Mapping[str, object]] = []
    for address in range(first, min(block.interval.last, network.last) + 1):
        entry, taken = known.get(address), seen.taken.get(address)
        ours = block.mirrored.get(address, placeholder)
        is_ours = address in block.own and taken is not None and taken.place is None
        path = f"/spec/allocations/{address - base}"
        if entry is None and (is_ours or taken is None):
            operations.append({"op": "test", "path": path, "value": None})
            operations.append({"op": "add", "path": path, "value": _document(ours)})
        elif entry is not None and entry.allocation.is_placeholder and entry.allocation != ours:
            # Another block's was here before: no other node writes placeholders of this one.
            operations += tests_of(entry)
            operations.append({"op": "replace", "path": path, "value": _document(ours)})
    return operations


def remove(api: ClusterApi, uid: str) -> None:
    """Remove the placeholders of a block from all IPPools. ApiError."""
    for found in held.listed(api, IPPool):
        remove_from(api, found, lambda each: each == uid)


def remove_from(api: ClusterApi, pool: IPPool, is_meant: Callable[[str], bool]) -> int:
    """Remove placeholders of the blocks whose uids are meant; how many there were. ApiError."""
    removed = attempt = 0
    while attempt < _ATTEMPTS:
        ours = [entry for entry in entries(pool) if (uid := uid_of(entry)) and is_meant(uid)]
        if not ours:
            return removed
        operations: list[Mapping[str, object]] = []
        for entry in ours[:_MOST_AT_ONCE]:
            operations += tests_of(entry)
            operations.append({"op": "remove", "path": f"/spec/allocations/{entry.offset}"})
        try:
            api.patch(pool, operations)
            removed += len(ours[:_MOST_AT_ONCE])
            if len(ours) <= _MOST_AT_ONCE:
                return removed
        except NotFound:
            return removed
        except Conflict:
            attempt += 1
            time.sleep(random.uniform(0, _PAUSE * attempt))
        try:
            pool = api.get(IPPool, pool.metadata.name, pool.metadata.namespace)
        except NotFound:
            return removed
    raise Conflict(f"patch IPPool {pool.metadata.name}: others change it all the time")


def uid_of(entry: PoolEntry) -> str:
    """The uid of the block that a placeholder is of; "" of any other entry."""
    allocation = entry.allocation
    return allocation.id.removeprefix(PLACEHOLDER) if allocation.is_placeholder else ""


def _made(api: ClusterApi, name: str, range_: str, listed: Sequence[IPPool]) -> IPPool:
    """The IPPool of the very range, which is made if it is missing. whereabouts finds it by its
    name. ApiError; Unusable if what is written there would not be what whereabouts reads."""
    namespace = _only_namespace(listed)
    found = next((each for each in listed if each.metadata.name == name), None)
    if found is None:
        meta = Meta(name=name, namespace=namespace)
        new = IPPool(metadata=meta, spec=IPPoolSpec(range=range_, allocations={}))
        try:
            found = api.create(new)
        except AlreadyExists:
            found = api.get(IPPool, name, namespace)
    network = parse_interface(range_)[1]
    with suppress(ValueError):
        if parse_interface(found.spec.range) == (network.address, network):
            return found
    raise Unusable(
        f"IPPool {name} has the spec.range {found.spec.range!r}, and not {range_}: no placeholder "
        "can be put there: see who wrote that, and mend it"
    )


def _only_namespace(listed: Sequence[IPPool]) -> str:
    """Where whereabouts keeps its objects: its nodes look nowhere else."""
    found = held.namespaces_of(listed)
    if len(found) > 1:
        raise Unusable(
            f"there are IPPools in the namespaces {' and '.join(found)}: whereabouts uses one of "
            "them (that of its kubeconfig's context): delete the others, once no pod has an entry"
        )
    return found[0]


def meet(one: Interval, other: Interval) -> bool:
    return one.first <= other.last and other.first <= one.last


def _document(allocation: IPAllocation) -> dict[str, str]:
    """An entry as whereabouts writes it: a placeholder has no interface."""
    written = {"id": allocation.id, "podref": allocation.podref}
    return written | ({"ifname": allocation.ifname} if allocation.ifname else {})
