"""Sticky addresses on a real API server, with the rights of the agents' tokens."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cni.spec.errors import Code
from ipam.controller.address_reservations import reserve
from ipam.controller.reclaim import free_powered_off
from ipam.controller.steps import Steps
from ipam.leases.block_layout import pool_name
from ipam.leases.objects import (
    AddressBlock,
    AddressPool,
    AddressReservation,
    OwnerReference,
    ReservationSpec,
)
from kube.resources import Meta, NotFound
from kube.transport import KubernetesApi
from tests.api.server import ApiServer, name
from tests.api.test_nodes import real_node
from tests.unit.ipam.calls import error_of
from tests.unit.ipam.leases.nodes import ClusterNode, put_pool

RANGE = "10.78.0.0/26"
POOL = pool_name("sticky", RANGE)
IPAM: dict[str, object] = {"range": RANGE, "network_name": "sticky", "sticky": True}
PODS = [f"web-{number}" for number in range(20)]
MOVES = 10


@pytest.fixture
def pool(server: ApiServer) -> Iterator[None]:
    """A pool of blocks of one address, and the reservation of a StatefulSet."""
    put_pool(server.admin, RANGE, name="sticky", size=1, block_size=1)
    server.send("POST", "/api/v1/namespaces", {"metadata": {"name": "ns"}})
    owner = OwnerReference(kind="StatefulSet", name="web")
    reservation = AddressReservation(
        metadata=Meta(name="web", namespace="ns"), spec=ReservationSpec(pool=POOL, owner=owner)
    )
    server.admin.create(reservation)
    yield
    for block in leased(server):
        server.admin.delete(block)
    server.admin.delete(server.admin.get(AddressPool, POOL))
    with suppress(NotFound):
        server.admin.delete(server.admin.get(AddressReservation, "web", "ns"))


def leased(server: ApiServer) -> tuple[AddressBlock, ...]:
    return server.admin.list(AddressBlock, {"spec.pool": POOL}).items


def add(node: ClusterNode, pod: str) -> str:
    (address,) = node.add(pod, IPAM)
    return address


def test_a_stateful_set_keeps_its_addresses_on_living_and_dead_nodes(
    server: ApiServer, node_a: KubernetesApi, pool: None, tmp_path: Path
) -> None:
    """Row A17: moved ten times from a live node, and once from a dead one."""
    nodes = [real_node(server, tmp_path / each, each) for each in (name("one"), name("two"))]
    given = {pod: add(nodes[0], pod) for pod in PODS}
    assert len(set(given.values())) == 20
    for move in range(MOVES):
        old, new = nodes[move % 2], nodes[(move + 1) % 2]
        refused = error_of(lambda new=new: add(new, PODS[0]))  # type: ignore[misc]
        assert refused.code == Code.TRY_AGAIN
        assert f"node {old.name} still has this address" in refused.message
        for pod in PODS:
            old.delete(pod)
        old.steps(3, 3.0)
        assert {pod: add(new, pod) for pod in PODS} == given
    blocks = leased(server)
    assert len(blocks) == 20
    assert {block.spec.epoch for block in blocks} == {MOVES + 1}
    dead, other = nodes[MOVES % 2], nodes[(MOVES + 1) % 2]
    assert error_of(lambda: add(other, PODS[0])).code == Code.TRY_AGAIN
    for block in blocks:
        assert block.spec.holder.node == dead.name
        assert free_powered_off(server.admin, block)
    assert {pod: add(other, pod) for pod in PODS} == given
    reserve(
        server.admin, [server.admin.get(AddressReservation, "web", "ns")], leased(server), Steps()
    )
    status = server.admin.get(AddressReservation, "web", "ns").status
    assert sorted(status.addresses) == sorted(given.values())
    assert status.bound_to == other.name
