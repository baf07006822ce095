"""The holder's side of ceding: others may lease free addresses of its blocks as sub-blocks.

An address is marked in the row of the store before the AddressBlock lists it in `ceded`. To take it
back, the object lists it in `recalled` first, then the sub-block is looked for, and without one the
mark goes. So whoever may have a sub-block is always in the row, and in the object: a store that is
made from the object hands out no such address.

Both lists are written from the row, so the row must have every mark: after a boot, or where the
store lacks changes, it takes over those of the object first (`confirmation`). It may then have
marks of addresses that pods of this node hold since they were taken back. Those are not ceded.
"""

import uuid
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

import msgspec

from ipam.addresses import Interval, parse, text
from ipam.blocks import LeasedBlock
from ipam.cluster.api import ClusterApi, Conflict, NotFound
from ipam.cluster.block_store import MOST_CEDED, BlockStore, Survey
from ipam.cluster.names import sub_block_name
from ipam.cluster.objects import AddressBlock
from ipam.cluster.pools import Pools, Unusable
from ipam.ranges import common

REVIEW_EVERY = 60.0  # seconds between two looks whether others still have what is ceded
REVIEW_EMPTY = 10.0  # the same of a block of which this node uses nothing: it is to go back
_UNCLAIMED = 30.0  # seconds that others have for a fresh cession


class Ceding:
    """Cedes addresses of blocks that are this node's in this `boot`.

    `objects` are its blocks as they were last seen. `clock` is CLOCK_BOOTTIME.
    """

    def __init__(
        self,
        api: ClusterApi,
        store: BlockStore,
        pools: Pools,
        objects: dict[str, AddressBlock],
        boot: str,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._store = store
        self._pools = pools
        self._objects = objects
        self._boot = boot
        self._clock = clock
        self._review_at: dict[str, float] = {}  # by the block's uid
        self.wanted_back: set[str] = set()  # uids of blocks that others want as a whole

    def answer(self, name: str, instance: str) -> AddressBlock | None:
        """Cede what the controller asks for, as far as it is free. The block, if it was changed.

        A block of which nothing is held is not ceded but given back, and `wanted_back` then.
        Raises ApiError.
        """
        row = self._store.blocks().get(name)
        found = self._ours(row, name, instance)
        if row is None or found is None or not found.spec.cede_wanted:
            return None
        if row.state == "usable" and not row.ceded and not self._store.holders(name):
            self.wanted_back.add(row.uid)
            return None
        self.wanted_back.discard(row.uid)
        if self._is_on(row.pool):
            row = self._store.cede(name, row.uid, map(parse, found.spec.cede_wanted)) or row
            self._review_at[row.uid] = self._clock() + _UNCLAIMED
        with suppress(Conflict, NotFound):  # it is looked at again
            held = self._store.held_marks(name, self._boot)
            return self._written(found, set(_each(row.ceded)), held)
        return None

    def review(self, survey: Survey, instance: str) -> None:
        """Take back, now and then, what no node leases. Raises ApiError."""
        now = self._clock()
        ceding = {each.block.uid: each for each in survey.blocks if each.block.ceded}
        self._review_at = {uid: self._review_at.get(uid, now) for uid in ceding}
        for uid, each in ceding.items():
            pause = REVIEW_EVERY if each.used else REVIEW_EMPTY
            if now >= self._review_at[uid]:
                self._review_at[uid] = now + pause
                self.take_back(each.block.name, instance)

    def take_back(
        self,
        name: str,
        instance: str,
        within: Iterable[Interval] | None = None,
        most: int = MOST_CEDED,
    ) -> bool:
        """Use ceded addresses again that no node leases, of those `within`; whether there are any.

        Raises ApiError.
        """
        row = self._store.blocks().get(name)
        found = self._ours(row, name, instance)
        if row is None or found is None or not row.ceded:
            return False
        marked = set(_each(row.ceded))
        asked = marked if within is None else marked & set(_each(common(row.ceded, within)))
        leased = {parse(each.spec.first) for each in self._sub_blocks(name)}  # a hint
        held = self._store.held_marks(name, self._boot)
        back = sorted(asked - leased, key=lambda each: (each not in held, each))[:most]
        try:
            if back or set(map(parse, found.spec.ceded)) != marked:
                found = self._written(found, marked, {*held, *back})
            free = [address for address in back if not self._is_leased(row, address)]
            self._store.uncede(name, row.uid, free)
            if len(free) < len(back):
                self._written(found, marked - set(free), held)
        except (Conflict, NotFound):
            return False  # the controller wrote to it: later again, from the row
        return bool(free)

    def _ours(self, row: LeasedBlock | None, name: str, instance: str) -> AddressBlock | None:
        """The object as it is now, if it is this row's, and the row has every mark."""
        if row is None or row.cover or row.sticky:
            return None
        if row.boot != self._boot or row.state not in ("usable", "draining"):
            return None
        try:
            found = self._api.get(AddressBlock, name)
        except NotFound:
            return None
        is_ours = found.metadata.uid == row.uid and found.spec.holder.instance == instance
        return found if is_ours and found.spec.state == "Active" else None

    def _is_on(self, name: str) -> bool:
        """Whether the pool's nodes cede. It is read again if it was off."""
        pool = self._pools.known(name)
        if pool is None or not pool.spec.ceding:
            try:
                pool = self._pools.read(name)
            except Unusable:
                return False
        return pool.spec.cedes and pool.spec.state == "Active"

    def _written(
        self, found: AddressBlock, marked: Collection[int], kept: Collection[int]
    ) -> AddressBlock:
        """Write what is marked: as ceded, or what is to be `kept` here, as recalled.

        A new nonce: a PUT that changes nothing gets no new version, and an earlier one may still be
        on its way. A row that took over marks may have more than there is room for as ceded.
        """
        ceded = sorted(set(marked) - set(kept))[:MOST_CEDED]
        spec = msgspec.structs.replace(
            found.spec,
            ceded=tuple(map(text, ceded)),
            recalled=tuple(map(text, sorted(set(marked) - set(ceded)))),
            cede_wanted=(),
            nonce=str(uuid.uuid4()),
        )
        written = self._api.update(msgspec.structs.replace(found, spec=spec))
        self._objects[written.metadata.name] = written
        return written

    def _sub_blocks(self, name: str) -> tuple[AddressBlock, ...]:
        return self._api.list(AddressBlock, {"spec.cover": name}).items

    def _is_leased(self, row: LeasedBlock, address: int) -> bool:
        try:
            self._api.get(AddressBlock, sub_block_name(row.space, address))
        except NotFound:
            return False
        return True


def ceded_texts(ceded: Iterable[Interval]) -> Iterable[str]:
    """What is ceded, as an AddressBlock has it."""
    return map(text, _each(ceded))


def ceded_by(found: AddressBlock) -> Iterable[int]:
    """The addresses that a store which takes the block over must not hand out."""
    return map(parse, (*found.spec.ceded, *found.spec.recalled))


def _each(intervals: Iterable[Interval]) -> Iterable[int]:
    return (address for first, last in intervals for address in range(first, last + 1))
