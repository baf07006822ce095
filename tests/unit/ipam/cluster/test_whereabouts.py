"""Moving over from whereabouts: no other pod gets what it holds, and its pods keep it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.attachment import Attachment
from cni.spec.errors import Code
from ipam.addresses import parse
from ipam.cluster.documents import decode
from ipam.cluster.lessee import FOREIGN_EVERY
from ipam.cluster.objects import AddressBlock, AddressPool, Meta
from ipam.cluster.whereabouts.objects import (
    IPAllocation,
    IPPool,
    IPPoolSpec,
    OverlappingRangeIPReservation,
    OverlappingReservationSpec,
    entries,
    reservation_name,
    reserved_address,
)
from ipam.cluster.whereabouts.settling import GRACE, UNUSED
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.calls import error_of
from tests.unit.ipam.cluster.beside import (
    NAMESPACE,
    allocation,
    offsets,
    put_ippool,
    put_reservation,
    put_slices,
    reserved,
)
from tests.unit.ipam.cluster.nodes import RANGE, ClusterNode, blocks_of, put_pool

IPAM = {"range": RANGE}


@pytest.fixture
def server() -> FakeApi:
    server = FakeApi()
    put_pool(server, compat="Read")
    return server


@pytest.fixture
def node(server: FakeApi, memory_path: Path) -> ClusterNode:
    return ClusterNode(server, memory_path / "a", compat="Read")


def test_what_whereabouts_holds_is_handed_out_by_nobody(server: FakeApi, memory_path: Path) -> None:
    held = {number: allocation(f"old{number}") for number in range(1, 240, 3)}
    put_ippool(server, held)
    nodes = [ClusterNode(server, memory_path / each, each, compat="Read") for each in "abc"]
    given = [node.add(f"p{number}")[0] for number in range(50) for node in nodes]
    theirs = {f"10.0.0.{number}" for number in held}
    assert len(set(given)) == 150
    assert not theirs & set(given)
    foreign = [
        address
        for block in server.look_at_all(AddressBlock).items
        for address in block.spec.foreign
    ]
    assert set(foreign) <= theirs
    assert len(foreign) == len(set(foreign)) > 50


def test_a_reservation_without_an_entry_counts_as_held(server: FakeApi, node: ClusterNode) -> None:
    for number in range(1, 255):
        if number != 77:
            put_reservation(
                server, f"10.0.0.{number}", OverlappingReservationSpec(podref="ns/lost")
            )
    assert node.add("p0") == ["10.0.0.77"]
    refused = error_of(lambda: node.add("p1"))
    assert refused.code == Code.NO_FREE_ADDRESS
    assert "whereabouts" in str(refused)


def test_a_slice_of_a_node_and_an_overlapping_range_count_too(
    server: FakeApi, node: ClusterNode
) -> None:
    put_slices(server, "", "gpu-1", prefix=25)
    put_ippool(
        server,
        {number: allocation(f"s{number}") for number in range(128)},
        "10.0.0.128/25",
        "gpu-1-10.0.0.128-25",
    )
    put_ippool(
        server,
        {number: allocation(f"w{number}") for number in range(126)},
        "10.0.0.0/16",
        "10.0.0.0-16",
    )
    for found in server.look_at_all(OverlappingRangeIPReservation).items:
        server.remove(OverlappingRangeIPReservation, found.metadata.name, NAMESPACE)
    assert node.add("p0") in (["10.0.0.126"], ["10.0.0.127"])


@pytest.mark.parametrize("shared", [True, False])
def test_entries_of_slices_count_when_the_node_slice_pool_is_gone(
    server: FakeApi, memory_path: Path, shared: bool
) -> None:
    """It is linked to a definition, with which Kubernetes deletes it. The pods run on."""
    put_pool(server, compat="Read", shared=shared)
    held = {number: allocation(f"old{number}") for number in range(128)}
    put_ippool(server, held, "10.0.0.0/25", "gpu-1-10.0.0.0-25")
    put_ippool(server, dict(list(held.items())[:126]), "10.0.0.128/25", "gpu-2-10.0.0.128-25")
    for found in reserved(server):
        server.remove(OverlappingRangeIPReservation, found, NAMESPACE)
    node = ClusterNode(server, memory_path / "a", compat="Read")
    ipam = {"range": RANGE, "enable_overlapping_ranges": shared}
    assert node.add("p0", ipam) == ["10.0.0.254"]
    assert error_of(lambda: node.add("p1", ipam)).code == Code.NO_FREE_ADDRESS


def test_another_network_name_is_another_space(server: FakeApi, node: ClusterNode) -> None:
    put_pool(server, name="blue")
    put_ippool(server, {n: allocation(f"b{n}") for n in range(256)}, name="blue-10.0.0.0-24")
    for found in reserved(server):
        server.remove(OverlappingRangeIPReservation, found, NAMESPACE)
    put_reservation(server, "blue-10.0.0.9", OverlappingReservationSpec(podref="ns/b9"))
    assert node.add("p0")


def test_without_compat_nobody_looks_at_the_objects(server: FakeApi, memory_path: Path) -> None:
    put_pool(server, "10.1.0.0/24")
    node = ClusterNode(server, memory_path / "a", compat="Read")
    node.add("p0", {"range": "10.1.0.0/24"})
    node.delete("p0", ipam={"range": "10.1.0.0/24"})
    node.delete("p0", ipam={"range": "10.1.0.0/24"})  # no node knows it any more
    node.steps(30, 60.0)
    kinds = {kind for _, kind in node.api.calls}
    assert not kinds & {"IPPool", "OverlappingRangeIPReservation", "NodeSlicePool"}


def test_a_warm_add_and_del_call_nobody(server: FakeApi, node: ClusterNode) -> None:
    put_ippool(server, {5: allocation("old")})
    node.add("p0")
    node.api.calls.clear()
    node.add("p1")
    node.delete("p0")
    assert not node.api.calls


@pytest.mark.parametrize("ifname", ["eth0", ""])
def test_the_del_of_a_sandbox_of_whereabouts_removes_its_entry(
    server: FakeApi, node: ClusterNode, ifname: str
) -> None:
    put_ippool(server, {5: allocation("old", ifname=ifname), 6: allocation("other")})
    server.down = True
    node.delete("old", "old-old", IPAM)
    node.steps(3, 60.0)
    server.down = False
    node.restart()
    node.steps(8)
    assert offsets(server) == {6: "old-other"}
    assert reserved(server) == ["10.0.0.6"]
    assert not list((node.directory / "whereabouts").iterdir())


def test_a_reservation_of_another_pod_stays(server: FakeApi, node: ClusterNode) -> None:
    put_ippool(server, {5: allocation("old")})
    put_reservation(
        server, "10.0.0.5", OverlappingReservationSpec(podref="ns/somebody", ifname="eth0")
    )
    node.delete("old", "old-old", IPAM)
    node.steps(8)
    assert offsets(server) == {}
    assert reserved(server) == ["10.0.0.5"]


def test_a_del_removes_only_entries_of_its_own_interface(
    server: FakeApi, node: ClusterNode
) -> None:
    put_ippool(server, {5: allocation("old"), 6: allocation("old", ifname="net1")})
    node.delete("old", "old-old", IPAM)
    node.steps(8)
    assert offsets(server) == {6: "old-old"}


def test_entries_without_an_interface_go_only_from_the_pools_of_the_network(
    server: FakeApi, node: ClusterNode
) -> None:
    put_ippool(server, {5: allocation("old", ifname="")})
    put_ippool(server, {9: allocation("old", ifname="")}, "10.9.0.0/24", "10.9.0.0-24")
    node.delete("old", "old-old", IPAM)
    node.steps(8)
    assert offsets(server) == {}
    assert offsets(server, "10.9.0.0-24") == {9: "old-old"}


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.LOST_REQUEST, Fault.CONFLICT])
@pytest.mark.parametrize("verb", ["get", "delete", "patch", "list"])
def test_what_fails_is_done_again(
    server: FakeApi, node: ClusterNode, fault: Fault, verb: str
) -> None:
    left = 2
    kinds = ("IPPool", "OverlappingRangeIPReservation")

    def faults(asked: str, kind: str, name: str) -> Fault | None:
        nonlocal left
        if asked == verb and kind in kinds and left:
            left -= 1
            return fault
        return None

    put_ippool(server, {5: allocation("old"), 6: allocation("other")})
    node.delete("old", "old-old", IPAM)
    node.api.faults = faults
    node.steps(30)
    assert offsets(server) == {6: "old-other"}
    assert reserved(server) == ["10.0.0.6"]


def test_an_address_is_ours_once_its_entry_is_gone(server: FakeApi, node: ClusterNode) -> None:
    server.remove(AddressPool, "10.0.0.0-24")
    put_pool(server, "10.0.0.0/28", compat="Read")
    put_ippool(server, {5: allocation("old")}, "10.0.0.0/28", "10.0.0.0-28")
    ipam = {"range": "10.0.0.0/28"}
    given = {node.add(f"p{number}", ipam)[0] for number in range(13)}
    assert "10.0.0.5" not in given
    assert error_of(lambda: node.add("last", ipam)).code == Code.NO_FREE_ADDRESS
    put_ippool(server, {}, "10.0.0.0/28", "10.0.0.0-28")
    server.remove(OverlappingRangeIPReservation, "10.0.0.5", NAMESPACE)
    node.steps(2, FOREIGN_EVERY)
    assert node.add("last", ipam) == ["10.0.0.5"]
    (block,) = server.look_at_all(AddressBlock).items
    assert block.spec.foreign == ()


@pytest.mark.parametrize("ifname", ["eth0", ""])
def test_a_pod_of_whereabouts_keeps_its_address_in_a_new_sandbox(
    server: FakeApi, node: ClusterNode, ifname: str
) -> None:
    put_ippool(server, {5: allocation("old", ifname=ifname), 6: allocation("other")})
    assert node.add("old", container="new-1") == ["10.0.0.5"]
    assert offsets(server) == {5: "new-1", 6: "old-other"}
    node.steps(3, 400.0)
    assert node.add("old", container="new-2") == ["10.0.0.5"]  # a third sandbox
    node.delete("old", "new-1")
    node.delete("old", "old-old", IPAM)  # late, of the sandbox that whereabouts made
    node.steps(8)
    assert offsets(server) == {5: "new-2", 6: "old-other"}
    assert node.held() == {"10.0.0.5"}
    node.delete("old", "new-2")
    node.steps(8)
    assert offsets(server) == {6: "old-other"}
    assert reserved(server) == ["10.0.0.6"]
    assert node.held() == set()


def test_a_pod_that_comes_back_right_after_its_del_keeps_its_address(
    server: FakeApi, node: ClusterNode
) -> None:
    put_ippool(server, {5: allocation("old")})
    node.delete("old", "old-old", IPAM)
    node.steps(1, GRACE / 2)
    assert node.add("old", container="new-1") == ["10.0.0.5"]
    node.steps(8)
    assert offsets(server) == {5: "new-1"}


def test_the_address_of_such_a_pod_may_be_in_another_nodes_block(
    server: FakeApi, node: ClusterNode, memory_path: Path
) -> None:
    put_ippool(server, {5: allocation("old")})
    put_pool(server, compat="Read", exclude=("10.0.0.48-10.0.0.255",))
    other = ClusterNode(server, memory_path / "b", "node-b", compat="Read")
    first = {other.add(f"p{number}")[0] for number in range(46)}
    assert len(blocks_of(server, "node-b")) == 3
    assert node.add("old", container="new-1") == ["10.0.0.5"]
    assert error_of(lambda: other.add("last")).code == Code.NO_FREE_ADDRESS
    other.steps(3, 400.0)
    assert error_of(lambda: other.add("last")).code == Code.NO_FREE_ADDRESS
    node.delete("old", "new-1")
    node.steps(8)
    other.steps(2, 400.0)
    assert other.add("last") == ["10.0.0.5"]
    assert "10.0.0.5" not in first


def test_while_the_api_server_is_away_a_pod_that_may_have_an_address_waits(
    server: FakeApi, node: ClusterNode
) -> None:
    put_ippool(server, {5: allocation("old")})
    node.add("p0")
    node.restart()
    server.down = True
    assert error_of(lambda: node.add("old", container="new-1")).code == Code.TRY_AGAIN
    server.down = False
    assert node.add("old", container="new-1") == ["10.0.0.5"]


def test_an_add_that_died_leaves_no_entry(server: FakeApi, node: ClusterNode) -> None:
    put_ippool(server, {5: allocation("old")})
    lost = Fault.LOST_ANSWER
    node.api.faults = lambda verb, kind, name: lost if verb == "patch" else None
    assert error_of(lambda: node.add("old", container="new-1")).code == Code.TRY_AGAIN
    node.api.faults = None
    assert offsets(server) == {5: "new-1"}
    node.restart()
    node.steps(4, UNUSED)
    assert offsets(server) == {}


def test_a_pod_that_comes_back_minutes_after_its_node_booted_keeps_its_address(
    server: FakeApi, node: ClusterNode
) -> None:
    put_ippool(server, {5: allocation("old")})
    assert node.add("old", container="new-1") == ["10.0.0.5"]
    node.restart("boot-2")
    node.store.release(Attachment("n1", "new-1", "eth0"))  # by the sweep
    node.steps(30, 10.0)
    assert node.add("old", container="new-2") == ["10.0.0.5"]
    node.steps(8)
    assert offsets(server) == {5: "new-2"}


def test_what_whereabouts_gives_away_of_a_block_all_the_same_is_reported(
    server: FakeApi, node: ClusterNode
) -> None:
    (first,) = node.add("p0")
    number = int(first.rpartition(".")[2])
    put_ippool(server, {number: allocation("theirs"), number + 1: allocation("more")})
    node.steps(1, 500.0)
    assert node.add("p1") == [f"10.0.0.{number + 2}"]
    node.steps(1)
    clashes = [event for event in server.events if event.reason == "AddressConflict"]
    assert [first in event.message for event in clashes] == [True]


def test_an_ippool_that_lacks_everything_hides_no_other(server: FakeApi, node: ClusterNode) -> None:
    bare = decode(b'{"metadata": {"name": "x", "namespace": "kube-system", "uid": "u"}}', IPPool)
    server.put(bare)
    put_ippool(server, {number: allocation(f"old{number}") for number in range(1, 254)})
    assert node.add("p0") == ["10.0.0.254"]


def test_entries_of_a_range_that_is_written_otherwise_count_for_a_private_one(
    server: FakeApi, memory_path: Path
) -> None:
    put_pool(server, compat="Read", shared=False)
    held = {number: allocation(f"old{number}") for number in range(1, 250)}
    put_ippool(server, held, "10.0.0.5/24", "10.0.0.5-24")
    node = ClusterNode(server, memory_path / "a", compat="Read")
    given = node.add("p0", {"range": RANGE, "enable_overlapping_ranges": False})
    assert given[0] in {f"10.0.0.{number}" for number in range(1, 6)}


def test_a_pool_that_is_switched_to_read_learns_of_its_blocks(
    server: FakeApi, node: ClusterNode
) -> None:
    pool = put_pool(server)
    put_ippool(server, {number: allocation(f"old{number}") for number in range(256)})
    (first,) = node.add("p0")
    server.put(replace(pool, spec=replace(pool.spec, compat="Read")))
    node.steps(1, 500.0)
    (block,) = server.look_at_all(AddressBlock).items
    assert len(block.spec.foreign) == block.spec.foreign.count(first) + 15
    assert error_of(lambda: node.add("p1")).code == Code.NO_FREE_ADDRESS
    node.steps(1)
    clashes = [event for event in server.events if event.reason == "AddressConflict"]
    assert [first in event.message for event in clashes] == [True]


@pytest.mark.parametrize(
    ("name", "network", "address"),
    [
        ("10.0.0.5", "", "10.0.0.5"),
        ("blue-10.0.0.5", "blue", "10.0.0.5"),
        ("blue-10.0.0.5", "", None),
        ("fd00--1", "", "fd00::1"),
        ("2001-db9--0", "", "2001:db9::"),
        ("n-2001-db9--0", "n", "2001:db9::"),
        ("10.0.0.5", "blue", None),
    ],
)
def test_names_of_reservations(name: str, network: str, address: str | None) -> None:
    expected = None if address is None else parse(address)
    assert reserved_address(name, network) == expected
    if expected is not None:
        assert reservation_name(network, expected) == name


def test_offsets_that_cannot_be_read_are_left_out() -> None:
    held = dict.fromkeys(["1", "x", "-1", "300", "9" * 40, "٣"], IPAllocation(id="c"))
    pool = IPPool(metadata=Meta(name="10.0.0.0-24"), spec=IPPoolSpec(range=RANGE, allocations=held))
    assert [entry.address for entry in entries(pool)] == [parse("10.0.0.1")]
    broken = replace(pool, spec=IPPoolSpec(range="nonsense", allocations=held))
    assert entries(broken) == []
