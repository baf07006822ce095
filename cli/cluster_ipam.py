"""`podfabric ipam ... --cluster`: commands for the pools and blocks on the API server.

The commands work without the controller. `reclaim` frees the blocks of a machine, after an
administrator has seen that the machine is off (docs/operate/controller.md).
"""

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from cli import output
from cli.output import Table
from ipam.addresses import Interval, parse, parse_interface, text
from ipam.controller.block_index import BlockIndex, contradictions
from ipam.controller.death_proofs import Machines, Standing
from ipam.controller.reclaim import free_powered_off
from ipam.leases import block_layout
from ipam.leases.objects import AddressBlock, AddressPool
from ipam.leases.sticky import is_let_go
from kube.client import ClusterApi
from kube.informer import all_nodes
from kube.resources import ApiError, NotFound

ATTEMPTS = 3  # to free a block that changes meanwhile


class AddressHolder(msgspec.Struct, frozen=True, kw_only=True):
    """An address, and the node that leases the block. `pod` is "" if no pod holds the address."""

    address: str
    pool: str
    block: str
    node: str
    state: str
    pod: str


def add_options(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the option `--cluster` to `show` and `fsck`, and add the command `reclaim`."""
    for name, form in (("show", _show), ("fsck", _fsck)):
        parser = commands.choices[name]
        parser.add_argument(
            "--cluster",
            action="store_true",
            help="use the pools and blocks of the cluster, not this node's store",
        )
        _add_kubeconfig(parser)
        parser.set_defaults(in_cluster=form)
    reclaim = commands.add_parser("reclaim", help="free the blocks of a node that is powered off")
    reclaim.add_argument("--node", required=True, help="the name of the Node object")
    reclaim.add_argument(
        "--powered-off",
        action="store_true",
        required=True,
        help="confirm that you have seen that the machine is off, so that it uses no address",
    )
    _add_kubeconfig(reclaim)
    reclaim.set_defaults(cluster=True, in_cluster=_reclaim)


def _add_kubeconfig(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="with --cluster: kubeconfig of the API server (default: $KUBECONFIG, or the pod's)",
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        code: int = arguments.in_cluster(arguments, connect(arguments.kubeconfig))
    except (ApiError, ValueError) as error:
        sys.stderr.write(f"podfabric ipam: {error}\n")
        return 1
    return code


def connect(kubeconfig: Path | None) -> ClusterApi:
    """Raises ApiError if no API server is configured."""
    from kube.transport import KubernetesApi

    named = os.environ.get("KUBECONFIG")
    return KubernetesApi(kubeconfig or (Path(named) if named else None), writer="podfabric-ipam")


def _show(arguments: argparse.Namespace, api: ClusterApi) -> int:
    address = parse(arguments.address)
    blocks = _blocks_with(address, api.list(AddressBlock).items)
    holders = [
        AddressHolder(
            address=text(address),
            pool=block.spec.pool,
            block=block.metadata.name,
            node=block.spec.holder.node,
            state=block.spec.state,
            pod=block.status.holders.get(str(address - covered.first), ""),
        )
        for block, covered in blocks
    ]
    if arguments.output == "json":
        output.document(holders)
    elif holders:
        rows = [(of.address, of.pod, of.node, of.block, of.state, of.pool) for of in holders]
        output.show(Table(("ADDRESS", "POD", "NODE", "BLOCK", "STATE", "POOL"), rows))
    if holders:
        return 0
    pools = ", ".join(
        pool.metadata.name for pool in api.list(AddressPool).items if _has(pool, address)
    )
    sys.stderr.write(
        f"podfabric ipam: no node leases {text(address)}: "
        f"{f'it is free in {pools}' if pools else 'no pool has it'}\n"
    )
    return 1


def _blocks_with(
    address: int, blocks: Iterable[AddressBlock]
) -> list[tuple[AddressBlock, Interval]]:
    found = []
    for block in blocks:
        try:
            covered = block_layout.interval(block)
        except ValueError:
            continue  # `fsck` reports this block
        if covered.first <= address <= covered.last:
            found.append((block, covered))
    return found


def _has(pool: AddressPool, address: int) -> bool:
    try:
        return address in parse_interface(pool.spec.range)[1]
    except ValueError:
        return False


def _reclaim(arguments: argparse.Namespace, api: ClusterApi) -> int:
    listed = api.list(AddressBlock, {"spec.holder.node": arguments.node}).items
    blocks = [block for block in listed if not is_let_go(block)]
    if not blocks:
        sys.stdout.write(f"{arguments.node} leases no block\n")
        return 0
    return _free(blocks, api)


def _free(blocks: Iterable[AddressBlock], api: ClusterApi) -> int:
    """Free the blocks, except blocks of machines that run. Returns the exit code."""
    machines = Machines(all_nodes(api), api.list(AddressBlock).items)
    standings = [(block, machines.standing(block.holder)) for block in blocks]
    replaced = {
        block.holder.node
        for block, standing in standings
        if standing in (Standing.GONE, Standing.REPLACED) and machines.has(block.holder.node)
    }
    code = 0
    for block, standing in standings:
        name, holder = block.metadata.name, block.holder
        if standing is Standing.WELL:
            sys.stderr.write(
                f"podfabric ipam: {name}: kept: the node {holder.node} is Ready, so its machine "
                "is not off\n"
            )
            code = 1
        elif standing is Standing.SILENT and holder.node in replaced:
            sys.stderr.write(
                f"podfabric ipam: {name}: kept: the present machine of {holder.node} leases it: "
                "if that machine is off, too, repeat the command\n"
            )
            code = 1
        elif _freed(block, api):
            sys.stdout.write(f"freed {name}, which {holder.node} leased\n")
        else:
            sys.stderr.write(
                f"podfabric ipam: {name}: kept: its holder changes it, so the machine is not off\n"
            )
            code = 1
    return code


def _freed(block: AddressBlock, api: ClusterApi) -> bool:
    """Free a block. Returns False if a living holder changes the block at each attempt."""
    uid = block.metadata.uid
    for _ in range(ATTEMPTS):
        try:
            if free_powered_off(api, block):
                return True
            block = api.get(type(block), block.metadata.name)
        except NotFound:
            return True
        if block.metadata.uid != uid:
            return True  # it was freed, and another node leases it
    return False


def _fsck(arguments: argparse.Namespace, api: ClusterApi) -> int:
    pools: Mapping[str, AddressPool] = {
        pool.metadata.name: pool for pool in api.list(AddressPool).items
    }
    blocks = api.list(AddressBlock).items
    machines = Machines(all_nodes(api), blocks)
    found = contradictions(pools, blocks, BlockIndex(blocks))
    lines = [f"wrong: {contradiction.text}" for contradiction in found]
    lines += [f"look: {it}" for it in (*_suspects(blocks, machines), *_unready(pools.values()))]
    verdict = f"{len(found)} contradictions" if found else "no contradiction"
    output.show([*lines, f"{len(pools)} pools, {len(blocks)} blocks: {verdict}"])
    return 1 if found else 0


def _suspects(blocks: Iterable[AddressBlock], machines: Machines) -> Iterable[str]:
    for block in blocks:
        standing = machines.standing(block.spec.holder)
        if is_let_go(block):
            continue
        if standing is not Standing.WELL or block.spec.state == "Reclaiming":
            yield (
                f"{block.metadata.name} is {block.spec.state} and leased by "
                f"{block.spec.holder.node}: its node {standing.value}"
            )


def _unready(pools: Iterable[AddressPool]) -> Iterable[str]:
    for pool in pools:
        ready = next((one for one in pool.status.conditions if one.type == "Ready"), None)
        if ready is None:
            yield f"{pool.metadata.name} has no status: does the controller run?"
        elif ready.status != "True":
            yield f"{pool.metadata.name} is not Ready: {ready.reason}: {ready.message}"
