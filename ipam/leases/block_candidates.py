"""Which blocks of a pool a claim tries, and in which order.

Each node has an order of its own, so that nodes which claim at the same time try different blocks.
And each tries the index first that it leased last: a pod has interfaces of several pools, and nodes
that won different indexes of the first pool do not try each other's in the next.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from ipam.addresses import Interval
from ipam.leases.block_layout import MOST_MAPPED, Geometry, is_leased, read_map
from ipam.leases.claim_request import Want
from ipam.leases.objects import AddressPool
from ipam.ranges import outside

_MOST_DRAWN = 32  # blocks of a pool without a map that are tried before it is read again


class Candidates:
    """The blocks that the node of a store tries; `instance` is that store's."""

    def __init__(self, instance: str) -> None:
        self._random = random.Random(instance)
        self._leased: int | None = None

    def leased(self, index: int) -> None:
        """This node has leased the block with that index of a pool."""
        self._leased = index

    def of(
        self,
        pool: AddressPool,
        blocks: Geometry,
        want: Want,
        holes: Sequence[Interval],
        *,
        use_map: bool,
    ) -> Iterator[int]:
        """Indexes of blocks with an address that is wanted: in the node's order.

        `use_map`: only those that the pool's map shows as free.
        """
        stretches = [
            range(blocks.index(part.first), blocks.index(part.last) + 1)
            for wanted in want.parts
            for part in outside(wanted, holes)
        ]
        if sum(map(_length, stretches)) > MOST_MAPPED:
            yield from self._same(stretches)
            yield from self._drawn(stretches)
            return
        bits = b""
        if use_map and pool.status.free_map:
            with suppress(ValueError):  # it is a hint
                bits = read_map(pool.status.free_map, blocks.total)
        yield from (index for index in self._same(stretches) if not is_leased(bits, index))
        indexes = {index for each in stretches for index in each if not is_leased(bits, index)}
        yield from self._shuffled(sorted(indexes))

    def _same(self, stretches: Iterable[range]) -> Iterator[int]:
        """The index that was leased last, if these have it."""
        if self._leased is not None and any(self._leased in each for each in stretches):
            yield self._leased

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
