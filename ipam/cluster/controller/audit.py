"""What contradicts itself among the objects of a cluster, as far as objects tell.

The controller and `podfabric ipam fsck --cluster` report what is found here; nothing repairs it by
himself: an address that is in use must not be freed by a guess.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ipam.cluster.controller.block_index import BlockIndex, PlacedBlock
from ipam.cluster.geometry import why_wrong
from ipam.cluster.objects import AddressBlock, AddressPool


class Contradiction(msgspec.Struct, frozen=True):
    """Something that should not be. `pool` is the pool that it endangers, "" for none."""

    pool: str
    text: str


def contradictions(
    pools: Mapping[str, AddressPool], blocks: Iterable[AddressBlock], index: BlockIndex
) -> list[Contradiction]:
    """Everything about blocks that cannot be right, by pool. Overlaps are those of `index`."""
    found = [*_overlaps(index), *_wrong(blocks, pools)]
    return sorted(found, key=lambda each: (each.pool, each.text))


def decisive(
    blocks: Iterable[AddressBlock], pools: Mapping[str, AddressPool]
) -> tuple[AddressBlock, ...]:
    """The blocks that may decide something: see `why_wrong`. One whose pool is gone is among them:
    pods may have its addresses, so a pool that is made for them now must not cut them otherwise."""
    return tuple(
        block
        for block in blocks
        if (pool := pools.get(block.spec.pool)) is None or not why_wrong(block, pool)
    )


def _overlaps(index: BlockIndex) -> Iterator[Contradiction]:
    for placed, other in index.neighbours():
        text = f"{_named(placed)} and {_named(other)} have addresses in common"
        for pool in {placed.block.spec.pool, other.block.spec.pool}:
            yield Contradiction(pool, text)


def _named(placed: PlacedBlock) -> str:
    return f"{placed.block.metadata.name} of node {placed.block.spec.holder.node}"


def _wrong(
    blocks: Iterable[AddressBlock], pools: Mapping[str, AddressPool]
) -> Iterator[Contradiction]:
    for block in blocks:
        pool = pools.get(block.spec.pool)
        if pool is None:
            name = block.spec.pool
            yield Contradiction("", f"{block.metadata.name}: there is no pool {name}")
        elif why := why_wrong(block, pool):
            yield Contradiction(block.spec.pool, f"{block.metadata.name}: {why}")
