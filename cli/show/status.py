"""`podfabric status`: HCAs, pools, GPUs, attachments and faults of this node, or of the cluster."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from agent import settings
from agent.observe.metrics import installed_version
from base.paths import Paths
from cli import output
from cli.output import CLEAR, Cell, Lines, Table
from deviceplugin.pools import formats
from deviceplugin.pools.pool_config import ConfigError
from kube.resources import ApiError
from node import fabric_node, observation, usage
from node.fabric_node import FabricNode, FabricNodeStatus, HcaStatus
from node.state import ThisNode, numa_text

_EVERY = 2.0  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output.add_option(parser)
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C")
    parser.add_argument(
        "--cluster", action="store_true", help="show the FabricNodes of all nodes, not this node"
    )
    parser.add_argument("--node", metavar="NAME", help="show the FabricNode of this node")
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="with --cluster and --node (default: $KUBECONFIG, or the pod's)",
    )
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    show = _of_this_node
    if arguments.cluster or arguments.node:
        show = partial(_of_cluster, arguments.kubeconfig, arguments.node or "")
    is_text = arguments.output == "table"
    try:
        while True:
            shown, parts = show()
            if not is_text:
                output.document(shown)
            else:
                if arguments.watch and sys.stdout.isatty():
                    sys.stdout.write(CLEAR)
                output.show(*parts)
            sys.stdout.flush()
            if not arguments.watch:
                return 0
            time.sleep(_EVERY)
    except ApiError as error:
        sys.stderr.write(f"podfabric status: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 0


def _of_this_node() -> tuple[object, Sequence[Table | Lines]]:
    paths = Paths.from_environ(os.environ)
    mistakes = dict(settings.load(paths.config).mistakes)
    node = ThisNode(paths, tolerant=True)
    try:
        formats.load(paths.config)
    except ConfigError as error:
        mistakes["pools"] = str(error)
    status = observation.observed(node, mistakes, installed_version())
    status = fabric_node.with_usage(status, usage.measured(node))
    return status, _parts(status)


def _of_cluster(kubeconfig: Path | None, name: str) -> tuple[object, Sequence[Table | Lines]]:
    from cli.cluster_ipam import connect

    api = connect(kubeconfig)
    if name:
        node = api.get(FabricNode, name)
        return node.status, _parts(node.status)
    nodes = sorted(api.list(FabricNode).items, key=lambda node: node.metadata.name)
    rows = [_row(node) for node in nodes]
    faults = [
        (node.metadata.name, fault.about, Cell(fault.text, "red"))
        for node in nodes
        for fault in node.status.faults
    ]
    headers = (
        "NODE", "HCAS", "PORTS ACTIVE", "GPUS", "ATTACHMENTS", "FAULTS", "REFUSED ADDS", "CHANGED",
    )  # fmt: skip
    return [{"name": node.metadata.name, "status": node.status} for node in nodes], (
        Table(headers, rows) or "no node has a FabricNode: do the agents run?",
        Table(("NODE", "FAULT OF", "WHY"), faults, folded=True),
    )


def _row(node: FabricNode) -> tuple[Lines | Cell, ...]:
    status, counts = node.status, node.status.counts
    down = counts.active_ports < counts.ports
    return (
        node.metadata.name,
        str(counts.hcas),
        Cell(f"{counts.active_ports} of {counts.ports}", "yellow" if down else ""),
        str(counts.gpus),
        str(counts.attachments),
        Cell(str(counts.faults), "red" if counts.faults else "green"),
        Cell(str(counts.refusals), "red" if counts.refusals else ""),
        status.written,
    )


def _parts(status: FabricNodeStatus) -> Sequence[Table | Lines]:
    hcas = [row for hca in status.hcas for row in _ports(hca)]
    pools = [
        (
            pool.resource,
            str(pool.ids),
            str(pool.held),
            Cell(str(pool.withheld), "red" if pool.withheld else ""),
            list(pool.reasons),
        )
        for pool in status.pools
    ]
    gpus = [
        (gpu.id, gpu.uuid, numa_text(gpu.numa), list(gpu.pools), list(gpu.pods), gpu.fault)
        for gpu in status.gpus
    ]
    attachments = [
        (
            one.pod,
            one.interface,
            one.phase,
            one.hca,
            one.parent,
            one.pkey,
            list(one.addresses),
            one.network,
        )
        for one in status.attachments
    ]
    objects = [one.texts for one in status.objects]
    parts = [part.texts for part in status.gpu_parts]
    return (
        f"podfabric {status.version}, kernel {status.kernel}",
        Table(("HCA", "NUMA", "VFS", "PORT", "STATE", "RATE", "LINK", "PODS"), hcas),
        Table(("POOL", "IDS", "HELD", "WITHHELD", "WHY"), pools, folded=True),
        Table(("GPU", "UUID", "NUMA", "POOLS", "PODS", "FAULT"), gpus),
        Table(("GPU", "POD", "CONTAINER", "MEMORY", "USED", "TIME", "THROTTLED"), parts),
        Table(
            ("POD", "INTERFACE", "PHASE", "HCA", "ON", "P_KEY", "ADDRESSES", "NETWORK"),
            attachments,
        ),
        Table(("OBJECTS OF", "DEVICE", "QP", "MR", "CQ", "CM_ID"), objects),
        [f"warning: {text}" for text in status.warnings],
        f"left out: {status.left_out}" if status.left_out else "",
        *_failures(status),
    )


def _failures(status: FabricNodeStatus) -> Sequence[Table | Lines]:
    faults = [
        (fault.about, Cell(fault.text, "red"), list(fault.pods), fault.since)
        for fault in status.faults
    ]
    refusals = [
        (one.pod, one.interface, one.network, str(one.code), Cell(one.text, "red"), one.since)
        for one in status.refusals
    ]
    headers = ("REFUSED ADD OF", "INTERFACE", "NETWORK", "CODE", "WHY", "SINCE")
    return (
        Table(("FAULT OF", "WHY", "PODS", "SINCE"), faults, folded=True) or "no faults",
        Table(headers, refusals, folded=True),
    )


def _ports(hca: HcaStatus) -> Sequence[tuple[Lines | Cell, ...]]:
    pods = [pod or "not known" for pod in hca.pods]
    head = (hca.id, numa_text(hca.numa), str(hca.vfs or ""))
    if not hca.ports:
        state = "in a pod" if hca.rdma and hca.present else "" if hca.present else "gone"
        return [(*head, list(hca.rdma), state, "", "", pods)]
    return [
        (
            *head,
            port.port,
            Cell(port.state, "green" if port.state == "ACTIVE" else "red"),
            port.rate,
            port.link_layer,
            pods,
        )
        for port in hca.ports
    ]
