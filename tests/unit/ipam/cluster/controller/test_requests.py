"""AddressRequests that no node waits for are deleted."""

from msgspec.structs import replace

from ipam.cluster.controller.requests import KEPT, TURN
from ipam.cluster.objects import (
    AddressBlock,
    AddressRequest,
    Meta,
    RequestSpec,
    RequestStatus,
    StickySpec,
)
from tests.unit.ipam.cluster.controller.cluster import Cluster


def _ask(
    cluster: Cluster, name: str, *, pool: str = "pool", node: str = "gpu-1", address: str = ""
) -> None:
    spec = RequestSpec(pool=pool, node=node, instance="store", address=address)
    cluster.api.create(AddressRequest(metadata=Meta(name=name), spec=spec))


def _left(cluster: Cluster) -> list[str]:
    return [each.metadata.name for each in cluster.api.look_at_all(AddressRequest).items]


def _exhausted() -> Cluster:
    """A pool of two addresses, both leased."""
    cluster = Cluster()
    node = cluster.node("gpu-1")
    cluster.pool("10.64.0.0/30")
    for last in (1, 2):
        cluster.block(f"10.64.0.{last}", node, prefix=32)
    cluster.round()
    return cluster


def test_a_request_stays_while_the_pool_is_exhausted_and_its_maker_is_there() -> None:
    cluster = _exhausted()
    _ask(cluster, "waits")
    cluster.run(KEPT - 10, every=10)
    assert _left(cluster) == ["waits"]
    assert cluster.seen.requests == 1
    cluster.run(30, every=10)
    assert _left(cluster) == []


def test_a_request_goes_with_its_node_its_pool_or_the_need() -> None:
    cluster = _exhausted()
    _ask(cluster, "no-node", node="gone")
    _ask(cluster, "no-pool", pool="gone")
    _ask(cluster, "waits")
    cluster.round()
    assert _left(cluster) == ["waits"]
    cluster.pool("10.65.0.0/24", name="roomy")
    cluster.round()
    _ask(cluster, "has-room", pool="roomy")
    cluster.round()
    assert _left(cluster) == ["waits"]


def test_a_new_leader_counts_the_age_of_a_request_anew() -> None:
    cluster = _exhausted()
    _ask(cluster, "waits")
    cluster.run(KEPT - 10, every=10)
    cluster.new_leader()
    cluster.run(KEPT - 10, every=10)
    assert _left(cluster) == ["waits"]


def test_a_block_that_is_for_the_name_of_a_pod_is_asked_for_nothing() -> None:
    cluster = Cluster()
    cluster.pool("10.64.0.0/28", block_size=8, ceding=True)
    sticky = StickySpec(reservation="ns/web", pod="web-0", ifname="net1", address="10.64.0.1")
    reserved = cluster.block("10.64.0.0", cluster.node("gpu-1"))
    cluster.api.put(replace(reserved, spec=replace(reserved.spec, sticky=sticky)))
    other = cluster.block("10.64.0.8", cluster.node("gpu-2"))
    cluster.api.update_status(replace(other, status=replace(other.status, used=3)))
    cluster.node("gpu-3")
    cluster.round()
    _ask(cluster, "waits", node="gpu-3")
    cluster.run(2)
    (offer,) = cluster.api.look(AddressRequest, "waits").status.offers
    assert offer in cluster.api.look(AddressBlock, other.metadata.name).spec.cede_wanted
    assert cluster.api.look(AddressBlock, reserved.metadata.name).spec.cede_wanted == ()


def _with_one_address() -> tuple[Cluster, AddressBlock]:
    """A pool that cedes, of which gpu-2 has the only block, with 10.64.0.3 held by a pod."""
    cluster = Cluster()
    cluster.pool("10.64.0.0/29", block_size=8, ceding=True)
    block = cluster.block("10.64.0.0", cluster.node("gpu-2"))
    cluster.node("gpu-1")
    cluster.round()
    return cluster, _hold(cluster, block, "3")


def _hold(cluster: Cluster, block: AddressBlock, *indexes: str) -> AddressBlock:
    """The block's holder publishes that pods have these addresses."""
    found = cluster.api.look(AddressBlock, block.metadata.name)
    holders = dict.fromkeys(indexes, "pod eth0")
    status = replace(found.status, used=1 + len(holders), holders=holders)
    return cluster.api.update_status(replace(found, status=status))


def _answers(cluster: Cluster) -> dict[str, RequestStatus]:
    found = cluster.api.look_at_all(AddressRequest).items
    return {each.metadata.name: each.status for each in found}


def test_an_offer_that_its_node_does_not_take_goes_to_the_others_in_turn() -> None:
    cluster, _ = _with_one_address()
    for name in ("first", "second"):
        _ask(cluster, name, address="10.64.0.2")
        cluster.now += 0.1
        cluster.round()
    offered, none = RequestStatus(offers=("10.64.0.2",)), RequestStatus()
    assert _answers(cluster) == {"first": offered, "second": none}  # it may be had yet: not 110
    cluster.run(TURN - 1.0)
    assert _answers(cluster) == {"first": offered, "second": none}
    cluster.run(2.0)
    assert _answers(cluster) == {"first": none, "second": offered}
    _ask(cluster, "third", address="10.64.0.2")
    cluster.run(TURN + 1.0)
    assert _answers(cluster) == {"first": none, "second": none, "third": offered}


def test_a_node_that_was_told_that_there_is_none_comes_behind_those_that_asked_later() -> None:
    """Its ADDs have failed: whether a pod of it still waits shows when it asks again."""
    cluster, block = _with_one_address()
    _ask(cluster, "early", address="10.64.0.3")
    cluster.round()
    assert _answers(cluster) == {"early": RequestStatus(exhausted=True)}
    cluster.now += 1.0
    _ask(cluster, "late", address="10.64.0.3")
    _hold(cluster, block)
    cluster.round()
    assert _answers(cluster) == {
        "early": RequestStatus(),
        "late": RequestStatus(offers=("10.64.0.3",)),
    }
