"""Decides the block size and the space of each pool.

The API server refuses a second claim of the same addresses only if both claims have the same name.
So overlapping pools of one space have one block size. A private pool uses the shared space if a
shared pool has the same range. A decision changes only when no block with the old decision exists.
A change takes two rounds. The first round writes that the pool is undecided. Agents read the pool
after each claim, and drop a claim of an undecided pool. The second round looks for blocks again and
decides.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from ipam.addresses import Interval, Network, parse_interface
from ipam.controller.block_index import BlockIndex
from ipam.leases.block_layout import space_name
from ipam.leases.objects import GROUP, AddressPool

LEAST_NODES = 8
LARGEST_AUTOMATIC = 128

NAMESPACE = f"{GROUP}/namespace"
"""The label of a pool that was made for a definition. Its value is the definition's namespace."""


def is_made(pool: AddressPool) -> bool:
    """Whether the controller made the pool for a definition, and nobody changed it since."""
    return NAMESPACE in pool.metadata.labels and pool.metadata.generation <= 1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`block_size` 0 is undecided. `ready`, `reason` and `message` are the condition Ready."""

    space: str = ""
    block_size: int = 0
    ready: bool = True
    reason: str = "Decided"
    message: str = ""


_CHANGING = Plan(
    ready=False,
    reason="Changing",
    message="nodes wait until the controller decides the block size again, in a moment",
)


class Ranged(msgspec.Struct, frozen=True):
    """A range of a pool. `space` is the space in the pool's status, or else the planned space."""

    pool: AddressPool
    range: Network
    space: str

    @property
    def name(self) -> str:
        return self.pool.metadata.name

    @property
    def interval(self) -> Interval:
        return Interval(self.range.address, self.range.last)

    @property
    def decided(self) -> int:
        return self.pool.status.block_size


def automatic_size(range_: Network, nodes: int) -> int:
    """The largest power of two up to LARGEST_AUTOMATIC that allows each node four blocks."""
    capacity = range_.last - range_.address + 1
    share = max(1, capacity // (4 * max(nodes, LEAST_NODES)))
    return min(LARGEST_AUTOMATIC, 1 << (share.bit_length() - 1))


def plans(pools: Iterable[AddressPool], index: BlockIndex, nodes: int) -> dict[str, Plan]:
    """The plan of each pool by name. The blocks must have been read after the pools."""
    return _Planning(index, nodes).plans(pools)


class _Planning:
    def __init__(self, index: BlockIndex, nodes: int) -> None:
        self._index = index
        self._nodes = nodes
        self._planned: dict[str, Plan] = {}

    def plans(self, pools: Iterable[AddressPool]) -> dict[str, Plan]:
        ranged = []
        for pool in sorted(pools, key=_age):
            try:
                ranged.append(Ranged(pool, _canonical(pool.spec.range), pool.status.space))
            except ValueError as error:
                self._planned[pool.metadata.name] = _refused(str(error), "InvalidRange")
        spaced = self._with_spaces(ranged)
        for group in _overlapping(each for each in spaced if each.name not in self._planned):
            widest = max((each.interval for each in group), key=_length)
            if any(self._index.within(group[0].space, widest)):
                self._plan_in_use(group)
            else:
                self._plan_unused(group)
        return self._planned

    def _with_spaces(self, ranged: Sequence[Ranged]) -> list[Ranged]:
        """Gives each pool its space. Plans the pools that must wait for a change."""
        twins: defaultdict[tuple[str, Network], list[Ranged]] = defaultdict(list)
        for each in ranged:
            twins[each.pool.spec.network_name, each.range].append(each)
        spaces = []
        for each in ranged:
            spec = each.pool.spec
            beside = twins[spec.network_name, each.range]
            is_shared = any(twin.pool.spec.shared for twin in beside)
            wanted = space_name(spec.network_name, spec.range, shared=is_shared)
            own = space_name(spec.network_name, spec.range, shared=False)
            leased_apart = any(self._index.within(own, each.interval))
            space = each.space or (own if leased_apart and not spec.shared else wanted)
            # A private pool keeps a shared space, because its blocks have that space.
            if space == own != wanted and not leased_apart:
                self._planned[each.name] = _CHANGING
            if spec.shared and not each.decided:
                self._wait_for_private(each, beside, own)
            spaces.append(replace(each, space=space))
        return spaces

    def _wait_for_private(self, each: Ranged, beside: Iterable[Ranged], own: str) -> None:
        """A shared pool waits while nodes may lease blocks in the separate space of a private
        pool."""
        for found in self._index.within(own, each.interval):
            self._planned[each.name] = Plan(
                ready=False,
                reason="PrivateBlocks",
                message=f"AddressBlock {found.block.metadata.name} of the private AddressPool "
                f"{found.block.spec.pool} has addresses of this pool: set spec.state of "
                f"{found.block.spec.pool} to Draining, and wait until its blocks are gone",
            )
            return
        if any(twin.space == own for twin in beside):
            self._planned[each.name] = _CHANGING

    def _plan_unused(self, group: Sequence[Ranged]) -> None:
        """Plan one size for the group. No block is leased, so the decision may change."""
        # An administrator's pools decide first, because any tenant writes definitions.
        first = [each for each in group if not is_made(each.pool)] or group
        written = [each.pool.spec.block_size for each in first]
        smallest = min(first, key=lambda each: _length(each.interval)).range
        size = written[0] or first[0].decided or max(written)
        size = size or automatic_size(smallest, self._nodes)
        is_changing = any(each.decided not in (0, size) for each in group)
        for each in group:
            waits = is_changing and each.decided != size
            self._planned[each.name] = _CHANGING if waits else _sized(each, size)

    def _plan_in_use(self, group: Sequence[Ranged]) -> None:
        """Plan pools with leased blocks. A decided pool keeps its size. An undecided pool takes the
        size of the pools and blocks that it overlaps. An administrator's pool that overlaps only
        pools of definitions is Ready with these pools' size. So no tenant can prevent Ready."""
        known: list[tuple[Ranged, int]] = []
        for each in group:
            beside = [
                (other, size)
                for other, size in known
                if each.range.address in other.range or other.range.address in each.range
            ]
            leased = self._index.within(each.space, each.interval)
            around = {size for _, size in beside} | {_length(found.interval) for found in leased}
            size = each.pool.spec.block_size or automatic_size(each.range, self._nodes)
            size = next(iter(around), size)
            if each.decided:
                self._planned[each.name] = _sized(each, each.decided)
            elif len(around) > 1:
                sizes = " and ".join(map(str, sorted(around)))
                self._planned[each.name] = _refused(
                    f"the pool overlaps pools or blocks of {sizes} addresses: use another range"
                )
            else:
                yields = not is_made(each.pool) and all(is_made(other.pool) for other, _ in beside)
                self._planned[each.name] = _sized(each, size, later=yields)
            if size := self._planned[each.name].block_size:
                known.append((each, size))


def _canonical(written: str) -> Network:
    range_ = parse_interface(written)[1]
    if str(range_) != written:
        raise ValueError(f"{written} is not a network in canonical form: write {range_}")
    return range_


def _overlapping(ranged: Iterable[Ranged]) -> list[list[Ranged]]:
    """Groups of overlapping pools of one space. Decided pools come first, because undecided pools
    must not change them."""
    groups: list[list[Ranged]] = []
    end: tuple[str, int] = ("", -1)
    # Networks are nested or apart: the widest of a group begins first.
    for each in sorted(ranged, key=lambda each: (each.space, each.range)):
        if groups and (each.space, each.interval.first) <= end and each.space == end[0]:
            groups[-1].append(each)
        else:
            groups.append([each])
            end = (each.space, each.interval.last)
    return [sorted(group, key=lambda each: (not each.decided, _age(each.pool))) for group in groups]


def _sized(each: Ranged, size: int, *, later: bool = False) -> Plan:
    """Plan blocks of `size` addresses. With `later`, another spec.blockSize waits until the pool
    has no block."""
    written = each.pool.spec.block_size
    if size > _length(each.interval):
        return _refused(
            f"{each.pool.spec.range} is smaller than a block of {size} addresses: enlarge it"
        )
    if written in (0, size):
        return Plan(space=each.space, block_size=size)
    if later or each.decided == size:
        message = f"spec.blockSize {written} takes effect when the pool has no block"
        return Plan(space=each.space, block_size=size, reason="BlockSizeLater", message=message)
    return _refused(
        f"the pool overlaps a pool with blocks of {size} addresses: set spec.blockSize to {size}"
    )


def _refused(why: str, reason: str = "BlockSizeDiffers") -> Plan:
    """A plan without decisions, so that overlapping pools need not wait for this pool."""
    return Plan(ready=False, reason=reason, message=why)


def _age(pool: AddressPool) -> tuple[str, str]:
    return pool.metadata.creation_timestamp, pool.metadata.name


def _length(interval: Interval) -> int:
    return interval.last - interval.first + 1
