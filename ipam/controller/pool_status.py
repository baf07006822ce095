"""Makes the status of a pool: counts, conditions, and the map of leased blocks."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from ipam.addresses import Interval, parse_interface
from ipam.controller.block_index import BlockIndex
from ipam.controller.block_sizes import Plan
from ipam.controller.whereabouts_coexistence import PoolShare
from ipam.leases.block_layout import MOST_MAPPED, Geometry, free_map, holes_of
from ipam.leases.objects import AddressCounts, AddressPool, BlockCounts, Condition, PoolStatus
from ipam.leases.sticky import is_let_go
from ipam.ranges import merged, size_of, written

MOST = 2**63 - 1  # the largest integer that the API server stores
MOST_RUNS = 8192  # most runs of addresses in one field of a status


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Facts for a pool's status.

    `conflicts` describes blocks that overlap or do not fit the pool. No pod gets the addresses in
    `kept_out`."""

    conflicts: Sequence[str] = ()
    kept_out: Sequence[Interval] = ()
    share: PoolShare = PoolShare()


def status(
    pool: AddressPool,
    plan: Plan,
    index: BlockIndex,
    quarantined: Collection[str],
    told: Told,
    now: str,
) -> PoolStatus:
    """The status that the pool should have. `quarantined` names blocks whose holder may be dead.
    `now` is the transition time of changed conditions."""
    share = told.share
    if share.problem:
        plan = replace(plan, ready=False, reason="Whereabouts", message=share.problem)
    made = PoolStatus(
        space=plan.space,
        held=written(share.held, MOST_RUNS),
        offered=None if share.offered is None else written(share.offered, MOST_RUNS),
        conditions=_dated(pool, _conditions(plan, told, None), now),
    )
    if not plan.block_size:
        return made
    geometry = Geometry(parse_interface(pool.spec.range)[1], plan.block_size)
    whole = Interval(geometry.range.address, geometry.range.last)
    leased = [
        placed
        for placed in index.within(plan.space, whole)
        if whole.first <= placed.interval.first and placed.interval.last <= whole.last
    ]
    # A block of another size counts as each block that it overlaps.
    covered = (map(geometry.index, placed.interval) for placed in leased)
    indexes = sorted({index for first, last in covered for index in range(first, last + 1)})
    holes = merged((*holes_of(pool.spec, geometry.range), *told.kept_out, *share.held))
    free = _free(geometry, indexes, holes)
    # Any node may lease these released blocks.
    free += sum(is_let_go(each.block) and not each.block.spec.sticky.reservation for each in leased)
    return replace(
        made,
        block_size=plan.block_size,
        blocks=BlockCounts(
            total=min(geometry.total, MOST),
            leased=len(indexes),
            quarantined=sum(placed.block.metadata.name in quarantined for placed in leased),
        ),
        addresses=AddressCounts(
            capacity=min(size_of([whole]) - size_of(holes), MOST),
            used=sum(placed.block.status.used for placed in leased),
        ),
        free_map=free_map(indexes, geometry.total) if geometry.total <= MOST_MAPPED else "",
        conditions=_dated(pool, _conditions(plan, told, free), now),
    )


def differs_in_use_only(old: PoolStatus, new: PoolStatus) -> bool:
    used = replace(old.addresses, used=new.addresses.used)
    return old != new and replace(old, addresses=used) == new


def decides_alike(old: PoolStatus, new: PoolStatus) -> bool:
    """Whether a node decides the same from both statuses."""
    decisive = ("space", "block_size", "held", "offered", "conditions")
    return all(getattr(old, each) == getattr(new, each) for each in decisive)


def _free(geometry: Geometry, leased: Sequence[int], holes: Iterable[Interval]) -> int:
    """How many blocks are not leased and have a usable address."""
    size, base = geometry.block_size, geometry.range.address
    runs = (
        range(-(-(hole.first - base) // size), (hole.last + 1 - base) // size) for hole in holes
    )
    unusable = [blocks for blocks in runs if blocks]  # a run may be shorter than a block
    idle = sum(max(0, blocks.stop - blocks.start) for blocks in unusable)  # too many for len()
    wasted = sum(any(number in blocks for blocks in unusable) for number in leased)
    return geometry.total - idle - (len(leased) - wasted)


def _conditions(plan: Plan, told: Told, free: int | None) -> Iterator[Condition]:
    """`free` is the number of free blocks, or `None` without a block size."""
    yield condition("Ready", plan.reason, plan.message, is_true=plan.ready)
    if free is not None and free > 0:
        yield condition("Exhausted", "BlocksAreFree", is_true=False)
    elif free is not None:
        why = "every block is leased: nodes release a block as soon as it is empty"
        yield condition("Exhausted", "NoBlockIsFree", why, is_true=True)
    conflicts = (*told.conflicts, *told.share.conflicts)
    if conflicts:
        more = f"; and {len(conflicts) - 3} more" if len(conflicts) > 3 else ""
        why = "; ".join(conflicts[:3]) + more
        yield condition("Conflict", "BlocksContradict", why, is_true=True)
    else:
        yield condition("Conflict", "NoConflict", is_true=False)


def condition(type_: str, reason: str, message: str = "", *, is_true: bool) -> Condition:
    return Condition(type=type_, status=str(is_true), reason=reason, message=message)


def _dated(pool: AddressPool, conditions: Iterable[Condition], now: str) -> tuple[Condition, ...]:
    """Adds the generation and transition times. An unchanged status keeps its time."""
    since = {(each.type, each.status): each.last_transition_time for each in pool.status.conditions}
    generation = pool.metadata.generation
    return tuple(
        replace(
            each,
            last_transition_time=since.get((each.type, each.status), now),
            observed_generation=generation,
        )
        for each in conditions
    )
