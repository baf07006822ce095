"""Removes from whereabouts' objects what sandboxes had there that are gone (`ipam.departures`).

The reservation goes before the entry, which finds it: a crash between both leaves the entry, and
nothing is forgotten. An entry stays a moment after its DEL, since the pod may come back for it.
"""

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from ipam.addresses import parse, parse_interface
from ipam.cluster.api import AlreadyExists, ClusterApi, Conflict, NotFound, Refused
from ipam.cluster.block_store import BlockStore
from ipam.cluster.names import pool_name
from ipam.cluster.objects import Meta
from ipam.cluster.pools import NotReadyYet, Pools
from ipam.cluster.whereabouts.held import listed, namespaces_of
from ipam.cluster.whereabouts.objects import (
    IPPool,
    OverlappingRangeIPReservation,
    PoolEntry,
    entries,
    node_of,
    reservation_name,
    tests_of,
)
from ipam.departures import DepartedAttachment, Departures

GRACE = 10.0  # seconds; a new sandbox of the pod comes within a few
UNUSED = 900.0  # seconds for an attachment that the store does not know: its node may have booted
_ATTEMPTS = 10  # of a patch that others forestall
_PAUSE = 0.1  # seconds


class _Found(NamedTuple):
    """An entry, and whose it was."""

    entry: PoolEntry
    departure: DepartedAttachment


class Settling:
    """Does what DELs owe. For one thread; `clock` is CLOCK_BOOTTIME."""

    def __init__(
        self,
        api: ClusterApi,
        store: BlockStore,
        pools: Pools,
        departures: Departures,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._store = store
        self._pools = pools
        self._departures = departures
        self._clock = clock
        self._since: dict[tuple[str, str], float] = {}

    def settle(self) -> bool:
        """Do what is due; whether any entry was removed. Raises ApiError: the rest comes later."""
        ripe = self._older(self._departures.departed(), "gone", GRACE)
        removed = False
        asked = [each for each in ripe if self._is_asked_for(each)]
        if asked or any(each.reserved for each in ripe):
            try:
                pools = listed(self._api, IPPool)
                for pool in pools if asked else ():
                    removed |= self._removed_of(pool, asked)
                for each in ripe:
                    self._release(each, pools)
            except Refused:
                if asked:
                    raise
                # With `None` this node has no right to them any more, and they count no more.
        for each in ripe:
            self._departures.settle(each)
        for each in self._older(self._departures.held(), "held", UNUSED):
            if not self._store.has(each.attachment):
                self._departures.depart(each)  # its ADD died, or a GC released it
        return removed

    def _older(
        self, departures: Iterable[DepartedAttachment], state: str, age: float
    ) -> list[DepartedAttachment]:
        """Those that this process has known for so long."""
        now = self._clock()
        present = {(state, each.attachment.key): each for each in departures}
        others = {key: at for key, at in self._since.items() if key[0] != state}
        self._since = others | {key: self._since.get(key, now) for key in present}
        return [each for key, each in present.items() if now - self._since[key] >= age]

    def _is_asked_for(self, departure: DepartedAttachment) -> bool:
        """Whether a pool of the attachment says that whereabouts is to be asked."""
        for domain, range_ in departure.ranges:
            name, private, _ = domain.partition(" ")
            pool = pool_name(name, range_, shared=not private)
            try:
                known = self._pools.known(pool) or self._pools.read(pool)
            except NotReadyYet:
                return True  # the definition is gone, and its pool may have been
            if known.spec.compat != "None":
                return True
        return not departure.ranges

    def _removed_of(self, pool: IPPool, departed: Sequence[DepartedAttachment]) -> bool:
        """Remove their entries from one pool."""
        by_id: dict[str, list[DepartedAttachment]] = {}
        for each in departed:
            by_id.setdefault(each.container_id, []).append(each)
        unreserved: dict[str, list[OverlappingRangeIPReservation]] = {}  # by offset
        for attempt in range(_ATTEMPTS):
            found = _found(pool, by_id)
            if not found:
                return attempt > 0
            operations: list[dict[str, str]] = []
            for pair in found:
                unreserved.setdefault(pair.entry.offset, []).extend(self._unreserve(pool, pair))
                operations += tests_of(pair.entry)
                path = f"/spec/allocations/{pair.entry.offset}"
                operations.append({"op": "remove", "path": path})
            try:
                self._api.patch(pool, operations)
            except NotFound:
                return True
            except Conflict:
                time.sleep(random.uniform(0, _PAUSE * (1 + attempt)))
                try:
                    pool = self._api.get(IPPool, pool.metadata.name, pool.metadata.namespace)
                except NotFound:
                    return True
                self._reserve_again(pool, unreserved, by_id)
            else:
                return True
        raise Conflict(f"patch IPPool {pool.metadata.name}: others change it all the time")

    def _reserve_again(
        self,
        pool: IPPool,
        unreserved: dict[str, list[OverlappingRangeIPReservation]],
        gone: Collection[str],
    ) -> None:
        """Make the reservations of entries that a new sandbox of the pod has taken over meanwhile:
        whereabouts makes none for a pod that had one when it looked."""
        there = pool.spec.allocations or {}
        for offset in [each for each in unreserved if each in there and there[each].id not in gone]:
            for former in unreserved.pop(offset):
                if former.spec.podref == there[offset].podref:
                    meta = Meta(name=former.metadata.name, namespace=former.metadata.namespace)
                    with suppress(AlreadyExists, Refused):  # `Read` has no right to
                        self._api.create(replace(former, metadata=meta))

    def _release(self, departure: DepartedAttachment, pools: Sequence[IPPool]) -> None:
        """Delete the reservations that were made for the attachment, but for addresses that a later
        sandbox of the pod has."""
        mine = (departure.podref, departure.ifname)
        for network, written in departure.reserved:
            address = parse(written)
            if _has_entry(pools, network, address, departure.podref):
                continue  # on a node of whereabouts
            name = reservation_name(network, address)
            for namespace in namespaces_of(pools):
                with suppress(NotFound):
                    there = self._api.get(OverlappingRangeIPReservation, name, namespace)
                    # An ADD takes its address before it makes a reservation: no ADD made this one.
                    if (there.spec.podref, there.spec.ifname) == mine and not self._store.is_held(
                        network, address
                    ):
                        self._api.delete(there)

    def _unreserve(self, pool: IPPool, found: _Found) -> list[OverlappingRangeIPReservation]:
        """Delete the reservation of an entry's address, if it is the pod's; what was deleted."""
        entry, departure = found
        podrefs = {entry.allocation.podref, departure.podref} - {"", "/"}
        deleted = []
        for network in _network_names(pool, departure):
            name = reservation_name(network, entry.address)
            with suppress(NotFound):
                there = self._api.get(OverlappingRangeIPReservation, name, pool.metadata.namespace)
                if there.spec.podref in podrefs and there.spec.ifname in ("", departure.ifname):
                    self._api.delete(there)
                    deleted.append(there)
        return deleted


def _has_entry(pools: Sequence[IPPool], network: str, address: int, podref: str) -> bool:
    """Whether the pod has an entry of the address."""
    return any(
        (entry.address, entry.allocation.podref) == (address, podref)
        for pool in pools
        if node_of(pool, network) is not None
        for entry in entries(pool)
    )


def _found(pool: IPPool, by_id: Mapping[str, Sequence[DepartedAttachment]]) -> list[_Found]:
    """Entries by id and interface; of versions that wrote no interface by id and pod, in the pools
    of the attachment's own network only."""
    found = []
    for entry in entries(pool):
        allocation = entry.allocation
        for each in by_id.get(allocation.id, ()):
            if allocation.ifname == each.ifname or (
                allocation.ifname == ""
                and allocation.podref in ("", each.podref)
                and _is_of(pool, each)
            ):
                found.append(_Found(entry, each))
                break
    return found


def _is_of(pool: IPPool, departure: DepartedAttachment) -> bool:
    if not departure.ranges:
        return True
    try:
        base = parse_interface(pool.spec.range)[0]
    except ValueError:
        return False
    return any(
        node_of(pool, domain.partition(" ")[0]) is not None and base in parse_interface(range_)[1]
        for domain, range_ in departure.ranges
    )


def _network_names(pool: IPPool, departure: DepartedAttachment) -> set[str]:
    if departure.ranges:
        return {domain.partition(" ")[0] for domain, _ in departure.ranges}
    return {"", node_of(pool, "") or ""}
