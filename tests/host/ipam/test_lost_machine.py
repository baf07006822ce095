"""A machine whose Node is gone still runs a pod: the next node's pod does not get its address. The
same holds for a machine outside of the cluster if the definition has each address probed.

Namespaces represent the node, its pod, and the lost machine. `place` does the part of sriov's ADD
that follows the choice of a device; here the device is one end of a veth pair.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from base.paths import Paths
from cni.spec.attachment import Attachment
from cni.spec.notes import collected
from cni.sriov.device_record import DeviceRecord
from cni.sriov.interface import place
from cni.sriov.plan import DevicePlan
from host import netdev_move
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark
from host.netlink import links
from host.netlink.sockets import netlink
from host.sysfs.pci import Function
from ipam.delegation import InProcess
from ipam.store.reservations import AddressInUse
from tests.fake_api import FakeApi
from tests.host.test_netdev_move import run
from tests.unit.ipam.calls import Calls, request
from tests.unit.ipam.controller.cluster import GONE_AFTER, MARGIN, OFFLINE, Cluster
from tests.unit.ipam.leases.nodes import RANGE, ClusterNode, put_pool

ATTACHMENT = Attachment("fabric", "p1-1", "net1")
FUNCTION = Function(
    address="0000:af:06.0", driver="mlx5_core", pf="", index=None, netdevs=(), rdma=()
)
RECORD = DeviceRecord(device=FUNCTION.address, driver=FUNCTION.driver)
LOST = "02:00:00:00:00:77"
RANGES = [("10.64.0.0/28", "10.64.0.0-28", 8), ("fd00:64::/124", "fd00-64--0-124", 16)]


class Fabric:
    """The node's interface `eth7`, its pod, and a machine at the other end of the cable."""

    def __init__(self, stack: ExitStack) -> None:
        self.node, self.pod, self.lost = (f"t{uuid4().hex[:10]}" for _ in range(3))
        for name in (self.node, self.pod, self.lost):
            run("netns", "add", name)
            stack.callback(run, "netns", "delete", name)
        far = ("far", "address", LOST, "netns", self.lost)
        run("-n", self.node, "link", "add", "eth7", "type", "veth", "peer", *far)
        run("-n", self.lost, "link", "set", "far", "up")
        self.namespace = stack.enter_context(NetworkNamespace.open(f"/var/run/netns/{self.pod}"))
        home = stack.enter_context(NetworkNamespace.open(f"/var/run/netns/{self.node}"))
        self.inside = stack.enter_context(netlink(self.namespace))
        stack.enter_context(home.entered())  # this thread is in the node's namespace
        self.outside = stack.enter_context(netlink())

    def add(self, ipam: InProcess) -> list[str]:
        """The ADD of the pod, undone if it fails; returns the addresses that the pod has then."""
        link = links.require(self.outside, "eth7")
        plan = DevicePlan(function=FUNCTION, link=link, vf=None)
        origin = netdev_move.origin_of(link)
        answer = ipam.add()
        arguments = (self.outside, self.inside, self.namespace, Paths(), ATTACHMENT)
        try:
            place(*arguments, plan, RECORD, answer, ipam)
        except BaseException:
            mark = Mark(ATTACHMENT.key)
            netdev_move.restore(self.outside, self.inside, "net1", origin, mark)
            ipam.undo()
            raise
        return self.addresses()

    def addresses(self) -> list[str]:
        (shown,) = json.loads(run("-n", self.pod, "-j", "address", "show", "dev", "net1"))
        found: list[dict[str, Any]] = shown["addr_info"]
        return [each["local"] for each in found if each["scope"] == "global"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def next_node(stack: ExitStack, directory: Path, range_: str, pool: str, size: int) -> ClusterNode:
    """A node, after another one had the pool's first block, vanished, and its wait was over."""
    cluster = Cluster()
    cluster.pool(range_, block_size=size, name=pool)
    cluster.round()
    first, prefix = range_.split("/")
    bits = int(prefix) + (1 if size == 8 else 0)
    cluster.block(first, cluster.node("gpu-1"), prefix=bits, pool=pool)
    cluster.node("gpu-2")
    cluster.round()
    cluster.remove_node("gpu-1")
    cluster.run(GONE_AFTER + OFFLINE + MARGIN + 2)
    assert cluster.blocks() == {}
    node = ClusterNode(cluster.api, directory, "gpu-2", clock=cluster.clock, kept=True)
    stack.callback(node.close)
    return node


def ipam_of(node: ClusterNode, range_: str, size: int, pod: str = "p1") -> InProcess:
    exclude = ["10.64.0.8/29"] if size == 8 else []
    asked = request("ADD", {"range": range_, "exclude": exclude}, f"{pod}-1", pod=pod)
    return InProcess(asked, node.plugin)


@pytest.mark.parametrize(("range_", "pool", "size"), RANGES)
def test_a_pod_does_not_get_an_address_that_a_lost_machine_still_has(
    stack: ExitStack, tmp_path: Path, range_: str, pool: str, size: int
) -> None:
    node = next_node(stack, tmp_path, range_, pool, size)
    fabric = Fabric(stack)
    first, second = (range_.split("/")[0].removesuffix("0") + each for each in "12")
    prefix = range_.split("/")[1]
    run("-n", fabric.lost, "address", "add", f"{first}/{prefix}", "dev", "far", "nodad")
    with pytest.raises(AddressInUse) as raised:
        fabric.add(ipam_of(node, range_, size))
    assert f"{first} ({LOST})" in raised.value.message
    assert node.held() == set()
    assert fabric.add(ipam_of(node, range_, size)) == [second]
    assert node.held() == {second}


@pytest.mark.parametrize(
    ("ipam", "taken", "given"),
    [
        ({"range": "10.65.0.0/24"}, ["10.65.0.1", "10.65.0.2"], ["10.65.0.3"]),
        (
            {"ipRanges": [{"range": "10.65.0.0/24"}, {"range": "fd00:65::/120"}]},
            ["fd00:65::1"],
            ["10.65.0.1", "fd00:65::2"],
        ),
        ({"range": "10.65.0.0/30"}, ["10.65.0.1", "10.65.0.2"], []),
        ({"addresses": [{"address": "10.65.0.1/24"}]}, ["10.65.0.1"], []),
    ],
)
def test_with_probes_the_pod_gets_the_first_unanswered_address(
    stack: ExitStack, tmp_path: Path, ipam: dict[str, Any], taken: list[str], given: list[str]
) -> None:
    node = Calls(tmp_path)
    fabric = Fabric(stack)
    for address in taken:
        prefix = 120 if ":" in address else 24
        run("-n", fabric.lost, "address", "add", f"{address}/{prefix}", "dev", "far", "nodad")
    call = InProcess(request("ADD", {**ipam, "probe": "always"}, "c1"), node.plugin)
    with collected() as notes:
        if given:
            assert fabric.add(call) == given
        else:
            with pytest.raises(AddressInUse, match=rf"{taken[-1]} \({LOST}\)"):
                fabric.add(call)
    assert all(f"{address} ({LOST})" in notes.text for address in taken)
    assert sorted(node.held()) == given


def test_with_probes_a_pool_gives_the_next_address_and_reports_it(
    stack: ExitStack, tmp_path: Path
) -> None:
    server = FakeApi()
    put_pool(server)
    node = ClusterNode(server, tmp_path)
    stack.callback(node.close)
    fabric = Fabric(stack)
    lowest = ip_address(*node.add("p0"))  # of the node's block
    run("-n", fabric.lost, "address", "add", f"{lowest + 1}/24", "dev", "far")
    asked = request("ADD", {"range": RANGE, "probe": "always"}, "c1", pod="p1")
    assert fabric.add(InProcess(asked, node.plugin)) == [f"{lowest + 2}"]
    node.steps(2)
    assert [each.reason for each in node.server.events] == ["AddressInUse"]


def test_pod_without_carrier_gets_the_address_and_a_warning_is_reported(
    stack: ExitStack, tmp_path: Path
) -> None:
    node = next_node(stack, tmp_path, *RANGES[0])
    fabric = Fabric(stack)
    run("-n", fabric.lost, "link", "set", "far", "down")
    ipam = ipam_of(node, RANGES[0][0], 8)
    assert fabric.add(ipam) == ["10.64.0.1"]
    node.steps(2)
    assert [each.reason for each in node.server.events] == ["AddressNotProbed"]
    ipam.undo()
    again = ipam_of(node, RANGES[0][0], 8, "p2")
    again.add()
    assert again.unprobed == ("10.64.0.1",)
