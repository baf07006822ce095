"""FabricNodes on a real API server: the agent's writes, and the writes that the server refuses."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.node_report import LOOK, NodeReport
from cli.commands import run
from kube.resources import ApiError, Conflict, Meta, Node, NodeCondition, Refused
from kube.transport import KubernetesApi
from node.conditions import TYPE, NodeConditions
from node.fabric_node import AttachmentStatus, FabricNode, FabricNodeStatus, FaultStatus
from tests.api.conftest import NODE_A, NODE_B
from tests.api.server import ACCOUNT, ApiServer
from tests.unit.cli.commands import short_path
from tests.unit.host import servers
from tests.waiting import until
from tools.manifests import NAMESPACE

OTHERS = "writes no other FabricNode than its own"


@pytest.fixture
def root() -> Iterator[Path]:
    with short_path() as made:
        yield made


@pytest.fixture(autouse=True)
def _none_left(server: ApiServer) -> Iterator[None]:
    yield
    for each in server.admin.list(FabricNode).items:
        server.admin.delete(each)


def test_an_agent_writes_its_node_and_kubectl_shows_it(
    server: ApiServer, node_a: KubernetesApi, root: Path
) -> None:
    paths = servers.dgx(root)
    report = NodeReport(paths, dict, print, {"NODE_NAME": NODE_A}, lambda environ: node_a)
    assert report.step() == LOOK
    stored = server.admin.get(FabricNode, NODE_A)
    assert stored.status.counts.hcas == 8
    (owner,) = stored.metadata.owner_references
    assert owner["uid"] == server.admin.get(Node, NODE_A).uid
    header, row = server.kubectl("get", "fabricnodes", "-o", "wide").splitlines()
    assert header.split()[:4] == ["NAME", "HCAS", "PORTS", "ACTIVE"]
    assert row.split()[:4] == [NODE_A, "8", "8", "8"]


def test_an_agent_cannot_write_another_node(
    server: ApiServer, node_a: KubernetesApi, node_b: KubernetesApi
) -> None:
    theirs = node_b.create(FabricNode(metadata=Meta(name=NODE_B)))
    with pytest.raises(Refused, match=OTHERS):
        node_a.create(FabricNode(metadata=Meta(name="node-c")))
    with pytest.raises(Refused, match=OTHERS):
        node_a.update_status(replace(theirs, status=FabricNodeStatus(version="1")))
    with pytest.raises(Refused):
        node_a.delete(theirs)
    assert server.admin.get(FabricNode, NODE_B) == theirs


def test_a_status_beyond_the_schema_is_refused_as_a_whole(
    server: ApiServer, node_a: KubernetesApi
) -> None:
    stored = node_a.create(FabricNode(metadata=Meta(name=NODE_A)))
    for status in (
        FabricNodeStatus(faults=tuple(FaultStatus(about="x", text="y") for _ in range(33))),
        FabricNodeStatus(attachments=(AttachmentStatus(pod="p", interface="n" * 16),)),
        FabricNodeStatus(written="yesterday"),
    ):
        with pytest.raises(Refused):
            node_a.update_status(replace(stored, status=status))
    assert server.admin.get(FabricNode, NODE_A) == stored


def test_an_agent_cannot_keep_its_object_after_its_node(node_a: KubernetesApi) -> None:
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "u"}
    for meta in (
        Meta(name=NODE_A, finalizers=("example.com/keep",)),
        Meta(name=NODE_A, owner_references=(owner,)),
    ):
        with pytest.raises(Refused, match="the only owner of a FabricNode is its Node"):
            node_a.create(FabricNode(metadata=meta))


@pytest.fixture
def controller(server: ApiServer) -> Iterator[KubernetesApi]:
    """A client with the controller's rights."""
    kubeconfig = server.kubeconfig("conditions", {}, account="podfabric-controller")
    client = KubernetesApi(kubeconfig, writer="podfabric-controller")
    yield client
    client.close()


def test_a_fault_degrades_the_node_and_its_end_clears_it(
    server: ApiServer, node_a: KubernetesApi, controller: KubernetesApi
) -> None:
    stored = node_a.create(FabricNode(metadata=Meta(name=NODE_A)))
    broken = FabricNodeStatus(faults=(FaultStatus(about="0000:3b:00.0", text="port 1 is DOWN"),))
    conditions = NodeConditions(controller)
    conditions.start()
    try:
        until(lambda: status_of(server) == "False", pause=0.2)
        stored = node_a.update_status(replace(stored, status=broken))
        until(lambda: status_of(server) == "True", pause=0.2)
        shown = server.kubectl("describe", "node", NODE_A)
        assert "0000:3b:00.0: port 1 is DOWN" in shown
        node_a.update_status(replace(stored, status=FabricNodeStatus()))
        until(lambda: status_of(server) == "False", pause=0.2)
    finally:
        conditions.close()
    assert server.admin.get(Node, NODE_A).is_ready  # the kubelet's conditions stay


def status_of(server: ApiServer) -> str:
    condition = server.admin.get(Node, NODE_A).condition(TYPE)
    return "" if condition is None else condition.status


def test_the_controller_changes_nothing_else_of_a_node(
    server: ApiServer, controller: KubernetesApi
) -> None:
    node = server.admin.get(Node, NODE_A)

    def is_refused() -> bool:
        try:
            controller.set_condition(node, NodeCondition("Ready", "False", "x", "x"))
        except ApiError as error:
            return "only the condition FabricDegraded" in str(error)
        return False

    until(is_refused, pause=0.2)  # the server applies a new policy after some time
    with pytest.raises(ApiError, match="only the condition FabricDegraded"):
        controller.set_condition(node, NodeCondition("DiskPressure", "True", "x", "x"))
    with pytest.raises(Conflict):
        gone = replace(node, metadata=replace(node.metadata, uid="0000"))
        controller.set_condition(gone, NodeCondition(TYPE, "True", "x", "x"))


@pytest.mark.parametrize(
    "job", ["trainer", "app in (trainer),job-name!=x", "batch.kubernetes.io/job-name=trainer"]
)
def test_the_controllers_rights_are_enough_for_explain_job(
    server: ApiServer, node_a: KubernetesApi, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = node_a.create(FabricNode(metadata=Meta(name=NODE_A)))
    attached = AttachmentStatus(pod=f"{NAMESPACE}/rank-0", interface="net1", mtu=2044)
    node_a.update_status(replace(stored, status=FabricNodeStatus(attachments=(attached,))))
    labels = {"app": "trainer", "batch.kubernetes.io/job-name": "trainer"}
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "rank-0", "labels": labels},
        "spec": {
            "nodeName": NODE_A,
            "serviceAccountName": ACCOUNT,
            "containers": [{"name": "main", "image": "x"}],
        },
    }
    server.make(pods, body)
    kubeconfig = server.kubeconfig("explain", {}, account="podfabric-controller")
    try:
        words = ["--job", job, "-n", NAMESPACE, "--kubeconfig", str(kubeconfig), "-o", "json"]
        assert run(["explain", *words]) == 0
    finally:
        server.send("DELETE", f"{pods}/rank-0?gracePeriodSeconds=0")
    (pod,) = json.loads(capsys.readouterr().out)["pods"]
    assert (pod["node"], pod["unknown"]) == (NODE_A, "it has not started")
    assert pod["interfaces"][0]["mtu"] == 2044
    assert run(["explain", "--job", "none", "-n", NAMESPACE, "--kubeconfig", str(kubeconfig)]) == 1
    assert "owner StatefulSet none" in capsys.readouterr().err
