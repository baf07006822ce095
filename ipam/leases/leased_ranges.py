"""What a request may have of the blocks that this node leases, within one transaction."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ipam.addresses import Interval, parse
from ipam.leases.block_store import Survey
from ipam.leases.claim_request import PodInterface, PoolRange, Want
from ipam.leases.sticky import is_for
from ipam.ranges import Range, RangeSet
from ipam.store import address_choice
from ipam.store.block_rows import LeasedBlock
from ipam.store.reservations import Owner
from ipam.store.tables import Tables


def may_have(survey: Survey, want: Want, boot: str, now: float) -> bool:
    """Whether a block may hand out an address of what is wanted, at that time of CLOCK_BOOTTIME."""
    return any(
        used < block.size
        and want.range.domain in block.domains
        and is_for(block, want.sticky)
        and block.is_confirmed(boot, now)
        and want.range.restricted(block.parts).parts
        for block, used in survey.blocks
    )


class LeasedView:
    """What a request may have of this node's blocks: its sets, restricted within a transaction.

    `wants` are the sets without a free address here, `low` are those of which less than a quarter
    of the blocks' addresses is free once this request has its own. Both are of the last call of
    `narrowed`. `is_passed_over`: the blocks have some, and none may be used on this link. Only the
    address that is reserved for the name of the pod in `sticky` will do, but from the pools in
    `unreserved`.
    """

    def __init__(
        self,
        owner: Owner | None,
        sets: Sequence[RangeSet],
        leased: frozenset[PoolRange],
        boot: str,
        clock: Callable[[], float],
        sticky: PodInterface | None = None,
        unreserved: Collection[PoolRange] = (),
    ) -> None:
        self.owner = owner
        self._sticky = sticky
        self._unreserved = unreserved
        self._sets = sets
        self._leased = leased
        self._boot = boot
        self._clock = clock
        self.wants: list[Want] = []
        self.low: list[Want] = []
        self.is_passed_over = False
        self._unconfirmed: LeasedBlock | None = None
        self._looked_at = 0.0

    @property
    def why_unconfirmed(self) -> str:
        """Why a new pod gets no address of the blocks that this node has; "" if they are in force,
        or it has none."""
        if self._unconfirmed is None:
            return ""
        return _why_unconfirmed(self._unconfirmed, self._boot, self._looked_at)

    def narrowed(self, tables: Tables) -> Sequence[RangeSet]:
        """The sets within confirmed blocks, the fullest first. None if a set has no address there.

        The clock is read here, so that no wait for the store comes between it and the hand-out.
        """
        now = self._clock()
        self.wants, self.low = [], []
        self._unconfirmed, self._looked_at = None, now
        held = _HeldBefore(tables, self.owner, self._boot)
        sets = [self._narrowed(tables, range_set, now, held) for range_set in self._sets]
        return [] if self.wants and not held.is_attached else sets

    def want_all(self) -> bool:
        """Ask for one more address of each set that is not fixed; whether there is one.

        No other address will do where one is reserved for the pod.
        """
        self.wants = [
            Want(range_, (range_.domain, range_.network))
            for range_set in self._sets
            for range_ in range_set.ranges[:1]
            if not range_set.fixed
            and (self._sticky is None or self._pool_range(range_) in self._unreserved)
        ]
        self.is_passed_over = bool(self.wants)
        return self.is_passed_over

    def _narrowed(
        self, tables: Tables, range_set: RangeSet, now: float, held: "_HeldBefore"
    ) -> RangeSet:
        ranges: list[Range] = []
        missing: list[Want] = []
        for range_ in range_set.ranges:
            pool = self._pool_range(range_)
            if pool is None:
                ranges.append(range_)
                continue
            is_any = range_set.fixed or pool in self._unreserved
            sticky = None if is_any else self._sticky
            want = Want(range_, pool, range_set.fixed, sticky)
            blocks = [
                block
                for block in tables.blocks_in(range_.domain, Interval(range_.first, range_.last))
                if is_for(block, sticky)
            ]
            confirmed = [block for block in blocks if block.is_confirmed(self._boot, now)]
            if not confirmed:
                late = (block for block in blocks if block.state == "usable")
                self._unconfirmed = next(late, self._unconfirmed)
            by_room = sorted(
                (_Remaining.of(tables, range_, block) for block in confirmed),
                key=lambda room: room[:2],
            )
            ranges += [room.range for room in by_room]
            # Else an earlier boot left it, and the allocation would take what is free before that.
            # In a confirmed block a former address is found as any other is.
            former = None if len(confirmed) == len(blocks) else held.within(range_, blocks)
            if former is not None:
                ranges.append(former)
            free, used = sum(room.free for room in by_room), sum(room.used for room in by_room)
            if sticky is None and not range_set.fixed and 4 * (free - 1) < free + used:
                self.low.append(want)
            if former is None and not self._has_one(range_set, by_room):
                former = held.within(range_, blocks)  # full: a new sandbox needs no further one
                if former is None:
                    missing.append(want)
                else:
                    ranges.append(former)
        if len(missing) == len(range_set.ranges):
            self.wants += missing
        return RangeSet(tuple(ranges), range_set.fixed)

    def _pool_range(self, range_: Range) -> PoolRange | None:
        """The pool that a range belongs to; a fixed address may be written with another prefix."""
        key = (range_.domain, range_.network)
        if key in self._leased:
            return key
        around = (pool for pool in self._leased if pool[0] == range_.domain)
        return next((pool for pool in around if range_.first in pool[1]), None)

    def _has_one(self, range_set: RangeSet, by_room: "Sequence[_Remaining]") -> bool:
        if range_set.fixed:  # in a block of ours: whether it is free is for the allocation to say
            return any(room.range.parts for room in by_room)
        return any(room.free for room in by_room)


class _Remaining(NamedTuple):
    """How many addresses a block has left for a range. Sorted, the fullest is first."""

    free: int
    first: int
    range: Range
    used: int

    @classmethod
    def of(cls, tables: Tables, range_: Range, block: LeasedBlock) -> "_Remaining":
        within = range_.restricted(block.parts)
        size = sum(part.last - part.first + 1 for part in within.parts)
        used = address_choice.held_in(tables, within)
        return cls(size - used, block.first, within, used)


class _HeldBefore:
    """What a pod that comes back has held in this boot: it keeps that, confirmed or not.

    What it held in an earlier boot is like any other address: the lease may be another's by now.
    """

    def __init__(self, tables: Tables, owner: Owner | None, boot: str) -> None:
        self._tables = tables
        self._owner = owner
        self._boot = boot

    @property
    def is_attached(self) -> bool:
        """Whether it is not a new attachment: the allocation says so."""
        if self._owner is None:
            return False
        held = self._tables.of_attachment(self._owner.attachment)
        return any(each.boot == self._boot for each in held)

    def within(self, range_: Range, blocks: Sequence[LeasedBlock]) -> Range | None:
        """Its addresses of the range, but for those in blocks that were lost."""
        ours = [block.interval for block in blocks if block.state != "lost"]
        held = [] if self._owner is None else self._tables.of_pod(self._owner)
        addresses = (
            parse(each.address)
            for each in held
            if each.boot == self._boot and each.domain == range_.domain
        )
        kept = [
            Interval(address, address)
            for address in addresses
            if any(block.first <= address <= block.last for block in ours)
        ]
        narrower = range_.restricted(kept)
        return narrower if narrower.parts else None


def _spoken(seconds: float) -> str:
    """A time for people."""
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def _why_unconfirmed(block: LeasedBlock, boot: str, now: float) -> str:
    if block.boot == boot and now >= block.confirmed:
        when = (
            f"the API server last confirmed its lease of AddressBlock {block.name} "
            f"{_spoken(now - block.confirmed)} ago, longer than spec.reclaim.maxOffline of "
            f"AddressPool {block.pool} ({_spoken(block.max_offline)})"
        )
    else:
        when = (
            f"it has not confirmed its lease of AddressBlock {block.name} at the API server since "
            "it booted"
        )
    return (
        f"this node gives no address to a new pod: {when}; see that the API server answers on this "
        "node, and that the Node object of this node exists"
    )
