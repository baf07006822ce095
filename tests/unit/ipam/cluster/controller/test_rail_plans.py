"""Pools with rails: what the controller makes of them, and of the pools of their rails."""

import pytest
from msgspec.structs import replace

from ipam.cluster.controller.block_index import BlockIndex
from ipam.cluster.controller.pool_status import status
from ipam.cluster.controller.ranged import Plan
from ipam.cluster.controller.rounds import QUIET_AFTER
from ipam.cluster.names import space_name
from ipam.cluster.objects import AddressBlock, AddressPool, Meta, PoolSpec
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


@pytest.mark.parametrize("range_", ["10.64.0.0/24", "10.65.0.0/24"])
def test_a_private_range_that_is_also_a_rail_is_leased_as_one(
    cluster: Cluster, range_: str
) -> None:
    railed(cluster)
    cluster.pool(range_, name="private", shared=False)
    cluster.pool("10.65.0.0/25", name="narrow", shared=False)
    cluster.round()
    assert cluster.condition("Ready", "main") == ("True", "Decided")
    assert cluster.condition("Ready", "private") == ("True", "RailOf")
    assert cluster.pool_now("private").status.rail_of == "main"
    assert cluster.pool_now("private").status.space == "default"
    own = space_name("", "10.65.0.0/25", shared=False)
    assert cluster.pool_now("narrow").status.space == own, "unique in its own range only"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_pool_with_rails_waits_for_the_blocks_of_a_private_one_of_a_rail(
    cluster: Cluster, is_there: bool
) -> None:
    own = space_name("", "10.66.0.0/24", shared=False)
    cluster.pool("10.66.0.0/24", name="private", shared=False)
    cluster.pool("10.65.0.0/24", name="one")
    cluster.round()
    block = cluster.block("10.66.0.8", cluster.node("a"), space=own, pool="private")
    if not is_there:  # somebody deleted the pool, whose pods still run
        cluster.api.remove(AddressPool, "private")
    railed(cluster)
    cluster.run(3 * QUIET_AFTER, every=10)
    assert cluster.condition("Ready", "main") == ("False", "PrivateBlocks")
    if is_there:
        assert cluster.condition("Ready", "private") == ("True", "Decided")
        assert cluster.pool_now("private").status.space == own
    assert cluster.condition("Ready", "one") == ("True", "Decided")
    cluster.api.remove(AddressBlock, block.metadata.name)
    cluster.run(3 * QUIET_AFTER, every=10)
    assert cluster.condition("Ready", "main") == ("True", "Decided")
    for name in ("private", "one") if is_there else ("one",):
        assert cluster.condition("Ready", name) == ("True", "RailOf")
        assert cluster.pool_now(name).status.space == "default"


def test_rails_that_make_no_sense_do_not_stop_the_statuses() -> None:
    """The plan says that the pool is not Ready, whatever else it says."""
    spec = PoolSpec(range="10.64.0.0/24", rails=("10.65.0.0/25", "x"), exclude=("10.64.0.9",))
    pool = AddressPool(metadata=Meta(name="main"), spec=spec)
    plan = Plan(space="default", block_size=8, ready=False, reason="PrivateBlocks")
    assert status(pool, plan, BlockIndex(()), (), (), "now").addresses.capacity == 253
