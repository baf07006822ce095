"""The client and a real API server: the contract, and behaviour that only a real server has."""

import json
import uuid
from pathlib import Path

import pytest
from kubernetes.config import incluster_config

from ipam.leases.objects import AddressBlock
from kube import encoding
from kube.client import ClusterApi
from kube.resources import NetworkDefinition, Node, NodeInfo, NotFound, Refused
from kube.transport import KubernetesApi
from tests.api.conftest import NODE_A
from tests.api.server import DEFINITIONS, ApiServer, name
from tests.unit.kube.contract import ApiContract, block, pool, reservation
from tests.waiting import PATIENCE


class TestContract(ApiContract):
    """The same tests that the stand-in of the API server passes."""

    @pytest.fixture
    def api(self, server: ApiServer) -> ClusterApi:
        return server.admin

    @pytest.fixture
    def expired_version(self) -> str:
        return "1"  # of an etcd that has no object of ours


def test_a_list_is_read_in_pages(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = str(uuid.uuid4())
    made = {server.admin.create(block(instance)).metadata.name for _ in range(25)}
    monkeypatch.setattr(encoding, "PAGE", 10)
    found = server.admin.list(AddressBlock, {"spec.holder.instance": instance})
    assert {each.metadata.name for each in found.items} == made
    assert len(found.items) == 25
    # All pages show the state at the time of the first.
    everything = server.admin.list(AddressBlock)
    assert made <= {each.metadata.name for each in everything.items}


def test_a_client_reads_its_node_and_its_pods(server: ApiServer, node_a: KubernetesApi) -> None:
    node = node_a.get(Node, NODE_A)
    assert node.machine == NodeInfo(machine_id="m-a", system_uuid="s-a", boot_id="b-a")
    assert node.is_ready
    assert node.uid
    assert NODE_A in [each.name for each in server.admin.list(Node).items]
    assert server.admin.has_pods(NODE_A)
    assert not server.admin.has_pods("node-without-pods")
    server.kubectl("taint", "node", NODE_A, "example.com/test=:NoSchedule")
    assert server.admin.get(Node, NODE_A).has_taint("example.com/test")
    server.kubectl("taint", "node", NODE_A, "example.com/test-")


def test_an_event_is_on_the_object(server: ApiServer) -> None:
    stored = server.admin.create(pool())
    regarding = {
        "apiVersion": "ipam.podfabric.io/v1alpha1",
        "kind": "AddressPool",
        "name": stored.metadata.name,
        "uid": stored.metadata.uid,
    }
    server.admin.report("Exhausted", "no address is free", regarding)
    shown = server.kubectl("events", "--for", f"addresspool/{stored.metadata.name}")
    assert "Warning" in shown
    assert "Exhausted" in shown
    assert "no address is free" in shown


def test_definitions_are_found_when_their_kind_is_installed(server: ApiServer) -> None:
    with pytest.raises(NotFound):
        server.admin.list(NetworkDefinition)
    server.install_kind(DEFINITIONS)
    made = server.define({"type": "ipoib"})
    (found,) = server.admin.list(NetworkDefinition).items
    assert (found.metadata.namespace, found.metadata.name, found.metadata.uid) == (
        *("default", made["metadata"]["name"], made["metadata"]["uid"]),
    )
    assert encoding.config_of(found) == '{"type": "ipoib"}'
    server.kubectl("delete", "crd", DEFINITIONS["metadata"]["name"])


def test_kubectl_shows_pools_and_blocks(server: ApiServer) -> None:
    server.admin.create(pool("shown"))
    server.admin.create(block())
    pools, blocks = (server.kubectl("get", short).splitlines() for short in ("apool", "ablock"))
    assert pools[0].split() == [
        *("NAME", "NETWORK", "RANGE", "BLOCK", "USED", "CAPACITY", "BLOCKS", "READY", "AGE")
    ]
    assert blocks[0].split() == ["NAME", "NODE", "STATE", "USED", "FREE", "CONFIRMED", "AGE"]
    wide = server.kubectl("get", "ablock", "-o", "wide").splitlines()[0].split()
    assert wide[-4:] == ["POOL", "EPOCH", "RESERVED", "INSTANCE"]
    assert "addresspool.ipam.podfabric.io/shown-" in server.kubectl(
        "get", "podfabric", "-o", "name"
    )
    server.admin.create(reservation())
    columns = ["NAME", "POOL", "KIND", "OWNER", "ADDRESSES", "NODE", "AGE"]
    assert server.kubectl("get", "ares").splitlines()[0].split() == columns


def test_a_pods_client_reads_its_token_again(
    server: ApiServer, node_a: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet replaces the token before it expires; a token that expired too early is read
    again."""
    token, ca = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("no-longer-valid")
    ca.write_text(server.plane.ca())
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(ca))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.plane.port))
    api = KubernetesApi(timeout=PATIENCE)
    with pytest.raises(Refused, match="401"):
        api.get(Node, NODE_A)
    kubeconfig = json.loads(server.kubeconfig(name("pod"), {}).read_text())
    token.write_text(kubeconfig["users"][0]["user"]["token"])
    assert api.get(Node, NODE_A) == node_a.get(Node, NODE_A)
    api.close()
