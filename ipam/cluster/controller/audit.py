"""What contradicts itself among the objects of a cluster, as far as objects tell.

The controller and `podfabric ipam fsck --cluster` report what is found here; nothing repairs it by
himself: an address that is in use must not be freed by a guess.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import msgspec

from ipam.addresses import text
from ipam.cluster.controller.block_index import BlockIndex, PlacedBlock
from ipam.cluster.geometry import interval
from ipam.cluster.names import block_name
from ipam.cluster.objects import AddressBlock, AddressPool
from ipam.cluster.rails import Rails


class Contradiction(msgspec.Struct, frozen=True):
    """Something that should not be. `pool` is the pool that it endangers, "" for none."""

    pool: str
    text: str


def contradictions(
    pools: Mapping[str, AddressPool], blocks: Iterable[AddressBlock], index: BlockIndex
) -> list[Contradiction]:
    """Everything about blocks that cannot be right, by pool."""
    blocks = tuple(blocks)
    found = [*_overlaps(index), *_uncovered(blocks)]
    rails = dict(_rails(pools))
    for block in blocks:
        found += _of_block(block, pools, rails)
    return sorted(found, key=lambda each: (each.pool, each.text))


def _rails(pools: Mapping[str, AddressPool]) -> Iterator[tuple[str, Rails]]:
    for name, pool in pools.items():
        with suppress(ValueError):  # the pool is not Ready, and says why
            yield name, Rails.readable(pool.spec)


def _overlaps(index: BlockIndex) -> Iterator[Contradiction]:
    for placed, other in index.neighbours():
        text = f"{_named(placed)} and {_named(other)} have addresses in common"
        for pool in {placed.block.spec.pool, other.block.spec.pool}:
            yield Contradiction(pool, text)


def _uncovered(blocks: Iterable[AddressBlock]) -> Iterator[Contradiction]:
    """Sub-blocks in use whose address no node has ceded."""
    by_name = {block.metadata.name: block.spec for block in blocks if not block.spec.cover}
    for block in blocks:
        name, spec = block.metadata.name, block.spec
        if not spec.cover or spec.state != "Active":
            continue
        cover = by_name.get(spec.cover)
        if cover is None:
            yield Contradiction(spec.pool, f"{name}: its cover {spec.cover} is gone")
        elif cover.state == "Active" and spec.first not in (*cover.ceded, *cover.recalled):
            yield Contradiction(spec.pool, f"{name}: {spec.cover} has not ceded the address")


def _named(placed: PlacedBlock) -> str:
    return f"{placed.block.metadata.name} of node {placed.block.spec.holder.node}"


def _of_block(
    block: AddressBlock, pools: Mapping[str, AddressPool], rails_of: Mapping[str, Rails]
) -> Iterator[Contradiction]:
    name, spec = block.metadata.name, block.spec
    try:
        first, last = interval(block)
    except ValueError as error:
        yield Contradiction(spec.pool, f"{name}: {error}")
        return
    right = block_name(spec.space, first, spec.prefix)
    if name != right:
        yield Contradiction(spec.pool, f"{name}: a block of these addresses is named {right}")
    pool = pools.get(spec.pool)
    if pool is None:
        yield Contradiction("", f"{name}: there is no pool {spec.pool}")
        return
    rails = rails_of.get(spec.pool)
    if rails is not None:
        if first not in rails.main or last not in rails.main:
            why = f"{name}: it is not in the pool's range {pool.spec.range}"
            yield Contradiction(spec.pool, why)
        if spec.rails != tuple(map(text, rails.firsts(first))):
            yield Contradiction(spec.pool, f"{name}: its rails are not those of the pool")
    if pool.status.space and spec.space != pool.status.space:
        yield Contradiction(spec.pool, f"{name}: the pool's space is {pool.status.space}")
    size = last - first + 1
    if not spec.cover and pool.status.block_size and size != pool.status.block_size:
        yield Contradiction(
            spec.pool, f"{name}: it has {size} addresses, a block has {pool.status.block_size}"
        )
