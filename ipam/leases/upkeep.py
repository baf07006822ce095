"""What a lessee does without being asked: it gives back, leases ahead, and tells what is used.

While the API server does not answer, it leaves all as it is: what is leased is needed then.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

from msgspec.structs import replace

from ipam.leases.block_store import BlockStore, Survey
from ipam.leases.claim_queue import Lease, WantKey
from ipam.leases.claim_request import Want
from ipam.leases.objects import AddressBlock, AddressPool, BlockStatus
from ipam.leases.pool_cache import ENOUGH, Pools, Unusable, is_scarce, pool_of
from ipam.leases.release import SMALL, Empties, give_back, over, returning
from ipam.ranges import size_of
from kube.client import ClusterApi
from kube.resources import ApiError, Conflict, NotFound

_LOOK_AT_POOL = 30.0, 450.0  # seconds, least and most; only where an empty block is kept
EVERY = 10.0  # seconds between two statuses of one node
_CALM = 5.0  # seconds after a claim until a status is written: pods have many interfaces
_LONGEST_STORM = 3 * EVERY  # seconds from one status to the next, however many claims there are

Guarded = Callable[[str, Callable[[], object]], bool]
"""Does some work, logs a failure, and answers whether there was none."""


class Upkeep:
    """The lessee's own work. `objects` are its blocks as they were last seen."""

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
        self.low: dict[WantKey, Want] = {}  # of which to lease a block; ADDs add to it
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
        """See what is held now, and forget what is over."""
        seq = self._store.seq()
        if seq != self._seen_seq:
            self.survey = self._store.survey()
            self._seen_seq = self.survey.seq
        for name, uid in over(self.survey).items():
            self._store.forget(name, uid)

    @property
    def has_unconfirmed(self) -> bool:
        """Whether a block waits to be confirmed in this boot, or the store does not know it any
        more: it was built again, say."""
        known = {each.block.name for each in self.survey.blocks}
        return not self._objects.keys() <= known or any(
            each.block.boot != self._boot and each.block.state not in ("returning", "lost")
            for each in self.survey.blocks
        )

    def confirmed(self, at: float) -> None:
        """All blocks and their pools were read then."""
        self._pool_seen = {each.block.pool: at for each in self.survey.blocks}

    def give_back(self, instance: str, guarded: Guarded) -> bool:
        """Return what is not needed, until a return fails; whether none did."""
        surplus = self._empties.surplus(self.survey, self._clock(), self._has_room)
        for block in (*returning(self.survey), *surplus):
            if not guarded(
                "give a block back", partial(give_back, self._api, self._store, instance, block)
            ):
                return False
            self._objects.pop(block.name, None)
        return True

    def lease_ahead(self, lease: Lease, is_late: Callable[[], bool], guarded: Guarded) -> None:
        """Lease a block where little is free."""
        while self.low:
            _, want = self.low.popitem()
            if self._is_ample(want) and not self._leaving():
                guarded("lease a block ahead", partial(lease, want, is_late))

    def leased(self) -> None:
        """A block was leased, and more may follow at once: a status can wait for these."""
        calm = min(self._clock() + _CALM, self._told_at + _LONGEST_STORM)
        self._tell_at = max(self._tell_at, calm)

    def tell(self) -> None:
        """Write one status, now and then. Raises ApiError."""
        now = self._clock()
        if now >= self._tell_at:
            self._told_at, self._tell_at = now, now + EVERY
            if not self._tell_one():
                self._tell_at = now

    def _tell_one(self) -> bool:
        """Write the status of the block whose use has changed most since its last one, which an
        earlier agent may have written; whether one has changed."""
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
            # A sticky block has none for any pod but its own.
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

    def _is_ample(self, want: Want) -> bool:
        pool = self._pools.known(pool_of(want))
        return pool is not None and pool.status.block_size > SMALL and not is_scarce(pool)

    def _has_room(self, name: str, since: float) -> bool:
        """Whether a pool can spare a block that is empty since then.

        The pool is read for that: once after the block became empty, and then now and then, the
        fewer blocks are left the more often.
        """
        if self._leaving():
            return False
        now, pool = self._clock(), self._pools.known(name)
        if self._pool_seen.get(name, -math.inf) < max(since, now - _look_every(pool)):
            self._pool_seen[name] = now
            with suppress(Unusable, ApiError):  # it is gone, or counts as it was read last
                self._pools.read(name)
            pool = self._pools.known(name)
        return pool is not None and pool.spec.state == "Active" and not is_scarce(pool)


def _look_every(pool: AddressPool | None) -> float:
    """Seconds from one look at the pool to the next; the least for a pool that could not be read.

    One second for each block that can be leased before the pool is scarce. All nodes that keep a
    block look at the pool at most ten times a second together.
    """
    least, most = _LOOK_AT_POOL
    if pool is None:
        return least
    blocks = pool.status.blocks
    return min(most, max(least, ENOUGH * blocks.total - blocks.leased, blocks.leased / 10))
