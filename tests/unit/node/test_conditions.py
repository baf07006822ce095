"""The condition FabricDegraded: written once for each change, by the leader alone."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kube.resources import Meta, Node
from node.conditions import AGAIN, STANDBY, TYPE, NodeConditions
from node.fabric_node import FabricNode, FabricNodeStatus, FaultStatus
from tests.fake_api import FakeApi, FakeClient, Fault
from tests.waiting import until

BROKEN = FabricNodeStatus(faults=(FaultStatus(about="mlx5_0", text="port 1 is\x1b[2J DOWN"),))


class Cluster:
    """Two nodes with FabricNodes, and a controller that leads."""

    def __init__(self) -> None:
        self.api = FakeApi()
        for name in ("node-a", "node-b"):
            self.api.add_node(name)
            self.api.put(FabricNode(metadata=Meta(name=name, uid=f"f-{name}")))
        self.client = self.api.client("controller")
        self.conditions = NodeConditions(self.client)

    def report(self, name: str, status: FabricNodeStatus) -> None:
        found = self.api.look(FabricNode, name)
        self.api.client("agent").update_status(replace(found, status=status))

    def status(self, name: str) -> tuple[str, str]:
        condition = self.api.look(Node, name).condition(TYPE)
        return ("", "") if condition is None else (condition.status, condition.message)

    def steps_until(self, name: str, status: str) -> None:
        def reached() -> bool:
            self.conditions.step()
            return self.status(name)[0] == status

        until(reached)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.conditions.close()


def test_each_change_is_written_once(cluster: Cluster) -> None:
    cluster.steps_until("node-b", "False")
    cluster.report("node-a", BROKEN)
    cluster.steps_until("node-a", "True")
    assert cluster.status("node-a") == ("True", "mlx5_0: port 1 is\\x1b[2J DOWN")
    assert cluster.status("node-b")[0] == "False"
    written = cluster.client.calls["set_condition", "Node"]
    assert cluster.conditions.step() == AGAIN
    assert cluster.client.calls["set_condition", "Node"] == written == 3
    assert cluster.api.look(Node, "node-a").is_ready


def test_a_new_leader_writes_only_what_differs(cluster: Cluster) -> None:
    cluster.report("node-a", BROKEN)
    cluster.steps_until("node-a", "True")
    cluster.steps_until("node-b", "False")
    cluster.conditions.close()
    client = cluster.api.client("controller-2")
    cluster.conditions = NodeConditions(client)
    until(lambda: cluster.conditions.step() == AGAIN)
    assert client.calls["set_condition", "Node"] == 0


def test_a_standby_writes_nothing(cluster: Cluster) -> None:
    cluster.client.may_write = lambda: False
    assert cluster.conditions.step() == STANDBY
    assert cluster.client.calls["list", "FabricNode"] == 0
    cluster.client.may_write = lambda: True
    cluster.steps_until("node-a", "False")


def test_a_node_whose_report_is_gone_is_unknown(cluster: Cluster) -> None:
    cluster.steps_until("node-a", "False")
    cluster.api.remove(FabricNode, "node-a")
    cluster.steps_until("node-a", "Unknown")
    cluster.api.add_node("node-c")  # never had a report
    cluster.conditions.step()
    assert cluster.status("node-c") == ("", "")


def test_a_node_that_refuses_its_condition_stops_no_other(cluster: Cluster) -> None:
    def fault(verb: str, kind: str, name: str) -> Fault | None:
        return Fault.REFUSED if (verb, name) == ("set_condition", "node-a") else None

    cluster.conditions = NodeConditions(cluster.api.client("controller", fault))
    cluster.report("node-b", BROKEN)
    cluster.steps_until("node-b", "True")
    assert cluster.status("node-a") == ("", "")


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.LOST_REQUEST, Fault.CONFLICT])
def test_a_failed_write_is_repeated(cluster: Cluster, fault: Fault) -> None:
    faults = iter([fault])
    client: FakeClient = cluster.api.client(
        "controller",
        lambda verb, kind, name: next(faults, None) if verb == "set_condition" else None,
    )
    cluster.conditions = NodeConditions(client)
    cluster.report("node-a", BROKEN)
    cluster.steps_until("node-a", "True")
    cluster.steps_until("node-b", "False")
