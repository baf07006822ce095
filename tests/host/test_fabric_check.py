"""Pods of `podfabric check` in network namespaces on a bridge, without privileges."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import msgspec
import pytest

from cli.fabric_check import ring
from cli.fabric_check.ring import Orders, PodReport, Rail, Rails
from tests.netns import ip, namespace
from tests.runtime import CHECKOUT

pytestmark = pytest.mark.root
SECONDS = 8.0
# As root, who alone may enter the checkout, but without capabilities.
UNPRIVILEGED = ("setpriv", "--inh-caps=-all", "--bounding-set=-all")
SERVE = "from cli.main import main; main()"


class Fabric:
    """Pods on the bridges of one namespace."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._switch = stack.enter_context(namespace()).name
        self._namespaces: dict[str, str] = {}
        for bridge in ("br0", "br1"):
            ip("-n", self._switch, "link", "add", bridge, "type", "bridge")
            ip("-n", self._switch, "link", "set", bridge, "up")

    def pod(
        self, name: str, address: str, mtu: int = 1500, bridge: str = "br0"
    ) -> dict[str, Rails]:
        """A pod with the interface net1. The ports of the bridge have MTU 1500."""
        pod = self._stack.enter_context(namespace()).name
        self._namespaces[name] = pod
        port, switch = f"p{len(self._namespaces)}", self._switch
        ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "net1", "netns", pod)
        ip("-n", switch, "link", "set", port, "master", bridge, "up")
        nodad = ["nodad"] if ":" in address else []
        ip("-n", pod, "address", "add", f"{address}/24", "dev", "net1", *nodad)
        ip("-n", pod, "link", "set", "net1", "mtu", str(mtu), "up")
        (link,) = msgspec.json.decode(ip("-n", pod, "-json", "link", "show", "net1"))
        return {name: (Rail("net1", address, link["address"]),)}

    def filter_strictly(self, *names: str) -> None:
        """Let pods drop packets whose answers have no route (rp_filter)."""
        for name in names:
            command = ["ip", "netns", "exec", self._namespaces[name], "sysctl", "-qw"]
            subprocess.run([*command, "net.ipv4.conf.all.rp_filter=1"], check=True)

    def reports(self, given: Sequence[Orders]) -> dict[str, PodReport]:
        """Run pods with these orders at the same time."""
        processes = {}
        for orders in given:
            orders = msgspec.structs.replace(orders, seconds=SECONDS)
            environ = {**os.environ, ring.VARIABLE: msgspec.json.encode(orders).decode()}
            command = ["ip", "netns", "exec", self._namespaces[orders.pod], *UNPRIVILEGED]
            command += [sys.executable, "-c", SERVE, "check"]
            processes[orders.pod] = subprocess.Popen(
                command, env=environ, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
            )
        said = {pod: process.communicate(timeout=60)[0] for pod, process in processes.items()}
        return {pod: msgspec.json.decode(text, type=PodReport) for pod, text in said.items()}


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with ExitStack() as stack:
        yield Fabric(stack)


def failed(reports: dict[str, PodReport]) -> list[tuple[str, str, str]]:
    """Each pod, the other pod, and the test that failed."""
    return [
        (pod, other, test)
        for pod, report in reports.items()
        for other, (test, _) in report.failed.items()
    ]


def ordered(*rings: Mapping[str, Rails]) -> list[Orders]:
    return list(ring.orders("r1", rings, 2, verbs=False))


@pytest.mark.parametrize("net", ["10.7.0.", "fd07::"])
def test_pods_that_reach_one_another_find_nothing(fabric: Fabric, net: str) -> None:
    pods = [fabric.pod(name, f"{net}{n}") for n, name in enumerate("abc", 1)]
    reports = fabric.reports(ordered(pods[0] | pods[1] | pods[2]))
    assert failed(reports) == []
    assert [report.rails[0].mtu for report in reports.values()] == [1500] * 3


def test_a_path_with_a_smaller_mtu_is_found(fabric: Fabric) -> None:
    pods = fabric.pod("a", "10.7.0.1", mtu=9000) | fabric.pod("b", "10.7.0.2", mtu=9000)
    reports = fabric.reports(ordered(pods))
    assert failed(reports) == [("a", "b", ring.MTU), ("b", "a", ring.MTU)]
    assert reports["a"].failed["b"][1] == (
        "10.7.0.2 answers 512 bytes, but not 9000, this interface's MTU: timed out"
    )


def test_a_gone_pod_and_an_address_of_two_pods_are_found(fabric: Fabric) -> None:
    a, b = fabric.pod("a", "10.7.0.1"), fabric.pod("b", "10.7.0.2")
    gone = fabric.pod("gone", "10.7.0.3")
    twice = {"twice": b["b"]}
    orders = Orders("r1", "a", a["a"], b | gone | twice), Orders("r1", "b", b["b"], a)
    reports = fabric.reports(orders)
    assert failed(reports) == [("a", "twice", ring.ADDRESS), ("a", "gone", ring.ADDRESS)]
    why = {pod: why for pod, (_, why) in reports["a"].failed.items()}
    assert why["gone"] == "no answer from 10.7.0.3 to 10.7.0.1: timed out"
    assert why["twice"].endswith("another one answers: b'podfabric check r1 b'")


def test_separate_networks_with_the_same_range_pass(fabric: Fabric) -> None:
    one = fabric.pod("a", "10.7.0.1") | fabric.pod("b", "10.7.0.2")
    other = fabric.pod("1", "10.7.0.1", bridge="br1") | fabric.pod("2", "10.7.0.2", bridge="br1")
    assert failed(fabric.reports(ordered(one, other))) == []


def test_a_breach_is_found_without_a_route_and_without_a_process(fabric: Fabric) -> None:
    a, c = fabric.pod("a", "10.7.0.1"), fabric.pod("c", "10.8.0.1")
    orders = ordered(a, c)
    reports = fabric.reports(orders)
    assert failed(reports) == [("a", "c", ring.ISOLATION), ("c", "a", ring.ISOLATION)]
    (alone,) = fabric.reports(orders[:1]).values()
    assert alone.failed["c"][1] == f"10.8.0.1 ({c['c'][0].mac}) answers 10.7.0.1"


def test_a_breach_is_found_although_pods_drop_packets_of_other_ranges(fabric: Fabric) -> None:
    a, c = fabric.pod("a", "10.7.0.1"), fabric.pod("c", "10.8.0.1")
    fabric.filter_strictly("a", "c")
    assert {test for _, _, test in failed(fabric.reports(ordered(a, c)))} == {ring.ISOLATION}


def test_separation_is_not_proved_without_a_way_to_the_other_network(fabric: Fabric) -> None:
    a, c = fabric.pod("a", "fd07::1"), fabric.pod("c", "fd08::1", bridge="br1")
    (alone,) = fabric.reports(ordered(a, c)[:1]).values()
    assert alone.failed["c"] == (
        ring.ISOLATION,
        "not proved from net1: [Errno 101] Network is unreachable",
    )
