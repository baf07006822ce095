"""Beside whereabouts: its objects on the stand-in for the API server, and a node that shares."""

from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from ipam.cluster.objects import AddressBlock, Meta
from ipam.cluster.whereabouts.objects import (
    IPAllocation,
    IPPool,
    IPPoolSpec,
    NodeSlicePool,
    OverlappingRangeIPReservation,
    OverlappingReservationSpec,
    Slice,
    SliceSpec,
    SliceStatus,
    entries,
    reservation_name,
)
from tests.fake_api import FakeApi
from tests.unit.ipam.cluster.nodes import RANGE, ClusterNode, put_pool

NAMESPACE = "kube-system"


def allocation(pod: str, container: str = "", ifname: str = "eth0") -> IPAllocation:
    """An entry of whereabouts 0.8 and later."""
    return IPAllocation(id=container or f"old-{pod}", podref=f"ns/{pod}", ifname=ifname)


def put_ippool(
    server: FakeApi, held: dict[int, IPAllocation], range_: str = RANGE, name: str = "10.0.0.0-24"
) -> IPPool:
    """An IPPool, with the reservations that go with it."""
    made = IPPool(
        metadata=Meta(name=name, namespace=NAMESPACE),
        spec=IPPoolSpec(range=range_, allocations={str(key): held[key] for key in held}),
    )
    for entry in entries(made):
        spec = OverlappingReservationSpec(
            podref=entry.allocation.podref, ifname=entry.allocation.ifname
        )
        put_reservation(server, reservation_name("", entry.address), spec)
    return server.put(made)


def put_reservation(server: FakeApi, name: str, spec: OverlappingReservationSpec) -> None:
    server.put(
        OverlappingRangeIPReservation(metadata=Meta(name=name, namespace=NAMESPACE), spec=spec)
    )


def offsets(server: FakeApi, name: str = "10.0.0.0-24") -> dict[int, str]:
    """Who has which offset, by the ids."""
    pool = server.look(IPPool, name, NAMESPACE)
    return {int(key): each.id for key, each in (pool.spec.allocations or {}).items()}


def reserved(server: FakeApi) -> list[str]:
    found = server.look_at_all(OverlappingRangeIPReservation).items
    return [each.metadata.name for each in found]


def put_slices(
    server: FakeApi,
    *nodes: str,
    range_: str = RANGE,
    prefix: int = 26,
    name: str = "nad",
) -> None:
    """A NodeSlicePool as whereabouts' controller makes it: the slices go to `nodes` in turn."""
    cut = ip_network(range_).subnets(new_prefix=prefix)
    slices = tuple(
        Slice(node_name=nodes[number] if number < len(nodes) else "", slice_range=str(each))
        for number, each in enumerate(cut)
    )
    server.put(
        NodeSlicePool(
            metadata=Meta(name=name, namespace=NAMESPACE),
            spec=SliceSpec(range=range_),
            status=SliceStatus(allocations=slices),
        )
    )


def told(server: FakeApi, name: str) -> set[str]:
    """The addresses that have a placeholder in an IPPool."""
    pool = server.look(IPPool, name, NAMESPACE)
    return {
        str(ip_address(entry.address & 0xFFFFFFFF))
        for entry in entries(pool)
        if entry.allocation.is_placeholder
    }


def leased(server: FakeApi) -> set[str]:
    """All addresses of all blocks."""
    blocks = server.look_at_all(AddressBlock).items
    cut = (ip_network(f"{each.spec.first}/{each.spec.prefix}") for each in blocks)
    return {str(address) for network in cut for address in network}


@pytest.fixture
def server() -> FakeApi:
    """A server with a pool of which whereabouts hands out addresses, too."""
    server = FakeApi()
    put_pool(server, compat="Coexist")
    return server


@pytest.fixture
def node(server: FakeApi, memory_path: Path) -> ClusterNode:
    return ClusterNode(server, memory_path / "a", compat="Coexist")
