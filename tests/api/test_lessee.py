"""Nodes that lease from a real API server: their stores, lessees and tokens are real too."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from cni.spec.result import Result
from ipam.cluster.kubernetes_api import KubernetesApi
from ipam.cluster.lessee import CONFIRM_EVERY, Lessee
from ipam.cluster.names import pool_name, space_name
from ipam.cluster.objects import AddressBlock, AddressPool, Meta, PoolSpec, PoolStatus
from ipam.plugin import AddressPlugin
from ipam.scope import Stores
from ipam.store_files import StoreFiles
from tests.api.conftest import NODE_A, NODE_B
from tests.api.server import ApiServer
from tests.unit.ipam.calls import request
from tests.unit.ipam.cluster.nodes import READY, Clock

RANGE = "10.77.0.0/24"


class LeasingNode:
    """A node with a store of its own. It steps when the test says so."""

    def __init__(self, api: KubernetesApi, name: str, directory: Path) -> None:
        self.clock = Clock()
        self.files = StoreFiles(directory)
        self.lessee = Lessee(api, self.files, name, f"boot-of-{name}", clock=self.clock)
        stores = Stores(self.files, lambda: "cluster", self.lessee, clock=self.clock, patience=60.0)
        self.plugin = AddressPlugin(stores, lambda: f"boot-of-{name}")
        self.close = self.files.close

    def add(self, pod: str) -> str:
        result = self.plugin.add(request("ADD", {"range": RANGE}, f"{pod}-1", pod=pod))
        assert isinstance(result, Result)
        return result.ips[0].address

    def delete(self, pod: str) -> None:
        self.plugin.delete(request("DEL", None, f"{pod}-1", pod=pod))

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.clock.now += seconds
            self.lessee.step()


@pytest.fixture
def nodes(
    server: ApiServer, node_a: KubernetesApi, node_b: KubernetesApi, tmp_path: Path
) -> Iterator[tuple[LeasingNode, LeasingNode]]:
    made = server.admin.create(
        AddressPool(metadata=Meta(name=pool_name("", RANGE)), spec=PoolSpec(range=RANGE))
    )
    ready = replace(READY, last_transition_time="2026-01-01T00:00:00Z")
    status = PoolStatus(space=space_name("", RANGE), block_size=16, conditions=(ready,))
    made = server.admin.update_status(replace(made, status=status))
    with ExitStack() as stack:
        yield (
            stack.enter_context(closing(LeasingNode(node_a, NODE_A, tmp_path / "a"))),
            stack.enter_context(closing(LeasingNode(node_b, NODE_B, tmp_path / "b"))),
        )
    for block in server.admin.list(AddressBlock, {"spec.pool": made.metadata.name}).items:
        server.admin.delete(block)
    server.admin.delete(server.admin.get(AddressPool, made.metadata.name))


def blocks(server: ApiServer) -> list[AddressBlock]:
    return list(server.admin.list(AddressBlock, {"spec.pool": pool_name("", RANGE)}).items)


def test_two_nodes_hand_out_100_addresses_and_give_all_blocks_back(
    server: ApiServer, nodes: tuple[LeasingNode, LeasingNode]
) -> None:
    seen = [node.add(f"p{number}") for number in range(50) for node in nodes]
    assert len(set(seen)) == 100
    for node in nodes:
        node.steps(4, 11.0)
    leased = blocks(server)
    assert {block.spec.holder.node for block in leased} == {NODE_A, NODE_B}
    assert sum(block.status.used for block in leased) > 0
    for node in nodes:
        for number in range(50):
            node.delete(f"p{number}")
        node.lessee.leaving = True
        node.steps(4, 5.0)
    assert blocks(server) == []


def test_a_node_confirms_answers_a_fence_and_loses_what_is_another_s(
    server: ApiServer, nodes: tuple[LeasingNode, LeasingNode]
) -> None:
    node, other = nodes
    node.add("p0")
    (block,) = blocks(server)
    server.admin.update(replace(block, spec=replace(block.spec, state="Reclaiming")))
    node.steps(1, CONFIRM_EVERY)
    (answered,) = blocks(server)
    assert (answered.spec.state, answered.metadata.uid) == ("Active", block.metadata.uid)
    assert node.add("p1")
    server.admin.delete(answered)
    node.steps(1, CONFIRM_EVERY)
    (again,) = blocks(server)
    assert again.metadata.name == block.metadata.name
    assert again.metadata.uid != block.metadata.uid
    other.add("q0")
    assert len(blocks(server)) == 2


def test_a_pool_that_is_drained_is_11(
    server: ApiServer, nodes: tuple[LeasingNode, LeasingNode]
) -> None:
    node, _ = nodes
    pool = server.admin.get(AddressPool, pool_name("", RANGE))
    server.admin.update(replace(pool, spec=replace(pool.spec, state="Draining")))
    stores = Stores(node.files, lambda: "cluster", node.lessee, clock=node.clock, patience=0.0)
    plugin = AddressPlugin(stores, lambda: "boot")
    with pytest.raises(CNIError, match="drained") as refused:
        plugin.add(request("ADD", {"range": RANGE}, "c", pod="p"))
    assert refused.value.code == Code.TRY_AGAIN
