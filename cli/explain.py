"""`podfabric explain`: a pod's devices and interfaces, or what a new container would get."""

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from base.paths import Paths
from cli import gpu_tables, output
from cli.arguments import count, namespace, pod
from cli.output import Cell, Table
from cli.this_node import ThisNode, gpu_label

if TYPE_CHECKING:
    from cli.dry_run import PreferredIds
    from cli.pods import AddressBeside, AttachedInterface, Explained, Way

_DASH = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("pod", nargs="?", type=pod, metavar="POD", help="name, or namespace/name")
    parser.add_argument("-n", "--namespace", type=namespace, help="of the pod (default: default)")
    output.add_option(parser)
    dry = parser.add_argument_group("what a new container would get")
    dry.add_argument("--dry-run", action="store_true", help="show the choice for a new container")
    dry.add_argument("--resource", metavar="NAME", help='such as "rdma/hca"')
    dry.add_argument("--size", type=count, metavar="N", help="default: 1")
    dry.add_argument(
        "--gpus",
        type=lambda text: [gpu for gpu in text.split(",") if gpu],
        metavar="GPU,...",
        help="of the container: PCI addresses, UUIDs, or GPU0 as topo calls it",
    )
    parser.set_defaults(main=run, wrong=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation, or the choice for --dry-run; the exit code."""
    node = ThisNode(Paths.from_environ(os.environ))
    if arguments.dry_run:
        return _dry_run(arguments, node)
    if arguments.pod is None:
        _wrong(arguments, "name a pod, or ask for --dry-run")
    if arguments.resource is not None or arguments.size is not None or arguments.gpus is not None:
        _wrong(arguments, "--resource, --size and --gpus go with --dry-run")
    of, slash, name = arguments.pod.rpartition("/")
    if slash and arguments.namespace not in (None, of):
        _wrong(arguments, f"{arguments.pod} is not in namespace {arguments.namespace}")
    from cli.pods import explained

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
        output.document(explanation, arguments.output)
    else:
        _show(node, explanation)
    return 0


def _dry_run(arguments: argparse.Namespace, node: ThisNode) -> int:
    from cli.dry_run import Impossible, choose

    if arguments.pod is not None:
        _wrong(arguments, "--dry-run takes no pod: leave the name out")
    if arguments.namespace is not None:
        _wrong(arguments, "--dry-run takes no namespace: leave it out")
    if not arguments.resource:
        _wrong(arguments, "--dry-run needs --resource")
    try:
        size, gpus = arguments.size or 1, arguments.gpus or []
        choice = choose(node, arguments.resource, size, gpus)
    except Impossible as error:
        sys.stderr.write(f"podfabric explain: {error}\n")
        return 1
    if arguments.output != "table":
        output.document(choice, arguments.output)
    else:
        _show_choice(choice)
    return 0 if len(choice.chosen) == size else 1


def _wrong(arguments: argparse.Namespace, text: str) -> NoReturn:
    arguments.wrong(text)
    raise AssertionError  # unreachable: argparse exits


def _show(node: ThisNode, explanation: "Explained") -> None:
    uid = f" ({explanation.pod.uid})" if explanation.pod.uid else ""
    output.show(
        f"Pod {explanation.pod}{uid}",
        _devices(explanation)
        if explanation.answered
        else "its devices are unknown: the kubelet could not be asked",
        _attachments(explanation.attachments),
        _beside(explanation.beside),
        _kept(explanation),
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


def _beside(addresses: "tuple[AddressBeside, ...]") -> Table | str:
    rows = [(each.ifname, each.network, each.address, each.range) for each in addresses]
    headers = ("INTERFACE OF ANOTHER PLUGIN", "NETWORK", "ADDRESS", "RANGE")
    return Table(headers, rows) if rows else ""


def _kept(explanation: "Explained") -> Table | str:
    """HCAs that are kept for attachments which do not exist now."""
    present = {f"{interface.network}/{interface.ifname}" for interface in explanation.attachments}
    rows = [(key, hca) for key, hca in sorted(explanation.claims.items()) if key not in present]
    return Table(("KEPT FOR A NEXT ADD", "HCA"), rows) if rows else ""


def _ways(ways: "tuple[Way, ...]") -> Table | str:
    """The distance of each GPU to each HCA, and what that costs where GPUs and HCAs are chosen."""
    if not ways:
        return ""
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


def _show_choice(choice: "PreferredIds") -> None:
    headers = ("DEVICE ID", "HCA", "RDMA", "HELD", "GPU", "DISTANCE")
    rows = [
        (
            chosen.id,
            chosen.hca,
            chosen.rdma,
            str(chosen.held),
            ", ".join(chosen.near),
            chosen.distance,
        )
        for chosen in choice.chosen
    ]
    output.show(
        f"{choice.resource}: {len(choice.chosen)} of {choice.available} free ids, "
        f"{choice.held} held, {choice.unhealthy} unhealthy",
        Table(headers, rows) if rows else "no id is free",
        [f"* {note}" for note in choice.notes],
    )
