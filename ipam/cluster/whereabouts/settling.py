"""Removes from whereabouts' objects what sandboxes had there that are gone (`ipam.departures`).

The reservation goes before the entry, which finds it: a crash between both leaves the entry, and
nothing is forgotten. An entry stays a moment after its DEL, since the pod may come back for it.
"""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ipam.addresses import parse, parse_interface
from ipam.cluster.api import ClusterApi, Conflict, NotFound
from ipam.cluster.block_store import BlockStore
from ipam.cluster.names import pool_name
from ipam.cluster.pools import NotReadyYet, Pools
from ipam.cluster.whereabouts.held import listed, namespaces
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
UNUSED = 120.0  # seconds that an entry may be meant for an attachment that the store does not know
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
        if ripe:
            for each in ripe:
                self._release(each)
            asked = [each for each in ripe if self._is_asked_for(each)]
            if asked:
                for pool in listed(self._api, IPPool):
                    removed |= self._removed_of(pool, asked)
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
        for attempt in range(_ATTEMPTS):
            found = _found(pool, by_id)
            if not found:
                return attempt > 0
            for pair in found:
                self._unreserve(pool, pair)
            operations: list[dict[str, str]] = []
            for pair in found:
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
            else:
                return True
        raise Conflict(f"patch IPPool {pool.metadata.name}: others change it all the time")

    def _release(self, departure: DepartedAttachment) -> None:
        """Delete the reservations that were made for the attachment."""
        for network, address in departure.reserved:
            name = reservation_name(network, parse(address))
            for namespace in namespaces(self._api):
                with suppress(NotFound):
                    there = self._api.get(OverlappingRangeIPReservation, name, namespace)
                    mine = (departure.podref, departure.ifname)
                    if (there.spec.podref, there.spec.ifname) == mine:
                        self._api.delete(there)

    def _unreserve(self, pool: IPPool, found: _Found) -> None:
        """Delete the reservation of an entry's address, if it is the pod's."""
        entry, departure = found
        podrefs = {entry.allocation.podref, departure.podref} - {"", "/"}
        for network in _network_names(pool, departure):
            name = reservation_name(network, entry.address)
            with suppress(NotFound):
                there = self._api.get(OverlappingRangeIPReservation, name, pool.metadata.namespace)
                if there.spec.podref in podrefs and there.spec.ifname in ("", departure.ifname):
                    self._api.delete(there)


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
