"""All blocks of a cluster by the addresses that they cover."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import attrgetter

import msgspec

from ipam.addresses import Interval
from ipam.cluster import geometry
from ipam.cluster.objects import AddressBlock

_LARGEST = 256  # addresses of a block


class PlacedBlock(msgspec.Struct, frozen=True):
    """A block and the addresses that it covers."""

    interval: Interval
    block: AddressBlock


_first = attrgetter("interval.first")


class BlockIndex:
    """Finds the blocks of a space that overlap an interval.

    A block whose addresses make no sense, which a CRD without its rules lets pass, is left out.
    """

    def __init__(self, blocks: Iterable[AddressBlock]) -> None:
        self._spaces: defaultdict[str, list[PlacedBlock]] = defaultdict(list)
        for block in blocks:
            with suppress(ValueError):
                placed = PlacedBlock(geometry.interval(block), block)
                self._spaces[block.space].append(placed)
        for placements in self._spaces.values():
            placements.sort(key=_first)

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
