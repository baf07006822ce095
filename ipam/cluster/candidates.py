"""Which blocks of a pool a claim tries, and in which order.

Each node has an order of its own, so that nodes which claim at the same time try different blocks.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ipam.addresses import Interval
from ipam.cluster import geometry
from ipam.cluster.geometry import MOST_MAPPED, Geometry
from ipam.cluster.objects import AddressPool
from ipam.cluster.wants import Want
from ipam.ranges import outside

_AHEAD = 1024  # blocks behind the last leased one that are tried in a pool without a map
_MOST_DRAWN = 32  # blocks of a pool without a map that are tried before it is read again


class Candidates:
    """The blocks that the node of a store tries; `instance` is that store's."""

    def __init__(self, instance: str) -> None:
        self._random = random.Random(instance)

    def of(
        self,
        pool: AddressPool,
        blocks: Geometry,
        want: Want,
        holes: Sequence[Interval],
        *,
        use_map: bool,
    ) -> Iterator[int]:
        """Indexes of blocks with an address that is wanted: in the node's order, or from the top.

        `use_map`: only those that the pool's map shows as free.
        """
        stretches = [
            range(blocks.index(part.first), blocks.index(part.last) + 1)
            for wanted in want.parts
            for part in outside(wanted, holes)
        ]
        if sum(map(_length, stretches)) > MOST_MAPPED:
            end = 2 * pool.status.high_water + _AHEAD
            low = [range(each.start, min(each.stop, end)) for each in stretches]
            return self._drawn([each for each in low if each] or stretches[:1])
        indexes = {index for stretch in stretches for index in stretch}
        if use_map and pool.status.free_map:
            with suppress(ValueError):  # it is a hint
                indexes &= set(geometry.free_indexes(pool.status.free_map, blocks.total))
        # whereabouts hands out the lowest address first
        from_top = pool.spec.claim_from == "High" or pool.spec.compat == "Coexist"
        order = sorted(indexes, reverse=from_top)
        return iter(order) if from_top else self._shuffled(order)

    def _shuffled(self, indexes: list[int]) -> Iterator[int]:
        """All of them in a random order. A claim tries a few: the others are not moved."""
        while indexes:
            at = self._random.randrange(len(indexes))
            indexes[at], indexes[-1] = indexes[-1], indexes[at]
            yield indexes.pop()

    def _drawn(self, stretches: Sequence[range]) -> Iterator[int]:
        """Indexes of a pool without a map, each at most some times."""
        total = sum(map(_length, stretches))
        for _ in range(_MOST_DRAWN):
            number = self._random.randrange(total)
            for stretch in stretches:
                if number < _length(stretch):
                    yield stretch.start + number
                    break
                number -= _length(stretch)


def _length(stretch: range) -> int:
    """How many blocks it has: in IPv6 more than len() can tell."""
    return max(0, stretch.stop - stretch.start)
