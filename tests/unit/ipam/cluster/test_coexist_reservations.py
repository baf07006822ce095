"""Reservations of our addresses with whereabouts: each address in use has one, and no other has."""

from pathlib import Path

from msgspec.structs import replace

from ipam.addresses import parse
from ipam.cluster.lessee import FOREIGN_EVERY
from ipam.cluster.objects import AddressBlock, AddressPool
from ipam.cluster.whereabouts.objects import (
    IPPool,
    OverlappingRangeIPReservation,
    OverlappingReservationSpec,
)
from ipam.cluster.whereabouts.settling import GRACE, UNUSED
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.cluster.beside import (
    NAMESPACE,
    allocation,
    offsets,
    put_ippool,
    put_reservation,
    reserved,
)
from tests.unit.ipam.cluster.beside import node as node
from tests.unit.ipam.cluster.beside import server as server  # fixtures
from tests.unit.ipam.cluster.nodes import RANGE, ClusterNode, alias, put_pool


def owners(server: FakeApi) -> dict[str, str]:
    """Whose each reservation is."""
    found = server.look_at_all(OverlappingRangeIPReservation).items
    return {each.metadata.name: each.spec.podref for each in found}


def set_compat(server: FakeApi, compat: str) -> None:
    pool = server.look(AddressPool, "10.0.0.0-24")
    server.put(replace(pool, spec=replace(pool.spec, compat=compat)))


def test_a_pod_that_is_made_again_at_once_keeps_the_reservation_of_its_address(
    server: FakeApi, node: ClusterNode
) -> None:
    (first,) = node.add("p0")
    node.steps(1)
    node.delete("p0")
    node.steps(1, GRACE / 3)
    assert node.add("p0", container="p0-2") == [first]
    node.steps(20)
    assert owners(server) == {first: "ns/p0"}
    node.delete("p0", "p0-2")
    node.steps(8)
    assert reserved(server) == []


def test_a_late_removal_does_not_find_the_reservation_of_the_next_sandbox(
    server: FakeApi, node: ClusterNode
) -> None:
    (first,) = node.add("p0")
    node.delete("p0")

    def late(verb: str, kind: str, name: str) -> Fault | None:
        is_it = verb == "delete" and kind == "OverlappingRangeIPReservation"
        return Fault.LATE if is_it else None

    node.steps(1)
    node.api.faults = late
    node.steps(4)
    assert server.late
    node.api.faults = None
    assert node.add("p0", container="p0-2") == [first]
    server.deliver()
    assert owners(server) == {first: "ns/p0"}


def test_an_address_that_a_pod_of_ours_has_just_left_is_at_the_next_pods_disposal(
    server: FakeApi, node: ClusterNode
) -> None:
    given = [node.add(f"p{number}")[0] for number in range(6)]
    for number in range(6):
        node.delete(f"p{number}")
    again = [node.add(f"q{number}")[0] for number in range(6)]
    assert again == given
    node.steps(20)
    assert owners(server) == {each: f"ns/q{number}" for number, each in enumerate(given)}


def test_an_address_that_a_gc_released_is_at_the_next_pods_disposal(
    server: FakeApi, node: ClusterNode
) -> None:
    (first,) = node.add("p0")
    node.store.collect("n1", [])
    assert node.add("q0") == [first]
    node.steps(3, UNUSED)
    assert owners(server) == {first: "ns/q0"}


def test_pods_from_before_the_switch_to_coexist_get_reservations(
    server: FakeApi, node: ClusterNode
) -> None:
    set_compat(server, "Read")
    given = [node.add(f"p{number}")[0] for number in range(3)]
    assert reserved(server) == []
    set_compat(server, "Coexist")
    node.steps(1, 500.0)
    assert owners(server) == {each: f"ns/p{number}" for number, each in enumerate(given)}
    (block,) = server.look_at_all(AddressBlock).items
    assert (block.spec.compat, block.spec.foreign) == ("Coexist", ())
    node.delete("p0")
    node.steps(8)
    assert reserved(server) == given[1:]


def test_reservations_that_the_reconciler_removed_are_made_again(
    server: FakeApi, node: ClusterNode
) -> None:
    given = [node.add(f"p{number}")[0] for number in range(2)]
    server.remove(OverlappingRangeIPReservation, given[0], NAMESPACE)
    node.steps(2, FOREIGN_EVERY)
    assert reserved(server) == given
    assert not server.events


def test_another_pod_that_got_the_address_meanwhile_is_reported(
    server: FakeApi, node: ClusterNode
) -> None:
    (first,) = node.add("p0")
    server.remove(OverlappingRangeIPReservation, first, NAMESPACE)
    put_reservation(server, first, OverlappingReservationSpec(podref="ns/theirs", ifname="eth0"))
    node.steps(2, FOREIGN_EVERY)
    assert {event.reason for event in server.events} == {"AddressConflict"}
    assert owners(server) == {first: "ns/theirs"}


def test_addresses_of_a_shared_range_are_reserved_in_the_blocks_of_its_private_pool(
    server: FakeApi, memory_path: Path
) -> None:
    private = alias(server)
    server.put(replace(private, spec=replace(private.spec, compat="Coexist")))
    node = ClusterNode(server, memory_path / "a", compat="Coexist")
    node.add("p0", {"range": RANGE, "enable_overlapping_ranges": False})
    (block,) = server.look_at_all(AddressBlock).items
    assert block.spec.pool.endswith("-private")
    assert reserved(server) == []
    (given,) = node.add("p1")
    assert owners(server) == {given: "ns/p1"}


def test_a_block_of_a_private_pool_in_a_shared_space_has_what_other_ranges_hold_as_foreign(
    server: FakeApi, memory_path: Path
) -> None:
    private = alias(server)
    server.put(replace(private, spec=replace(private.spec, compat="Coexist")))
    put_ippool(server, {250: allocation("theirs")}, "10.0.0.0/16", "10.0.0.0-16")
    node = ClusterNode(server, memory_path / "a", compat="Coexist")
    node.add("p0", {"range": RANGE, "enable_overlapping_ranges": False})
    (block,) = server.look_at_all(AddressBlock).items
    assert block.spec.foreign == ("10.0.0.250",)


def test_a_pod_that_goes_on_at_a_node_of_whereabouts_keeps_its_reservation(
    server: FakeApi, node: ClusterNode
) -> None:
    put_ippool(server, {250: allocation("old")})
    (other,) = node.add("p0")
    assert node.add("old", container="new-1") == ["10.0.0.250"]
    node.delete("old", "new-1")
    put_entry(server, 250, "theirs-1")  # its plugin finds the pod's entry, and keeps it
    node.steps(8)
    assert offsets(server)[250] == "theirs-1"
    assert owners(server) == {other: "ns/p0", "10.0.0.250": "ns/old"}


def test_a_pod_that_goes_on_at_a_node_of_whereabouts_just_now_keeps_its_reservation(
    server: FakeApi, node: ClusterNode
) -> None:
    put_ippool(server, {5: allocation("old")})
    node.delete("old", "old-old", {"range": RANGE})

    def forestalled(verb: str, kind: str, name: str) -> Fault | None:
        if (verb, kind) == ("patch", "IPPool"):
            put_entry(server, 5, "theirs-1")
        return None

    node.api.faults = forestalled
    node.steps(8)
    assert offsets(server) == {5: "theirs-1"}
    assert owners(server) == {"10.0.0.5": "ns/old"}


def put_entry(server: FakeApi, offset: int, container: str) -> None:
    """The pod's entry with another container."""
    pool = server.look(IPPool, "10.0.0.0-24", NAMESPACE)
    held = dict(pool.spec.allocations or {})
    held[str(offset)] = allocation("old", container)
    server.put(replace(pool, spec=replace(pool.spec, allocations=held)))


def test_where_whereabouts_counts_no_more_and_the_right_is_gone_nothing_is_owed(
    server: FakeApi, node: ClusterNode
) -> None:
    node.add("p0")
    set_compat(server, "None")
    node.steps(1, 500.0)
    kinds = ("IPPool", "OverlappingRangeIPReservation")
    node.api.faults = lambda verb, kind, name: Fault.REFUSED if kind in kinds else None
    node.delete("p0")
    node.steps(8)
    assert not list((node.directory / "whereabouts").iterdir())


def test_looking_at_many_blocks_lists_the_objects_once(server: FakeApi, node: ClusterNode) -> None:
    for number in range(60):
        node.add(f"p{number}")
    node.steps(20)  # it leases one more ahead
    node.api.calls.clear()
    node.steps(1, FOREIGN_EVERY + 1)
    assert node.api.calls["list", "IPPool"] == 1
    assert node.api.calls["list", "OverlappingRangeIPReservation"] == 2
    assert node.api.calls["list", "NodeSlicePool"] == 1


def test_ipv6_addresses_have_placeholders_and_reservations(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pool(server, "fd00::/64", compat="Coexist")
    ipam = {"range": "fd00::/64"}
    (given,) = node.add("p0", ipam)
    (block,) = server.look_at_all(AddressBlock).items
    pool = server.look(IPPool, "fd00---64", NAMESPACE)
    first = parse(block.spec.first) - parse("fd00::")
    assert {int(each) for each in pool.spec.allocations or {}} == set(range(first, first + 16))
    assert reserved(server) == [given.replace(":", "-")]
    node.delete("p0", ipam=ipam)
    node.lessee.leaving = True
    node.steps(8)
    assert reserved(server) == []
    assert offsets(server, "fd00---64") == {}
