"""FabricNodes on a real API server: the agent's writes, and the writes that the server refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.node_report import LOOK, NodeReport
from kube.resources import Meta, Node, Refused
from kube.transport import KubernetesApi
from node.fabric_node import AttachmentStatus, FabricNode, FabricNodeStatus, FaultStatus
from tests.api.conftest import NODE_A, NODE_B
from tests.api.server import ApiServer
from tests.unit.cli.commands import short_path
from tests.unit.host import servers

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
