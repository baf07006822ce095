"""Nodes of podfabric beside nodes that still run whereabouts, with the same definitions."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import Code
from ipam.cluster.lessee import FOREIGN_EVERY
from ipam.cluster.objects import AddressBlock, AddressPool, Meta
from ipam.cluster.whereabouts.objects import (
    IPPool,
    IPPoolSpec,
    OverlappingRangeIPReservation,
    OverlappingReservationSpec,
)
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.calls import error_of
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
from tests.unit.ipam.cluster.nodes import RANGE, ClusterNode, blocks_of, put_pool


def placeholders(server: FakeApi) -> set[int]:
    return {key for key, id_ in offsets(server).items() if id_.startswith("podfabric/")}


def test_a_block_comes_from_the_top_and_all_its_free_addresses_get_placeholders(
    server: FakeApi, node: ClusterNode
) -> None:
    put_ippool(server, {1: allocation("low"), 243: allocation("high")})
    (given,) = node.add("p0")
    (block,) = server.look_at_all(AddressBlock).items
    assert (block.spec.first, block.spec.state, block.spec.compat) == (
        "10.0.0.240",
        "Active",
        "Coexist",
    )
    assert block.spec.foreign == ("10.0.0.243",)
    assert placeholders(server) == set(range(240, 256)) - {243}
    assert {offsets(server)[key] for key in placeholders(server)} == {
        f"podfabric/{block.metadata.uid}"
    }
    pool = server.look(IPPool, "10.0.0.0-24", NAMESPACE)
    assert {each.podref for each in (pool.spec.allocations or {}).values()} == {
        "ns/low",
        "ns/high",
        "",
    }
    assert given != "10.0.0.243"


def test_an_ippool_that_is_missing_is_made(server: FakeApi, node: ClusterNode) -> None:
    node.add("p0")
    assert placeholders(server) == set(range(240, 256))


def test_each_address_has_a_reservation_until_the_pod_has_ended(
    server: FakeApi, node: ClusterNode
) -> None:
    (first,) = node.add("p0")
    (second,) = node.add("p1")
    assert reserved(server) == sorted([first, second])
    node.delete("p0")
    node.steps(8)
    assert reserved(server) == [second]
    assert node.add("p2") == [first]
    (block,) = server.look_at_all(AddressBlock).items
    assert block.spec.foreign == ()
    assert not server.events


def test_an_address_that_an_overlapping_range_gave_away_is_passed_over(
    server: FakeApi, node: ClusterNode
) -> None:
    (first,) = node.add("p0")
    number = int(first.rpartition(".")[2])
    spec = OverlappingReservationSpec(podref="ns/theirs", ifname="eth0")
    put_reservation(server, f"10.0.0.{number + 1}", spec)
    assert node.add("p1") == [f"10.0.0.{number + 2}"]
    assert node.held() == {first, f"10.0.0.{number + 2}"}
    node.delete("p1")
    node.steps(8)
    assert reserved(server) == sorted([first, f"10.0.0.{number + 1}"])


def test_a_block_that_goes_back_takes_its_placeholders_along(
    server: FakeApi, node: ClusterNode
) -> None:
    put_ippool(server, {1: allocation("low")})
    node.add("p0")
    node.delete("p0")
    node.lessee.leaving = True
    node.steps(8)
    assert blocks_of(server) == []
    assert offsets(server) == {1: "old-low"}
    assert reserved(server) == ["10.0.0.1"]


def test_an_address_that_whereabouts_frees_becomes_ours_by_a_placeholder(
    server: FakeApi, node: ClusterNode
) -> None:
    put_ippool(server, {243: allocation("high")})
    node.add("p0")
    server.remove(OverlappingRangeIPReservation, "10.0.0.243", NAMESPACE)
    pool = server.look(IPPool, "10.0.0.0-24", NAMESPACE)
    held = {k: v for k, v in (pool.spec.allocations or {}).items() if k != "243"}
    server.put(replace(pool, spec=replace(pool.spec, allocations=held)))
    node.steps(2, FOREIGN_EVERY)
    assert placeholders(server) == set(range(240, 256))
    (block,) = server.look_at_all(AddressBlock).items
    assert block.spec.foreign == ()


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.LOST_REQUEST])
@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        ("patch", "IPPool"),
        ("list", "IPPool"),
        ("create", "IPPool"),
        ("update", "AddressBlock"),
        ("create", "AddressBlock"),
        ("create", "OverlappingRangeIPReservation"),
        ("delete", "OverlappingRangeIPReservation"),
        ("delete", "AddressBlock"),
    ],
)
def test_what_fails_is_done_again_and_nothing_is_left(
    server: FakeApi, node: ClusterNode, fault: Fault, verb: str, kind: str
) -> None:
    left = 2

    def faults(asked: str, of: str, name: str) -> Fault | None:
        nonlocal left
        if (asked, of) == (verb, kind) and left:
            left -= 1
            return fault
        return None

    node.api.faults = faults
    for number in range(6):
        try:
            node.add("p0", container=f"c{number}")
            break
        except Exception as error:  # noqa: BLE001 - as a runtime: DEL, and again
            assert getattr(error, "code", None) == Code.TRY_AGAIN
            node.delete("p0", f"c{number}", {"range": RANGE})
            node.steps(1, 25.0)
    assert len(node.held()) == 1
    usable = {name for name, state in node.rows().items() if state == "usable"}
    for block in server.look_at_all(AddressBlock).items:
        if block.metadata.name in usable:
            first = int(block.spec.first.rpartition(".")[2])
            assert set(range(first, first + 16)) <= placeholders(server)
    node.delete("p0", f"c{number}", {"range": RANGE})
    node.lessee.leaving = True
    node.steps(40, 25.0)
    assert blocks_of(server) == []
    assert offsets(server) == {}
    assert reserved(server) == []


def test_placeholders_of_a_block_that_is_gone_are_taken_over(
    server: FakeApi, node: ClusterNode, memory_path: Path
) -> None:
    node.add("p0")
    (name,) = blocks_of(server)
    server.remove(AddressBlock, name)  # by the controller, after a proof of death
    other = ClusterNode(server, memory_path / "b", "node-b", compat="Coexist")
    other.add("q0")
    (block,) = server.look_at_all(AddressBlock).items
    assert {offsets(server)[key] for key in placeholders(server)} == {
        f"podfabric/{block.metadata.uid}"
    }


def test_a_pool_that_is_switched_to_read_gives_its_placeholders_up(
    server: FakeApi, node: ClusterNode
) -> None:
    put_ippool(server, {1: allocation("low")})
    node.add("p0")
    pool = server.look(AddressPool, "10.0.0.0-24")
    server.put(replace(pool, spec=replace(pool.spec, compat="Read")))
    node.steps(1, 500.0)
    assert offsets(server) == {1: "old-low"}
    (block,) = server.look_at_all(AddressBlock).items
    assert (block.spec.compat, block.spec.foreign) == ("Read", ())
    assert not server.events
    node.add("p1")


@pytest.mark.parametrize("lost", ["one placeholder", "the IPPool"])
def test_placeholders_that_are_lost_are_put_again(
    server: FakeApi, node: ClusterNode, lost: str
) -> None:
    node.add("p0")
    before = placeholders(server)
    pool = server.look(IPPool, "10.0.0.0-24", NAMESPACE)
    if lost == "the IPPool":
        server.remove(IPPool, "10.0.0.0-24", NAMESPACE)
    else:
        held = {k: v for k, v in (pool.spec.allocations or {}).items() if k != "245"}
        server.put(replace(pool, spec=replace(pool.spec, allocations=held)))
    node.steps(1, FOREIGN_EVERY + 1)
    assert placeholders(server) == before
    (block,) = server.look_at_all(AddressBlock).items
    assert block.spec.foreign == ()
    assert not server.events


def test_what_whereabouts_gave_away_while_a_placeholder_was_lost_is_handed_out_no_more(
    server: FakeApi, node: ClusterNode
) -> None:
    (first,) = node.add("p0")
    number = int(first.rpartition(".")[2])
    theirs = {number: allocation("one"), number + 1: allocation("two")}
    put_ippool(server, theirs)
    node.steps(1, FOREIGN_EVERY + 1)
    assert node.add("p1") == [f"10.0.0.{number + 2}"]
    node.steps(1)
    assert [first in event.message for event in server.events] == [True]


@pytest.mark.parametrize("range_", ["nonsense", "", "10.0.0.5/24", "10.9.0.0/24"])
def test_an_ippool_of_another_range_than_its_name_says_is_refused(
    server: FakeApi, node: ClusterNode, range_: str
) -> None:
    put_pool(server, "10.7.0.0/24")
    kept = node.add("q0", {"range": "10.7.0.0/24"})
    server.put(
        IPPool(
            metadata=Meta(name="10.0.0.0-24", namespace=NAMESPACE), spec=IPPoolSpec(range=range_)
        )
    )
    refused = error_of(lambda: node.add("p0"))
    assert refused.code == Code.TRY_AGAIN
    assert "IPPool 10.0.0.0-24" in str(refused)
    node.steps(2, 500.0)
    assert not [name for name in blocks_of(server) if "10.0.0." in name]
    assert node.add("q1", {"range": "10.7.0.0/24"}) != kept  # its lease is confirmed all the same


def test_ippools_in_two_namespaces_are_refused(server: FakeApi, node: ClusterNode) -> None:
    for namespace in ("kube-system", "openshift-multus"):
        server.put(
            IPPool(
                metadata=Meta(name="10.0.0.0-24", namespace=namespace),
                spec=IPPoolSpec(range=RANGE, allocations={}),
            )
        )
    refused = error_of(lambda: node.add("p0"))
    assert refused.code == Code.TRY_AGAIN
    assert "kube-system and openshift-multus" in str(refused)


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.LOST_REQUEST])
def test_attempts_in_vain_leave_no_pending_blocks_behind(
    server: FakeApi, node: ClusterNode, fault: Fault
) -> None:
    node.api.faults = lambda verb, kind, name: (
        fault if (verb, kind) == ("patch", "IPPool") else None
    )
    for _ in range(4):  # as where the IPPool is as large as etcd takes
        assert error_of(lambda: node.add("p0")).code == Code.TRY_AGAIN
    assert blocks_of(server) == []


def test_a_node_whose_own_configuration_knows_nothing_of_whereabouts_leases_nothing(
    server: FakeApi, memory_path: Path
) -> None:
    pool = put_pool(server)
    node = ClusterNode(server, memory_path / "a")
    node.add("p0")
    server.put(replace(pool, spec=replace(pool.spec, compat="Coexist")))
    node.steps(1, 500.0)
    other = ClusterNode(server, memory_path / "b", "node-b")
    for each in (node, other):
        refused = error_of(lambda each=each: each.add("q0"))  # type: ignore[misc]
        assert refused.code == Code.TRY_AGAIN
        assert '"ipam.compat"' in str(refused)


def test_a_claim_that_died_in_coexist_leaves_no_placeholders_in_read(
    server: FakeApi, node: ClusterNode
) -> None:
    def killed(verb: str, kind: str, name: str) -> Fault | None:
        if (verb, kind) == ("update", "AddressBlock"):
            raise Killed
        return None

    node.api.faults = killed
    with pytest.raises(Killed):
        node.add("p0")
    node.api.faults = None
    assert len(placeholders(server)) == 16
    pool = server.look(AddressPool, "10.0.0.0-24")
    server.put(replace(pool, spec=replace(pool.spec, compat="Read")))
    node.restart()
    node.steps(1, 500.0)
    assert placeholders(server) == set()
    assert set(node.rows().values()) == {"usable"}


class Killed(BaseException):
    """The end of the process."""
