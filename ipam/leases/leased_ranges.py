"""The parts of a request's ranges that this node leases, within one transaction."""

from collections.abc import Callable, Collection, Sequence

from ipam.addresses import Interval, parse
from ipam.leases.block_store import Survey
from ipam.leases.claim_request import PodInterface, PoolRange, Want
from ipam.leases.sticky import is_for
from ipam.ranges import Range, RangeSet, size_of
from ipam.store import address_choice
from ipam.store.block_rows import LeasedBlock
from ipam.store.reservations import Owner
from ipam.store.tables import Tables


def may_have(survey: Survey, want: Want, boot: str, now: float) -> bool:
    """Whether a block may hand out an address for the want at `now` (CLOCK_BOOTTIME)."""
    return any(
        used < block.size
        and want.range.domain in block.domains
        and is_for(block, want.sticky)
        and block.is_confirmed(boot, now)
        and want.range.restricted(block.parts).parts
        for block, used in survey.blocks
    )


class LeasedView:
    """A request's sets, restricted to this node's blocks within a transaction.

    After `narrowed`, `wants` are the sets without a free address here, and `low` those whose blocks
    have less than a quarter free after this request. `is_passed_over`: the free addresses of the
    blocks cannot be used on this link. A pod in `sticky` gets only addresses that are reserved for
    its name, except from the pools in `unreserved`.
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
        """Why this node's blocks give no address to a new pod; "" if they do or there are none."""
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
        """The sets within confirmed blocks, the fullest first. Empty if a set has no address there.

        The clock is read here, so that no wait for the store comes between it and the hand-out.
        """
        now = self._clock()
        self.wants, self.low = [], []
        self._unconfirmed, self._looked_at = None, now
        held = _HeldBefore(tables, self.owner, self._boot)
        sets = [self._narrowed(tables, range_set, now, held) for range_set in self._sets]
        return [] if self.wants and not held.is_attached else sets

    def want_all(self) -> bool:
        """Want one more address of each set that is not bound to one; returns whether any is."""
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
            usable = [range_.restricted(block.parts) for block in confirmed]
            used = [address_choice.held_in(tables, each) for each in usable]
            free = [size_of(each.parts) - held for each, held in zip(usable, used, strict=True)]
            fullest_first = sorted(
                zip(free, (b.first for b in confirmed), usable, strict=True),
                key=lambda room: room[:2],
            )
            ranges += [room[2] for room in fullest_first]
            # An unconfirmed block still gives a pod its earlier address.
            former = None if len(confirmed) == len(blocks) else held.within(range_, blocks)
            if former is not None:
                ranges.append(former)
            if (
                sticky is None
                and not range_set.fixed
                and 4 * (sum(free) - 1) < sum(free) + sum(used)
            ):
                self.low.append(want)
            # Of a fixed address, the choice reports whether it is free.
            has_one = any(each.parts for each in usable) if range_set.fixed else any(free)
            if former is None and not has_one:
                former = held.within(range_, blocks)  # a new sandbox keeps the address
                if former is None:
                    missing.append(want)
                else:
                    ranges.append(former)
        if len(missing) == len(range_set.ranges):
            self.wants += missing
        return RangeSet(tuple(ranges), range_set.fixed)

    def _pool_range(self, range_: Range) -> PoolRange | None:
        """The pool of a range. A fixed address may be written with another prefix."""
        key = (range_.domain, range_.network)
        if key in self._leased:
            return key
        around = (pool for pool in self._leased if pool[0] == range_.domain)
        return next((pool for pool in around if range_.first in pool[1]), None)


class _HeldBefore:
    """The addresses of a returning pod in this boot: it keeps them, confirmed or not. An address of
    an earlier boot is like any other: another node may have leased it since."""

    def __init__(self, tables: Tables, owner: Owner | None, boot: str) -> None:
        self._tables = tables
        self._owner = owner
        self._boot = boot

    @property
    def is_attached(self) -> bool:
        """Whether the attachment holds addresses already, which is an error later."""
        if self._owner is None:
            return False
        held = self._tables.of_attachment(self._owner.attachment)
        return any(each.boot == self._boot for each in held)

    def within(self, range_: Range, blocks: Sequence[LeasedBlock]) -> Range | None:
        """The range restricted to the pod's addresses, without blocks that were lost."""
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
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
