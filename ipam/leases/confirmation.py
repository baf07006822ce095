"""Confirms this node's leases by one consistent LIST of the node's blocks.

Leases are confirmed only while the Node object exists. The object of a confirmed block has our
instance, the row's uid and this boot. The object's state is not `Reclaiming`. If the store and the
API server differ, the store decides which addresses pods have. The API server decides which node
holds a block. The time of a confirmation is read before the confirmation's first request.
"""

import logging
import math
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from base.pod import Pod
from ipam.addresses import Interval, Network, text
from ipam.leases import block_layout
from ipam.leases.block_store import Revision
from ipam.leases.lease_context import Leasing, same_machine_before
from ipam.leases.objects import AddressBlock, BlockSpec, BlockStatus
from ipam.leases.pool_cache import Unusable, max_offline, require_usable
from ipam.leases.sticky import holes, is_let_go, of_row, row_of
from ipam.store.block_rows import LeasedBlock, State
from kube.client import PendingEvents
from kube.resources import AlreadyExists, Conflict, Meta, NotFound, Refused

_MOST_NAMED = 8  # addresses of a block in an event
_log = logging.getLogger(__name__)


class Confirmed(NamedTuple):
    """Objects by name. `rolled_back` says whether a block had to be claimed again."""

    objects: Mapping[str, AddressBlock]
    rolled_back: bool


class Confirmation:
    """Brings the store's rows and the API server's objects into agreement."""

    def __init__(self, leasing: Leasing, events: PendingEvents) -> None:
        self._api, self._store, self._pools, self._holder, self._clock = leasing
        self._events = events

    def run(self, at: float) -> Confirmed:
        """Confirm all blocks. `at` is a time before the Node object was read. Raises ApiError."""
        rows = self._store.blocks()  # before the LIST, so the block of each row was POSTed
        # Blocks of an unreadable pool keep their limit.
        self._pools.read_all({row.pool for row in rows.values()})
        selector = {"spec.holder.instance": self._holder.instance}
        listed = self._api.list(AddressBlock, selector)
        for unreadable in listed.unreadable:
            rows.pop(unreadable.metadata.name, None)  # the object exists
        objects: dict[str, AddressBlock] = {}
        revisions: dict[tuple[str, str], Revision] = {}
        for found in listed.items:
            name = found.metadata.name
            row = rows.pop(name, None)
            if row is not None and row.uid == found.spec.nonce:
                # An earlier `_claim_again` died or got no answer.
                row = replace(row, uid=found.metadata.uid)
                self._store.put(row)
            if row is not None and row.uid != found.metadata.uid:
                self._lose(row, "its lease had ended, and this node has leased it again")
                row = self._store.blocks().get(name)
                if row is not None:
                    continue  # pods of the ended lease hold its addresses
            if row is None and is_let_go(found):
                continue
            if row is None:
                ours = self._taken_over(found)
            elif row.state not in ("returning", "lost"):
                ours = self._asserted(found, at, row)
            else:
                continue
            if ours is not None:
                objects[name], when = ours
                revisions[name, found.metadata.uid] = self._revision(objects[name], when)
        self._store.revise(revisions)
        again = [row for row in rows.values() if self._is_missing(row, objects, at)]
        return Confirmed(objects, bool(again))

    def _revision(self, found: AddressBlock, at: float) -> Revision:
        pool = self._pools.known(found.spec.pool)
        state: State = "usable"
        limit, out = None, None
        if pool is not None:
            if pool.spec.state != "Active":
                state = "draining"
            try:
                limit = max_offline(pool)
                out = holes(pool, found.spec, block_layout.interval(found))
            except Unusable:
                limit = 0.0  # no address is handed out
        # A store with fewer transactions than it published in this boot is an older copy.
        lacks = found.spec.holder.boot == self._holder.boot and found.status.seq > self._store.seq()
        return self._confirmed(at, "unconfirmed" if lacks else state, limit, out)

    def _confirmed(
        self,
        at: float,
        state: State = "usable",
        limit: float | None = None,
        holes: tuple[Interval, ...] | None = None,
    ) -> Revision:
        """The row after a confirmation. The state `unconfirmed` stays until the next boot."""
        boot = self._holder.boot

        def confirmed(row: LeasedBlock) -> LeasedBlock:
            if row.state == "lost":
                return row
            same_boot = row.boot == boot
            return replace(
                row,
                state="unconfirmed" if same_boot and row.state == "unconfirmed" else state,
                boot=boot,
                confirmed=max(at, row.confirmed) if same_boot else at,
                max_offline=row.max_offline if limit is None else limit,
                kept_out=row.kept_out if holes is None else holes,
            )

        return confirmed

    def _asserted(
        self, found: AddressBlock, at: float, row: LeasedBlock | None = None, nonce: str = ""
    ) -> tuple[AddressBlock, float] | None:
        """Write this node and boot into the object. Returns the object and the time of its
        confirmation, or `None` if the API server refuses. A new `nonce` always changes the
        object."""
        spec = replace(
            found.spec,
            state="Active",
            holder=self._holder,
            epoch=found.spec.epoch + (found.spec.holder != self._holder),
            nonce=nonce or found.spec.nonce,
            max_offline_seconds=self._max_offline(found, row),
        )
        if spec == found.spec:
            return found, at
        when = self._clock()
        try:
            return self._written(found, spec), when
        except (Conflict, NotFound):
            return None  # the next confirmation finds the reason
        except Refused as error:  # the other blocks are still confirmed
            _log.warning("leases: %s is not confirmed: %s", found.metadata.name, error)
            return None

    def _max_offline(self, found: AddressBlock, row: LeasedBlock | None) -> int:
        """`maxOfflineSeconds` of the object. A longer limit is written before it is used. A shorter
        limit is used before it is written."""
        limits = [row.max_offline if row is not None else 0.0]
        pool = self._pools.known(found.spec.pool)
        if pool is not None:
            with suppress(Unusable):
                limits.append(max_offline(pool))
        return math.ceil(max(limits)) or found.spec.max_offline_seconds

    def _written(self, found: AddressBlock, spec: BlockSpec) -> AddressBlock:
        former = found.spec.holder
        if (former.instance, former.boot) != (self._holder.instance, self._holder.boot):
            # Its status is from another store or boot.
            found = self._api.update_status(replace(found, status=BlockStatus()))
        return self._api.update(replace(found, spec=spec))

    def _taken_over(self, found: AddressBlock) -> tuple[AddressBlock, float] | None:
        """Add the missing row of a block, or delete the block.

        Either a process claimed the block and died, or the store is an older copy. An older copy
        may lack reservations of this boot, so no pod gets an address of the block. The object is
        changed before the row is written, so that a delayed DELETE by this node fails.
        """
        same_boot = found.spec.holder.boot == self._holder.boot
        if found.spec.holder.node != self._holder.node:
            return None
        try:
            pool = self._pools.read(found.spec.pool)
            require_usable(pool)
            fits = not block_layout.why_wrong(found, pool)
        except (Unusable, ValueError):
            fits = False
        if not fits:
            if not (same_boot and found.status.used) and not found.spec.sticky.reservation:
                with suppress(NotFound, Conflict, Refused):
                    self._api.delete(found)
            return None
        ours = self._asserted(found, 0.0, nonce=str(uuid.uuid4()))
        if ours is None:
            return None
        spec = pool.spec
        domain = spec.network_name if spec.shared else f"{spec.network_name} {spec.range}"
        self._store.put(row_of(found, pool, domain, boot="", at=0.0))  # not confirmed yet
        return ours

    def _is_missing(self, row: LeasedBlock, objects: dict[str, AddressBlock], at: float) -> bool:
        """Decide about a row without an object. Returns True if the block had to be claimed
        again."""
        try:
            found = self._api.get(AddressBlock, row.name)
        except NotFound:
            found = None
        if found is not None and found.metadata.uid == row.uid:
            if found.spec.holder.instance != self._holder.instance:
                self._lose(row, f"node {found.spec.holder.node} has taken it over")
            return False  # ours, and changed during the LIST: the next run confirms it
        if found is not None:
            self._lose(row, f"node {found.spec.holder.node} has leased it")
            return False
        if row.state in ("returning", "lost"):
            self._store.forget(row.name, row.uid)
            return False
        holders = self._store.holders(row.name).values()
        if all(held.boot != self._holder.boot for held in holders):
            # Reservations of an earlier boot keep the row, which stays unused.
            self._store.lose(row.name, row.uid)
            return False
        return self._claim_again(row, objects, at)

    def _claim_again(self, row: LeasedBlock, objects: dict[str, AddressBlock], at: float) -> bool:
        """Claim a block again. Pods hold the block's addresses, but the object is gone (deleted, or
        etcd was restored). The first node that claims the block gets the block."""
        block = AddressBlock(
            metadata=Meta(name=row.name),
            spec=BlockSpec(
                pool=row.pool,
                range=f"{text(row.first)}/{prefix_of(row)}",
                sticky=of_row(row),
                holder=self._holder,
                nonce=row.uid,
                max_offline_seconds=math.ceil(row.max_offline),
            ),
        )
        when = self._clock()
        try:
            stored = self._api.create(block)
        except AlreadyExists:
            stored = self._api.get(AddressBlock, row.name)
            if stored.spec.nonce != row.uid or stored.spec.holder != self._holder:
                self._lose(row, f"node {stored.spec.holder.node} has leased it")
                return True
            when = at
        except Refused as error:  # as in `_asserted`
            _log.warning(
                "leases: object %s is missing and cannot be created again: %s", row.name, error
            )
            return False
        again = replace(row, uid=stored.metadata.uid)
        self._store.put(self._confirmed(when)(again))
        objects[row.name] = stored
        return True

    def _lose(self, row: LeasedBlock, why: str) -> None:
        block, held = row.name, self._store.lose(row.name, row.uid)
        if row.state in ("returning", "lost"):
            return
        addresses = ", ".join(text(address) for address in sorted(held)[:_MOST_NAMED]) or "none"
        message = (
            f"AddressBlock {block} no longer belongs to this node: {why}. Pods of node "
            f"{self._holder.node} hold its addresses {addresses}: delete these pods, because "
            "other pods may get the same addresses"
        )
        _log.error("leases: %s", message)
        regarding = {"apiVersion": AddressBlock.API, "kind": AddressBlock.KIND, "name": block}
        self._events.add("AddressBlockLost", message, regarding)
        for each in held.values():
            pod = Pod(namespace=each.namespace, name=each.pod, uid=each.uid)
            self._events.of_pod("AddressConflict", message, pod)

    def adopt(self) -> None:
        """Take over the blocks that this machine leased in an earlier boot, before its store was
        lost. The next `run` adds the blocks' rows. Raises ApiError."""
        mine = self._holder
        if not (mine.machine_id and mine.system_uuid):
            return
        for found in self._api.list(AddressBlock, {"spec.holder.node": mine.node}).items:
            if same_machine_before(mine, found.spec.holder) and not is_let_go(found):
                self._asserted(found, 0.0)


def prefix_of(row: LeasedBlock) -> int:
    """The prefix length of a block, at most 32 for IPv4."""
    return Network(row.first, 129 - row.size.bit_length()).family_prefix
