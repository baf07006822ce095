"""Nodes lease blocks from a real API server, with the rights and the tokens of their agents."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from ipam.leases.block_layout import pool_name
from ipam.leases.objects import AddressBlock, AddressPool
from kube.transport import KubernetesApi
from tests.api.conftest import NODE_A
from tests.api.server import ApiServer, name
from tests.unit.ipam.leases.nodes import ClusterNode, put_pool
from tests.waiting import join

NODES = 4
PODS = 12  # of a node
RANGE = "10.77.0.0/26"
IPAM: dict[str, object] = {"range": RANGE, "network_name": "nodes"}


def real_node(server: ApiServer, directory: Path, name: str) -> ClusterNode:
    """A new node, whose lessee uses its own token at the API server."""
    client = server.node(name, machineID=f"m-{name}", systemUUID=f"s-{name}")
    return ClusterNode(client, directory, name)


@pytest.fixture
def pool(server: ApiServer) -> Iterator[AddressPool]:
    """A pool of 16 blocks, in the state that the controller creates."""
    stored = put_pool(server.admin, RANGE, name="nodes", size=4)
    yield stored
    for block in leased(server):
        server.admin.delete(block)
    server.admin.delete(server.admin.get(AddressPool, stored.metadata.name))


def leased(server: ApiServer) -> tuple[AddressBlock, ...]:
    """The blocks of the pool."""
    return server.admin.list(AddressBlock, {"spec.pool": pool_name("nodes", RANGE)}).items


def make_nodes(server: ApiServer, path: Path) -> list[ClusterNode]:
    """Nodes with unique names."""
    names = [name("leasing") for _ in range(NODES)]
    return [real_node(server, path / each, each) for each in names]


def test_nodes_share_a_range_and_give_blocks_back(
    server: ApiServer, node_a: KubernetesApi, pool: AddressPool, tmp_path: Path
) -> None:
    nodes = make_nodes(server, tmp_path)
    given: dict[str, list[str]] = {node.name: [] for node in nodes}

    def work(node: ClusterNode) -> None:
        for number in range(PODS):
            given[node.name] += node.add(f"p{number}", dict(IPAM))

    threads = [threading.Thread(target=work, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    addresses = [address for each in given.values() for address in each]
    assert len(addresses) == NODES * PODS
    assert len(set(addresses)) == len(addresses)
    blocks = leased(server)
    assert {block.spec.holder.node for block in blocks} == given.keys()
    assert len(blocks) <= 16
    for node in nodes:
        node.steps(3, 30.0)
        mine = [each for each in leased(server) if each.spec.holder.node == node.name]
        assert sum(each.status.used for each in mine) <= PODS
        assert any(each.status.holders for each in mine)
        for number in range(PODS):
            node.delete(f"p{number}")
        node.steps(30, 60.0)
    # At most one empty block stays with each node, and only for a while.
    assert len(leased(server)) <= NODES


def test_warm_adds_and_deletions_need_no_server_and_a_new_boot_names_itself(
    server: ApiServer, node_a: KubernetesApi, pool: AddressPool, tmp_path: Path
) -> None:
    node = real_node(server, tmp_path, name("cut-off"))
    (first,) = node.add("p0", dict(IPAM))
    server.plane.stop_api_server()
    try:
        (second,) = node.add("p1", dict(IPAM))
        node.delete("p0")
        assert node.add("p2", dict(IPAM)) == [first]
        assert second != first
    finally:
        server.plane.start_api_server()
        server.await_policy(node_a, NODE_A)
    (before,) = leased(server)
    node.restart("boot-2")
    node.steps(2, 30.0)
    (after,) = leased(server)
    assert after.metadata.uid == before.metadata.uid
    assert after.spec.holder == replace(before.spec.holder, boot="boot-2")
    assert after.spec.epoch == before.spec.epoch + 1
    assert node.add("p3", dict(IPAM))


def test_a_copy_of_a_nodes_store_is_another_lessee(
    server: ApiServer, node_a: KubernetesApi, pool: AddressPool, tmp_path: Path
) -> None:
    one = real_node(server, tmp_path / "one", name("original"))
    (first,) = one.add("p0", dict(IPAM))
    (tmp_path / "two").mkdir()
    for file in (tmp_path / "one").iterdir():
        if file.is_file():
            (tmp_path / "two" / file.name).write_bytes(file.read_bytes())
    two = real_node(server, tmp_path / "two", name("copy"))
    two.steps(2, 30.0)
    (second,) = two.add("p1", dict(IPAM))
    (third,) = one.add("p2", dict(IPAM))
    assert len({first, second, third}) == 3
    holders = {block.spec.holder.instance for block in leased(server)}
    assert len(holders) == 2
