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
    tests_of,
)

_ATTEMPTS = 20
_PAUSE = 0.05  # seconds
_MOST_AT_ONCE = 2000  # entries of a patch: an API server takes 10,000 operations, we need up to 3


class PoolReading(NamedTuple):
    """A look at a pool: its IPPool, those of ranges that overlap it, and who holds what."""

    own: IPPool
    others: Sequence[IPPool]
    taken: Mapping[int, Held]


class Block(NamedTuple):
    """A block of ours by its uid. What our pods hold of it is `own`: a reservation alone of that is
    most likely theirs. What is `mirrored` gets the pod's own entry in place of a placeholder."""

    interval: Interval
    uid: str
    own: Collection[int] = ()
    mirrored: Mapping[int, IPAllocation] = {}


def put(
    api: ClusterApi, pool: AddressPool, block: Block, seen: PoolReading | None = None
) -> tuple[Mapping[int, Held], PoolReading]:
    """Put placeholders on all addresses of a block that no pod of whereabouts holds; who holds the
    others, and all that was read. What was `seen` a moment ago is not read again.

    Those of ranges that overlap get some, too: whereabouts' DEL after an ADD that found our
    reservation deletes it. Raises ApiError, and Unusable where nodes of whereabouts have slices of
    the range.
    """
    for attempt in range(_ATTEMPTS):
        if seen is None:
            seen = _look(api, pool)
        patches = [(each, _missing(block, each, seen)) for each in (seen.own, *seen.others)]
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


def _look(api: ClusterApi, pool: AddressPool) -> PoolReading:
    require_whole(api, pool)
    listed = held.listed(api, IPPool)
    own = _own(api, pool, listed)
    pools = held.pools_of(api, pool, listed)
    others = [each for each in pools if each.metadata.name != own.metadata.name]
    return PoolReading(own, others, held.read(api, pool, (own, *others)))


def _missing(block: Block, there: IPPool, seen: PoolReading) -> Sequence[Mapping[str, object]]:
    """What a patch does that puts what is missing; each part tests what is there now."""
    known = {entry.address: entry for entry in entries(there)}
    mirrored = block.mirrored if there is seen.own else {}
    placeholder = IPAllocation(id=f"{PLACEHOLDER}{block.uid}")
    base, network = parse_interface(there.spec.range)
    first = max(block.interval.first, base)
    operations: list[Mapping[str, object]] = []
    for address in range(first, min(block.interval.last, network.last) + 1):
        entry, taken = known.get(address), seen.taken.get(address)
        ours = mirrored.get(address, placeholder)
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


def require_whole(api: ClusterApi, pool: AddressPool) -> None:
    """Unusable if the range is cut into slices, from which nodes of whereabouts take addresses."""
    network = parse_interface(pool.spec.range)[1]
    for found in held.listed(api, NodeSlicePool):
        if held.meets(found.spec.range, network):
            raise Unusable(
                f"AddressPool {pool.metadata.name}: NodeSlicePool {found.metadata.name} gives "
                "slices of its range to nodes: run whereabouts on no node, set spec.compat to Read"
            )


def _own(api: ClusterApi, pool: AddressPool, listed: Sequence[IPPool]) -> IPPool:
    """The IPPool of the very range, which is made if it is missing. whereabouts finds it by its
    name. ApiError; Unusable if what is written there would not be what whereabouts reads."""
    spec = pool.spec
    name = ippool_name(spec.network_name, spec.range)
    namespace = _only_namespace(listed)
    found = next((each for each in listed if each.metadata.name == name), None)
    if found is None:
        meta = Meta(name=name, namespace=namespace)
        new = IPPool(metadata=meta, spec=IPPoolSpec(range=spec.range, allocations={}))
        try:
            found = api.create(new)
        except AlreadyExists:
            found = api.get(IPPool, name, namespace)
    network = parse_interface(spec.range)[1]
    with suppress(ValueError):
        if parse_interface(found.spec.range) == (network.address, network):
            return found
    raise Unusable(
        f"IPPool {name} has the spec.range {found.spec.range!r}, and not {spec.range}: no "
        "placeholder can be put there: see who wrote that, and mend it"
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


def _document(allocation: IPAllocation) -> dict[str, str]:
    """An entry as whereabouts writes it: a placeholder has no interface."""
    written = {"id": allocation.id, "podref": allocation.podref}
    return written | ({"ifname": allocation.ifname} if allocation.ifname else {})
