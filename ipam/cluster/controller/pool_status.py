"""The status of a pool: counts, and the map of leased blocks."""

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from ipam.addresses import Interval, Network, parse_interface, parse_interval
from ipam.cluster.controller import pool_conditions
from ipam.cluster.controller.block_index import BlockIndex, PlacedBlock
from ipam.cluster.controller.ranged import Plan
from ipam.cluster.geometry import MOST_MAPPED, Geometry, free_map
from ipam.cluster.objects import (
    AddressBlock,
    AddressCounts,
    AddressPool,
    BlockCounts,
    PoolSpec,
    PoolStatus,
)
from ipam.cluster.sticky import is_let_go
from ipam.ranges import merged, never_usable, of_network, written

MOST = 2**63 - 1  # that a number of the API server can be
MOST_RUNS = 8192  # of addresses, in one field of a status


def status(
    pool: AddressPool,
    plan: Plan,
    index: BlockIndex,
    quarantined: Collection[str],
    conflicts: Sequence[str],
    now: str,
    full: str = "",
    kept_out: Sequence[Interval] = (),
    held: Sequence[Interval] = (),
    offered: Sequence[Interval] | None = None,
) -> PoolStatus:
    """The status that the pool should have.

    Args:
        pool: as it is; conditions that do not change keep their transition times.
        plan: how it is cut into blocks.
        index: all blocks.
        quarantined: names of the blocks whose holder may be dead.
        conflicts: what contradicts itself among the pool's blocks, a sentence each.
        now: the time, for people.
        full: why it reserves no further address, "" if it does.
        kept_out: what no pod gets, beside what the pool excludes.
        held: what pods of whereabouts have.
        offered: where nodes may lease blocks; None is everywhere.
    """
    told = PoolStatus(
        space=plan.space,
        held=written(held, MOST_RUNS),
        offered=None if offered is None else written(offered, MOST_RUNS),
    )
    if not plan.block_size:
        conditions = [
            pool_conditions.ready(plan.reason, plan.message, is_true=plan.ready),
            pool_conditions.conflict(conflicts),
            *pool_conditions.reservations_refused(full),
        ]
        return replace(
            told,
            conditions=pool_conditions.dated(pool, conditions, now),
        )
    geometry = Geometry(parse_interface(pool.spec.range)[1], plan.block_size)
    whole = Interval(geometry.range.address, geometry.range.last)
    leased = [
        placed for placed in index.within(plan.space, whole) if _inside(placed.interval, whole)
    ]
    # One of another size, whose pool is gone, counts as each block that it covers a part of.
    indexes = sorted({covered for placed in leased for covered in _covered(placed, geometry)})
    holes = merged((*holes_of(pool.spec, geometry.range), *kept_out, *held))
    free = _free(geometry, indexes, holes)
    free += sum(_is_anybodys(placed.block) for placed in leased)
    mapped = geometry.total <= MOST_MAPPED
    return replace(
        told,
        block_size=plan.block_size,
        blocks=BlockCounts(
            total=min(geometry.total, MOST),
            leased=len(indexes),
            quarantined=sum(placed.block.metadata.name in quarantined for placed in leased),
        ),
        addresses=AddressCounts(
            capacity=min(_capacity(whole, holes), MOST),
            used=sum(placed.block.status.used for placed in leased),
        ),
        free_map=free_map(indexes, geometry.total) if mapped else "",
        high_water=min(indexes[-1] + 1, MOST) if indexes else 0,
        conditions=pool_conditions.dated(
            pool,
            [
                pool_conditions.ready(plan.reason, plan.message, is_true=plan.ready),
                pool_conditions.exhausted(free),
                pool_conditions.conflict(conflicts),
                *pool_conditions.reservations_refused(full),
            ],
            now,
        ),
    )


def differs_in_use_only(old: PoolStatus, new: PoolStatus) -> bool:
    """Whether the statuses differ, and only in how many addresses pods have."""
    used = replace(old.addresses, used=new.addresses.used)
    return old != new and replace(old, addresses=used) == new


def decides_alike(old: PoolStatus, new: PoolStatus) -> bool:
    """Whether no node decides otherwise by the new status: only counts and hints may differ."""
    decisive = ("space", "block_size", "held", "offered", "conditions")
    return all(getattr(old, each) == getattr(new, each) for each in decisive)


def _is_anybodys(block: AddressBlock) -> bool:
    """Whether any node may take the block over."""
    return is_let_go(block) and not block.spec.sticky.reservation


def _inside(inner: Interval, outer: Interval) -> bool:
    return outer.first <= inner.first and inner.last <= outer.last


def _covered(placed: PlacedBlock, geometry: Geometry) -> range:
    first, last = placed.interval
    return range(geometry.index(first), geometry.index(last) + 1)


def holes_of(spec: PoolSpec, range_: Network) -> tuple[Interval, ...]:
    """What no network of the pool may hand out. An exclude that cannot be read excludes nothing."""
    try:
        first, last = of_network(range_)
    except ValueError:  # a /31 or /32: only networks with use_all_addresses have addresses there
        first, last = range_.address, range_.last
    holes = [*never_usable(range_)]
    if first > range_.address:
        holes.append(Interval(range_.address, first - 1))
    if last < range_.last:
        holes.append(Interval(last + 1, range_.last))
    for each in spec.exclude:
        try:
            excluded = parse_interval(each)
        except ValueError:
            continue
        start, end = max(excluded.first, range_.address), min(excluded.last, range_.last)
        if start <= end:
            holes.append(Interval(start, end))
    return merged(holes)


def _capacity(whole: Interval, holes: Iterable[Interval]) -> int:
    return whole.last - whole.first + 1 - sum(hole.last - hole.first + 1 for hole in holes)


def _free(geometry: Geometry, leased: Sequence[int], holes: Iterable[Interval]) -> int:
    """How many blocks no node leases and a network may hand out an address of."""
    size, base = geometry.block_size, geometry.range.address
    runs = (
        range(-(-(hole.first - base) // size), (hole.last + 1 - base) // size) for hole in holes
    )
    unusable = [blocks for blocks in runs if blocks]  # a run may be shorter than a block
    idle = sum(max(0, blocks.stop - blocks.start) for blocks in unusable)  # too many for len()
    wasted = sum(any(number in blocks for blocks in unusable) for number in leased)
    return geometry.total - idle - (len(leased) - wasted)
