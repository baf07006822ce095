"""`podfabric explain`: what a pod was given and why it belongs together, or what one would get."""

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from base.paths import Paths
from cli import output
from cli.arguments import count, namespace, pod
from cli.output import Cell, Table
from cli.this_node import ThisNode

if TYPE_CHECKING:
    from cli.dry_run import PreferredIds
    from cli.pod_devices import HeldDevice
    from cli.pods import AttachedInterface, Explained, Way

_DASH = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("pod", nargs="?", type=pod, metavar="POD", help="name, or namespace/name")
    parser.add_argument("-n", "--namespace", type=namespace, help="of the pod (default: default)")
    output.add_option(parser)
    dry = parser.add_argument_group("what a container would get")
    dry.add_argument("--dry-run", action="store_true", help="ask what would be chosen, for no pod")
    dry.add_argument("--resource", metavar="NAME", help='such as "rdma/hca"')
    dry.add_argument("--size", type=count, metavar="N", help="default: 1")
    dry.add_argument(
        "--gpus",
        type=lambda text: [one for one in text.split(",") if one],
        metavar="GPU,...",
        help="of the container: PCI addresses, UUIDs, or GPU0 as topo calls it",
    )
    parser.set_defaults(main=run, wrong=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Print what `arguments` ask for; the exit code."""
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

    found = explained(node, of or arguments.namespace or "default", name)
    if not found.known and not (found.notes and not found.answered):
        sys.stderr.write(
            f"podfabric explain: pod {found.pod}: this node's kubelet gave it no device, and no "
            "attachment of it is known here: is it on this node, and named as namespace/name?\n"
        )
        for note in found.notes:
            sys.stderr.write(f"podfabric explain: {note}\n")
        return 1
    if arguments.output != "table":
        output.document(found, arguments.output)
    else:
        _show(found)
    return 0 if found.known else 1


def _dry_run(arguments: argparse.Namespace, node: ThisNode) -> int:
    from cli.dry_run import Impossible, choose

    if arguments.pod is not None:
        _wrong(arguments, "--dry-run is for no pod: leave the name out")
    if not arguments.resource:
        _wrong(arguments, "--dry-run needs --resource")
    try:
        choice = choose(node, arguments.resource, arguments.size or 1, arguments.gpus or [])
    except Impossible as error:
        sys.stderr.write(f"podfabric explain: {error}\n")
        return 1
    if arguments.output != "table":
        output.document(choice, arguments.output)
    else:
        _show_choice(choice)
    return 0


def _wrong(arguments: argparse.Namespace, text: str) -> NoReturn:
    arguments.wrong(text)
    raise AssertionError  # argparse has ended the program


def _show(found: "Explained") -> None:
    uid = f" ({found.pod.uid})" if found.pod.uid else ""
    notes = "\n".join(f"* {note}" for note in found.notes)
    output.show(
        f"Pod {found.pod}{uid}",
        _devices(found.devices) if found.answered else "what the kubelet gave to it is not known",
        _attachments(found.attachments),
        _kept(found),
        _ways(found.ways),
        notes,
    )


def _devices(devices: "tuple[HeldDevice, ...]") -> Table | str:
    if not devices:
        return "the kubelet gave no device to it"
    headers = ("CONTAINER", "RESOURCE", "DEVICE ID", "DEVICE", "RDMA", "VERBS", "NETDEVS", "SINCE")
    rows = []
    for one in devices:
        verbs = (
            f"{each.uverbs} {each.major}:{each.minor}" if each.uverbs else _DASH
            for each in one.verbs
        )
        rows.append(
            (
                one.container,
                one.resource,
                one.id,
                one.gpu or one.hca,
                "\n".join(each.rdma for each in one.verbs),
                "\n".join(verbs),
                ",".join(one.netdevs),
                one.since,
            )
        )
    return Table(headers, rows)


def _attachments(attachments: "tuple[AttachedInterface, ...]") -> Table | str:
    if not attachments:
        return "no attachment of it is known here"
    headers = ("INTERFACE", "NETWORK", "PLUGIN", "ON", "HCA", "RDMA", "ADDRESSES", "STATE", "MATCH")
    styles = {True: "green", False: "red", None: ""}
    rows = [
        (
            one.ifname,
            one.network,
            one.plugin,
            f"{one.on} {one.pkey}".strip(),
            one.hca,
            one.rdma,
            "\n".join(one.addresses),
            one.phase,
            Cell(
                {True: "yes: ", False: "NO: ", None: ""}[one.matches] + one.verdict,
                styles[one.matches],
            ),
        )
        for one in attachments
    ]
    return Table(headers, rows)


def _kept(found: "Explained") -> Table | str:
    """Claims of attachments that are not there now."""
    there = {f"{one.network}/{one.ifname}" for one in found.attachments}
    rows = [(key, hca) for key, hca in sorted(found.claims.items()) if key not in there]
    return Table(("KEPT FOR A NEXT ADD", "HCA"), rows) if rows else ""


def _ways(ways: "tuple[Way, ...]") -> Table | str:
    """GPUs by HCAs, in the matrix' classes."""
    if not ways:
        return ""
    hcas = dict.fromkeys(one.rdma for one in ways)
    rows: list[tuple[str | Cell, ...]] = [
        (
            gpu,
            *(
                Cell(one.distance, "green" if one.gpudirect else "red")
                for one in ways
                if one.gpu == gpu
            ),
        )
        for gpu in dict.fromkeys(one.gpu for one in ways)
    ]
    return Table(("GPU", *hcas), rows)


def _show_choice(choice: "PreferredIds") -> None:
    headers = ("DEVICE ID", "HCA", "RDMA", "NUMA", "SWITCH", "HELD", "GPU", "DISTANCE", "WHY")
    rows = [
        (
            one.id,
            one.hca,
            one.rdma,
            "" if one.numa is None else str(one.numa),
            one.switch,
            str(one.held),
            one.gpu,
            one.distance,
            one.why,
        )
        for one in choice.chosen
    ]
    output.show(
        f"{choice.resource}: {len(choice.chosen)} of {choice.available} free ids, "
        f"{choice.held} held, {choice.unhealthy} not well",
        Table(headers, rows) if rows else "nothing is left to choose",
        choice.rule,
        "\n".join(f"* {note}" for note in choice.notes),
    )
