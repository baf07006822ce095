"""How pools with rails are cut into blocks, and what becomes of the pools of the rails themselves.

A block of such a pool leases addresses on rails that its name does not say. So no other pool may
lease there: the pool of a rail leases nothing while the pool with the rails is Ready or has blocks,
and a pool with rails is not Ready while another pool has blocks there, or may be claiming some.
"""

from collections.abc import Collection, Iterable
from itertools import pairwise

from ipam.addresses import Interval, text
from ipam.cluster.controller.block_index import BlockIndex
from ipam.cluster.controller.ranged import (
    Plan,
    Ranged,
    automatic_size,
    length,
    paused,
    rank,
    refused,
    sized,
)
from ipam.cluster.rails import Rails


def without_rails(
    ranged: Iterable[Ranged],
    index: BlockIndex,
    nodes: int,
    quiet: Collection[str],
    planned: dict[str, Plan],
) -> list[Ranged]:
    """The pools that have to do with no rail. The plans of the others go to `planned`.

    What has a plan there already waits for something else, and keeps its rails.
    """
    ranged = list(ranged)
    accepted: list[tuple[Ranged, Rails]] = []
    plain = [each for each in ranged if not each.pool.spec.rails]
    for each in sorted((each for each in ranged if each.pool.spec.rails), key=rank):
        try:
            rails = Rails.of(each.pool.spec)
        except ValueError as error:
            planned[each.name] = refused(str(error), "InvalidRange")
            continue
        if each.name in planned:
            if each.decided:
                accepted.append((each, rails))
            continue
        planned[each.name] = plan = _plan(each, rails, accepted, plain, index, nodes, quiet)
        if plan.reason == "RailsWait":
            for rail in _near(each, rails, plain):
                if rail.decided:  # it may have claims under way
                    planned[rail.name] = paused(rail, "RailOf", f"{each.name} leases its addresses")
        if plan.block_size or plan.reason == "RailsWait":
            accepted.append((each, rails))
    for other in plain:
        if other.name not in planned:
            beside = _beside_rails(other, accepted, index)
            if beside is not None:
                planned[other.name] = beside
    return [each for each in plain if each.name not in planned]


def _plan(
    each: Ranged,
    rails: Rails,
    accepted: Collection[tuple[Ranged, Rails]],
    plain: Collection[Ranged],
    index: BlockIndex,
    nodes: int,
    quiet: Collection[str],
) -> Plan:
    """The plan of a pool with rails. A decision stays."""
    problem = _problem(each, rails, accepted)
    if problem is not None:
        return refused(problem, "RailsOverlap")
    if each.decided:
        return sized(each, each.decided)
    near = _near(each, rails, plain)
    for other in near:
        if other.range not in rails.networks:
            return refused(f"its rails overlap AddressPool {other.name}", "RailsOverlap")
    size = each.pool.spec.block_size or automatic_size(each.range, nodes)
    placed = [found for rail in rails.intervals for found in index.within(each.space, rail)]
    for found in placed:
        spec = found.block.spec
        if found.is_rail and spec.pool == each.name:
            continue  # seen on the range, too
        if spec.rails != tuple(map(text, rails.firsts(found.interval.first))):
            return refused(
                f"AddressBlock {found.block.metadata.name} was leased without these rails: set "
                f"spec.state of AddressPool {spec.pool} to Draining, and wait until its blocks "
                "are gone",
                "RailsInUse",
            )
        size = length(found.interval)  # the same pool, made again
    waiting = [other.name for other in near if other.decided and other.name not in quiet]
    if waiting:
        message = f"nodes may claim in a few minutes, when {', '.join(waiting)} lease nothing more"
        return Plan(ready=False, reason="RailsWait", message=message)
    return sized(each, size)


def _problem(each: Ranged, rails: Rails, accepted: Iterable[tuple[Ranged, Rails]]) -> str | None:
    """Why a pool cannot have these rails, apart from what other pools have."""
    if not each.pool.spec.shared:
        return "a private pool (spec.shared: false) has no rails"
    intervals = sorted(rails.intervals)
    if any(one.last >= next_.first for one, next_ in pairwise(intervals)):
        return "two of its rails have addresses in common"
    for other, others in accepted:
        if other.space == each.space and _touch(rails.intervals, others.intervals):
            return f"its rails overlap those of AddressPool {other.name}"
    return None


def _beside_rails(
    other: Ranged, accepted: Iterable[tuple[Ranged, Rails]], index: BlockIndex
) -> Plan | None:
    """The plan of a pool whose addresses are a rail's; None if none of them is."""
    for each, rails in accepted:
        if other.space == each.space and _touch([other.interval], rails.intervals):
            if other.range in rails.networks:
                message = f"its addresses are leased as a rail of AddressPool {each.name}"
                return Plan(space=other.space, rail_of=each.name, reason="RailOf", message=message)
            return refused(f"it overlaps a rail of AddressPool {each.name}", "RailsOverlap")
    for found in index.within(other.space, other.interval):
        if found.is_rail:
            return refused(
                f"AddressBlock {found.block.metadata.name} has addresses of it as a rail of "
                f"AddressPool {found.block.spec.pool}: wait until it is given back",
                "RailsInUse",
            )
    return None


def _near(each: Ranged, rails: Rails, plain: Iterable[Ranged]) -> list[Ranged]:
    return [
        other
        for other in plain
        if other.space == each.space and _touch([other.interval], rails.intervals)
    ]


def _touch(some: Iterable[Interval], others: Collection[Interval]) -> bool:
    return any(
        one.first <= other.last and other.first <= one.last for one in some for other in others
    )
