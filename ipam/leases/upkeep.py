"""Background work of the lessee: return idle blocks, lease ahead, publish status.

While the API server does not answer, this node keeps its leases, because the node can lease no
other block. To return a block, this node first marks the row, then deletes the AddressBlock. A
`returning` row never becomes usable again. A sticky block is not deleted, but drained for the next
holder. A block that a lost machine may still use is drained too.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import groupby, islice

from msgspec.structs import replace

from ipam.leases.block_store import BlockStore, Survey
from ipam.leases.claim_request import Lease, Want, WantKey
from ipam.leases.objects import AddressBlock, AddressPool, BlockStatus
from ipam.leases.pool_cache import ENOUGH, Pools, Unusable, is_scarce
from ipam.leases.sticky import drain
from ipam.ranges import size_of
from ipam.store.block_rows import LeasedBlock
from kube.client import ClusterApi
from kube.resources import ApiError, Conflict, NotFound

HOLD = 600.0  # seconds for which a node keeps one empty block beside used blocks
SMALL = 2  # addresses; an empty block of at most this size is not kept
_GRACE = 2.0  # seconds; a new block is empty until the ADD takes an address
_LOOK_AT_POOL = (
    30.0,
    450.0,
)  # least and most seconds between two reads, while an empty block is kept
EVERY = 10.0  # seconds between two statuses of one node
_CALM = 5.0  # seconds from a claim to the next status, because a pod may claim more
_LONGEST_STORM = 3 * EVERY  # most seconds between two statuses, for any number of claims

Guarded = Callable[[str, Callable[[], object]], bool]
"""Does some work, logs a failure, and returns whether it succeeded."""


class Upkeep:
    """`objects` has the node's blocks as they were last read."""

    def __init__(
        self,
        api: ClusterApi,
        store: BlockStore,
        pools: Pools,
        objects: dict[str, AddressBlock],
        boot: str,
        clock: Callable[[], float],
        leaving: Callable[[], bool],
    ) -> None:
        self.low: dict[WantKey, Want] = {}  # to lease ahead; ADDs add to it
        self.survey = Survey(0, ())
        self._api = api
        self._store = store
        self._pools = pools
        self._objects = objects
        self._boot = boot
        self._clock = clock
        self._leaving = leaving
        self._empties = Empties(boot)
        self._seen_seq = -1
        self._pool_seen: dict[str, float] = {}
        self._told_at = self._tell_at = clock()

    def look(self) -> None:
        """Survey the store, and delete the rows of lost blocks that have no reservations."""
        seq = self._store.seq()
        if seq != self._seen_seq:
            self.survey = self._store.survey()
            self._seen_seq = self.survey.seq
        for block, used in self.survey.blocks:
            if block.state == "lost" and not used:
                self._store.forget(block.name, block.uid)

    @property
    def has_unconfirmed(self) -> bool:
        """Whether a block is not confirmed in this boot, or has no row in the store."""
        known = {each.block.name for each in self.survey.blocks}
        return not self._objects.keys() <= known or any(
            each.block.boot != self._boot and each.block.state not in ("returning", "lost")
            for each in self.survey.blocks
        )

    def confirmed(self, at: float) -> None:
        self._pool_seen = {each.block.pool: at for each in self.survey.blocks}

    def give_back(self, instance: str, guarded: Guarded) -> bool:
        """Give back unneeded blocks. Returns False at the first failure."""
        surplus = self._empties.surplus(self.survey, self._clock(), self._has_room)
        returning = (each.block for each in self.survey.blocks if each.block.state == "returning")
        for block in (*returning, *surplus):
            if not guarded(
                "give a block back", partial(give_back, self._api, self._store, instance, block)
            ):
                return False
            self._objects.pop(block.name, None)
        return True

    def lease_ahead(self, lease: Lease, is_late: Callable[[], bool], guarded: Guarded) -> None:
        """Lease a block of each pool in which this node has few free addresses."""
        while self.low:
            _, want = self.low.popitem()
            pool = self._pools.known(want.pool_name)
            if pool is None or pool.status.block_size <= SMALL or is_scarce(pool):
                continue
            if not self._leaving():
                guarded("lease a block ahead", partial(lease, want, is_late))

    def leased(self) -> None:
        """Delay the next status after a lease, because more leases may follow."""
        calm = min(self._clock() + _CALM, self._told_at + _LONGEST_STORM)
        self._tell_at = max(self._tell_at, calm)

    def tell(self) -> None:
        """Write one status if it is due. Raises ApiError."""
        now = self._clock()
        if now >= self._tell_at:
            self._told_at, self._tell_at = now, now + EVERY
            if not self._tell_one():
                self._tell_at = now

    def _tell_one(self) -> bool:
        """Write the status of the block whose use changed most.

        Returns False if no block's use changed.
        """
        changes = {
            each.block: abs(each.used - self._objects[each.block.name].status.used)
            for each in self.survey.blocks
            if each.block.state in ("usable", "draining") and each.block.name in self._objects
        }
        block = max(changes, key=lambda block: changes[block], default=None)
        if block is None or not changes[block]:
            return False
        holders = {
            str(address - block.first): f"{held.pod_name or held.container_id} {held.ifname}"
            for address, held in sorted(self._store.holders(block.name).items(), reverse=True)
        }
        status = BlockStatus(
            used=len(holders),
            # A sticky block has no free address for other pods.
            free=0 if block.sticky else max(0, size_of(block.parts) - len(holders)),
            seq=self.survey.seq,
            confirmed=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            holders=holders,
        )
        try:
            told = replace(self._objects[block.name], status=status)
            self._objects[block.name] = self._api.update_status(told)
        except (Conflict, NotFound):
            self._objects.pop(block.name)  # until it is confirmed again
        return True

    def _has_room(self, name: str, since: float) -> bool:
        """Whether this node may keep an empty block of the pool. The block has been empty since
        `since`. Reads the pool more often if few blocks are free."""
        if self._leaving():
            return False
        now, pool = self._clock(), self._pools.known(name)
        if self._pool_seen.get(name, -math.inf) < max(since, now - _look_every(pool)):
            self._pool_seen[name] = now
            with suppress(Unusable, ApiError):  # the pool is deleted, or its last state counts
                self._pools.read(name)
            pool = self._pools.known(name)
        return pool is not None and pool.spec.state == "Active" and not is_scarce(pool)


def _look_every(pool: AddressPool | None) -> float:
    """The seconds between two reads: one for each block that nodes can lease before the pool is
    scarce. Up to 4500 holders together read the pool at most ten times a second."""
    least, most = _LOOK_AT_POOL
    if pool is None:
        return least
    blocks = pool.status.blocks
    return min(most, max(least, ENOUGH * blocks.total - blocks.leased, blocks.leased / 10))


def give_back(api: ClusterApi, store: BlockStore, instance: str, block: LeasedBlock) -> None:
    """Give a block back if no pod holds its addresses.

    If the first request fails, the row is not marked, because a pod may still need the block.
    Raises ApiError."""
    found = None
    with suppress(NotFound):
        found = api.get(AddressBlock, block.name)
    if block.state != "returning" and not store.begin_return(block.name, block.uid):
        return
    holder = "" if found is None else found.spec.holder.instance
    if found is not None and (found.metadata.uid, holder) == (block.uid, instance):
        is_suspect = bool(block.unprobed or block.answered)
        row = store.blocks().get(block.name)
        try:
            if not (block.sticky or is_suspect):
                api.delete(found)
            elif row is not None and (row.uid, row.state) == (block.uid, "returning"):
                drain(api, found, probe=is_suspect)
            else:
                return  # the pod came back, and this node took the block over again
        except Conflict:
            return  # the controller changed the block: try again later
        except NotFound:
            pass
    store.forget(block.name, block.uid)


class Empties:
    """Finds empty blocks to return. Blocks that are not confirmed in this `boot` stay, because the
    store may lack their reservations."""

    def __init__(self, boot: str) -> None:
        self._boot = boot
        self._since: dict[tuple[str, str], float] = {}

    def surplus(
        self, survey: Survey, now: float, spare: Callable[[str, float], bool]
    ) -> Iterator[LeasedBlock]:
        """The blocks to return. One empty block of each pool stays for HOLD seconds. If this node
        has no other block of the pool, the block stays longer. `spare` is `Upkeep._has_room`."""
        keys = {(each.block.name, each.block.uid) for each in survey.blocks if not each.used}
        self._since = {key: self._since.get(key, now) for key in keys}
        for pool, grouped in groupby(
            sorted(survey.blocks, key=lambda each: (each.block.pool, each.block.first)),
            key=lambda each: each.block.pool,
        ):
            present = [
                each
                for each in grouped
                if each.block.state in ("usable", "draining") and each.block.boot == self._boot
            ]
            empty = [each.block for each in present if not each.used]
            usable = (
                block
                for block in empty
                if block.state == "usable" and block.size > SMALL and block.parts
                if not block.sticky
            )
            kept = list(islice(usable, 1))
            for block in kept[:]:  # a block that was just claimed stays
                since = self._since[block.name, block.uid]
                if self._age(block, now) >= _GRACE and not spare(pool, since):
                    kept.remove(block)
            if len(present) > 1:
                kept = [block for block in kept if self._age(block, now) < HOLD]
            for block in empty:
                if block not in kept and self._age(block, now) >= _GRACE:
                    yield block

    def _age(self, block: LeasedBlock, now: float) -> float:
        since = self._since[block.name, block.uid]
        # A sticky block that was taken over again counts as just claimed.
        return now - (max(since, block.confirmed) if block.sticky else since)
