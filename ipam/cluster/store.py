"""The store of a node whose addresses are the cluster's: its own, within the blocks it leases.

An ADD that finds an address in a block of this node makes no call to the API server, and no other
verb ever does. An ADD that finds none waits a little for the lessee (`Claims`) to lease a block.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from ipam import allocation
from ipam.addresses import Interval, Network, parse
from ipam.blocks import LeasedBlock
from ipam.ranges import Range, RangeSet
from ipam.sqlite_store import SqliteStore
from ipam.store import Grant, Owner, Reservation, Usage
from ipam.tables import Tables

PATIENCE = 3.0  # seconds that an ADD waits for a block
POOL_PATIENCE = 15.0  # seconds that it waits for a pool: its definition may be as new as the pod
_AGAIN = 0.2  # seconds between two attempts of an ADD to get a block
_POOL_AGAIN = 0.5  # seconds between two looks at a pool

_MOST_IN_VAIN = 3  # blocks that are leased for an ADD although the last one did not help

PoolRange = tuple[str, Network]
"""Domain and network of a range: what names its AddressPool."""


def boottime() -> float:
    """Seconds since the machine booted, suspend included: `time.monotonic` stands still in it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Want(NamedTuple):
    """A range of which a node needs an address, the very one if it is `fixed`."""

    range: Range
    fixed: bool = False

    @property
    def parts(self) -> tuple[Interval, ...]:
        """The addresses that would do."""
        return self.range.parts


class PoolPending(CNIError):
    """There is no pool for a range yet, or it is not ready."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.TRY_AGAIN, message)


class Claims(Protocol):
    """Who leases blocks for this node."""

    def claim(self, wants: Sequence[Want], deadline: float) -> None:
        """Wait until there may be an address of each, at most until then (`time.monotonic`).

        CNIError 11 if that may succeed later (PoolPending: soon), 110 if the pool has no address
        left, AddressTaken if another node has leased the one that is wanted.
        """

    def used(self, range_: Range, free: int) -> None:
        """An address of the range was handed out, and this node's blocks have so many more."""

    def failed(self, owner: Owner, error: CNIError) -> None:
        """A pod got no address."""

    def unable(self, wants: Sequence[Want]) -> str | None:
        """Why `claim` would fail, as far as that is known without asking anybody."""


class NoClaims:
    """The `Claims` of a process that leases nothing: another than the agent."""

    def claim(self, wants: Sequence[Want], deadline: float) -> None:
        raise CNIError(Code.TRY_AGAIN, self.unable(wants))

    def used(self, range_: Range, free: int) -> None:
        pass

    def failed(self, owner: Owner, error: CNIError) -> None:
        pass

    def unable(self, wants: Sequence[Want]) -> str:
        listed = ", ".join(str(want.range.network) for want in wants)
        return (
            f"this node has leased no free address of {listed}, and only podfabric's agent can "
            "lease more: nothing was changed; see that the agent of this node runs, with "
            '"ipam.scope": cluster in config.yaml'
        )


class ClusterStore:
    """Implements `ipam.store.Store` over the store of this node.

    `leased` are the ranges that belong to a pool. All others (fixed addresses outside of every
    range) are the node's own. `clock` is CLOCK_BOOTTIME; `patience` and `pool_patience` are how
    many seconds an ADD waits for a block and for a pool.
    """

    def __init__(
        self,
        local: SqliteStore,
        claims: Claims,
        leased: Collection[PoolRange],
        *,
        clock: Callable[[], float] = boottime,
        patience: float = PATIENCE,
        pool_patience: float = POOL_PATIENCE,
    ) -> None:
        self._local = local
        self._claims = claims
        self._leased = frozenset(leased)
        self._clock = clock
        self._patience = patience
        self._pool_patience = pool_patience

    def reserve(
        self,
        owner: Owner,
        sets: Sequence[RangeSet],
        *,
        segment: str = "",
        alone: Sequence[Range] = (),
    ) -> Grant:
        """See Store.reserve. Waits for a block where this node has no free address of a set."""
        pool_deadline = time.monotonic() + self._pool_patience
        in_vain = 0
        try:
            while True:
                view = self._view(owner, sets)
                grant = self._attempt(view, segment, alone)
                if grant is not None:
                    break
                if view.is_passed_over:
                    in_vain += 1
                    if in_vain > _MOST_IN_VAIN:
                        raise _passed_over(view.wants)
                self._wait(view.wants, pool_deadline)
        except CNIError as error:
            self._claims.failed(owner, error)
            raise
        for range_, free in view.free:
            self._claims.used(range_, free)
        return grant

    def exhausted(self, sets: Sequence[RangeSet]) -> str | None:
        """See Store.exhausted: without a call to the API server."""
        view = self._view(None, [each for each in sets if not each.fixed])
        self._local.look(view.narrowed)
        return self._claims.unable(view.wants) if view.wants else None

    def _view(self, owner: Owner | None, sets: Sequence[RangeSet]) -> "_View":
        return _View(owner, sets, self._leased, self._local.boot, self._clock)

    def _attempt(self, view: "_View", segment: str, alone: Sequence[Range]) -> Grant | None:
        """A grant, or None if the node lacks a block."""
        assert view.owner is not None
        try:
            grant = self._local.reserve_seen(
                view.owner, view.narrowed, segment=segment, alone=alone
            )
        except CNIError as error:
            # What is free in our blocks may be held by another domain on the same link.
            if error.code != Code.NO_FREE_ADDRESS or not view.want_all():
                raise
            return None
        return None if view.wants else grant

    def _wait(self, wants: Sequence[Want], pool_deadline: float) -> None:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._claims.claim(wants, deadline)
            except PoolPending:
                if time.monotonic() + _POOL_AGAIN > pool_deadline:
                    raise
                time.sleep(_POOL_AGAIN)
                deadline = time.monotonic() + self._patience
            except CNIError as error:
                if error.code != Code.TRY_AGAIN or time.monotonic() + _AGAIN > deadline:
                    raise
                time.sleep(_AGAIN)

    # --- what the node's own store does ------------------------------------------------------

    def undo(self, grant: Grant) -> None:
        """See Store.undo."""
        self._local.undo(grant)

    def release(self, attachment: Attachment) -> list[Reservation]:
        """See Store.release."""
        return self._local.release(attachment)

    def collect(self, network: str, valid: Collection[tuple[str, str]]) -> list[Reservation]:
        """See Store.collect."""
        return self._local.collect(network, valid)

    def release_stale(self) -> list[Reservation]:
        """See Store.release_stale."""
        return self._local.release_stale()

    def held_by(self, attachment: Attachment) -> list[Reservation]:
        """See Store.held_by."""
        return self._local.held_by(attachment)

    def usage(self, asked: tuple[Range, ...], last: Usage) -> Usage:
        """See Store.usage: of this node's store."""
        return self._local.usage(asked, last)

    def reservations(self) -> list[Reservation]:
        """See Store.reservations."""
        return self._local.reservations()

    def load(self, reservations: Sequence[Reservation]) -> None:
        """See Store.load."""
        self._local.load(reservations)


class _View:
    """What a request may have of this node's blocks: its sets, restricted within a transaction.

    `wants` are the sets without a free address here, `free` is how many addresses the blocks have
    left, this request's not counted. Both are of the last call of `narrowed`. `is_passed_over`: the
    blocks have some, and none may be used on this link.
    """

    def __init__(
        self,
        owner: Owner | None,
        sets: Sequence[RangeSet],
        leased: frozenset[PoolRange],
        boot: str,
        clock: Callable[[], float],
    ) -> None:
        self.owner = owner
        self._sets = sets
        self._leased = leased
        self._boot = boot
        self._clock = clock
        self.wants: list[Want] = []
        self.free: list[tuple[Range, int]] = []
        self.is_passed_over = False

    def narrowed(self, tables: Tables) -> Sequence[RangeSet]:
        """The sets within confirmed blocks, the fullest first. None if a set has no address there.

        The clock is read here, so that no wait for the store comes between it and the hand-out.
        """
        now = self._clock()
        self.wants, self.free = [], []
        held = _HeldBefore(tables, self.owner, self._boot)
        sets = [self._narrowed(tables, range_set, now, held) for range_set in self._sets]
        return [] if self.wants and not held.is_attached else sets

    def want_all(self) -> bool:
        """Ask for one more address of each set that is not fixed; whether there is one."""
        self.wants = [
            Want(range_)
            for range_set in self._sets
            for range_ in range_set.ranges[:1]
            if not range_set.fixed and _key(range_) in self._leased
        ]
        self.is_passed_over = bool(self.wants)
        return self.is_passed_over

    def _narrowed(
        self, tables: Tables, range_set: RangeSet, now: float, held: "_HeldBefore"
    ) -> RangeSet:
        ranges: list[Range] = []
        missing: list[Range] = []
        for range_ in range_set.ranges:
            if _key(range_) not in self._leased:
                ranges.append(range_)
                continue
            blocks = tables.blocks_in(range_.domain, Interval(range_.first, range_.last))
            confirmed = [block for block in blocks if block.is_confirmed(self._boot, now)]
            by_room = sorted(_Remaining.of(tables, range_, block) for block in confirmed)
            ranges += [room.range for room in by_room]
            # In a confirmed block a former address is found as any other is.
            former = None if len(confirmed) == len(blocks) else held.within(range_, blocks)
            if former is not None:
                ranges.append(former)
            free = sum(room.free for room in by_room)
            self.free.append((range_, free - 1))
            if former is None and not self._has_one(tables, range_set, by_room):
                missing.append(range_)
        if len(missing) == len(range_set.ranges):
            self.wants += [Want(range_, range_set.fixed) for range_ in missing]
        return RangeSet(tuple(ranges), range_set.fixed)

    def _has_one(
        self, tables: Tables, range_set: RangeSet, by_room: "Sequence[_Remaining]"
    ) -> bool:
        if range_set.fixed:  # in a block of ours: whether it is free is for the allocation to say
            return any(room.range.parts for room in by_room)
        if any(room.free for room in by_room):
            return True
        ranges = RangeSet(tuple(room.range for room in by_room))
        return allocation.exhaustion(tables, ranges, self._boot) is None  # a stale one will do


class _Remaining(NamedTuple):
    """How many addresses a block has left for a range. Sorted, the fullest is first."""

    free: int
    first: int
    range: Range

    @classmethod
    def of(cls, tables: Tables, range_: Range, block: LeasedBlock) -> "_Remaining":
        within = range_.restricted(block.parts)
        size = sum(part.last - part.first + 1 for part in within.parts)
        return cls(size - allocation.held_in(tables, within), block.first, within)


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
        """Whether it is no new attachment: the allocation says so."""
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


def _passed_over(wants: Sequence[Want]) -> CNIError:
    listed = ", ".join(str(want.range) for want in wants)
    return CNIError(
        Code.NO_FREE_ADDRESS,
        f"the blocks that this node leases have no address of {listed} that is free on this link, "
        "or not enough for all that the network asks for: other networks use the others: nothing "
        "was reserved; delete pods that no longer need one, or widen the range",
    )


def _key(range_: Range) -> PoolRange:
    return range_.domain, range_.network
