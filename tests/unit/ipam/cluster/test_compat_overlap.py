"""Pools of one network name that overlap, one of which is shared with whereabouts.

A block that is leased by one pool is handed out for all that overlap it. So the strictest `compat`
of them counts for each, whether a controller runs or not.
"""

from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import Code
from ipam.addresses import Interval, parse
from ipam.blocks import LeasedBlock
from ipam.cluster.lessee import FOREIGN_EVERY
from ipam.cluster.objects import AddressBlock, AddressPool
from ipam.cluster.pools import AT_ONCE
from ipam.cluster.whereabouts.objects import OverlappingRangeIPReservation
from ipam.ranges import merged
from ipam.scope import Compat
from tests.fake_api import FakeApi
from tests.unit.ipam.calls import error_of
from tests.unit.ipam.cluster.beside import NAMESPACE, allocation, offsets, put_ippool
from tests.unit.ipam.cluster.nodes import ClusterNode, put_pool

NARROW = "10.0.0.0/25"  # of podfabric alone
OURS = {"range": NARROW}
THEIRS = {number: allocation(f"old{number}") for number in range(1, 40)}  # of RANGE


def switch(server: FakeApi, pool: AddressPool, compat: Compat) -> None:
    there = server.look(AddressPool, pool.metadata.name)
    server.put(replace(there, spec=replace(there.spec, compat=compat)))


@pytest.mark.parametrize("compat", ["Read", "Coexist"])
def test_no_pod_of_ours_gets_an_address_by_the_pool_without_compat(
    memory_path: Path, compat: Compat
) -> None:
    server = FakeApi()
    put_pool(server, compat=compat)
    put_pool(server, NARROW)
    put_ippool(server, THEIRS)
    node = ClusterNode(server, memory_path / "a", compat=compat)
    given = [parse(node.add(f"p{number}", OURS)[0]) & 0xFF for number in range(60)]
    assert not set(given) & set(THEIRS)
    assert {block.spec.compat for block in server.look_at_all(AddressBlock).items} == {compat}


def test_whereabouts_is_told_of_blocks_that_are_leased_by_the_pool_without_compat(
    memory_path: Path,
) -> None:
    server = FakeApi()
    put_pool(server, compat="Coexist")
    put_pool(server, NARROW)
    put_ippool(server, {1: allocation("old1")})
    node = ClusterNode(server, memory_path / "a", compat="Coexist")
    (given,) = node.add("p0", OURS)
    (block,) = server.look_at_all(AddressBlock).items
    assert block.spec.pool == "10.0.0.0-25"
    told = offsets(server)
    assert told[parse(given) & 0xFF] == f"podfabric/{block.metadata.uid}"
    assert server.look(OverlappingRangeIPReservation, given, NAMESPACE)


def test_blocks_of_before_learn_of_a_pool_that_is_shared_from_now_on(memory_path: Path) -> None:
    server = FakeApi()
    wide, _ = put_pool(server), put_pool(server, NARROW)
    put_ippool(server, {number: allocation(f"old{number}") for number in range(128)})
    node = ClusterNode(server, memory_path / "a", compat="Read")
    node.add("p0", OURS)
    switch(server, wide, "Read")
    node.steps(1, 460.0)
    refused = error_of(lambda: node.add("p1", OURS))
    assert refused.code == Code.NO_FREE_ADDRESS
    assert "whereabouts" in str(refused)


def test_a_claim_sees_that_another_pool_is_shared_since(memory_path: Path) -> None:
    server = FakeApi()
    wide, _ = put_pool(server), put_pool(server, NARROW)
    put_ippool(server, THEIRS)
    node = ClusterNode(server, memory_path / "a", compat="Read")
    node.steps()
    switch(server, wide, "Read")  # the node still takes both for its own
    (given,) = node.add("p0", OURS)
    assert parse(given) & 0xFF not in THEIRS
    assert {block.spec.compat for block in server.look_at_all(AddressBlock).items} == {"Read"}


@pytest.mark.parametrize("others", [0, AT_ONCE])
def test_a_node_that_is_not_told_of_whereabouts_leases_nothing_there(
    memory_path: Path, others: int
) -> None:
    """Its configuration says None: it may not read what whereabouts holds."""
    server = FakeApi()
    for number in range(others):
        put_pool(server, f"10.9.{number}.0/24", name="a")
    put_pool(server, compat="Coexist")
    put_pool(server, NARROW)
    put_ippool(server, THEIRS)
    node = ClusterNode(server, memory_path / "a")
    refused = error_of(lambda: node.add("p0", OURS))
    assert refused.code == Code.TRY_AGAIN
    assert "ipam.compat" in str(refused)
    assert not server.look_at_all(AddressBlock).items


def test_blocks_of_a_pool_that_is_gone_go_by_one_that_has_their_addresses(
    memory_path: Path,
) -> None:
    server = FakeApi()
    wide, narrow = put_pool(server), put_pool(server, NARROW, exclude=("10.0.0.10",))
    put_ippool(server, {number: allocation(f"old{number}") for number in range(128)})
    node = ClusterNode(server, memory_path / "a", compat="Read")
    node.add("p0", OURS)
    server.remove(AddressPool, narrow.metadata.name)
    switch(server, wide, "Read")
    node.steps(1, 460.0)
    assert node.add("p1")[0] > "10.0.0.127"  # not of the block of before
    (row,) = (row for row in rows(node) if row.pool == narrow.metadata.name)
    excluded = parse("10.0.0.10")  # which the block may have or not
    assert row.kept_out == merged((Interval(excluded, excluded), row.interval))


@pytest.mark.parametrize("compat", ["Read", "Coexist"])
def test_addresses_of_a_block_whose_pool_is_gone_are_handed_out_as_the_others_say(
    memory_path: Path, compat: Compat
) -> None:
    server = FakeApi()
    put_pool(server, compat="Read")
    put_pool(server, "10.0.0.0/23", compat=compat)
    narrow = put_pool(server, NARROW)
    node = ClusterNode(server, memory_path / "a", compat=compat)
    (first,) = node.add("p0", OURS)
    server.remove(AddressPool, narrow.metadata.name)
    node.steps(1, 460.0)
    assert {block.spec.compat for block in server.look_at_all(AddressBlock).items} == {compat}
    (second,) = node.add("p1")
    assert len(server.look_at_all(AddressBlock).items) == 1
    found = server.look_at_all(OverlappingRangeIPReservation).items
    expected = {first, second} if compat == "Coexist" else set()
    assert {each.metadata.name for each in found} == expected


def test_whereabouts_finds_placeholders_in_an_ippool_that_it_did_not_need_before(
    memory_path: Path,
) -> None:
    """Else its ADD and DEL might come between ours, and remove our reservation."""
    server = FakeApi()
    put_pool(server, compat="Coexist")
    put_pool(server, "10.0.0.128/25")
    node = ClusterNode(server, memory_path / "a", compat="Coexist")
    node.add("p0")
    assert set(offsets(server, "10.0.0.128-25")) == set(range(112, 128))
    node.delete("p0")
    node.lessee.leaving = True
    node.steps(8)
    assert not offsets(server, "10.0.0.128-25")


def test_blocks_of_a_private_range_keep_their_placeholders_beside_a_shared_range(
    memory_path: Path,
) -> None:
    """Both have blocks of the same addresses, and each its own IPPool."""
    server = FakeApi()
    put_pool(server, compat="Coexist")
    put_pool(server, "10.0.0.128/25", compat="Coexist", shared=False)
    private = {"range": "10.0.0.128/25", "enable_overlapping_ranges": False}
    node = ClusterNode(server, memory_path / "a", compat="Coexist")
    node.add("p0", private)
    told = offsets(server, "10.0.0.128-25")
    assert len(told) == 16
    node.add("q0")
    assert offsets(server, "10.0.0.128-25") == told
    node.steps(4)
    node.api.calls.clear()
    node.steps(3, FOREIGN_EVERY + 1)
    assert node.api.calls["patch", "IPPool"] == 0
    assert offsets(server, "10.0.0.128-25") == told
    assert set(offsets(server)) == set(range(240, 256))


def test_addresses_of_which_whereabouts_takes_no_notice_are_left_alone(memory_path: Path) -> None:
    server = FakeApi()
    put_pool(server, "fd00::/60", compat="Coexist")
    node = ClusterNode(server, memory_path / "a", compat="Coexist")
    node.add("p0", {"range": "fd00::/60"})
    for start in ("fd00::8000:0:0:0", "fd00:0:0:1::"):
        refused = error_of(lambda: node.add("p1", {"range": "fd00::/60", "range_start": start}))  # noqa: B023
        assert refused.code == Code.NO_FREE_ADDRESS
        assert "whereabouts" in str(refused)
    asked = "IP=fd00::8000:0:0:7"
    refused = error_of(lambda: node.add("p2", {"range": "fd00::/60"}, args=asked))
    assert refused.code == Code.ADDRESS_TAKEN
    assert "is so far up in its range" in str(refused)
    (only,) = server.look_at_all(AddressBlock).items
    assert parse(only.spec.first) - parse("fd00::") < 1 << 63


def rows(node: ClusterNode) -> list[LeasedBlock]:
    with node.files.transaction() as tables:
        return list(tables.blocks())


def test_pools_that_do_not_overlap_stay_as_they_are(memory_path: Path) -> None:
    server = FakeApi()
    put_pool(server, compat="Coexist")
    put_pool(server, "10.0.1.0/24")
    put_pool(server, NARROW, name="blue")
    node = ClusterNode(server, memory_path / "a", compat="Coexist")
    node.add("p0", {"range": "10.0.1.0/24"})
    node.add("p1", {"range": NARROW, "network_name": "blue"})
    assert {block.spec.compat for block in server.look_at_all(AddressBlock).items} == {"None"}
