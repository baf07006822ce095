"""The controller and sticky addresses: dead nodes, the status of reservations, their end."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import Code
from ipam.leases.objects import AddressBlock, AddressPool, AddressReservation, ReclaimSpec
from kube.resources import Meta
from tests.unit.ipam.calls import error_of
from tests.unit.ipam.controller.cluster import Cluster
from tests.unit.ipam.leases.nodes import ClusterNode, put_pool
from tests.unit.ipam.leases.test_sticky import PODS, POOL, add, bound, let_go, reserve


def refusal(node: ClusterNode, pod: str) -> int:
    """The code of the error that the pod's ADD gets."""
    return error_of(lambda: add(node, pod)).code


def put_small_pool(cluster: Cluster) -> None:
    pool = put_pool(cluster.api, size=1, block_size=1)
    reclaim = ReclaimSpec(node_gone_after="10s", max_offline="30s")
    cluster.api.put(replace(pool, spec=replace(pool.spec, reclaim=reclaim)))


def test_a_dead_nodes_pods_keep_their_addresses_only_after_the_proof(
    memory_path: Path, stack: ExitStack
) -> None:
    """Row A17, with the old node dead, ten times."""
    cluster = Cluster()
    put_small_pool(cluster)
    reserve(cluster.api)

    def node(number: int) -> ClusterNode:
        made = ClusterNode(
            cluster.api,
            memory_path / f"{number}",
            f"node-{number}",
            clock=cluster.clock,
            boot=f"boot-{number}",
            kept=True,
        )
        stack.callback(made.close)
        return made

    old = node(0)
    given = {pod: add(old, pod) for pod in PODS}
    for number in range(1, 11):
        new = node(number)
        cluster.remove_node(old.name)  # and its machine is dead
        for _ in range(2):
            cluster.run(20)
            assert {refusal(new, pod) for pod in PODS} == {Code.TRY_AGAIN}
        cluster.run(30)
        assert {pod: add(new, pod) for pod in PODS} == given
        old = new
    assert len(cluster.blocks()) == 20


def test_a_holder_that_answers_the_fence_keeps_the_address(memory_path: Path) -> None:
    cluster = Cluster()
    put_small_pool(cluster)
    reserve(cluster.api)
    a = ClusterNode(cluster.api, memory_path / "a", clock=cluster.clock)
    b = ClusterNode(cluster.api, memory_path / "b", "node-b", clock=cluster.clock)
    address = add(a, "web-0")
    gone = cluster.api.machines.pop("node-a")
    cluster.run(20)
    assert [*cluster.blocks().values()] == ["Reclaiming"]
    cluster.api.machines["node-a"] = gone
    for _ in range(10):
        a.steps(1, 10.0)
        cluster.round()
    assert [*cluster.blocks().values()] == ["Active"]
    assert error_of(lambda: add(b, "web-0")).code == Code.TRY_AGAIN
    assert a.held() == {address}


def test_addresses_are_free_when_their_reservation_is_deleted_and_no_pod_has_them(
    memory_path: Path,
) -> None:
    cluster = Cluster()
    put_small_pool(cluster)
    reservation = reserve(cluster.api)
    a = ClusterNode(cluster.api, memory_path / "a", clock=cluster.clock)
    add(a, "web-0")
    add(a, "web-1")
    a.delete("web-0")
    let_go(a)
    cluster.run(60)
    assert len(cluster.blocks()) == 2
    cluster.api.remove(AddressReservation, reservation.metadata.name, "ns")
    cluster.round()
    assert bound(cluster.api) == {"web-1": ("node-a", "Active")}
    a.delete("web-1")
    let_go(a)
    cluster.round()
    assert cluster.blocks() == {}
    assert cluster.api.look(AddressPool, POOL)


def test_a_reservation_made_again_for_another_owner_or_pool_frees_what_it_does_not_name(
    memory_path: Path,
) -> None:
    cluster = Cluster()
    put_small_pool(cluster)
    reservation = reserve(cluster.api)
    a = ClusterNode(cluster.api, memory_path / "a", clock=cluster.clock)
    kept = add(a, "web-0")
    add(a, "web-1")
    for pod in ("web-0", "web-1"):
        a.delete(pod)
    let_go(a)
    cluster.api.remove(AddressReservation, "web", "ns")
    reserve(cluster.api, kind="Pod", owner="web-0")
    cluster.run(5)
    assert list(bound(cluster.api)) == ["web-0"]
    assert cluster.api.look(AddressReservation, "web", "ns").status.addresses == (kept,)
    cluster.api.remove(AddressReservation, "web", "ns")
    cluster.api.put(
        replace(
            reservation,
            spec=replace(reservation.spec, pool="another"),
        )
    )
    cluster.run(5)
    assert cluster.blocks() == {}


@pytest.mark.parametrize("first_is", ["Active", "Draining"])
def test_a_second_block_of_a_pod_is_freed_when_no_node_has_it(
    memory_path: Path, first_is: str
) -> None:
    cluster = Cluster()
    put_small_pool(cluster)
    reserve(cluster.api)
    a = ClusterNode(cluster.api, memory_path / "a", clock=cluster.clock)
    address = add(a, "web-0")
    if first_is == "Draining":
        a.delete("web-0")
        let_go(a)
    (block,) = cluster.api.look_at_all(AddressBlock).items
    other = "10.0.0.9" if address != "10.0.0.9" else "10.0.0.8"
    spec = replace(block.spec, range=f"{other}/32", state="Draining")
    spec = replace(spec, sticky=replace(block.spec.sticky, address=other))
    meta = Meta(name=f"default.{other}-32", creation_timestamp="2999-01-01T00:00:00Z")
    cluster.api.put(replace(block, metadata=meta, spec=spec))
    cluster.run(5)
    assert cluster.blocks() == {block.metadata.name: first_is}
