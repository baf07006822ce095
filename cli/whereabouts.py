"""`podfabric ipam compat`: what whereabouts' objects still hold of each pool."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec

from cli import output
from cli.cluster_addresses import add_kubeconfig
from cli.output import Cell, Table
from ipam.addresses import text
from ipam.cluster import geometry
from ipam.cluster.api import ClusterApi
from ipam.cluster.objects import AddressBlock, AddressPool, Compat
from ipam.cluster.whereabouts import held, placeholders
from ipam.cluster.whereabouts.held import Held, listed
from ipam.cluster.whereabouts.objects import IPPool, entries
from ipam.cluster.whereabouts.overlap import has, strictest


class ForeignPool(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A pool, and the addresses of it that whereabouts' objects hold, with their pods.

    `compat` is the strictest of all pools that overlap it, by which nodes use it. `behind` are its
    blocks, with their nodes, that are not used so yet.
    """

    pool: str
    compat: str
    held: dict[str, str]
    behind: dict[str, str]


def add_options(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `compat`."""
    compat = commands.add_parser(
        "compat",
        help="what whereabouts' objects hold of each pool (1: something, or a node is behind)",
    )
    compat.add_argument("-o", "--output", choices=("table", "json"), default="table")
    compat.add_argument(
        "--clear",
        action="store_true",
        help="remove placeholders of blocks that no node leases any more, as of dead nodes",
    )
    add_kubeconfig(compat)
    compat.set_defaults(cluster=True, in_cluster=_compat)


def _compat(arguments: argparse.Namespace, api: ClusterApi) -> int:
    if arguments.clear:
        _clear(api)
    listed_pools = api.list(AddressPool).items
    names = {pool.metadata.name for pool in listed_pools}
    blocks = api.list(AddressBlock).items
    orphans = [block for block in blocks if block.spec.pool not in names]
    pools = []
    for pool in listed_pools:
        compat = strictest(pool, listed_pools)
        mine = [each for each in blocks if each.spec.pool == pool.metadata.name]
        if compat != "None":  # nodes go by it for blocks whose own pool is gone
            mine += [each for each in orphans if _has(pool, each)]
        pools.append(_foreign(api, pool, compat, mine, listed_pools))
    if arguments.output == "json":
        output.document({"pools": pools}, "json")
    else:
        rows: list[list[str | Cell]] = [
            [
                each.pool,
                each.compat,
                str(len(each.held)),
                str(len(each.behind)),
                _some(each.behind.values()),
                _some(f"{address} {pod}" for address, pod in each.held.items()),
            ]
            for each in pools
        ]
        output.show(Table(("POOL", "COMPAT", "HELD", "BEHIND", "ON", "BY"), rows))
    return 1 if any(each.held or each.behind for each in pools) else 0


def _clear(api: ClusterApi) -> None:
    """Remove placeholders without a block: those that are there now, since a block that is leased
    meanwhile needs its own. So the pools are read first, and then the blocks."""
    pools = listed(api, IPPool)
    seen = {placeholders.uid_of(entry) for pool in pools for entry in entries(pool)}
    stale = seen - {block.metadata.uid for block in api.list(AddressBlock).items}
    count = sum(placeholders.remove_from(api, pool, lambda uid: uid in stale) for pool in pools)
    sys.stdout.write(f"removed {count} placeholders\n")


def _foreign(
    api: ClusterApi,
    pool: AddressPool,
    compat: Compat,
    blocks: Sequence[AddressBlock],
    all_pools: Sequence[AddressPool],
) -> ForeignPool:
    name = pool.metadata.name
    found = held.read(api, pool, all_pools)
    ours = {key for block in blocks for key in _published(block)}
    pods = {
        text(each): there.allocation.podref
        for each, there in sorted(found.items())
        # A reservation alone may be one that our node made for its pod.
        if there.place or (each, there.allocation.podref) not in ours
    }
    behind = {
        block.metadata.name: block.spec.holder.node
        for block in blocks
        if block.spec.compat != compat or (pool.spec.mirror and not _is_mirrored(block, found))
    }
    return ForeignPool(pool=name, compat=compat, held=pods, behind=behind)


def _has(pool: AddressPool, block: AddressBlock) -> bool:
    """Whether the addresses of a block are the pool's."""
    with suppress(ValueError):
        return has(pool, block.spec.space, geometry.interval(block).first)
    return False


def _is_mirrored(block: AddressBlock, found: Mapping[int, Held]) -> bool:
    """Whether all pods that have an address of the block have an entry."""
    there = {(each.address, each.allocation.podref) for each in found.values() if each.place}
    return set(_published(block)) <= there


def _published(block: AddressBlock) -> Iterator[tuple[int, str]]:
    """The addresses that a block's node has given to pods, with these, as it last told."""
    first = geometry.interval(block).first
    for offset, holder in block.status.holders.items():
        if offset.isascii() and offset.isdigit():
            yield first + int(offset), holder.partition(" ")[0]


def _some(listed: Iterable[str]) -> str:
    """The first few."""
    unique = list(dict.fromkeys(listed))
    return ", ".join([*unique[:2], "..."] if len(unique) > 2 else unique)
