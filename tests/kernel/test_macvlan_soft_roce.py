"""`macvlan` and `ipvlan` on the interfaces of Soft-RoCE devices, and on VLANs."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from cni.spec import notes
from tests.kernel.macvlan_node import POD, MacvlanNode
from tests.kernel.pods import IP, Node, Reply, ipam, link_in, link_names, pings, run
from tests.kernel.processes import killed_at
from tests.kernel.verbs import soft_roce
from tests.unit.deviceplugin.holding import Holding

MASTER, VLAN = "rxe0-net", "rxe0-net.7"
GIDS = Path("/sys/class/infiniband/rxe0/ports/1/gids")
V4 = ipam("10.9.0.0/24")
KINDS = pytest.mark.parametrize("kind", ["macvlan", "ipvlan"])
MORE_THAN_ENOUGH = 400  # changes; an ADD makes fewer


class SoftRoceNode(MacvlanNode):
    """This machine, whose pod "worker-0" holds rxe0."""

    def __init__(self, root: Path, kind: str) -> None:
        Node.__init__(self, root)
        self.type = kind  # type: ignore[misc]
        self.paths = Paths(run=root / "run", state=root / "state", kubelet=root / "kubelet")
        self.holding = Holding(self.paths)
        self.give("rxe0")


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    """Two Soft-RoCE devices, and a VLAN on the interface of the first."""
    with soft_roce("rxe0"), soft_roce("rxe1"):
        run(IP, "link", "add", "link", MASTER, "name", VLAN, "type", "vlan", "id", "7")
        run(IP, "link", "set", VLAN, "up")
        yield


@pytest.fixture
def node(tmp_path: Path, kind: str) -> SoftRoceNode:
    return SoftRoceNode(tmp_path, kind)


@pytest.mark.parametrize("mode", ["l2", "l3", "l3s"])
def test_an_ipvlan_lives_from_add_to_del(tmp_path: Path, pods: list[str], mode: str) -> None:
    node = SoftRoceNode(tmp_path, "ipvlan")
    config: dict[str, Any] = {"master": MASTER, "mode": mode, "ipam": V4}
    replies = [node.add(netns, netns, **config) for netns in pods[:2]]
    link = link_in(pods[0])
    assert link is not None
    assert (link.kind, link.mode, link.mac) == ("ipvlan", mode, replies[0].interface["mac"])
    assert pings(pods[0], "10.9.0.2")
    previous = replies[0]
    assert node.call("CHECK", pods[0], pods[0], previous=previous, **config) == Reply(0, {})
    for netns in pods[:2]:
        node.delete(netns, netns, **config)
    assert (link_names(pods[0]), node.leftovers()) == ({"lo"}, [])


@KINDS
@pytest.mark.parametrize("master", ["auto", VLAN])
def test_the_gid_is_there_before_add_answers(
    node: SoftRoceNode, pods: list[str], kind: str, master: str
) -> None:
    config: dict[str, Any] = {"master": master, "ipam": V4, "args": POD}
    with notes.collected() as said:
        node.add("c1", pods[0], **config)
        gids = [path.read_text().strip() for path in GIDS.iterdir()]
    assert said.text == ""
    link = link_in(pods[0])
    assert link is not None
    assert link.kind == kind
    assert "0000:0000:0000:0000:0000:ffff:0a09:0001" in gids
    node.delete("c1", pods[0], **config)


@KINDS
def test_a_master_of_another_hca_is_refused(node: SoftRoceNode, pods: list[str], kind: str) -> None:
    refused = node.refused("c1", pods[0], master="rxe1-net", args=POD)
    assert refused.document["code"] == 120
    assert 'master "rxe1-net" is on HCA rxe1' in refused.text


@KINDS
def test_a_vlan_needs_a_rule(node: SoftRoceNode, pods: list[str], kind: str) -> None:
    node.allow(use={"devices": ["*"], "vlans": [0, 8]})
    refused = node.refused("c1", pods[0], master=VLAN, args=POD)
    assert f'"vlan of {VLAN}": 7' in refused.text
    node.add("c1", pods[0], master=MASTER, args=POD)
    node.delete("c1", pods[0], master=MASTER, args=POD)
    assert node.leftovers() == []


def test_an_ipvlan_has_the_address_of_its_master(tmp_path: Path, pods: list[str]) -> None:
    node = SoftRoceNode(tmp_path, "ipvlan")
    refused = node.refused("c1", pods[0], master=MASTER, mac="02:00:00:00:00:01")
    assert "an ipvlan has the address of its master" in refused.text
    previous = Reply(0, {"cniVersion": "1.1.0", "interfaces": [{"name": "eth0"}]})
    assert '"prevResult"' in node.refused("c1", pods[0], previous=previous).text


@KINDS
def test_add_killed_at_every_step_then_delete(
    node: SoftRoceNode, pods: list[str], kind: str
) -> None:
    config: dict[str, Any] = {"master": "auto", "ipam": V4, "args": POD}
    for step in range(1, MORE_THAN_ENOUGH):
        killed = killed_at(step, partial(node.call, "ADD", "c1", pods[0], **config))
        node.delete("c1", pods[0], **config)
        assert (step, node.leftovers(), link_names(pods[0])) == (step, [], {"lo"})
        if not killed:
            break
    assert step > 10, "the injection counts no changes"
