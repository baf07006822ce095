"""The addresses that a request may get from this node's leased blocks."""

from collections.abc import Callable, Collection, Sequence

from ipam.addresses import Interval, parse
from ipam.leases.block_store import Survey
from ipam.leases.claim_request import PodInterface, PoolRange, Want
from ipam.leases.sticky import is_for
from ipam.ranges import Range, RangeSet, is_within, size_of
from ipam.store.address_choice import held_in
from ipam.store.block_rows import LeasedBlock
from ipam.store.reservations import Owner
from ipam.store.tables import Tables


def may_have(survey: Survey, want: Want, boot: str, now: float) -> bool:
    """Whether a block may have an address for the want. `now` is CLOCK_BOOTTIME."""
    return any(
        used < block.size
        and want.range.domain in block.domains
        and is_for(block, want.sticky)
        and block.is_confirmed(boot, now)
        and want.range.restricted(block.parts).parts
        for block, used in survey.blocks
    )


class LeasedView:
    """The range sets of a request. `narrowed` restricts the sets to this node's blocks.

    After `narrowed`, `wants` has the ranges of each set that has no free address. `low` has the
    ranges whose blocks are more than three quarters full after this request. `is_passed_over` means
    that the free addresses cannot be used on this link. If `sticky` is set, the pod gets only
    addresses that are reserved for its name. From a pool in `unreserved`, the pod gets any address.
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
        """The reason why a needed block of this node is not confirmed, or ""."""
        block, now = self._unconfirmed, self._looked_at
        if block is None:
            return ""
        lease = f"its lease of AddressBlock {block.name}"
        when = f"it has not confirmed {lease} at the API server since it booted"
        if block.boot == self._boot and now >= block.confirmed:
            when = (
                f"the API server last confirmed {lease} {_spoken(now - block.confirmed)} ago, "
                f"longer than spec.reclaim.maxOffline of AddressPool {block.pool} "
                f"({_spoken(block.max_offline)})"
            )
        return (
            f"this node gives no address to a new pod: {when}; see that the API server answers on "
            "this node, and that the Node object of this node exists"
        )

    def narrowed(self, tables: Tables) -> Sequence[RangeSet]:
        """The sets, restricted to confirmed blocks. Fuller blocks come first. Returns [] if a set
        has no free address. The clock is read within the transaction, because a lease may end
        during a wait for the lock."""
        now = self._clock()
        self.wants, self.low = [], []
        self._unconfirmed, self._looked_at = None, now
        sets = [self._narrowed(tables, range_set, now) for range_set in self._sets]
        return [] if self.wants and not self._is_attached(tables) else sets

    def want_all(self) -> bool:
        """Set `wants` for the sets that need neither a fixed nor a reserved address.

        Returns False if no set does.
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

    def _narrowed(self, tables: Tables, range_set: RangeSet, now: float) -> RangeSet:
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
            usable = [range_.restricted(block.parts) for block in confirmed]
            rooms = [(size_of(each.parts) - held_in(tables, each), each) for each in usable]
            ranges += [each for _, each in sorted(rooms, key=lambda room: room[0])]
            free, size = sum(room[0] for room in rooms), sum(size_of(each.parts) for each in usable)
            if sticky is None and not range_set.fixed and 4 * (free - 1) < size:
                self.low.append(want)
            # The choice of an address reports whether a fixed address is free.
            has_one = any(each.parts for each in usable) if range_set.fixed else free > 0
            if len(confirmed) < len(blocks) or not has_one:
                # A pod's new sandbox keeps the address, even if the block is full or not confirmed.
                earlier = self._held_before(tables, range_, blocks)
                if earlier.parts:
                    ranges.append(earlier)
                elif not has_one:
                    missing.append(want)
        if len(missing) == len(range_set.ranges):
            self.wants += missing
        return RangeSet(tuple(ranges), range_set.fixed)

    def _pool_range(self, range_: Range) -> PoolRange | None:
        """The pool range that contains `range_`, if any. The two prefix lengths may differ."""
        key = (range_.domain, range_.network)
        if key in self._leased:
            return key
        around = (pool for pool in self._leased if pool[0] == range_.domain)
        return next((pool for pool in around if range_.first in pool[1]), None)

    def _is_attached(self, tables: Tables) -> bool:
        """Whether the attachment holds addresses already. If so, a later step raises an error."""
        held = tables.of_attachment(self.owner.attachment) if self.owner else []
        return any(each.boot == self._boot for each in held)

    def _held_before(self, tables: Tables, range_: Range, blocks: Sequence[LeasedBlock]) -> Range:
        """The addresses that the pod has in this boot, except addresses in lost blocks. Addresses
        of an earlier boot do not count, because another node may have leased them."""
        ours = [block.interval for block in blocks if block.state != "lost"]
        addresses = (
            parse(each.address)
            for each in (tables.of_pod(self.owner) if self.owner else ())
            if each.boot == self._boot and each.domain == range_.domain
        )
        return range_.restricted(
            Interval(address, address) for address in addresses if is_within(address, ours)
        )


def _spoken(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
