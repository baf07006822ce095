"""CIDRPools of nv-ipam: each node leases one prefix."""

from pathlib import Path
from typing import Any

import pytest

from cni.spec.errors import CNIError, Code
from cni.spec.result import Route
from ipam.leases.objects import AddressBlock
from ipam.nv_ipam.pool_import import ExcludedIndexes, NodePart, PoolRoute
from tests.unit.ipam.nv_ipam.nodes import World, daemon_writes, duplicates, own_pool, put_cidrpool

ROUTED = {"poolName": "routed", "poolType": "cidrpool"}
PLAIN: dict[str, Any] = {"cidr": "10.8.0.0/26", "per_node_network_prefix": 29, "gateway_index": 1}


@pytest.fixture
def world(memory_path: Path) -> World:
    return World(memory_path)


def prefixes(world: World) -> dict[str, str]:
    """The range that each node leases."""
    blocks = world.server.look_at_all(AddressBlock).items
    assert len({each.spec.holder.node for each in blocks}) == len(blocks)
    return {each.spec.holder.node: each.spec.range for each in blocks}


def test_each_node_has_a_prefix_with_its_gateway_and_no_address_of_another(world: World) -> None:
    put_cidrpool(
        world.server,
        {},
        "10.8.0.0/27",
        per_node_network_prefix=29,
        gateway_index=1,
        routes=(PoolRoute("10.9.0.0/16"),),
        per_node_exclusions=(ExcludedIndexes(start_index=2, end_index=3),),
    )
    a, b = world.node("a"), world.node("b")
    world.settle()
    for node in (a, b):
        found = node.result("p", ROUTED)
        base = prefixes(world)[node.name].removesuffix("/29").rpartition(".")[2]
        (ip,) = found.ips
        assert (ip.address, ip.gateway) == (
            f"10.8.0.{int(base) + 4}/29",
            f"10.8.0.{int(base) + 1}",
        )
        assert found.routes == (Route(dst="10.9.0.0/16", gw=ip.gateway),)
        assert node.add("q", ROUTED) == [f"10.8.0.{int(base) + 5}/29"]
        assert node.add("r", ROUTED) == [f"10.8.0.{int(base) + 6}/29"]
        with pytest.raises(CNIError) as caught:
            node.add("s", ROUTED)  # other prefixes are not lent
        assert caught.value.code == Code.NO_FREE_ADDRESS
    assert len(set(prefixes(world).values())) == 2
    assert (own_pool(world.server).spec.block_size, own_pool(world.server).status.block_size) == (
        8,
        8,
    )
    world.settle(8)
    assert own_pool(world.server).status.addresses.capacity == 12


def test_a_node_for_which_no_prefix_is_left_gets_no_address(world: World) -> None:
    put_cidrpool(world.server, {}, "10.8.0.0/29", per_node_network_prefix=29, gateway_index=1)
    a, b = world.node("a"), world.node("b")
    world.settle()
    assert a.add("p", ROUTED) == ["10.8.0.2/29"]
    for wish in ({"ips": ["10.8.0.4"]}, {"allocateDefaultGateway": True}, {}):
        with pytest.raises(CNIError) as caught:
            b.add("q", ROUTED, config={"args": {"cni": wish}})
        assert caught.value.code in (
            Code.NO_FREE_ADDRESS,
            Code.ADDRESS_TAKEN,
            Code.TRY_AGAIN,
        )
    assert not duplicates((a, b))


def test_pods_may_ask_for_what_they_may_ask_of_nv_ipam(world: World) -> None:
    put_cidrpool(world.server, {"a": ("10.8.0.0/29", "10.8.0.1")}, **PLAIN)
    a = world.node("a")
    world.settle()

    def added(pod: str, wish: dict[str, object]) -> list[str]:
        return a.add(pod, ROUTED, config={"args": {"cni": wish}})

    assert added("p", {"ips": ["10.8.0.5"]}) == ["10.8.0.5/29"]
    assert added("q", {"allocateIPWithIndex": 2}) == ["10.8.0.3/29"]
    assert added("r", {"allocateDefaultGateway": True}) == ["10.8.0.1/29"]
    wishes: list[dict[str, object]] = [
        {"ips": ["10.8.0.1"]},
        {"ips": ["10.8.0.7"]},
        {"allocateIPWithIndex": 6},
    ]
    for wish in wishes:
        with pytest.raises(CNIError) as caught:
            added("s", wish)
        assert caught.value.code == Code.INVALID_CONFIG


def test_static_prefixes_are_for_their_nodes_and_those_of_no_node_for_none(world: World) -> None:
    static = (
        NodePart(node="b", prefix="10.8.0.0/29", gateway="10.8.0.5"),
        NodePart(prefix="10.8.0.8/29"),
        NodePart(node="elsewhere", prefix="10.8.0.16/29"),
    )
    put_cidrpool(
        world.server,
        {},
        "10.8.0.0/27",
        static_allocations=static,
        per_node_network_prefix=29,
        gateway_index=1,
    )
    a, b = world.node("a"), world.node("b")
    world.settle()
    (ip,) = b.result("p", ROUTED).ips
    assert (ip.address, ip.gateway) == ("10.8.0.1/29", "10.8.0.5")
    (ip,) = a.result("p", ROUTED).ips
    assert (ip.address, ip.gateway) == ("10.8.0.26/29", "10.8.0.25")
    assert prefixes(world) == {"a": "10.8.0.24/29", "b": "10.8.0.0/29"}


def test_a_node_keeps_the_prefix_that_nv_ipam_gave_to_it(world: World) -> None:
    given = {"a": ("10.8.0.16/29", "10.8.0.17"), "gone": ("10.8.0.0/29", "10.8.0.1")}
    put_cidrpool(
        world.server,
        given,
        "10.8.0.0/27",
        per_node_network_prefix=29,
        gateway_index=1,
        exclusions=(NodePart(start="10.8.0.24", end="10.8.0.31"),),
    )
    a, b = world.node("a"), world.node("b")
    daemon_writes(a, "10.8.0.18", subnet="10.8.0.16/29", pool="cidrpool/routed")
    world.settle()
    assert b.add("p", ROUTED) == ["10.8.0.10/29"]
    assert a.add("p", ROUTED) == ["10.8.0.19/29"]
    assert prefixes(world) == {"a": "10.8.0.16/29", "b": "10.8.0.8/29"}
    c = world.node("c")
    world.settle()
    with pytest.raises(CNIError) as caught:
        c.add("p", ROUTED)
    assert caught.value.code == Code.NO_FREE_ADDRESS
    assert not duplicates((a, b, c))


@pytest.mark.parametrize(
    ("cidr", "length", "index", "first"),
    [
        ("fd00::/48", 64, 1, "fd00:0:0:7::2/64"),
        ("fd00::/48", 120, 1, "fd00::702/120"),
        ("10.0.0.0/8", 20, 1, "10.0.112.2/20"),
        ("10.0.0.0/24", 31, 0, "10.0.0.15/31"),
        ("10.0.0.0/24", 32, None, "10.0.0.7/32"),
    ],
)
def test_prefixes_of_any_length_are_leased(
    world: World, cidr: str, length: int, index: int | None, first: str
) -> None:
    from ipam.addresses import parse_interface, text

    network = parse_interface(first)[1]
    entries = {"a": (str(network), "")}
    put_cidrpool(world.server, entries, cidr, per_node_network_prefix=length, gateway_index=index)
    a, b = world.node("a"), world.node("b")
    world.settle()
    assert a.add("p", ROUTED) == [first]
    (other,) = b.add("p", ROUTED)
    assert parse_interface(other)[1].address != network.address, text(network.address)
    assert other.endswith(f"/{length}")


@pytest.mark.parametrize(
    "spec",
    [
        {"gateway_index": 99},
        {"per_node_network_prefix": 25},
        {"static_allocations": (NodePart(node="a", prefix="10.8.0.4/29"),)},
        {"per_node_exclusions": (ExcludedIndexes(start_index=0, end_index=8),)},
    ],
)
def test_an_invalid_spec_gives_no_address(world: World, spec: dict[str, object]) -> None:
    put_cidrpool(world.server, {}, **PLAIN | spec)
    a = world.node("a")
    assert world.controller.round().unusable == 1
    assert [event.reason for event in world.server.events] == ["InvalidPool"]
    world.settle()
    with pytest.raises(CNIError, match="the pool is valid"):
        a.add("p", ROUTED)
