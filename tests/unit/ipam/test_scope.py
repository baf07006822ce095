"""The scope of a request's addresses, by config.yaml and by the definition."""

from pathlib import Path

import pytest

from cni.spec.errors import Code
from ipam import store_choice
from ipam.plugin import AddressPlugin
from ipam.store.store_files import StoreFiles
from ipam.store_choice import Stores
from tests.fake_api import FakeApi
from tests.unit.ipam.calls import error_of, request
from tests.unit.ipam.leases.nodes import RANGE, ClusterNode, blocks_of, put_pool


@pytest.fixture
def server() -> FakeApi:
    server = FakeApi()
    put_pool(server)
    return server


@pytest.fixture
def node(server: FakeApi, memory_path: Path) -> ClusterNode:
    return ClusterNode(server, memory_path / "a")


def test_a_file_says_the_scope_and_none_is_node(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"

    def source() -> str:
        return store_choice.settings(path).scope

    assert source() == "node"
    path.write_text("ipam:\n  scope: cluster\npolicy: {}\n")
    assert source() == "cluster"
    path.write_text("ipam: {scope: all}\n")
    error = error_of(source)
    assert (error.code, "ipam.scope" in error.message) == (Code.IO_FAILURE, True)
    path.write_text("ipam: {scop: node}\n")
    assert "scope" in error_of(source).message


def test_a_definition_overrides_the_node(server: FakeApi, node: ClusterNode) -> None:
    assert node.add("p0", {"range": RANGE, "scope": "node"}) == ["10.0.0.1"]
    assert blocks_of(server) == []
    node.add("p1", {"range": RANGE})
    assert len(blocks_of(server)) == 1
    error = error_of(lambda: node.add("p2", {"range": RANGE, "scope": "mine"}))
    assert (error.code, "ipam.scope" in error.message) == (Code.INVALID_CONFIG, True)


def test_whereabouts_is_the_cluster_s_too(server: FakeApi, node: ClusterNode) -> None:
    node.add("p0", {"type": "whereabouts", "range": RANGE})
    assert len(blocks_of(server)) == 1


def test_both_scopes_on_one_node_never_give_one_address_twice(
    server: FakeApi, node: ClusterNode
) -> None:
    own = {"range": RANGE, "scope": "node"}
    for number in range(40):
        node.add(f"n{number}", own)
        node.add(f"c{number}")
    assert len(node.held()) == 80


def test_del_check_and_gc_go_by_the_store_whatever_the_scope(
    server: FakeApi, node: ClusterNode
) -> None:
    (address,) = node.add("p0")
    server.down = True
    config = {"prevResult": {"cniVersion": "1.0.0", "ips": [{"address": f"{address}/24"}]}}
    own = {"range": RANGE, "scope": "node"}
    node.plugin.check(request("CHECK", own, "p0-1", pod="p0", config=config))
    node.plugin.check(request("CHECK", {"range": RANGE}, "p0-1", pod="p0", config=config))
    node.plugin.gc(request("GC", own, "", config={"cni.dev/valid-attachments": []}))
    assert node.held() == set()


def test_without_the_agent_adds_of_the_cluster_are_11_and_dels_work(
    server: FakeApi, node: ClusterNode
) -> None:
    node.add("p0")
    node.api.calls.clear()
    stores = Stores(StoreFiles(node.directory, kept=False), lambda: "cluster", clock=node.clock)
    plugin = AddressPlugin(stores, lambda: node.boot)
    error = error_of(lambda: plugin.reserve(request("ADD", {"range": RANGE}, "p1-1", pod="p1")))
    assert (error.code, "only an agent with" in error.message) == (Code.TRY_AGAIN, True)
    status = error_of(lambda: plugin.status(request("STATUS", {"range": RANGE}, "")))
    assert status.code == Code.UNAVAILABLE
    plugin.delete(request("DEL", None, "p0-1", pod="p0"))
    assert node.held() == set()
    assert not node.api.calls


def test_a_second_add_of_an_attachment_is_103_and_leases_nothing(
    server: FakeApi, node: ClusterNode
) -> None:
    node.add("p0")
    server.down = True
    assert error_of(lambda: node.add("p0")).code == Code.ALREADY_ATTACHED
    node.clock.now += 100_000
    assert error_of(lambda: node.add("p0")).code == Code.ALREADY_ATTACHED
