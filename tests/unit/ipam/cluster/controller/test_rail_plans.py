"""Pools with rails: what the controller makes of them, and of the pools of their rails."""

import pytest
from msgspec.structs import replace

from ipam.cluster.objects import AddressBlock, AddressPool, Meta
from tests.unit.ipam.cluster.controller.cluster import Cluster


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def railed(cluster: Cluster, **spec: object) -> AddressPool:
    spec = {"rails": ("10.65.0.0/24", "10.66.0.0/24"), "name": "main", **spec}
    return cluster.pool("10.64.0.0/24", **spec)


def test_a_pool_with_rails_is_ready_and_the_pools_of_its_rails_lease_nothing(
    cluster: Cluster,
) -> None:
    railed(cluster)
    cluster.pool("10.65.0.0/24", name="one")
    cluster.round()
    assert cluster.condition("Ready", "main") == ("True", "Decided")
    assert cluster.pool_now("main").status.block_size == 8
    assert cluster.condition("Ready", "one") == ("True", "RailOf")
    assert (cluster.pool_now("one").status.rail_of, cluster.pool_now("one").status.block_size) == (
        "main",
        0,
    )


def test_a_pool_that_nodes_may_claim_from_becomes_a_rail_only_after_a_pause(
    cluster: Cluster,
) -> None:
    cluster.pool("10.65.0.0/24", name="one")
    cluster.round()
    railed(cluster)
    cluster.round()
    assert cluster.condition("Ready", "main") == ("False", "RailsWait")
    assert cluster.condition("Ready", "one") == ("False", "RailOf")
    cluster.run(130, every=10)
    assert cluster.condition("Ready", "main") == ("True", "Decided")
    assert cluster.condition("Ready", "one") == ("True", "RailOf")


def test_a_pool_with_rails_waits_for_blocks_that_are_leased_there(cluster: Cluster) -> None:
    cluster.pool("10.65.0.0/24", name="one", block_size=8)
    cluster.round()
    block = cluster.block("10.65.0.8", cluster.node("a"), pool="one")
    railed(cluster)
    cluster.run(200, every=20)
    assert cluster.condition("Ready", "main") == ("False", "RailsInUse")
    assert cluster.condition("Ready", "one") == ("True", "Decided")
    cluster.api.delete(cluster.api.look(AddressBlock, block.metadata.name))
    cluster.run(200, every=20)
    assert cluster.condition("Ready", "main") == ("True", "Decided")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"rails": ("10.64.0.0/24",)}, "RailsOverlap"),
        ({"rails": ("10.65.0.0/25",)}, "InvalidRange"),
        ({"rails": ("10.70.0.0/24",)}, "RailsOverlap"),
        ({"shared": False}, "RailsOverlap"),
    ],
)
def test_rails_that_cannot_be_are_refused(
    cluster: Cluster, spec: dict[str, object], reason: str
) -> None:
    cluster.pool("10.70.0.0/20", name="other")
    cluster.round()
    railed(cluster, **spec)
    cluster.round()
    assert cluster.condition("Ready", "main") == ("False", reason)
    assert cluster.condition("Ready", "other") == ("True", "Decided")


def test_a_range_that_overlaps_a_rail_is_refused(cluster: Cluster) -> None:
    railed(cluster)
    cluster.round()
    cluster.pool("10.65.0.0/20", name="wide")
    cluster.pool("10.66.0.0/24", name="second", rails=("10.80.0.0/24",))
    cluster.round()
    assert cluster.condition("Ready", "wide") == ("False", "RailsOverlap")
    assert cluster.condition("Ready", "second") == ("False", "RailsOverlap")


def test_rails_stay_leased_when_their_pool_is_deleted(cluster: Cluster) -> None:
    pool = railed(cluster, block_size=8)
    cluster.pool("10.65.0.0/24", name="one")
    cluster.round()
    block = cluster.block("10.64.0.8", cluster.node("a"), pool="main")
    cluster.api.put(replace(block, spec=replace(block.spec, rails=("10.65.0.8", "10.66.0.8"))))
    cluster.api.remove(AddressPool, "main")
    cluster.run(400, every=50)
    assert cluster.condition("Ready", "one") == ("False", "RailsInUse")
    cluster.api.create(AddressPool(metadata=Meta(name="main"), spec=pool.spec))
    cluster.run(400, every=50)
    assert cluster.condition("Ready", "main") == ("True", "Decided")
    assert cluster.pool_now("main").status.block_size == 8
    assert cluster.condition("Ready", "one") == ("True", "RailOf")


def test_an_index_that_any_rail_excludes_is_no_capacity(cluster: Cluster) -> None:
    railed(cluster, exclude=("10.64.0.9", "10.65.0.9", "10.66.0.10"))
    cluster.round()
    assert cluster.pool_now("main").status.addresses.capacity == 252
