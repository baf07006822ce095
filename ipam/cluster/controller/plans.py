"""How each pool is cut into blocks, and whether nodes may claim from it.

Equal addresses must have equal names, or the API server cannot keep two claims of them apart. So
pools of one space that overlap have one block size, and a private pool lies in the shared space if
its range is that of a shared pool. Both are decided once. A change of what was
decided begins only when no block of the old kind exists: the controller first writes Ready False
(agents read the pool after each claim, and drop a claim if it is not Ready), waits, looks for
blocks again, and then decides.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from ipam.addresses import Network, parse_interface
from ipam.cluster.controller.block_index import BlockIndex
from ipam.cluster.controller.pool_conditions import is_made, is_ready
from ipam.cluster.controller.ranged import (
    Plan,
    Ranged,
    age,
    automatic_size,
    length,
    paused,
    rank,
    refused,
    sized,
)
from ipam.cluster.names import space_name
from ipam.cluster.objects import AddressBlock, AddressPool


def plans(
    pools: Iterable[AddressPool], index: BlockIndex, nodes: int, quiet: Collection[str]
) -> dict[str, Plan]:
    """The plan of each pool by its name.

    `quiet` are the pools of which nodes cannot have a claim under way, since they have been not
    Ready for long enough.
    """
    planned: dict[str, Plan] = {}
    ranged = []
    for pool in sorted(pools, key=age):
        try:
            range_ = _canonical(pool.spec.range)
        except ValueError as error:
            planned[pool.metadata.name] = Plan(
                ready=False, reason="InvalidRange", message=str(error)
            )
        else:
            ranged.append(Ranged(pool, range_, pool.status.space))
    spaced = _with_spaces(ranged, index, quiet, planned)
    for group in _overlapping(each for each in spaced if each.name not in planned):
        _plan_sizes(group, index, nodes, quiet, planned)
    return planned


def _canonical(written: str) -> Network:
    range_ = parse_interface(written)[1]
    if str(range_) != written:
        raise ValueError(f"{written} is not written as a network: make a pool of {range_}")
    return range_


def _with_spaces(
    ranged: Iterable[Ranged],
    index: BlockIndex,
    quiet: Collection[str],
    planned: dict[str, Plan],
) -> list[Ranged]:
    """Each pool with its space. The plans of those that must wait for a change go to `planned`."""
    ranged = tuple(ranged)
    shared: defaultdict[tuple[str, Network], list[Ranged]] = defaultdict(list)
    for each in ranged:
        if each.pool.spec.shared:
            # One that is Ready stays so: a private pool beside it lies in its space.
            private = None if is_ready(each.pool) else _private_block(each, index)
            if private is not None:
                planned[each.name] = _waiting_for(private, each)
            shared[each.pool.spec.network_name, each.range].append(each)
    spaces = []
    for each in ranged:
        spec, decided = each.pool.spec, each.pool.status.space
        twins = shared[spec.network_name, each.range]
        wanted = space_name(spec.network_name, spec.range, shared=bool(twins))
        space = decided or wanted
        # A private pool that once was beside a shared one stays: its blocks have that space.
        if decided not in ("", wanted) and twins and not any(index.within(decided, each.interval)):
            if {each.name, *(twin.name for twin in twins)} <= set(quiet):
                space = wanted
            else:
                for waiting in (each, *twins):
                    planned[waiting.name] = paused(
                        waiting, "SpaceChanges", f"the space is {wanted}"
                    )
        spaces.append(replace(each, space=space))
    return spaces


def _private_block(each: Ranged, index: BlockIndex) -> AddressBlock | None:
    """A block with addresses of a shared pool that a private pool of the very same range leased
    before, in a space of its own."""
    own = space_name(each.pool.spec.network_name, each.pool.spec.range, shared=False)
    return next((found.block for found in index.within(own, each.interval)), None)


def _waiting_for(private: AddressBlock, each: Ranged) -> Plan:
    return Plan(
        space=each.pool.status.space,
        block_size=each.decided,
        ready=False,
        reason="PrivateBlocks",
        message=f"AddressBlock {private.metadata.name} of AddressPool {private.spec.pool} has "
        "addresses of it in a space of its own: set spec.state of that pool to Draining and wait "
        "until its blocks are gone",
    )


def _overlapping(ranged: Iterable[Ranged]) -> list[list[Ranged]]:
    """The pools in groups: those of one space whose ranges overlap.

    First come those that nodes claim from: the next ones must not change them.
    """
    groups: list[list[Ranged]] = []
    end: tuple[str, int] = ("", -1)
    # Networks are nested or apart: the widest of a group begins first.
    for each in sorted(ranged, key=lambda each: (each.space, each.range)):
        if groups and (each.space, each.interval.first) <= end and each.space == end[0]:
            groups[-1].append(each)
        else:
            groups.append([each])
            end = (each.space, each.interval.last)
    return [sorted(group, key=rank) for group in groups]


def _plan_sizes(
    group: list[Ranged],
    index: BlockIndex,
    nodes: int,
    quiet: Collection[str],
    planned: dict[str, Plan],
) -> None:
    widest = max((each.interval for each in group), key=length)
    if any(index.within(group[0].space, widest)):
        _plan_in_use(group, index, nodes, quiet, planned)
    else:
        _plan_unused(group, nodes, quiet, planned)


def _plan_unused(
    group: list[Ranged], nodes: int, quiet: Collection[str], planned: dict[str, Plan]
) -> None:
    """One size for all: nothing is leased, so the decision may change."""
    # What a person wrote goes before what a definition made, which is of any tenant.
    first = [each for each in group if not is_made(each.pool)] or group
    written = [each.pool.spec.block_size for each in first]
    smallest = min((each.range for each in first), key=lambda range_: range_.last - range_.address)
    size = written[0] or first[0].decided or max(written) or automatic_size(smallest, nodes)
    moving = {each.name for each in group if each.decided not in (0, size)}
    waiting = not moving <= set(quiet)
    for each in group:
        if waiting and each.decided != size:
            planned[each.name] = paused(each, "BlockSizeChanges", f"blockSize is {size}")
        else:
            planned[each.name] = sized(each, size)


def _plan_in_use(
    group: list[Ranged],
    index: BlockIndex,
    nodes: int,
    quiet: Collection[str],
    planned: dict[str, Plan],
) -> None:
    """Those that are Ready stay as they are. Each other one takes the size of what it overlaps. One
    of a person that overlaps pools of definitions only does so in any case: no tenant keeps it from
    being Ready."""
    known: list[tuple[Ranged, int]] = []
    for each in group:
        around = {size for other, size in known if _overlap(each, other)}
        around |= {length(placed.interval) for placed in index.within(each.space, each.interval)}
        if each.decided and is_ready(each.pool):
            plan = sized(each, each.decided)
        elif len(around) > 1:
            sizes = " and ".join(map(str, sorted(around)))
            plan = refused(f"it overlaps pools and blocks of {sizes} addresses: use another range")
        else:
            written = each.pool.spec.block_size
            choice = each.decided or written or automatic_size(each.range, nodes)
            size = next(iter(around), choice)
            yields = not is_made(each.pool) and all(
                is_made(other.pool) for other, _ in known if _overlap(each, other)
            )
            if each.decided not in (0, size) and each.name not in quiet:
                plan = paused(each, "BlockSizeChanges", f"blockSize is {size}")
            else:
                plan = sized(each, size, later=yields)
        planned[each.name] = plan
        if plan.block_size:
            known.append((each, plan.block_size))


def _overlap(one: Ranged, other: Ranged) -> bool:
    return one.interval.first <= other.interval.last and other.interval.first <= one.interval.last
