"""The controller together with nodes that have real stores, on one simulated clock."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.leases.objects import AddressBlock
from tests.unit.ipam.controller.cluster import MARGIN, Cluster
from tests.unit.ipam.leases.nodes import ClusterNode

RANGE = "10.64.0.0/29"  # six addresses, in blocks of one
MINUTE = 60.0


class Fabric:
    """Nodes, a controller, and a definition of a small range."""

    def __init__(self, stack: ExitStack, directory: Path, *names: str) -> None:
        self._stack = stack
        self.cluster = Cluster()
        self.cluster.define({"type": "podfabric-ipam", "range": RANGE})
        self.nodes = {name: self.node(directory / name, name) for name in names}
        self.cluster.round()

    def node(self, directory: Path, name: str, boot: str = "boot-1") -> ClusterNode:
        """A node that keeps its store open until the end of the test."""
        clock = self.cluster.clock
        node = ClusterNode(self.cluster.api, directory, name, clock=clock, boot=boot, kept=True)
        self._stack.callback(node.close)
        return node

    def add(self, node: ClusterNode, pod: str) -> str | int:
        """The pod's address, or the code of the error."""
        try:
            (address,) = node.add(pod, {"range": RANGE})
        except CNIError as error:
            return error.code
        return address

    def run(self, seconds: float, every: float = 5.0) -> None:
        """Time passes for nodes and controller."""
        end = self.cluster.now + seconds
        while self.cluster.now < end:
            self.cluster.now += every
            for node in self.nodes.values():
                node.lessee.step()
            self.cluster.round()


def test_a_pool_that_is_exhausted_recovers_when_a_pod_ends_elsewhere(
    stack: ExitStack, tmp_path: Path
) -> None:
    """Row A11."""
    fabric = Fabric(stack, tmp_path, "a", "b")
    a, b = fabric.nodes["a"], fabric.nodes["b"]
    held = [fabric.add(a, f"pod-{number}") for number in range(6)]
    fabric.run(10)
    assert fabric.cluster.condition("Exhausted", "10.64.0.0-29") == ("True", "NoBlockIsFree")
    assert fabric.add(b, "late") == Code.NO_FREE_ADDRESS
    a.delete("pod-3")
    fabric.run(10)
    assert fabric.add(b, "late") == held[3]


@pytest.mark.parametrize("changes_at", [(), (15,)], ids=["one leader", "another leader"])
def test_a_partitioned_node_hands_out_nothing_when_another_has_its_addresses(
    stack: ExitStack, tmp_path: Path, changes_at: tuple[int, ...]
) -> None:
    """Row A7, where the Node is deleted while its machine runs: the wait is longer than what the
    node may do without the API server."""
    fabric = Fabric(stack, tmp_path, "a", "b")
    a, b = fabric.nodes["a"], fabric.nodes["b"]
    pods = [f"pod-{number}" for number in range(6)]
    for pod in pods:
        fabric.add(a, pod)
    fabric.run(10)
    a.api.down = True
    fabric.cluster.remove_node("a")
    by_a, by_b = [], []
    for minute in range(70):
        if minute in changes_at:
            fabric.cluster.new_leader()
        fabric.run(MINUTE, every=MINUTE)
        if pods:
            a.delete(pods.pop(0))
            if isinstance(fabric.add(a, f"a-{minute}"), str):
                by_a.append(fabric.cluster.now)
                pods.append(f"a-{minute}")
        if isinstance(fabric.add(b, f"b-{minute}"), str):
            by_b.append(fabric.cluster.now)
    assert len(by_a) >= 20, "it may hand out for maxOffline"
    assert len(by_b) == 6, "its addresses are free in the end"
    assert by_b[0] - by_a[-1] > MARGIN
    a.api.down = False
    fabric.cluster.api.add_node("a", a.machine, f"uuid-of-{a.machine}", a.boot)
    fabric.run(10 * MINUTE, every=MINUTE)
    assert fabric.add(a, "back") == Code.NO_FREE_ADDRESS


def test_a_node_object_that_is_made_again_under_churn_keeps_its_blocks(
    stack: ExitStack, tmp_path: Path
) -> None:
    """Row A8, with a node that answers the fence."""
    fabric = Fabric(stack, tmp_path, "a", "b")
    a = fabric.nodes["a"]
    address = fabric.add(a, "stays")
    fabric.run(20)
    api = fabric.cluster.api
    (block,) = api.look_at_all(AddressBlock).items
    machine = api.machines["a"].machine
    for number, minutes in enumerate((0, 9, 14, 30, 12)):
        fabric.cluster.remove_node("a")
        fabric.run(minutes * MINUTE, every=MINUTE)
        api.add_node("a", machine.machine_id, machine.system_uuid, machine.boot_id)
        fabric.run(10 * MINUTE, every=MINUTE)
        assert isinstance(fabric.add(a, f"pod-{number}"), str)
        a.delete(f"pod-{number}")
    kept = api.look(AddressBlock, block.metadata.name)
    assert kept.metadata.uid == block.metadata.uid
    assert kept.spec.state == "Active"
    assert kept.spec.holder.node_uid == api.machines["a"].uid
    assert a.add("stays", {"range": RANGE}, container="stays-2") == [address]
    assert fabric.cluster.counts.fenced > 0
    assert fabric.cluster.counts.freed == 0
