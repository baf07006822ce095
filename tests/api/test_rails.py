"""Rails on a real API server, from the pool that an administrator writes to the pods of nodes."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipam.addresses import parse
from ipam.cluster.controller.rounds import Rounds, read_world
from ipam.cluster.kubernetes_api import KubernetesApi
from ipam.cluster.names import pool_name
from ipam.cluster.objects import AddressBlock, AddressPool, Meta, PoolSpec
from tests.api.server import ApiServer, name
from tests.api.test_nodes import RealNode
from tests.waiting import join, until

RAILS = [f"10.{160 + rail}.0.0/20" for rail in range(16)]
MAIN = pool_name("rails", RAILS[0])
NODES = 4


@pytest.fixture
def pools(server: ApiServer) -> Iterator[None]:
    """A pool with 15 further rails, the pools of these, and what a controller makes of them."""
    for range_ in RAILS:
        rails = tuple(RAILS[1:]) if range_ == RAILS[0] else ()
        spec = PoolSpec(range=range_, network_name="rails", rails=rails)
        server.admin.create(AddressPool(metadata=Meta(name=pool_name("rails", range_)), spec=spec))
    rounds = Rounds(server.admin)

    def settled() -> bool:
        rounds.round(read_world(server.admin, lambda: 0.0))
        made = [server.admin.get(AddressPool, pool_name("rails", each)) for each in RAILS]
        return bool(made[0].status.block_size) and {each.status.rail_of for each in made[1:]} == {
            MAIN
        }

    until(settled)
    yield
    for block in server.admin.list(AddressBlock, {"spec.pool": MAIN}).items:
        server.admin.delete(block)
    for range_ in RAILS:
        server.admin.delete(server.admin.get(AddressPool, pool_name("rails", range_)))


def test_pods_of_all_nodes_have_one_index_on_16_rails(
    server: ApiServer, node_a: KubernetesApi, pools: None, tmp_path: Path
) -> None:
    names = [name("railed") for _ in range(NODES)]
    nodes = [RealNode(server, tmp_path / each, each) for each in names]
    given: dict[str, list[int]] = {}

    def work(node: RealNode) -> None:
        given[node.name] = [
            parse(address) & 0xFFF
            for nic, rail in enumerate(RAILS)
            for address in node.add(
                "p",
                {"range": rail, "network_name": "rails"},
                uid=f"uid-{node.name}",
                network=f"rail{nic}",
                ifname=f"net{nic}",
            )
        ]

    threads = [threading.Thread(target=work, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert all(len(each) == 16 and len(set(each)) == 1 for each in given.values())
    assert len({each[0] for each in given.values()}) == NODES
    blocks = server.admin.list(AddressBlock, {"spec.pool": MAIN}).items
    assert sorted(block.spec.holder.node for block in blocks) == sorted(names)
    assert all(len(block.spec.rails) == 15 for block in blocks)
