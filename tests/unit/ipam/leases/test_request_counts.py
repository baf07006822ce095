"""How many requests an ADD, a lease, a confirmation and an idle node cost the API server.

docs/developers/protocol.md has the numbers.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from cni.spec.errors import CNIError
from ipam.leases.pool_cache import AT_ONCE
from tests.fake_api import FakeApi, Fault, Faults
from tests.unit.ipam.calls import Json
from tests.unit.ipam.leases.nodes import ClusterNode, put_pool

CONFIRMED = Counter({("get", "Node"): 1, ("list", "AddressBlock"): 1})
POOLS = 16


def network(number: int) -> Json:
    return {"range": f"10.{number}.0.0/24", "network_name": f"net{number}"}


def put_pools(server: FakeApi, count: int = POOLS) -> None:
    for number in range(count):
        put_pool(server, f"10.{number}.0.0/24", name=f"net{number}")


def add_to_all(node: ClusterNode, pod: str) -> None:
    for number in range(POOLS):
        node.add(pod, network(number), ifname=f"net{number}")


@pytest.fixture
def server() -> FakeApi:
    return FakeApi()


@pytest.fixture
def node(server: FakeApi, memory_path: Path) -> Iterator[ClusterNode]:
    node = ClusterNode(server, memory_path / "a", kept=True)
    node.lessee.step()  # its first confirmation
    node.api.calls.clear()
    yield node
    node.close()


def test_the_first_lease_of_a_pool_is_three_requests_and_the_next_ones_are_two(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pool(server)
    node.add("p0")
    pool, post = ("get", "AddressPool"), ("create", "AddressBlock")
    # The list reads all pools. The get after the POST reads the pool again.
    assert node.api.calls == {("list", "AddressPool"): 1, pool: 1, post: 1}
    node.api.calls.clear()
    for number in range(1, 20):  # 14 addresses are in the first block
        node.add(f"p{number}")
    assert len(node.rows()) == 2
    assert node.api.calls == {pool: 1, post: 1}


def test_an_add_and_a_del_that_need_no_block_are_no_request(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pool(server)
    node.add("p0")
    node.api.calls.clear()
    for number in range(1, 12):
        node.add(f"p{number}")
        node.delete(f"p{number}")
    assert not node.api.calls


def test_the_blocks_of_many_pools_are_two_requests_each_and_one_more_for_all(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pools(server)
    add_to_all(node, "p0")
    assert node.api.calls == {
        ("get", "AddressPool"): POOLS,
        ("list", "AddressPool"): 1,
        ("create", "AddressBlock"): POOLS,
    }


def test_no_status_is_written_until_blocks_are_leased_no_more(
    server: FakeApi, node: ClusterNode
) -> None:
    for number in range(5):
        put_pool(server, f"10.{number}.0.0/24", name=f"net{number}")
        node.add("p0", network(number), ifname=f"net{number}")
        node.steps(1, 1.0)
        assert not node.api.calls["update_status", "AddressBlock"]
    node.steps(6, 1.0)
    assert node.api.calls["update_status", "AddressBlock"] == 1


def test_a_status_is_written_however_long_blocks_are_leased(
    server: FakeApi, node: ClusterNode
) -> None:
    for number in range(POOLS):
        put_pool(server, f"10.{number}.0.0/24", name=f"net{number}")
        node.add("p0", network(number), ifname=f"net{number}")
        node.steps(1, 3.0)
    assert node.api.calls["update_status", "AddressBlock"] == 1


def test_in_a_cluster_of_more_pools_than_one_list_shows_each_is_asked_for(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pools(server, AT_ONCE + 1)
    add_to_all(node, "p0")
    assert node.api.calls["list", "AddressPool"] == 1
    node.steps(40)
    node.api.calls.clear()
    node.steps(1, 460.0)
    assert node.api.calls == CONFIRMED + Counter({("get", "AddressPool"): POOLS})


def losses(count: int) -> Faults:
    """Other nodes win the first `count` claims."""
    left = count

    def faults(verb: str, kind: str, name: str) -> Fault | None:
        nonlocal left
        if verb == "create" and left:
            left -= 1
            return Fault.CONFLICT
        return None

    return faults


def test_a_block_that_another_node_won_costs_one_request(
    server: FakeApi, node: ClusterNode
) -> None:
    ipam = {"range": "10.0.0.0/16"}  # 4096 blocks
    put_pool(server, ipam["range"])
    node.api.faults = losses(3)
    node.add("p0", ipam)
    pools = {("list", "AddressPool"): 1, ("get", "AddressPool"): 1}
    assert node.api.calls == {**pools, ("create", "AddressBlock"): 4}


def test_the_blocks_of_a_small_pool_are_listed_after_others_won_two(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pool(server)  # 16 blocks
    node.api.faults = losses(2)
    node.add("p0")
    assert node.api.calls == {
        ("list", "AddressPool"): 1,
        ("get", "AddressPool"): 2,
        ("create", "AddressBlock"): 3,
        ("list", "AddressBlock"): 1,
    }


def test_blocks_that_a_list_has_shown_as_leased_are_not_tried_again(
    server: FakeApi, node: ClusterNode, memory_path: Path
) -> None:
    """The controller's map is as old as the pool: it shows none of them."""
    put_pool(server)
    other = ClusterNode(server, memory_path / "b", "node-b")
    for number in range(13 * 16):
        other.add(f"q{number}")
    with pytest.raises(CNIError):
        for number in count():
            node.add(f"p{number}")
    assert node.lessee.counted().conflicts <= 3  # of two claims: a list follows the second loss
    node.api.calls.clear()
    for number in range(3):  # none is free
        with pytest.raises(CNIError):
            node.add(f"late-{number}")
        node.clock.now += 2
    assert ("create", "AddressBlock") not in node.api.calls


def test_a_confirmation_of_many_pools_is_three_requests(server: FakeApi, node: ClusterNode) -> None:
    put_pools(server)
    add_to_all(node, "p0")
    node.steps(40)  # all statuses are published
    node.api.calls.clear()
    node.steps(1, 460.0)
    assert node.api.calls == CONFIRMED + Counter({("list", "AddressPool"): 1})


def test_an_idle_node_asks_for_nothing_but_its_confirmations(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pools(server)
    add_to_all(node, "p0")
    node.steps(40)
    node.api.calls.clear()
    node.steps(1800, 1.0)  # half an hour
    assert node.api.calls.total() == 3 * 4  # 0.4 a minute


def test_a_block_that_was_just_claimed_costs_no_look_at_its_pool(
    server: FakeApi, node: ClusterNode
) -> None:
    """Its pod takes an address of it soon. On a busy node the lessee looks before that."""
    put_pool(server)
    node.add("p0")
    node.delete("p0")
    node.api.calls.clear()
    node.steps(2, 0.9)
    assert ("get", "AddressPool") not in node.api.calls
    node.steps(3, 1.0)
    assert node.api.calls["get", "AddressPool"] == 1
