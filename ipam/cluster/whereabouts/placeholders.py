"""Placeholders: entries in whereabouts' IPPool by which its nodes leave our blocks alone.

With `compat: Coexist` a block is used only when each of its addresses is either held by a pod of
whereabouts or has a placeholder of ours; and it is deleted only when they are gone. whereabouts'
plugin, reconciler and control loop skip an entry whose `podref` is "".
"""

import random
import time
from collections.abc import Callable, Mapping

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
    entries,
    ippool_name,
    node_of,
    tests_of,
)

_ATTEMPTS = 20
_PAUSE = 0.05  # seconds


def put(api: ClusterApi, pool: AddressPool, block: Interval, uid: str) -> Mapping[int, Held]:
    """Put placeholders of the block `uid` on all its addresses that no pod holds; who holds the
    others. Raises ApiError, and Unusable where nodes of whereabouts have slices of the range."""
    require_whole(api, pool)
    ours = {"id": f"{PLACEHOLDER}{uid}", "podref": ""}
    for attempt in range(_ATTEMPTS):
        there = _own(api, pool)
        base = parse_interface(there.spec.range)[0]
        known = {entry.address: entry for entry in entries(there)}
        taken = held.read(api, pool)
        operations: list[Mapping[str, object]] = []
        for address in range(block.first, block.last + 1):
            entry = known.get(address)
            path = f"/spec/allocations/{address - base}"
            if entry is None and address not in taken:
                operations.append({"op": "test", "path": path, "value": None})
                operations.append({"op": "add", "path": path, "value": ours})
            elif entry is not None and _is_stale(entry.allocation, uid):
                # Of a block that was here before: no other node writes placeholders of this one.
                operations += tests_of(entry)
                operations.append({"op": "replace", "path": path, "value": ours})
        if not operations:
            # Beside a placeholder of ours a reservation is most likely ours too.
            return {
                address: taken[address]
                for address in range(block.first, block.last + 1)
                if address in taken and (address not in known or taken[address].place)
            }
        try:
            api.patch(there, operations)
        except (Conflict, NotFound):
            time.sleep(random.uniform(0, _PAUSE * (1 + attempt)))
    raise Conflict(f"patch IPPool of {pool.metadata.name}: others change it all the time")


def remove(api: ClusterApi, uid: str) -> None:
    """Remove the placeholders of a block from all IPPools. ApiError."""
    for found in held.listed(api, IPPool):
        remove_from(api, found, lambda each: each == uid)


def remove_from(api: ClusterApi, pool: IPPool, is_meant: Callable[[str], bool]) -> int:
    """Remove placeholders of the blocks whose uids are meant; how many there were. ApiError."""
    for attempt in range(_ATTEMPTS):
        ours = [
            entry
            for entry in entries(pool)
            if entry.allocation.is_placeholder
            and is_meant(entry.allocation.id.removeprefix(PLACEHOLDER))
        ]
        if not ours:
            return 0
        operations: list[Mapping[str, object]] = []
        for entry in ours:
            operations += tests_of(entry)
            operations.append({"op": "remove", "path": f"/spec/allocations/{entry.offset}"})
        try:
            api.patch(pool, operations)
        except NotFound:
            return 0
        except Conflict:
            time.sleep(random.uniform(0, _PAUSE * (1 + attempt)))
            try:
                pool = api.get(IPPool, pool.metadata.name, pool.metadata.namespace)
            except NotFound:
                return 0
        else:
            return len(ours)
    raise Conflict(f"patch IPPool {pool.metadata.name}: others change it all the time")


def require_whole(api: ClusterApi, pool: AddressPool) -> None:
    """Unusable if the range is cut into slices, from which nodes of whereabouts take addresses."""
    network = parse_interface(pool.spec.range)[1]
    for found in held.listed(api, NodeSlicePool):
        if held.meets(found.spec.range, network):
            raise Unusable(
                f"AddressPool {pool.metadata.name}: NodeSlicePool {found.metadata.name} gives "
                "slices of its range to nodes: run whereabouts on no node, set spec.compat to Read"
            )


def _own(api: ClusterApi, pool: AddressPool) -> IPPool:
    """The IPPool of the very range, which is made if it is missing."""
    spec = pool.spec
    listed = held.listed(api, IPPool)
    for found in listed:
        if node_of(found, spec.network_name) == "" and found.spec.range == spec.range:
            return found
    namespace = listed[0].metadata.namespace if listed else held.NAMESPACE
    meta = Meta(name=ippool_name(spec.network_name, spec.range), namespace=namespace)
    try:
        return api.create(IPPool(metadata=meta, spec=IPPoolSpec(range=spec.range, allocations={})))
    except AlreadyExists:
        return api.get(IPPool, meta.name, namespace)


def _is_stale(allocation: IPAllocation, uid: str) -> bool:
    return allocation.is_placeholder and allocation.id != f"{PLACEHOLDER}{uid}"
