"""CIDRPools of nv-ipam as podfabric's own: each node has one prefix while its machine lives."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from cni.spec.result import Route
from ipam.cluster.api import ApiError
from ipam.cluster.controller.machines import OUT_OF_SERVICE
from ipam.cluster.nv_ipam import entries
from ipam.cluster.nv_ipam.objects import (
    ExcludedIndexes,
    ExcludedRun,
    NvCIDRPool,
    PoolRoute,
    StaticPrefix,
)
from ipam.cluster.nv_ipam.selectors import NodeSelector, Requirement, SelectorTerm
from ipam.cluster.objects import AddressBlock, AddressPool, AddressShare
from tests.fake_api import Fault
from tests.unit.ipam.cluster.nv_ipam.nodes import NAMESPACE, duplicates, put_cidrpool
from tests.unit.ipam.cluster.nv_ipam.own import OwnNode
from tests.unit.ipam.cluster.nv_ipam.test_own import World, daemon_writes, import_, share_of

ROUTED = {"poolName": "routed", "poolType": "cidrpool"}
PLAIN: dict[str, Any] = {"cidr": "10.8.0.0/26", "per_node_network_prefix": 29, "gateway_index": 1}
GONE = 600.0 + 1800.0 + 300.0 + 120.0  # seconds after which a machine is proved dead


@pytest.fixture
def world(memory_path: Path) -> World:
    return World(memory_path)


def prefixes(world: World) -> dict[str, str]:
    """What the status says."""
    (pool,) = world.server.look_at_all(NvCIDRPool, namespace=NAMESPACE).items
    return {each.node: each.prefix for each in pool.status.allocations or ()}


def change(world: World, **spec: object) -> None:
    """Edit the pool's spec."""
    (pool,) = world.server.look_at_all(NvCIDRPool, namespace=NAMESPACE).items
    world.server.put(replace(pool, spec=replace(pool.spec, **spec)))


def test_each_node_has_a_prefix_with_its_gateway_and_no_address_of_another(world: World) -> None:
    put_cidrpool(
        world.server,
        {},
        "10.8.0.0/27",
        per_node_network_prefix=29,
        gateway_index=1,
        routes=(PoolRoute("10.9.0.0/16"),),
        per_node_exclusions=(ExcludedIndexes(start_index=2, end_index=3),),
        exclusions=(ExcludedRun(start="10.8.0.6", end="10.8.0.6"),),
    )
    a, b = world.node("a"), world.node("b")
    world.settle()
    found = a.result("p", ROUTED)
    assert [(ip.address, ip.gateway) for ip in found.ips] == [("10.8.0.4/29", "10.8.0.1")]
    assert found.routes == (Route(dst="10.9.0.0/16", gw="10.8.0.1"),)
    assert a.add("q", ROUTED) == ["10.8.0.5/29"]
    with pytest.raises(CNIError, match=r"node a has 10\.8\.0\.1 to 10\.8\.0\.6") as caught:
        a.add("r", ROUTED)  # the prefix of b is empty, and is not lent
    assert caught.value.code == Code.NO_FREE_ADDRESS
    assert b.add("p", ROUTED) == ["10.8.0.12/29"]
    assert prefixes(world) == {"a": "10.8.0.0/29", "b": "10.8.0.8/29"}
    # Neither the pool nor a prefix is cut further.
    assert not world.server.look_at_all(AddressPool).items
    assert not world.server.look_at_all(AddressBlock).items


def test_a_node_without_a_prefix_gets_no_address_at_all(world: World) -> None:
    put_cidrpool(world.server, {}, "10.8.0.0/29", per_node_network_prefix=29, gateway_index=1)
    a, b = world.node("a"), world.node("b")
    world.settle()
    assert a.add("p", ROUTED) == ["10.8.0.2/29"]
    for wish in ({"ips": ["10.8.0.4"]}, {"allocateDefaultGateway": True}, {}):
        with pytest.raises(CNIError, match="no addresses of cidrpool/routed") as caught:
            b.add("q", ROUTED, config={"args": {"cni": wish}})
        assert caught.value.code == Code.TRY_AGAIN
    assert share_of(world, "b") is None
    assert "NoFreePrefixes" in [event.reason for event in world.server.events]


def test_pods_may_ask_for_what_they_may_ask_of_nv_ipam(world: World) -> None:
    put_cidrpool(world.server, {}, **PLAIN)
    a = world.node("a")
    world.settle()

    def added(pod: str, wish: dict[str, object]) -> list[str]:
        return a.add(pod, ROUTED, config={"args": {"cni": wish}})

    assert added("p", {"ips": ["10.8.0.5"]}) == ["10.8.0.5/29"]
    assert added("q", {"allocateIPWithIndex": 2}) == ["10.8.0.3/29"]
    assert added("r", {"allocateDefaultGateway": True}) == ["10.8.0.1/29"]


def test_static_prefixes_are_for_their_nodes_and_those_of_no_node_for_none(world: World) -> None:
    static = (
        StaticPrefix(node="b", prefix="10.8.0.0/29", gateway="10.8.0.5"),
        StaticPrefix(prefix="10.8.0.8/29"),
        StaticPrefix(node="elsewhere", prefix="10.8.0.16/29"),
    )
    put_cidrpool(world.server, {}, static_allocations=static, **PLAIN)
    a, b = world.node("a"), world.node("b")
    world.settle()
    assert prefixes(world) == {"a": "10.8.0.24/29", "b": "10.8.0.0/29"}
    (ip,) = b.result("p", ROUTED).ips
    assert (ip.address, ip.gateway) == ("10.8.0.1/29", "10.8.0.5")
    (ip,) = a.result("p", ROUTED).ips
    assert (ip.address, ip.gateway) == ("10.8.0.26/29", "10.8.0.25")


def test_a_static_prefix_that_another_node_has_is_given_when_its_pods_are_gone(
    world: World,
) -> None:
    put_cidrpool(world.server, {}, **PLAIN)
    a, b = world.node("a"), world.node("b")
    world.settle()
    assert a.add("p", ROUTED) == ["10.8.0.2/29"]
    change(world, static_allocations=(StaticPrefix(node="b", prefix="10.8.0.0/29"),))
    world.settle()
    assert prefixes(world) == {"a": "10.8.0.16/29", "b": "10.8.0.8/29"}
    assert b.add("q", ROUTED) == ["10.8.0.10/29"]
    a.delete("p")
    world.settle()
    assert prefixes(world) == {"a": "10.8.0.16/29", "b": "10.8.0.0/29"}
    assert b.add("r", ROUTED) == ["10.8.0.2/29"]
    assert not duplicates((a, b))


def test_a_prefix_stays_with_a_node_that_is_deleted_and_comes_back(world: World) -> None:
    put_cidrpool(world.server, {}, **PLAIN)
    a, b = world.node("a"), world.node("b")
    world.settle()
    a.add("p", ROUTED)
    node = world.server.machines.pop("a")
    world.settle()
    world.node("c")
    world.settle()
    assert prefixes(world) == {"a": "10.8.0.0/29", "b": "10.8.0.8/29", "c": "10.8.0.16/29"}
    world.server.machines["a"] = node
    world.settle()
    assert a.add("q", ROUTED) == ["10.8.0.3/29"]
    assert b.add("p", ROUTED) == ["10.8.0.10/29"]


def test_the_prefix_of_a_machine_that_is_proved_dead_goes_to_another_node(world: World) -> None:
    put_cidrpool(world.server, {}, "10.8.0.0/29", per_node_network_prefix=29)
    a = world.node("a")
    world.settle()
    a.add("p", ROUTED)
    del world.server.machines["a"], world.nodes["a"]
    b = world.node("b")
    for _ in range(int(GONE / 60.0)):
        world.settle(1)
        assert prefixes(world).keys() <= {"a"} or world.clock.now > 2000.0
        world.clock.now += 60.0
    world.settle()
    assert prefixes(world) == {"b": "10.8.0.0/29"}
    assert b.add("q", ROUTED) == ["10.8.0.1/29"]


def test_a_machine_that_is_out_of_service_leaves_its_prefix_to_others(world: World) -> None:
    put_cidrpool(world.server, {}, "10.8.0.0/29", per_node_network_prefix=29)
    a = world.node("a")
    world.settle()
    a.add("p", ROUTED)
    tainted = replace(world.server.machines["a"], ready=False, taints=(OUT_OF_SERVICE,))
    world.server.machines["a"] = tainted
    del world.nodes["a"]
    for _ in range(4):
        world.settle(1)
        world.clock.now += 60.0
    assert not world.server.look_at_all(AddressShare).items
    del world.server.machines["a"]
    b = world.node("b")
    world.settle()
    assert prefixes(world) == {"b": "10.8.0.0/29"}
    assert b.add("q", ROUTED) == ["10.8.0.1/29"]


def test_a_label_that_is_gone_for_a_moment_moves_no_prefix_of_which_pods_have_addresses(
    world: World,
) -> None:
    only = NodeSelector(
        node_selector_terms=(
            SelectorTerm(match_expressions=(Requirement("rdma", "In", ("yes",)),)),
        )
    )
    put_cidrpool(world.server, {}, node_selector=only, **PLAIN)
    a, b = world.node("a"), world.node("b")
    machines = world.server.machines
    machines["a"] = replace(machines["a"], labels={"rdma": "yes"})
    world.settle()
    assert a.add("p", ROUTED) == ["10.8.0.2/29"]
    assert prefixes(world) == {"a": "10.8.0.0/29"}
    machines["a"] = replace(machines["a"], labels={})
    machines["b"] = replace(machines["b"], labels={"rdma": "yes"})
    world.clock.now += 400.0
    world.settle()
    assert prefixes(world) == {"b": "10.8.0.8/29"}
    with pytest.raises(CNIError, match="nodeSelector"):
        a.add("q", ROUTED)
    machines["a"] = replace(machines["a"], labels={"rdma": "yes"})
    world.clock.now += 400.0
    world.settle()
    assert prefixes(world) == {"a": "10.8.0.0/29", "b": "10.8.0.8/29"}
    assert a.add("q", ROUTED) == ["10.8.0.3/29"]
    assert not duplicates((a, b))


def test_another_length_moves_nodes_to_prefixes_of_which_no_pod_has_an_address(
    world: World,
) -> None:
    put_cidrpool(world.server, {}, **PLAIN)
    a, b = world.node("a"), world.node("b")
    world.settle()
    a.add("p", ROUTED)
    b.add("p", ROUTED)
    change(world, per_node_network_prefix=28)
    world.settle()
    given = prefixes(world)
    assert {each.rpartition("/")[2] for each in given.values()} == {"28"}
    assert len(set(given.values())) == 2
    assert "10.8.0.0/28" not in given.values()  # pods of both have addresses of it
    a.add("q", ROUTED)
    b.add("q", ROUTED)
    assert not duplicates((a, b))


def test_an_invalid_spec_leaves_the_entries_as_they_are(world: World) -> None:
    put_cidrpool(world.server, {}, **PLAIN)
    a = world.node("a")
    world.settle()
    change(world, gateway_index=99)
    assert world.controller.round().unusable == 1
    assert [event.reason for event in world.server.events] == ["InvalidPool"]
    assert prefixes(world) == {"a": "10.8.0.0/29"}
    assert a.add("p", ROUTED)


def test_entries_of_nv_ipams_controller_stay_and_wait_for_the_import(world: World) -> None:
    given = {"a": ("10.8.0.16/29", "10.8.0.17"), "gone": ("10.8.0.0/29", "10.8.0.1")}
    put_cidrpool(world.server, given, **PLAIN)
    a, b = world.node("a"), world.node("b")
    daemon_writes(a, "10.8.0.18", subnet="10.8.0.16/29", pool="cidrpool/routed")
    world.settle()
    assert prefixes(world) == {
        "a": "10.8.0.16/29",
        "b": "10.8.0.8/29",
        "gone": "10.8.0.0/29",
    }
    with pytest.raises(CNIError, match="podfabric ipam import") as caught:
        a.add("p", ROUTED)
    assert caught.value.code == Code.TRY_AGAIN
    assert share_of(world, "a") is None
    # Not even another spec moves what the daemon's pods may have.
    change(world, per_node_network_prefix=28)
    world.settle()
    assert prefixes(world)["a"] == "10.8.0.16/29"
    change(world, per_node_network_prefix=29)
    import_(a)
    world.settle()
    share = share_of(world, "a")
    assert share is not None
    assert share.spec.ranges == ("10.8.0.17-10.8.0.22",)
    assert a.add("p", ROUTED) == ["10.8.0.19/29"]
    assert not duplicates((a, b))


def test_the_entry_of_a_node_whose_share_was_deleted_ends_by_the_word_of_an_administrator(
    world: World,
) -> None:
    put_cidrpool(world.server, {}, "10.8.0.0/29", per_node_network_prefix=29)
    a = world.node("a")
    world.settle()
    a.add("p", ROUTED)
    del world.server.machines["a"], world.nodes["a"]
    (share,) = world.server.look_at_all(AddressShare).items
    world.server.delete(share)
    b = world.node("b")
    for _ in range(int(GONE / 60.0)):
        world.settle(1)
        world.clock.now += 60.0
    assert prefixes(world) == {"a": "10.8.0.0/29"}
    assert list(entries.remove(world.server, NAMESPACE, "a")) == ["cidrpool/routed"]
    world.settle()
    assert prefixes(world) == {"b": "10.8.0.0/29"}
    assert b.add("q", ROUTED) == ["10.8.0.1/29"]


def test_pods_get_addresses_of_the_prefix_without_the_api_server(world: World) -> None:
    put_cidrpool(world.server, {}, **PLAIN)
    a = world.node("a")
    world.settle()
    a.add("p", ROUTED)
    world.server.down = True
    a.restart()
    a.follower.step()
    assert a.add("q", ROUTED) == ["10.8.0.3/29"]
    a.delete("p")


@pytest.mark.parametrize("fault", [Fault.LOST_REQUEST, Fault.LOST_ANSWER])
def test_no_fault_at_any_request_gives_two_nodes_one_prefix(
    memory_path: Path, fault: Fault
) -> None:
    number, is_over = 0, False
    while not is_over:
        is_over = _cut_with_fault(memory_path / str(number), number, fault)
        number += 3  # every third request: each try makes two nodes
        assert number < 100
    assert number > 5


def _cut_with_fault(directory: Path, number: int, fault: Fault) -> bool:
    """Nodes get prefixes, with one fault after which controller and agents are new processes.

    Whether there are fewer requests.
    """
    world = World(directory)
    put_cidrpool(world.server, {}, **PLAIN)
    count = 0

    def faulty(verb: str, kind: str, name: str) -> Fault | None:
        nonlocal count
        if kind not in ("AddressShare", "CIDRPool"):
            return None
        count += 1
        return fault if count == number + 1 else None

    world.controller.client.faults = faulty
    nodes: list[OwnNode] = [world.node(name) for name in ("a", "b")]
    for node in nodes:
        node.api.faults = faulty
    for step in range(2):
        try:
            world.controller.round()
        except ApiError:
            world.controller.restart()
        for node in nodes:
            node.step()
            node.restart()
            try:
                node.add(f"p{step}", ROUTED)
            except CNIError as error:
                assert error.code == Code.TRY_AGAIN, error
        assert not duplicates(nodes)
        assert len(set(prefixes(world).values())) == len(prefixes(world))
    is_over = count <= number
    world.controller.client.faults = None
    for node in nodes:
        node.api.faults = None
    for node in nodes:
        assert world_add(world, node)
    assert not duplicates(nodes)
    return is_over


def world_add(world: World, node: OwnNode) -> list[str]:
    """ADD, as a runtime repeats it."""
    for _ in range(5):
        try:
            return node.add("last", ROUTED)
        except CNIError as error:
            assert error.code == Code.TRY_AGAIN, error
        world.settle(1)
    return node.add("last", ROUTED)
