"""Finds blocks by address, and blocks that contradict each other."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import NamedTuple

import msgspec

from ipam.addresses import Interval
from ipam.leases import block_layout
from ipam.leases.block_layout import why_wrong
from ipam.leases.objects import AddressBlock, AddressPool

_LARGEST = 256  # addresses of a block


class PlacedBlock(msgspec.Struct, frozen=True):
    interval: Interval
    block: AddressBlock


_first = attrgetter("interval.first")


class BlockIndex:
    """Finds the blocks of a space that overlap an interval. Leaves out unreadable blocks."""

    def __init__(self, blocks: Iterable[AddressBlock]) -> None:
        self._spaces: defaultdict[str, list[PlacedBlock]] = defaultdict(list)
        for block in blocks:
            with suppress(ValueError):
                placed = PlacedBlock(block_layout.interval(block), block)
                self._spaces[block.space].append(placed)
        for placements in self._spaces.values():
            placements.sort(key=_first)

    def within(self, space: str, interval: Interval) -> Iterator[PlacedBlock]:
        placements = self._spaces.get(space, [])
        # A block that begins before the interval may reach into it.
        start = bisect_left(placements, interval.first - _LARGEST + 1, key=_first)
        for index in range(start, len(placements)):
            placed = placements[index]
            if placed.interval.first > interval.last:
                break
            if placed.interval.last >= interval.first:
                yield placed

    def neighbours(self) -> Iterator[tuple[PlacedBlock, PlacedBlock]]:
        """Pairs of overlapping blocks. Each overlapping block is in at least one pair."""
        for placements in self._spaces.values():
            widest: PlacedBlock | None = None  # the earlier block that ends last
            for placed in placements:
                if widest is not None and placed.interval.first <= widest.interval.last:
                    yield widest, placed
                if widest is None or placed.interval.last > widest.interval.last:
                    widest = placed


class Contradiction(NamedTuple):
    """Two blocks, or a block and its pool, contradict. `pool` is "" for a missing pool."""

    pool: str
    text: str


def contradictions(
    pools: Mapping[str, AddressPool], blocks: Iterable[AddressBlock], index: BlockIndex
) -> list[Contradiction]:
    """All contradictions, sorted by pool. The controller repairs none, because a repair could free
    an address that a pod uses."""
    found = list[Contradiction]()
    for placed, other in index.neighbours():
        text = f"{_named(placed)} and {_named(other)} have addresses in common"
        both = {placed.block.spec.pool, other.block.spec.pool}
        found += (Contradiction(pool, text) for pool in both)
    for block in blocks:
        name, pool = block.metadata.name, pools.get(block.spec.pool)
        if pool is None:
            found.append(Contradiction("", f"{name}: there is no pool {block.spec.pool}"))
        elif why := why_wrong(block, pool):
            found.append(Contradiction(block.spec.pool, f"{name}: {why}"))
    return sorted(found)


def decisive(
    blocks: Iterable[AddressBlock], pools: Mapping[str, AddressPool]
) -> tuple[AddressBlock, ...]:
    """Blocks that do not contradict their pool. Blocks without a pool count too, because pods may
    have addresses of these blocks."""
    return tuple(
        block
        for block in blocks
        if (pool := pools.get(block.spec.pool)) is None or not why_wrong(block, pool)
    )


def _named(placed: PlacedBlock) -> str:
    return f"{placed.block.metadata.name} of node {placed.block.spec.holder.node}"
