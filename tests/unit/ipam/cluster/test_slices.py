"""Ranges that whereabouts cuts into slices of nodes, beside nodes that still run whereabouts."""

from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import Code
from ipam.addresses import parse
from ipam.cluster.lessee import FOREIGN_EVERY
from ipam.cluster.objects import AddressPool
from ipam.cluster.whereabouts.objects import (
    IPPool,
    NodeSlicePool,
)
from tests.fake_api import FakeApi
from tests.unit.ipam.calls import error_of
from tests.unit.ipam.cluster.beside import (
    NAMESPACE,
    allocation,
    leased,
    offsets,
    put_ippool,
    put_slices,
    told,
)
from tests.unit.ipam.cluster.beside import node as node
from tests.unit.ipam.cluster.nodes import RANGE, ClusterNode, blocks_of, put_pool

SLICE = "10.0.0.64/26"
IPPOOL = "node-a-10.0.0.64-26"


@pytest.fixture
def server() -> FakeApi:
    server = FakeApi()
    put_pool(server, compat="Coexist")
    put_slices(server, "theirs", "node-a")
    return server


def test_a_node_leases_in_its_own_slice_only(server: FakeApi, node: ClusterNode) -> None:
    given = {node.add(f"p{number}")[0] for number in range(64)}
    assert given == {str(each) for each in ip_network(SLICE)}
    refused = error_of(lambda: node.add("q0"))
    assert refused.code == Code.NO_FREE_ADDRESS
    assert "whereabouts" in str(refused)


def test_placeholders_are_in_the_ippool_that_whereabouts_reads_on_the_node(
    server: FakeApi, node: ClusterNode
) -> None:
    node.add("p0")
    assert server.look(IPPool, IPPOOL, NAMESPACE).spec.range == SLICE
    assert told(server, IPPOOL) == leased(server)
    assert told(server, "10.0.0.0-24") == leased(server)
    with pytest.raises(Exception, match="theirs"):
        server.look(IPPool, "theirs-10.0.0.0-26", NAMESPACE)


def test_what_whereabouts_gave_away_of_the_slice_is_handed_out_by_no_node(
    server: FakeApi, node: ClusterNode
) -> None:
    held = {number: allocation(f"old{number}") for number in range(1, 60)}
    put_ippool(server, held, SLICE, IPPOOL)
    given = [node.add(f"p{number}")[0] for number in range(4)]
    assert {parse(each) - parse("10.0.0.64") for each in given} == {60, 61, 62, 63}
    assert node.add("old7", container="new-1") == ["10.0.0.71"]
    node.delete("old7", "new-1")
    node.delete("old8", "old-old8", {"range": RANGE})
    node.steps(8)
    theirs = {key for key, id_ in offsets(server, IPPOOL).items() if id_.startswith("old-")}
    assert set(held) - theirs == {7, 8}


def test_a_slice_that_goes_to_another_node_has_placeholders_there_too(
    server: FakeApi, node: ClusterNode
) -> None:
    node.add("p0")
    put_slices(server, "theirs", "new")
    node.steps(1, FOREIGN_EVERY + 1)
    assert told(server, "new-10.0.0.64-26") == leased(server)
    node.delete("p0")
    node.lessee.leaving = True
    node.steps(8)
    assert blocks_of(server) == []
    for name in (IPPOOL, "new-10.0.0.64-26", "10.0.0.0-24"):
        assert not told(server, name)


def test_blocks_from_before_have_placeholders_in_each_slice_that_they_meet(
    server: FakeApi, node: ClusterNode
) -> None:
    server.remove(NodeSlicePool, "nad", NAMESPACE)
    node.add("p0")
    put_slices(server, "1", "2", "3", "4", "theirs", range_="10.0.0.192/26", prefix=29)
    put_slices(server, *[str(n) for n in range(31)], "last", prefix=29)
    node.steps(1, FOREIGN_EVERY + 1)
    assert told(server, "last-10.0.0.248-29") == {f"10.0.0.{n}" for n in range(248, 256)}
    assert told(server, "30-10.0.0.240-29") == {f"10.0.0.{n}" for n in range(240, 248)}


def test_a_pod_gets_its_entry_where_whereabouts_looks_for_it(
    server: FakeApi, node: ClusterNode
) -> None:
    (given,) = node.add("p0")
    pool = server.look(AddressPool, "10.0.0.0-24")
    server.put(replace(pool, spec=replace(pool.spec, mirror=True)))
    node.steps(1, FOREIGN_EVERY + 1)
    offset = parse(given) - parse("10.0.0.64")
    assert offsets(server, IPPOOL)[offset] == "p0-1"
    assert "p0-1" not in offsets(server).values()
    node.delete("p0")
    node.steps(8)
    assert "p0-1" not in offsets(server, IPPOOL).values()


def test_a_node_without_a_slice_leases_nothing(server: FakeApi, node: ClusterNode) -> None:
    put_slices(server, "theirs", "others")
    refused = error_of(lambda: node.add("p0"))
    assert refused.code == Code.TRY_AGAIN
    assert "NodeSlicePool nad gives node node-a no slice" in str(refused)
    assert blocks_of(server) == []


def test_a_slice_that_is_smaller_than_a_block_is_refused(
    server: FakeApi, node: ClusterNode
) -> None:
    put_slices(server, "theirs", "node-a", prefix=29)
    refused = error_of(lambda: node.add("p0"))
    assert refused.code == Code.TRY_AGAIN
    assert "spec.blockSize" in str(refused)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("10.0.0.7", "is in slice 10.0.0.0/26 of node theirs"),
        ("10.0.0.200", "is in no node's slice"),
    ],
)
def test_an_address_outside_of_its_slice_is_refused_by_naming_the_slice(
    server: FakeApi, node: ClusterNode, address: str, why: str
) -> None:
    refused = error_of(lambda: node.add("p0", args=f"IP={address}"))
    assert refused.code == Code.ADDRESS_TAKEN
    assert f"{address} {why}: NodeSlicePool nad gives this node {SLICE}" in str(refused)
    assert "exclude" not in str(refused)
    assert blocks_of(server) == []
    pool = server.look(AddressPool, "10.0.0.0-24")
    server.put(replace(pool, spec=replace(pool.spec, exclude=("10.0.0.70",))))
    error = error_of(lambda: node.add("p1", args="IP=10.0.0.70"))
    assert error.code == Code.ADDRESS_TAKEN
    assert "kept out of AddressPool 10.0.0.0-24" in str(error)


def test_a_range_without_reservations_is_not_shared_by_slices(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pool(server, compat="Coexist", shared=False)
    ipam = {"range": RANGE, "enable_overlapping_ranges": False}
    refused = error_of(lambda: node.add("p0", ipam))
    assert refused.code == Code.TRY_AGAIN
    assert "NodeSlicePool nad" in str(refused)


def test_a_range_beside_slices_is_used_but_for_the_slices(
    server: FakeApi, node: ClusterNode
) -> None:
    """A range that is not cut, of which another definition cuts a part."""
    put_slices(server, "theirs", range_="10.0.0.128/25", prefix=26)
    given = [node.add(f"p{number}")[0] for number in range(100)]
    assert all(ip_address(each) in ip_network("10.0.0.0/25") for each in given)


def test_slices_of_another_network_name_do_not_count(server: FakeApi, memory_path: Path) -> None:
    put_pool(server, compat="Coexist", name="blue")
    put_slices(server, "theirs", "node-a", name="blue", prefix=25)
    node = ClusterNode(server, memory_path / "a", compat="Coexist")
    ipam = {"range": RANGE, "network_name": "blue"}
    given = [node.add(f"p{number}", ipam)[0] for number in range(100)]
    assert all(ip_address(each) in ip_network("10.0.0.128/25") for each in given)
    assert told(server, "blue-node-a-10.0.0.128-25") == leased(server)
