"""nv-ipam's IPPools: nodes lease blocks of them, and none gives what another one may hold."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from ipam.addresses import parse
from ipam.leases.objects import AddressCounts, AddressPool
from ipam.nv_ipam import importing
from ipam.nv_ipam.pool_import import ExcludedIndexes, NodePart
from ipam.store.reservations import unnamed
from kube.resources import Meta, Node, NodeSelector, Requirement, SelectorTerm, selects
from tests.unit.ipam.nv_ipam.nodes import (
    World,
    daemon_writes,
    duplicates,
    own_pool,
    put_cidrpool,
    put_ippool,
)

GATEWAY = {"gateway": "10.0.0.1"}


@pytest.fixture
def world(memory_path: Path) -> World:
    return World(memory_path)


def labelled(node: Node) -> Node:
    meta = Meta(name=node.name, uid=node.uid, labels={"rdma": "yes"})
    return replace(node, metadata=meta)


def test_a_node_with_a_full_block_leases_another_until_the_pool_is_full(world: World) -> None:
    put_ippool(world.server, {}, "10.0.0.0/27", per_node_block_size=4, **GATEWAY)
    a = world.node("a")
    world.settle()
    given = [address for number in range(29) for address in a.add(f"p{number}")]
    assert sorted(map(parse, (each.partition("/")[0] for each in given))) == [
        parse("10.0.0.0") + number for number in range(2, 31)
    ]
    assert {each.partition("/")[2] for each in given} == {"27"}
    with pytest.raises(CNIError, match=r"ippool/pool: AddressPool") as caught:
        world.add(a, "p30")
    assert caught.value.code == Code.NO_FREE_ADDRESS


def test_eight_nodes_share_a_pool_that_has_entries_for_five(world: World) -> None:
    put_ippool(world.server, {}, "10.0.0.0/26", per_node_block_size=12, **GATEWAY)
    nodes = [world.node(f"n{number}") for number in range(8)]
    world.settle()
    assert own_pool(world.server).status.block_size == 8
    given = 0
    for number in range(64):
        try:
            world.add(nodes[number % 8], f"p{number}")
            given += 1
        except CNIError as error:
            assert error.code == Code.NO_FREE_ADDRESS
    assert given == 61  # all that there is
    assert not duplicates(nodes)
    assert all(node.held() for node in nodes)


def test_requested_addresses_and_the_gateway_are_given_to_one_pod(world: World) -> None:
    put_ippool(world.server, {}, per_node_block_size=16, **GATEWAY)
    a, b = world.node("a"), world.node("b")
    world.settle()
    ask = {"args": {"cni": {"ips": ["10.0.0.77"]}}}
    assert a.add("p", config=ask) == ["10.0.0.77/24"]
    with pytest.raises(CNIError) as caught:
        b.add("q", config=ask)
    assert caught.value.code in (Code.ADDRESS_TAKEN, Code.TRY_AGAIN)
    assert not duplicates((a, b))
    gateway = {"args": {"cni": {"allocateDefaultGateway": True}}}
    (ip,) = a.result("router", config=gateway).ips
    assert (ip.address, ip.gateway) == ("10.0.0.1/24", None)
    with pytest.raises(CNIError, match=r"args\.cni\.ips") as refused:
        a.add("r", config={"args": {"cni": {"allocateIPWithIndex": 3}}})
    assert refused.value.code == Code.INVALID_CONFIG


def test_exclusions_are_those_of_nv_ipam(world: World) -> None:
    put_ippool(
        world.server,
        {},
        "10.0.0.0/28",
        per_node_block_size=5,
        exclusions=(NodePart(start="10.0.0.13", end="10.0.0.20"),),
        per_node_exclusions=(ExcludedIndexes(start_index=0, end_index=1),),
    )
    a = world.node("a")
    world.settle()
    given = {address for number in range(6) for address in a.add(f"p{number}")}
    # Of the runs .1-.5, .6-.10 and .11-.14 the first two are kept out, and .13 and .14.
    assert given == {f"10.0.0.{last}/28" for last in (3, 4, 5, 8, 9, 10)}
    world.settle(8)
    (pool,) = world.server.look_at_all(AddressPool).items
    assert pool.status.addresses == AddressCounts(capacity=6, used=6)
    exhausted = {each.type: each.status for each in pool.status.conditions}["Exhausted"]
    assert exhausted == "True"


def test_only_selected_nodes_get_addresses(world: World) -> None:
    only = NodeSelector(
        node_selector_terms=(
            SelectorTerm(match_expressions=(Requirement("rdma", "In", ("yes",)),)),
        )
    )
    put_ippool(world.server, {}, per_node_block_size=16, node_selector=only)
    a, b = world.node("a"), world.node("b")
    machines = world.server.machines
    machines["a"] = labelled(machines["a"])
    world.settle()
    assert a.add("p")
    with pytest.raises(CNIError, match="valid and selects this node"):
        b.add("q")
    machines["b"] = labelled(machines["b"])
    b.step(400.0)
    assert world.add(b, "q")


@pytest.mark.parametrize(
    ("operator", "values", "selected"),
    [
        ("In", ("1", "5"), True),
        ("In", ("1",), False),
        ("NotIn", ("1",), True),
        ("Exists", (), True),
        ("DoesNotExist", (), False),
        ("Gt", ("4",), True),
        ("Gt", ("5",), False),
        ("Lt", ("6",), True),
        ("Lt", ("x",), False),
        ("Like", ("5",), False),
    ],
)
def test_selectors_are_those_of_kubernetes(
    operator: str, values: tuple[str, ...], selected: bool
) -> None:
    term = SelectorTerm(match_expressions=(Requirement("key", operator, values),))
    selector = NodeSelector(node_selector_terms=(SelectorTerm(), term))
    assert selects(selector, "n", {"key": "5"}) is selected


def test_a_term_without_requirements_selects_no_node_and_a_field_names_one() -> None:
    assert not selects(NodeSelector(node_selector_terms=(SelectorTerm(),)), "n", {})
    named = SelectorTerm(match_fields=(Requirement("metadata.name", "In", ("n",)),))
    assert selects(NodeSelector(node_selector_terms=(named,)), "n", {})
    assert not selects(NodeSelector(node_selector_terms=(named,)), "m", {})
    both = SelectorTerm(match_fields=(Requirement("metadata.name", "In", ("n", "m")),))
    assert not selects(NodeSelector(node_selector_terms=(both,)), "n", {})  # an error in Kubernetes


@pytest.mark.parametrize("spoilt", ["running", "damaged", "unseen"])
def test_a_node_gives_nothing_while_its_store_may_lack_something(
    world: World, spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.254")}, per_node_block_size=254)
    a = world.node("a")
    daemon_writes(a, "10.0.0.3")
    if spoilt == "running":

        def answers(path: Path) -> None:
            raise CNIError(Code.TRY_AGAIN, "nv-ipam's daemon still answers")

        monkeypatch.setattr(importing, "_require_stopped", answers)
    elif spoilt == "damaged":
        a.daemon_store.write_bytes(b"{")
    else:
        monkeypatch.setattr(a.pools, "_daemon_store", Path("/nowhere/nv-ipam/store"))
    world.settle()
    with pytest.raises(CNIError, match="the daemon's store") as caught:
        a.add("p")
    assert caught.value.code == Code.TRY_AGAIN
    assert not a.held()


def test_the_store_is_imported_once_and_again_after_a_loss(world: World) -> None:
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.254")}, per_node_block_size=254)
    a = world.node("a")
    daemon_writes(a, "10.0.0.3")
    world.settle()
    assert a.held() == {"10.0.0.3"}
    a.delete("", container="old10.0.0.3", ifname="net1")
    a.restart()
    world.settle()
    assert a.held() == set()
    for file in a.directory.iterdir():
        if file.is_file() and file.name != "nv-ipam.json":
            file.unlink()
    a.restart()
    world.settle()
    assert a.held() == {"10.0.0.3"}


def test_check_finds_what_was_imported(world: World) -> None:
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.254")}, per_node_block_size=254)
    a = world.node("a")
    daemon_writes(a, "10.0.0.3")
    world.settle()
    assert a.store.held_by(unnamed(Attachment("net", "old10.0.0.3", "net1")))


def test_an_address_pool_has_what_the_ippool_says_and_keeps_what_others_write(
    world: World,
) -> None:
    put_ippool(world.server, {}, per_node_block_size=50)
    world.controller.round()
    pool = own_pool(world.server)
    assert pool.metadata.name.endswith("-10.0.0.0-24")
    assert (pool.spec.network_name, pool.spec.range) == ("nv-ipam/pools", "10.0.0.0/24")
    assert (pool.spec.block_size, pool.spec.exclude) == (32, ())
    world.server.put(replace(pool, spec=replace(pool.spec, max_blocks_per_node=2)))
    put_ippool(world.server, {}, per_node_block_size=9)
    world.controller.round()
    spec = own_pool(world.server).spec
    assert (spec.block_size, spec.max_blocks_per_node) == (8, 2)


@pytest.mark.parametrize(
    "spec",
    [
        {"gateway": "10.1.0.1"},
        {"per_node_block_size": 0},
        {"exclusions": (NodePart(start="10.0.0.9", end="x"),)},
        {"subnet": "10.0.0.0/33"},
        {
            "subnet": "10.0.0.0/8",
            "per_node_exclusions": (ExcludedIndexes(start_index=0, end_index=0),),
        },
    ],
)
def test_an_invalid_pool_gets_no_address_pool_and_an_event_and_stops_no_other(
    world: World, spec: dict[str, object]
) -> None:
    put_ippool(world.server, {}, **{"per_node_block_size": 9} | spec)  # type: ignore[arg-type]
    put_ippool(world.server, {}, "10.2.0.0/24", "good", per_node_block_size=9)
    a = world.node("a")
    assert world.controller.round().unusable == 1
    assert [event.reason for event in world.server.events] == ["InvalidPool"]
    world.settle()
    with pytest.raises(CNIError, match="the pool is valid") as caught:
        a.add("p")
    assert caught.value.code == Code.TRY_AGAIN
    assert a.add("p", {"poolName": "good"})
    assert [each.spec.range for each in world.server.look_at_all(AddressPool).items] == [
        "10.2.0.0/24"
    ]


def test_pools_that_overlap_never_give_an_address_twice(world: World) -> None:
    for name, subnet in (("pool", "10.0.0.0/27"), ("twin", "10.0.0.0/27"), ("wide", "10.0.0.0/26")):
        put_ippool(world.server, {}, subnet, name, per_node_block_size=8)
    nodes = [world.node("a"), world.node("b")]
    world.settle(4)
    for number in range(90):
        try:
            name = ("pool", "twin", "wide")[number % 3]
            world.add(nodes[number % 2], f"p{number}", {"poolName": name})
        except CNIError as error:
            assert error.code == Code.NO_FREE_ADDRESS
    assert not duplicates(nodes)
    assert sum(len(node.held()) for node in nodes) > 45


def test_pools_that_overlap_with_blocks_of_other_sizes_are_reported(world: World) -> None:
    put_ippool(world.server, {}, "10.0.0.0/24", "pool", per_node_block_size=8)
    put_cidrpool(world.server, {}, "10.0.0.0/24", "routed", per_node_network_prefix=27)
    put_ippool(world.server, {}, "10.0.0.0/16", "wide", per_node_block_size=16)
    for _ in range(3):
        unusable = world.controller.round().unusable
    assert unusable == 1
    assert [event.reason for event in world.server.events] == ["InvalidPool"]
    ready = {
        pool.spec.range: [each.reason for each in pool.status.conditions if each.type == "Ready"]
        for pool in world.server.look_at_all(AddressPool).items
    }
    assert "BlockSizeDiffers" in str(ready)
