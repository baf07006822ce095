"""What a confirmation makes of a block where whereabouts has addresses of its pool."""

import logging
from collections.abc import Mapping

from msgspec.structs import replace

from cni.spec.errors import CNIError
from ipam.addresses import Interval, parse
from ipam.blocks import LeasedBlock
from ipam.cluster import geometry
from ipam.cluster.api import ApiError
from ipam.cluster.leasing import Leasing
from ipam.cluster.objects import AddressBlock, AddressPool, BlockSpec
from ipam.cluster.pools import Unusable, foreign_within
from ipam.cluster.whereabouts import placeholders
from ipam.cluster.whereabouts.announcements import Announcements
from ipam.cluster.whereabouts.held import Held, reservations
from ipam.cluster.whereabouts.objects import IPAllocation, OverlappingReservationSpec
from ipam.ranges import is_shared_domain, merged
from ipam.store import Reservation

_log = logging.getLogger(__name__)


class Looks:
    """Looks at whereabouts' objects for one confirmation, at most once for each pool.

    `clashes` are addresses of ours that whereabouts has given to another pod since. `unseen` are
    the names of blocks for which it could not look: what they keep out stays so.
    """

    def __init__(self, leasing: Leasing) -> None:
        self._api, self._store, self._pools, self._holder, _ = leasing
        self._announcements = Announcements(self._api, self._store, self._pools)
        self._foreign: dict[str, Mapping[int, Held] | None] = {}
        self._seen: dict[str, placeholders.PoolReading] = {}
        self._reserved: dict[str, Mapping[int, OverlappingReservationSpec]] = {}
        self.clashes: list[Reservation] = []
        self.unseen: set[str] = set()

    def of(self, found: AddressBlock) -> BlockSpec | None:
        """The block's spec, with what whereabouts holds of it now; None if it may not be used yet.

        It is asked as long as the pool's `compat` says so: what was written there may be lost, and
        whereabouts may run where it should not.
        """
        pool = self._pools.of_block(found)
        spec = found.spec
        if pool is not None and ({spec.compat, pool.spec.compat} != {"None"} or spec.foreign):
            held = self._held(pool, found)
            if held is None:
                self.unseen.add(found.metadata.name)
            else:
                ours = self._store.holders(found.metadata.name)
                others = (each for each in held if not _is_ours(held[each], ours.get(each)))
                foreign = foreign_within(others, geometry.interval(found))
                self._compare(found, held, foreign)
                spec = replace(spec, foreign=foreign, compat=pool.spec.compat)
        is_unseen = pool is None or spec.compat != pool.spec.compat
        return None if spec.state == "Pending" and is_unseen else spec

    def forget(self, found: AddressBlock) -> None:
        """Take the placeholders of a block back, before it is deleted. ApiError."""
        pool = self._pools.of_block(found)
        if found.spec.compat == "Coexist" or (pool and pool.spec.compat == "Coexist"):
            placeholders.remove(self._api, found.metadata.uid)

    def _held(self, pool: AddressPool, found: AddressBlock) -> Mapping[int, Held] | None:
        """What whereabouts holds of a pool; None if it cannot be seen, or told of the block."""
        name = pool.metadata.name
        try:
            # What it holds no more becomes ours first.
            if pool.spec.compat == "Coexist":
                return self._told(pool, found)
            if found.spec.compat == "Coexist" or found.spec.state == "Pending":
                placeholders.remove(self._api, found.metadata.uid)
            if name not in self._foreign:
                self._foreign[name] = self._pools.foreign(pool)
        except (ApiError, Unusable, CNIError) as error:  # leases do not depend on it
            _log.warning("leases: cannot see what whereabouts holds of %s: %s", name, error)
            self._foreign.setdefault(name, None)
            return None
        return self._foreign[name]

    def _told(self, pool: AddressPool, found: AddressBlock) -> Mapping[int, Held]:
        """What whereabouts holds of a pool, after it was told of the block and of what pods hold of
        it: placeholders and reservations may be lost, and are made again."""
        mirrored = self._mirrored(pool, found) if pool.spec.mirror else {}
        holders = self._store.holders(found.metadata.name)
        name = pool.metadata.name
        block = placeholders.Block(
            geometry.interval(found), found.metadata.uid, holders.keys(), mirrored
        )
        seen = self._seen.pop(name, None)
        all_pools = self._pools.all_pools
        held, self._seen[name] = placeholders.put(self._api, all_pools, pool, block, seen)
        if mirrored:
            self._pools.foreign(pool)  # a new sandbox of the pod finds the entry
        if any(is_shared_domain(holder.domain) for holder in holders.values()):
            if name not in self._reserved:
                self._reserved[name] = reservations(self._api, pool)
            for address, holder in holders.items():
                there = self._reserved[name].get(address)
                if (
                    is_shared_domain(holder.domain)
                    and (there is None or there.podref != holder.pod_name)
                    and not self._announcements.restore(holder)
                    and address not in held
                ):
                    self.clashes.append(holder)
        return held

    def _mirrored(self, pool: AddressPool, found: AddressBlock) -> Mapping[int, IPAllocation]:
        """The entries that the block's pods are to have. From here on these are what holds their
        addresses, as those of pods that whereabouts has set up: no other pod of ours gets one."""
        name = found.metadata.name
        before = self._store.holders(name)
        out = [Interval(each, each) for each in before]

        def revised(row: LeasedBlock) -> LeasedBlock:
            return replace(row, kept_out=merged((*row.kept_out, *out)))

        self._store.revise({(name, found.metadata.uid): revised})
        entries = {}
        for address, holder in self._store.holders(name).items():
            is_named = bool(holder.namespace and holder.pod)
            if address in before and is_named and holder.boot == self._holder.boot:
                departure = self._announcements.hold(holder)
                entries[address] = IPAllocation(
                    id=departure.container_id, podref=departure.podref, ifname=departure.ifname
                )
        return entries

    def _compare(
        self, found: AddressBlock, held: Mapping[int, Held], foreign: tuple[str, ...]
    ) -> None:
        for address in map(parse, set(foreign) - set(found.spec.foreign)):
            holder = self._store.holders(found.metadata.name).get(address)
            if holder is not None and _is_another(held[address].allocation, holder):
                self.clashes.append(holder)


def _is_ours(held: Held, holder: Reservation | None) -> bool:
    """Whether all that whereabouts' objects have of an address is our own pod's reservation."""
    pod = held.allocation.podref
    return held.place is None and holder is not None and holder.pod_name == pod


def _is_another(allocation: IPAllocation, holder: Reservation) -> bool:
    """Whether whereabouts has given the address to another pod."""
    return allocation.id != holder.container_id and allocation.podref != holder.pod_name
