"""`podfabric check`: tests the fabric between nodes with one pod on each node."""

import argparse
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

from cli import output
from cli.arguments import namespace, seconds
from cli.fabric_check import check_pods, matrix
from cli.fabric_check.check_pods import CheckPod, PodsOfRun, Wish, rails
from cli.fabric_check.matrix import Member
from cli.fabric_check.ring import MOST_PEERS, Neighbour, Times, orders
from kube.client import ClusterApi
from kube.resources import ApiError, Node
from node.fabric_node import FabricNode

MOST_NODES = 1000
_MARGIN = 30.0  # seconds: until the kubelet starts a container with orders, and reports its end
_TESTS = Times().end + _MARGIN
LEAST = 40 + _TESTS  # seconds
_NETWORK = re.compile(r"[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9.-]*")
_AGENT = "app.kubernetes.io/name=podfabric,app.kubernetes.io/component=agent"


class CheckError(Exception):
    """The fabric cannot be tested; the text has the reason and the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", type=_network, metavar="NAMESPACE/DEFINITION")
    parser.add_argument("--resource", default="", help="one device for each pod: rdma/hca")
    parser.add_argument(
        "--isolated-from",
        type=_network,
        metavar="NAMESPACE/DEFINITION",
        help="another network, whose interfaces must not answer",
    )
    parser.add_argument(
        "--nodes", metavar="SELECTOR", help="labels (default: nodes with HCAs, or the resource)"
    )
    parser.add_argument("--peers", type=int, choices=range(1, MOST_PEERS + 1), default=2)
    parser.add_argument(
        "-n", "--namespace", type=namespace, help="of the pods (default: the definition's)"
    )
    parser.add_argument("--image", default="", help="podfabric's (default: that of the agents)")
    parser.add_argument("--timeout", type=seconds, default=300.0, metavar="SECONDS")
    parser.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", help="default: $KUBECONFIG, or the pod's"
    )
    parser.add_argument("--pods-per-node", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    output.add_option(parser)
    parser.set_defaults(main=run, wrong=parser.error)


def _network(text: str) -> str:
    if not _NETWORK.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected namespace/definition")
    return text


def run(arguments: argparse.Namespace) -> int:
    if arguments.serve:
        from cli.fabric_check import probes

        return probes.run()
    if not arguments.network:
        arguments.wrong("--network is missing")
    if arguments.network == arguments.isolated_from:
        arguments.wrong("--isolated-from names the same definition as --network")
    if arguments.timeout < LEAST:
        arguments.wrong(f"--timeout: a check takes up to {LEAST:g} seconds")
    from cli.cluster_ipam import connect

    signal.signal(signal.SIGTERM, _terminated)
    try:
        found = _checked(connect(arguments.kubeconfig), arguments)
    except (ApiError, CheckError) as error:
        sys.stderr.write(f"podfabric check: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if arguments.output == "json":
        output.document(found)
    else:
        matrix.show(found)
    return 0 if found.ok else 1


def _terminated(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _checked(api: ClusterApi, arguments: argparse.Namespace) -> matrix.FabricVerdict:
    where = arguments.namespace or arguments.network.partition("/")[0]
    nodes = _nodes(api, arguments.nodes, arguments.resource)
    image = arguments.image or _image(api)
    check_pods.remove_leftovers(api, where, datetime.now(UTC))
    run = secrets.token_hex(4)
    pods = PodsOfRun(api, run, Wish(where, image, arguments.resource, arguments.timeout))
    try:
        return _tested(pods, run, nodes, arguments)
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        if left := pods.remove():
            sys.stderr.write(
                f"podfabric check: {len(left)} pods are left: kubectl -n {where} delete pods "
                f"-l {check_pods.RUN_LABEL}={run}\n"
            )


def _tested(
    pods: PodsOfRun, run: str, nodes: list[str], arguments: argparse.Namespace
) -> matrix.FabricVerdict:
    end = time.monotonic() + arguments.timeout
    members: dict[str, Member] = {}
    networks = list(filter(None, (arguments.network, arguments.isolated_from)))
    for letter, network in zip("ab", networks, strict=False):
        for number, (node, shown) in enumerate(_places(nodes, arguments.pods_per_node)):
            name = f"fabric-check-{run}-{letter}{number}"
            members[name] = Member(name, shown, network)
            pods.create(name, node, network)
    ready = pods.wait(lambda pod: any(rails(pod, each) for each in networks), end - _TESTS)
    rings = [
        [Neighbour(name, got) for name, pod in ready.items() if (got := rails(pod, network))]
        for network in networks
    ]
    given = list(orders(run, rings, arguments.peers, verbs=bool(arguments.resource)))
    started = {each.pod for each in given}
    for each in given:
        pods.order(ready[each.pod], each)
    reasons = pods.reasons([pod for name, pod in ready.items() if name not in started])
    done = pods.wait(lambda pod: pod.metadata.name not in started, end)
    reports = {name: done[name].report for name in started if name in done}
    reasons |= pods.reasons([done[name] for name, report in reports.items() if report is None])
    judged = {
        name: replace(each, why=reasons.get(name, ""), report=reports.get(name))
        for name, each in members.items()
    }
    return matrix.verdict(judged, given)


def _places(nodes: list[str], each: int) -> Iterator[tuple[str, str]]:
    """The nodes of the pods, and the names that the output shows."""
    for node in nodes:
        for number in range(each):
            yield node, node if each == 1 else f"{node}#{number + 1}"


def _nodes(api: ClusterApi, selector: str | None, resource: str) -> list[str]:
    """Raises CheckError, and ApiError."""
    if selector is not None:
        names = [each.metadata.name for each in api.list(Node, labels=selector).items]
    else:
        names = [
            each.metadata.name
            for page in api.pages(FabricNode)
            for each in page.items
            if any(it.resource == resource and it.ids for it in each.status.pools)
            or (not resource and each.status.hcas)
        ]
    if not names:
        what = f"labels {selector}" if selector is not None else resource or "an HCA"
        raise CheckError(f"no node has {what}: name other nodes with --nodes")
    if len(names) > MOST_NODES:
        raise CheckError(f"{len(names)} nodes, of at most {MOST_NODES}: name some with --nodes")
    return sorted(names)


def _image(api: ClusterApi) -> str:
    """The image of an agent. Raises CheckError, and ApiError."""
    for pod in api.list(CheckPod, labels=_AGENT, most=1).items:
        for container in pod.spec.get("containers", ()):
            return str(container["image"])
    raise CheckError("no agent of podfabric runs in this cluster: name the image with --image")
