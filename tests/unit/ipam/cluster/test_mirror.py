"""The way back to whereabouts: pods of podfabric get entries of their own, as pods of its have."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from ipam.cluster.lessee import FOREIGN_EVERY
from ipam.cluster.objects import AddressBlock, AddressPool
from ipam.cluster.whereabouts.objects import IPAllocation, IPPool, OverlappingRangeIPReservation
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.cluster.beside import NAMESPACE, offsets, reserved
from tests.unit.ipam.cluster.beside import node as node  # fixtures
from tests.unit.ipam.cluster.nodes import RANGE, ClusterNode, put_pool

LOOK = FOREIGN_EVERY + 1


@pytest.fixture
def server() -> FakeApi:
    server = FakeApi()
    put_pool(server, compat="Read")
    return server


def mirror(server: FakeApi) -> None:
    pool = server.look(AddressPool, "10.0.0.0-24")
    server.put(replace(pool, spec=replace(pool.spec, compat="Coexist", mirror=True)))


def entries(server: FakeApi) -> dict[str, IPAllocation]:
    """Those of pods, by address."""
    pool = server.look(IPPool, "10.0.0.0-24", NAMESPACE)
    return {
        f"10.0.0.{offset}": each
        for offset, each in (pool.spec.allocations or {}).items()
        if not each.is_placeholder
    }


def test_pods_get_entries_as_whereabouts_writes_them(server: FakeApi, node: ClusterNode) -> None:
    given = {node.add(f"p{number}")[0]: f"p{number}" for number in range(3)}
    mirror(server)
    node.steps(1, 500.0)
    assert entries(server) == {
        address: IPAllocation(id=f"{pod}-1", podref=f"ns/{pod}", ifname="eth0")
        for address, pod in given.items()
    }
    assert reserved(server) == sorted(given)
    (block,) = server.look_at_all(AddressBlock).items
    first = int(block.spec.first.rpartition(".")[2])
    assert set(offsets(server)) == set(range(first, first + 16))
    assert not server.events
    node.add("later")
    node.steps(1, LOOK)
    assert len(entries(server)) == 4


def test_an_address_is_free_again_once_its_entry_is_gone(
    server: FakeApi, node: ClusterNode
) -> None:
    (first,) = node.add("p0")
    mirror(server)
    node.steps(1, 500.0)
    node.delete("p0")
    assert node.add("p1") != [first]
    node.steps(1)
    node.steps(3)
    assert first not in entries(server)
    node.steps(1, LOOK)
    assert node.add("p2") == [first]
    node.steps(2, LOOK)
    assert entries(server)[first].podref == "ns/p2"


def test_a_pod_with_an_entry_keeps_its_address_in_a_new_sandbox(
    server: FakeApi, node: ClusterNode
) -> None:
    (first,) = node.add("p0")
    mirror(server)
    node.steps(1, 500.0)
    node.delete("p0")
    assert node.add("p0", container="p0-2") == [first]
    node.steps(8)
    assert entries(server)[first].id == "p0-2"
    assert reserved(server) == [first]


def test_what_is_left_without_podfabric_is_what_whereabouts_needs(
    server: FakeApi, node: ClusterNode
) -> None:
    (first,) = node.add("p0")
    (second,) = node.add("p1")
    mirror(server)
    node.steps(1, 500.0)
    node.delete("p1")
    node.lessee.leaving = True
    node.steps(8)
    assert set(entries(server)) == set(reserved(server)) == {first}
    assert second not in entries(server)


@pytest.mark.parametrize("fault", [None, Fault.LOST_ANSWER])
def test_no_other_pod_gets_an_address_while_its_entry_is_made(
    server: FakeApi, memory_path: Path, fault: Fault | None
) -> None:
    """A private range: no reservation protects it."""
    put_pool(server, compat="Coexist", shared=False, mirror=True)
    ipam = {"range": RANGE, "enable_overlapping_ranges": False}
    node = ClusterNode(server, memory_path / "a", compat="Coexist")
    (first,) = node.add("p0", ipam)
    given: list[str] = []

    def meanwhile(verb: str, kind: str, name: str) -> Fault | None:
        if (verb, kind) != ("patch", "IPPool") or given:
            return None
        given.append("")
        node.delete("p0")
        given[:] = node.add("p1", ipam)
        return fault

    node.api.faults = meanwhile
    node.steps(1, 500.0)
    given += node.add("p2", ipam)
    assert given
    assert first not in given
    assert entries(server)[first].podref == "ns/p0"
    node.steps(8)
    assert first not in entries(server)
    assert not server.look_at_all(OverlappingRangeIPReservation).items
