"""All blocks of a cluster by the addresses that they cover."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter

import msgspec

from ipam.addresses import Interval, parse
from ipam.cluster import geometry
from ipam.cluster.objects import AddressBlock

_LARGEST = 256  # addresses of a block


class PlacedBlock(msgspec.Struct, frozen=True):
    """A block and what it covers, on its pool's range or on another of the pool's rails."""

    interval: Interval
    block: AddressBlock
    is_rail: bool = False


_first = attrgetter("interval.first")


class BlockIndex:
    """Finds the blocks of a space that overlap an interval. Sub-blocks are apart, by their cover.

    A block whose addresses make no sense, which a CRD without its rules lets pass, is left out.
    """

    def __init__(self, blocks: Iterable[AddressBlock]) -> None:
        self._sub_blocks: defaultdict[str, list[AddressBlock]] = defaultdict(list)
        self._spaces: defaultdict[str, list[PlacedBlock]] = defaultdict(list)
        for block in blocks:
            if block.spec.cover:
                self._sub_blocks[block.spec.cover].append(block)
                continue
            with suppress(ValueError):
                self._spaces[block.spec.space] += list(placed(block))
        for placements in self._spaces.values():
            placements.sort(key=_first)

    def sub_blocks(self, cover: str) -> Sequence[AddressBlock]:
        """The sub-blocks of the block of that name."""
        return self._sub_blocks.get(cover, ())

    def within(self, space: str, interval: Interval) -> Iterator[PlacedBlock]:
        """The blocks that overlap the interval, lowest first."""
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
        """Pairs of blocks with an address in common; each such block is in one pair at least."""
        for placements in self._spaces.values():
            widest: PlacedBlock | None = None  # of those that begin before: it reaches farthest
            for placed in placements:
                if widest is not None and placed.interval.first <= widest.interval.last:
                    yield widest, placed
                if widest is None or placed.interval.last > widest.interval.last:
                    widest = placed


def placed(block: AddressBlock) -> Iterator[PlacedBlock]:
    """The block on each rail. ValueError: its addresses make no sense."""
    covered = geometry.interval(block)
    yield PlacedBlock(covered, block)
    for first in map(parse, block.spec.rails):
        yield PlacedBlock(Interval(first, first + covered.last - covered.first), block, True)
