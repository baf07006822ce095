"""`podfabric explain`: prints a pod's devices and interfaces, or compares the pods of a job."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from base.paths import Paths
from cli import output
from cli.arguments import namespace, pod
from cli.output import Cell, Table
from cli.show import gpu_tables
from node.state import ThisNode, gpu_label

if TYPE_CHECKING:
    from node.pods import AddressBeside, AttachedInterface, Explained, Way

_DASH = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pod", nargs="?", type=pod, metavar="POD", help="name, or namespace/name")
    parser.add_argument(
        "-n", "--namespace", type=namespace, help="the pod's namespace (default: default)"
    )
    parser.add_argument(
        "--job",
        metavar="NAME",
        help="compare the pods of a Job, JobSet, MPIJob, StatefulSet or label selector",
    )
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="with --job (default: $KUBECONFIG, or the pod's)",
    )
    output.add_option(parser)
    parser.set_defaults(main=run, wrong=parser.error)


def run(arguments: argparse.Namespace) -> int:
    if bool(arguments.pod) == bool(arguments.job):
        arguments.wrong("expected POD or --job NAME")
    if arguments.job:
        from cli.show import job_table

        where = arguments.namespace or "default"
        return job_table.run(arguments.kubeconfig, where, arguments.job, arguments.output)
    node = ThisNode(Paths.from_environ(os.environ))
    of, slash, name = arguments.pod.rpartition("/")
    if slash and arguments.namespace not in (None, of):
        arguments.wrong(f"{arguments.pod} is not in namespace {arguments.namespace}")
    from node.pods import explained

    explanation = explained(node, of or arguments.namespace or "default", name)
    if not explanation.known:
        asked = "gave it no device" if explanation.answered else "could not be asked"
        sys.stderr.write(
            f"podfabric explain: podfabric knows no pod {explanation.pod} on this node: it has no "
            f"attachment and no address here, and the kubelet {asked}: is it on this node, and is "
            "the name namespace/name?\n"
        )
        for note in explanation.notes:
            sys.stderr.write(f"podfabric explain: {note}\n")
        return 1
    if arguments.output != "table":
        output.document(explanation)
    else:
        _show(node, explanation)
    return 0


def _show(node: ThisNode, explanation: "Explained") -> None:
    uid = f" ({explanation.pod.uid})" if explanation.pod.uid else ""
    output.show(
        f"Pod {explanation.pod}{uid}",
        _devices(explanation)
        if explanation.answered
        else "its devices are unknown: the kubelet could not be asked",
        _attachments(explanation.attachments),
        _beside(explanation.beside),
        _ways(explanation.ways),
        gpu_tables.parts(
            explanation.gpus,
            [(part.gpu, gpu_label(node.gpus, part.gpu)) for part in explanation.gpus],
        ),
        [f"* {note}" for note in explanation.notes],
    )


def _devices(explanation: "Explained") -> Table | str:
    if not explanation.devices:
        return "" if explanation.gpus else "the kubelet gave it no device"
    headers = ("CONTAINER", "RESOURCE", "DEVICE ID", "DEVICE", "RDMA", "UVERBS", "NETDEVS", "SINCE")
    rows = []
    for device in explanation.devices:
        verbs = [
            f"{rdma.uverbs} {rdma.major}:{rdma.minor}" if rdma.uverbs else _DASH
            for rdma in device.verbs
        ]
        rows.append(
            (
                device.container,
                device.resource,
                device.id,
                device.gpu or device.hca,
                [rdma.rdma for rdma in device.verbs],
                verbs,
                ",".join(device.netdevs),
                device.since,
            )
        )
    return Table(headers, rows)


def _attachments(attachments: "tuple[AttachedInterface, ...]") -> Table | str:
    if not attachments:
        return "podfabric made no interface of it on this node"
    headers = ("INTERFACE", "NETWORK", "PLUGIN", "ON", "HCA", "RDMA", "ADDRESSES", "STATE", "MATCH")
    styles = {True: "green", False: "red", None: ""}
    rows = [
        (
            interface.ifname,
            interface.network,
            interface.plugin,
            f"{interface.on} {interface.pkey}".strip(),
            interface.hca,
            interface.rdma,
            interface.addresses,
            interface.phase,
            Cell(
                {True: "yes: ", False: "NO: ", None: ""}[interface.matches] + interface.verdict,
                styles[interface.matches],
            ),
        )
        for interface in attachments
    ]
    return Table(headers, rows)


def _beside(addresses: "tuple[AddressBeside, ...]") -> Table:
    rows = [(it.ifname, it.network, it.address, it.range) for it in addresses]
    return Table(("INTERFACE OF ANOTHER PLUGIN", "NETWORK", "ADDRESS", "RANGE"), rows)


def _ways(ways: "tuple[Way, ...]") -> Table:
    """The distance of each GPU to each HCA, with the cost that the device plugin uses."""
    hcas = dict.fromkeys(way.rdma for way in ways)
    rows: list[tuple[str | Cell, ...]] = [
        (
            gpu,
            *(
                Cell(f"{way.distance}, cost {way.cost}", "green" if way.gpudirect else "red")
                for way in ways
                if way.gpu == gpu
            ),
        )
        for gpu in dict.fromkeys(way.gpu for way in ways)
    ]
    return Table(("GPU", *hcas), rows)
