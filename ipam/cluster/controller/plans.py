"""How each pool is cut into blocks, and whether nodes may claim from it.

Equal addresses must have equal names, or the API server cannot keep two claims of them apart. So
pools of one space that overlap have one block size, and a private pool lies in the shared space if
its range is that of a shared pool. Both are decided once. A change of what was
decided begins only when no block of the old kind exists: the controller first writes Ready False
(agents read the pool after each claim, and drop a claim if it is not Ready), waits, looks for
blocks again, and then decides.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from ipam.addresses import Interval, Network, parse_interface
from ipam.cluster.controller.block_index import BlockIndex
from ipam.cluster.names import space_name
from ipam.cluster.objects import GROUP, AddressPool

LEAST_NODES = 8
LARGEST_AUTOMATIC = 128


NAMESPACE = f"{GROUP}/namespace"
"""The label of a pool that was made for a definition: the definition's namespace."""


def is_made(pool: AddressPool) -> bool:
    """Whether the controller made it for a definition, and no person has changed it since."""
    return NAMESPACE in pool.metadata.labels and pool.metadata.generation <= 1


def is_ready(pool: AddressPool) -> bool:
    """Whether the status says that nodes may claim."""
    return any(each.type == "Ready" and each.status == "True" for each in pool.status.conditions)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool's status shall say. `block_size` 0: nothing was decided yet.

    `reason` and `message` are those of the condition Ready.
    """

    space: str = ""
    block_size: int = 0
    ready: bool = True
    reason: str = "Decided"
    message: str = ""


class Ranged(msgspec.Struct, frozen=True):
    """A pool and its range; `space` is the one that it has or gets."""

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
        """The block size that the status says."""
        return self.pool.status.block_size


def automatic_size(range_: Network, nodes: int) -> int:
    """The largest power of two of which each node can have four blocks; at least 1."""
    capacity = range_.last - range_.address + 1
    share = max(1, capacity // (4 * max(nodes, LEAST_NODES)))
    return min(LARGEST_AUTOMATIC, 1 << (share.bit_length() - 1))


def plans(
    pools: Iterable[AddressPool], index: BlockIndex, nodes: int, quiet: Collection[str]
) -> dict[str, Plan]:
    """The plan of each pool by its name.

    `quiet` are the pools of which nodes cannot have a claim under way, since they have been not
    Ready for long enough.
    """
    return _Planning(index, nodes, quiet).plans(pools)


class _Planning:
    """The plans of all pools, by name, as they are made."""

    def __init__(self, index: BlockIndex, nodes: int, quiet: Collection[str]) -> None:
        self._index = index
        self._nodes = nodes
        self._quiet = quiet
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
        """Each pool with its space. Those that must wait for a change are planned."""
        shared: defaultdict[tuple[str, Network], list[Ranged]] = defaultdict(list)
        for each in ranged:
            if each.pool.spec.shared:
                # One that is Ready stays so: a private pool beside it lies in its space.
                if not is_ready(each.pool):
                    self._wait_for_private(each)
                shared[each.pool.spec.network_name, each.range].append(each)
        spaces = []
        for each in ranged:
            spec, decided = each.pool.spec, each.pool.status.space
            twins = shared[spec.network_name, each.range]
            wanted = space_name(spec.network_name, spec.range, shared=bool(twins))
            space = decided or wanted
            # A private pool that once was beside a shared one stays: its blocks have that space.
            is_used = any(self._index.within(space, each.interval))
            if space != wanted and twins and not is_used:
                if {each.name, *(twin.name for twin in twins)} <= set(self._quiet):
                    space = wanted
                else:
                    for waiting in (each, *twins):
                        self._pause(waiting, "SpaceChanges", f"the space is {wanted}")
            spaces.append(replace(each, space=space))
        return spaces

    def _wait_for_private(self, each: Ranged) -> None:
        """Plan a shared pool of which a private pool of the very same range leased addresses
        before, in a space of its own."""
        own = space_name(each.pool.spec.network_name, each.pool.spec.range, shared=False)
        for found in self._index.within(own, each.interval):
            self._planned[each.name] = Plan(
                space=each.pool.status.space,
                block_size=each.decided,
                ready=False,
                reason="PrivateBlocks",
                message=f"AddressBlock {found.block.metadata.name} of AddressPool "
                f"{found.block.spec.pool} has addresses of it in a space of its own: set "
                "spec.state of that pool to Draining and wait until its blocks are gone",
            )
            return

    def _plan_unused(self, group: Sequence[Ranged]) -> None:
        """One size for all: nothing is leased, so the decision may change."""
        # What a person wrote goes before what a definition made, which is of any tenant.
        first = [each for each in group if not is_made(each.pool)] or group
        written = [each.pool.spec.block_size for each in first]
        smallest = min(first, key=lambda each: _length(each.interval)).range
        size = written[0] or first[0].decided or max(written)
        size = size or automatic_size(smallest, self._nodes)
        moving = {each.name for each in group if each.decided not in (0, size)}
        waiting = not moving <= set(self._quiet)
        for each in group:
            if waiting and each.decided != size:
                self._pause(each, "BlockSizeChanges", f"blockSize is {size}")
            else:
                self._planned[each.name] = _sized(each, size)

    def _plan_in_use(self, group: Sequence[Ranged]) -> None:
        """Those that are Ready stay as they are. Each other one takes the size of what it overlaps.
        One of a person that overlaps pools of definitions only does so in any case: no tenant keeps
        it from being Ready."""
        known: list[tuple[Ranged, int]] = []
        for each in group:
            beside = [(other, size) for other, size in known if _overlap(each, other)]
            leased = self._index.within(each.space, each.interval)
            around = {size for _, size in beside} | {_length(found.interval) for found in leased}
            size = each.decided or each.pool.spec.block_size
            size = next(iter(around), size or automatic_size(each.range, self._nodes))
            if each.decided and is_ready(each.pool):
                self._planned[each.name] = _sized(each, each.decided)
            elif len(around) > 1:
                sizes = " and ".join(map(str, sorted(around)))
                self._planned[each.name] = _refused(
                    f"it overlaps pools and blocks of {sizes} addresses: use another range"
                )
            elif each.decided not in (0, size) and each.name not in self._quiet:
                self._pause(each, "BlockSizeChanges", f"blockSize is {size}")
            else:
                yields = not is_made(each.pool) and all(is_made(other.pool) for other, _ in beside)
                self._planned[each.name] = _sized(each, size, later=yields)
            if size := self._planned[each.name].block_size:
                known.append((each, size))

    def _pause(self, each: Ranged, reason: str, what: str) -> None:
        """The pool as it was decided, without claims until the change is made."""
        self._planned[each.name] = Plan(
            space=each.pool.status.space,
            block_size=each.decided,
            ready=False,
            reason=reason,
            message=f"nodes may claim again in a few minutes, when {what}",
        )


def _canonical(written: str) -> Network:
    range_ = parse_interface(written)[1]
    if str(range_) != written:
        raise ValueError(f"{written} is not written as a network: make a pool of {range_}")
    return range_


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
    return [sorted(group, key=_rank) for group in groups]


def _sized(each: Ranged, size: int, *, later: bool = False) -> Plan:
    """The pool with blocks of that size; `later`: another one that it names may take effect
    later."""
    written = each.pool.spec.block_size
    if size > _length(each.interval):
        return _refused(f"{each.pool.spec.range} is smaller than a block of {size} addresses")
    if written in (0, size):
        return Plan(space=each.space, block_size=size)
    if later or each.decided == size:
        message = f"spec.blockSize {written} takes effect when the pool has no block"
        return Plan(space=each.space, block_size=size, reason="BlockSizeLater", message=message)
    return _refused(
        f"it overlaps a pool with blocks of {size} addresses: set spec.blockSize to {size}"
    )


def _refused(why: str, reason: str = "BlockSizeDiffers") -> Plan:
    """Nothing is decided: so the pools that the pool overlaps need not wait for it."""
    return Plan(ready=False, reason=reason, message=why)


def _age(pool: AddressPool) -> tuple[str, str]:
    return pool.metadata.creation_timestamp, pool.metadata.name


def _rank(each: Ranged) -> tuple[bool, bool, tuple[str, str]]:
    return not (each.decided and is_ready(each.pool)), not each.decided, _age(each.pool)


def _length(interval: Interval) -> int:
    return interval.last - interval.first + 1


def _overlap(one: Ranged, other: Ranged) -> bool:
    return one.interval.first <= other.interval.last and other.interval.first <= one.interval.last
