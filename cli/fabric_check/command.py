"""`podfabric check`: tests the fabric between nodes with one pod on each node."""

import argparse
import os
import secrets
import signal
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from base.text import line
from cli import output
from cli.arguments import namespace, seconds
from cli.fabric_check import check_pods, ring
from cli.fabric_check.check_pods import CheckPod, PodsOfRun
from cli.fabric_check.ring import FabricTest, Member
from kube.client import ClusterApi
from kube.resources import ApiError, Node
from node.fabric_node import FabricNode

MOST_NODES = 1000
_TESTS = ring.SECONDS + 30  # until the kubelet starts a container with orders, and reports its end
LEAST = 40 + _TESTS  # seconds
_AGENT = "app.kubernetes.io/name=podfabric,app.kubernetes.io/component=agent"


class CheckError(Exception):
    """The fabric cannot be tested; the text has the reason and the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    form = "NAMESPACE/DEFINITION"
    add("--network", type=_network, metavar=form)
    add("--resource", default="", help="one device for each pod: rdma/hca")
    other = "another network, whose interfaces must not answer"
    add("--isolated-from", type=_network, metavar=form, help=other)
    add("--nodes", metavar="SELECTOR", help="labels (default: nodes with HCAs, or the resource)")
    add("--peers", type=int, choices=range(1, ring.MOST_PEERS + 1), default=2)
    add("-n", "--namespace", type=namespace, help="of the pods (default: the definition's)")
    add("--image", default="", help="podfabric's (default: that of the agents)")
    add("--timeout", type=seconds, default=300.0, metavar="SECONDS")
    add("--kubeconfig", type=Path, metavar="FILE", help="default: $KUBECONFIG, or the pod's")
    add("--pods-per-node", type=int, default=1, help=argparse.SUPPRESS)
    output.add_option(parser)
    parser.set_defaults(main=run, wrong=parser.error)


def _network(text: str) -> str:
    if text.count("/") != 1 or not all(text.split("/")):
        raise argparse.ArgumentTypeError(f"{text!r}: expected namespace/definition")
    return text


def run(arguments: argparse.Namespace) -> int:
    if ring.VARIABLE in os.environ:  # in a pod
        from cli.fabric_check import probes

        return probes.run()
    if not arguments.network:
        arguments.wrong("--network is missing")
    if arguments.network == arguments.isolated_from:
        arguments.wrong("--isolated-from names the same definition as --network")
    if arguments.timeout < LEAST:
        arguments.wrong(f"--timeout: a check takes up to {LEAST:g} seconds")
    from cli.cluster_ipam import connect

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: sys.exit(128 + number))
    try:
        members, tests = _checked(connect(arguments.kubeconfig), arguments)
    except (ApiError, CheckError) as error:
        sys.stderr.write(f"podfabric check: {error}\n")
        return 1
    failures = [each for each in tests if each.cause]
    if arguments.output == "json":
        pairs = [each for each in tests if each.target]
        found = {"ok": not failures, "pods": members, "pairs": pairs, "failures": failures}
        output.document(found)
    else:
        ring.show(members, tests)
    return 1 if failures else 0


Found = tuple[list[Member], list[FabricTest]]


def _checked(api: ClusterApi, arguments: argparse.Namespace) -> Found:
    where = arguments.namespace or arguments.network.partition("/")[0]
    nodes = _nodes(api, arguments.nodes, arguments.resource) * arguments.pods_per_node
    image = arguments.image or _image(api)
    check_pods.remove_leftovers(api, where, datetime.now(UTC))
    run_id = secrets.token_hex(4)
    pods = PodsOfRun(api, run_id, where, image, arguments.resource, arguments.timeout)
    try:
        return _tested(pods, nodes, arguments)
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        if not pods.remove():
            left = f"kubectl -n {where} delete pods -l {check_pods.RUN_LABEL}={run_id}"
            sys.stderr.write(f"podfabric check: pods are left: {left}\n")


def _tested(pods: PodsOfRun, nodes: list[str], arguments: argparse.Namespace) -> Found:
    end = time.monotonic() + arguments.timeout
    members = dict[str, Member]()
    networks = [it for it in (arguments.network, arguments.isolated_from) if it]
    for letter, network in zip("ab", networks, strict=False):
        for number, node in enumerate(nodes):
            name = f"fabric-check-{pods.run}-{letter}{number}"
            members[name] = Member(name, node, network)
            pods.create(name, node, network)
    ready = pods.wait(lambda pod: any(map(pod.rails, networks)), end - _TESTS)
    rings = [
        {name: got for name, pod in ready.items() if (got := pod.rails(network))}
        for network in networks
    ]
    verbs = bool(arguments.resource)
    given = {it.pod: it for it in ring.orders(pods.run, rings, arguments.peers, verbs=verbs)}
    for name, each in given.items():
        pods.order(ready[name], each)
    done = pods.wait(lambda pod: pod.metadata.name not in given, end)
    refused = _refused(pods) if any(pod.report is None for pod in done.values()) else {}
    for name, pod in done.items():
        members[name].report = pod.report
        words = refused.get(name) or ": ".join(pod.words)
        members[name].why = line(words) if pod.report is None else ""
    return list(members.values()), list(ring.judged(members, given.values()))


def _refused(pods: PodsOfRun) -> dict[str, str]:
    """The errors of refused ADDs by pod; {} without the right to list FabricNodes."""
    with suppress(ApiError):
        pages = list(pods.api.pages(FabricNode))
        refusals = (it for page in pages for node in page.items for it in node.status.refusals)
        return {it.pod.partition("/")[2]: f"ADD of {it.interface}: {it.text}" for it in refusals}
    return {}


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
    if not 0 < len(names) <= MOST_NODES:
        what = f"are found by {selector}" if selector else f"have {resource or 'an HCA'}"
        many = f"{len(names)} nodes {what}, not 1 to {MOST_NODES}"
        raise CheckError(f"{many}: name other nodes with --nodes")
    return sorted(names)


def _image(api: ClusterApi) -> str:
    """The image of an agent. Raises CheckError, and ApiError."""
    for pod in api.list(CheckPod, labels=_AGENT, most=1).items:
        for container in pod.spec.get("containers", ()):
            return str(container["image"])
    raise CheckError("no agent of podfabric runs in this cluster: name the image with --image")
