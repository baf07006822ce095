"""`podfabric ipam compat`: what whereabouts' objects still hold of each pool."""

import argparse
import sys

import msgspec

from cli import output
from cli.cluster_addresses import add_kubeconfig
from cli.output import Cell, Table
from ipam.addresses import text
from ipam.cluster.api import ClusterApi
from ipam.cluster.objects import AddressBlock, AddressPool
from ipam.cluster.whereabouts import held, placeholders
from ipam.cluster.whereabouts.held import listed
from ipam.cluster.whereabouts.objects import IPPool


class ForeignPool(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A pool, and the addresses of it that whereabouts' objects hold, with their pods."""

    pool: str
    compat: str
    held: dict[str, str]


def add_options(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `compat`."""
    compat = commands.add_parser(
        "compat", help="what whereabouts' objects hold of each pool (1: something)"
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
    pools = [_foreign(api, pool) for pool in api.list(AddressPool).items]
    if arguments.output == "json":
        output.document({"pools": pools}, "json")
    else:
        rows: list[list[str | Cell]] = [
            [each.pool, each.compat, str(len(each.held)), _shown(each)] for each in pools
        ]
        output.show(Table(("POOL", "COMPAT", "HELD", "BY"), rows))
    return 1 if any(each.held for each in pools) else 0


def _clear(api: ClusterApi) -> None:
    """Remove placeholders without a block. One that was leased meanwhile gets them back when its
    holder next looks; so the pools are read first, and then the blocks."""
    pools = listed(api, IPPool)
    leased = {block.metadata.uid for block in api.list(AddressBlock).items}
    count = sum(
        placeholders.remove_from(api, pool, lambda uid: uid not in leased) for pool in pools
    )
    sys.stdout.write(f"removed {count} placeholders\n")


def _foreign(api: ClusterApi, pool: AddressPool) -> ForeignPool:
    found = held.read(api, pool)
    pods = {text(each): found[each].allocation.podref for each in sorted(found)}
    return ForeignPool(pool=pool.metadata.name, compat=pool.spec.compat, held=pods)


def _shown(pool: ForeignPool) -> str:
    """A few of the pods."""
    some = [f"{address} {pod}" for address, pod in list(pool.held.items())[:2]]
    return ", ".join([*some, "..."] if len(pool.held) > len(some) else some)
