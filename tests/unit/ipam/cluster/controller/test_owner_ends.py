"""Reservations whose pod or StatefulSet is gone for good end, where their pool says so."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from ipam.cluster.controller.owner_ends import (
    LOOK_EVERY,
    MOST_LOOKS,
    TELL_EVERY,
    PodObject,
    StatefulSetObject,
)
from ipam.cluster.objects import (
    AddressPool,
    AddressReservation,
    Meta,
    ReservationStatus,
    StickyLimits,
)
from tests.fake_api import Fault
from tests.unit.ipam.cluster.controller.cluster import Cluster
from tests.unit.ipam.cluster.controller.test_reservations import put_small_pool
from tests.unit.ipam.cluster.nodes import ClusterNode
from tests.unit.ipam.cluster.test_sticky import POOL, add, let_go, reserve

WAIT = 600.0  # seconds: spec.sticky.ownerGoneAfter


def set_wait(cluster: Cluster, after: str = "10m") -> None:
    """What an administrator writes into the pool."""
    pool = cluster.api.look(AddressPool, POOL)
    sticky = StickyLimits(owner_gone_after=after)
    cluster.api.put(replace(pool, spec=replace(pool.spec, sticky=sticky)))


def put_owner(cluster: Cluster, name: str = "web") -> str:
    """A StatefulSet; its uid."""
    meta = Meta(name=name, namespace="ns")
    return cluster.api.put(StatefulSetObject(metadata=meta)).metadata.uid


def remove_owner(cluster: Cluster) -> None:
    cluster.api.remove(StatefulSetObject, "web", "ns")


def kept(cluster: Cluster) -> bool:
    """Whether the reservation is there."""
    return bool(cluster.api.look_at_all(AddressReservation).items)


def status(cluster: Cluster) -> ReservationStatus:
    return cluster.api.look(AddressReservation, "web", "ns").status


def let_owner_go(cluster: Cluster) -> None:
    """A reservation whose owner the controller has seen, and which is gone now."""
    put_small_pool(cluster)
    set_wait(cluster)
    reserve(cluster.api)
    put_owner(cluster)
    cluster.run(10, every=5)
    remove_owner(cluster)


@pytest.fixture
def cluster() -> Cluster:
    """A reservation of a StatefulSet that is there and was seen, in a pool with the wait."""
    cluster = Cluster()
    put_small_pool(cluster)
    set_wait(cluster)
    reserve(cluster.api)
    put_owner(cluster)
    cluster.run(10, every=5)
    return cluster


@pytest.fixture
def node(cluster: Cluster, memory_path: Path) -> ClusterNode:
    return ClusterNode(cluster.api, memory_path / "a", clock=cluster.clock)


def test_a_reservation_and_its_addresses_end_with_the_owner(
    cluster: Cluster, node: ClusterNode
) -> None:
    address = add(node, "web-0")
    node.delete("web-0")
    let_go(node)
    cluster.run(10, every=5)
    remove_owner(cluster)
    cluster.run(WAIT - 10, every=10)
    assert status(cluster).owner_gone_since
    assert status(cluster).addresses == (address,)
    assert [*cluster.blocks().values()] == ["Draining"]
    cluster.run(LOOK_EVERY + 30, every=10)
    assert not kept(cluster)
    assert cluster.blocks() == {}
    assert cluster.errors == []


def test_without_the_setting_none_ends_and_no_owner_is_looked_for(cluster: Cluster) -> None:
    set_wait(cluster, "")
    cluster.client.calls.clear()
    remove_owner(cluster)
    cluster.run(3 * WAIT, every=20)
    assert kept(cluster)
    assert not cluster.client.calls["get", "StatefulSet"]


def test_a_reservation_that_is_older_than_its_owner_waits_for_it(cluster: Cluster) -> None:
    """The uid of the owner that was seen is the proof that it was there."""
    reserve(cluster.api, "early", owner="later")
    cluster.run(3 * WAIT, every=20)
    early = cluster.api.look(AddressReservation, "early", "ns")
    assert early.status == ReservationStatus()
    uid = put_owner(cluster, "later")
    cluster.run(2 * LOOK_EVERY, every=10)
    assert cluster.api.look(AddressReservation, "early", "ns").status.owner_uid == uid
    assert kept(cluster)


def test_a_pod_that_outlives_its_set_keeps_the_reservation(
    cluster: Cluster, node: ClusterNode
) -> None:
    """As after `kubectl delete --cascade=orphan`. The wait begins when the pod is gone."""
    add(node, "web-0")
    remove_owner(cluster)
    cluster.run(3 * WAIT, every=20)
    assert kept(cluster)
    assert status(cluster).owner_gone_since == ""
    node.delete("web-0")
    let_go(node)
    cluster.run(WAIT - 20, every=20)
    assert kept(cluster)
    cluster.run(LOOK_EVERY + 40, every=20)
    assert not kept(cluster)


@pytest.mark.parametrize("comes_back", [WAIT / 2, WAIT - 10])
def test_an_owner_that_is_made_again_keeps_it(cluster: Cluster, comes_back: float) -> None:
    remove_owner(cluster)
    cluster.run(comes_back, every=10)
    uid = put_owner(cluster)
    cluster.run(3 * WAIT, every=20)
    assert status(cluster) == ReservationStatus(owner_uid=uid)


@pytest.mark.parametrize("lasts", [LOOK_EVERY + 20, 3 * LOOK_EVERY + 20])
def test_leaders_that_last_for_less_than_the_wait_count_together(
    cluster: Cluster, lasts: float
) -> None:
    """Time in which none leads does not count, and no wall clock does."""
    remove_owner(cluster)
    counted = 0.0
    while kept(cluster):
        assert counted < 3 * WAIT
        cluster.new_leader()
        cluster.run(lasts, every=10)
        counted += lasts
        cluster.now += 10 * WAIT
    assert counted >= WAIT


@pytest.mark.parametrize("comes", ["the owner", "a pod with an address"])
def test_a_wait_that_has_ended_is_not_gone_on_with(
    cluster: Cluster, node: ClusterNode, comes: str
) -> None:
    remove_owner(cluster)
    cluster.run(WAIT - 20, every=10)
    assert status(cluster).owner_gone_seconds >= WAIT - 20 - 2 * LOOK_EVERY
    if comes == "the owner":
        put_owner(cluster)
    else:
        add(node, "web-0")
    cluster.run(2 * LOOK_EVERY, every=10)
    assert status(cluster).owner_gone_seconds == 0
    if comes == "the owner":
        remove_owner(cluster)
    else:
        node.delete("web-0")
        let_go(node)
    cluster.new_leader()
    cluster.run(WAIT - 20, every=10)
    assert kept(cluster)


def test_a_wait_that_begins_again_counts_from_nothing_though_no_write_succeeds(
    cluster: Cluster,
) -> None:
    """The status still has what was counted before the owner came again."""
    remove_owner(cluster)
    cluster.run(WAIT - 20, every=10)
    cluster.client.faults = lambda verb, kind, name: (
        Fault.CONFLICT if (verb, kind) == ("update_status", "AddressReservation") else None
    )
    put_owner(cluster)
    cluster.run(2 * LOOK_EVERY, every=10)
    remove_owner(cluster)
    cluster.run(WAIT - 20, every=10)
    assert status(cluster).owner_gone_seconds
    cluster.client.faults = None
    cluster.run(20, every=10)
    assert kept(cluster)
    cluster.run(2 * LOOK_EVERY, every=10)
    assert not kept(cluster)


def test_how_long_it_has_waited_is_written_now_and_then(cluster: Cluster) -> None:
    set_wait(cluster, "168h")
    remove_owner(cluster)
    cluster.run(120, every=10)
    cluster.client.calls.clear()
    cluster.run(24 * TELL_EVERY, every=30)
    assert 22 <= cluster.client.calls["update_status", "AddressReservation"] <= 24


def label(cluster: Cluster) -> None:
    """What a user may do with the reservation."""
    found = cluster.api.look(AddressReservation, "web", "ns")
    cluster.api.put(replace(found, metadata=replace(found.metadata, labels={"keep": "it"})))


@pytest.mark.parametrize(
    "change",
    [
        lambda cluster, node: set_wait(cluster, ""),
        lambda cluster, node: set_wait(cluster, "168h"),
        lambda cluster, node: put_owner(cluster),
        lambda cluster, node: add(node, "web-0"),
        lambda cluster, node: label(cluster),
    ],
    ids=["the setting goes", "a longer wait", "the owner", "a pod with an address", "a label"],
)
def test_what_the_end_rests_on_is_read_right_before_it(
    cluster: Cluster, node: ClusterNode, change: Callable[[Cluster, ClusterNode], object]
) -> None:
    """What came a moment ago is not in the view of the round."""
    remove_owner(cluster)
    changed: list[str] = []

    def once(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("get", "AddressPool") and not changed:
            changed.append(name)
            change(cluster, node)

    cluster.client.faults = once
    while not changed:
        cluster.run(10, every=10)
    assert kept(cluster)
    assert cluster.now >= WAIT


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.LOST_REQUEST])
@pytest.mark.parametrize("kind", ["StatefulSet", "AddressBlock", "AddressPool"])
def test_without_an_answer_none_ends(fault: Fault, kind: str) -> None:
    failing: list[str] = []
    cluster = Cluster(lambda verb, asked, name: fault if asked in failing else None)
    let_owner_go(cluster)
    cluster.run(WAIT - 10, every=10)
    stale = cluster.world()
    failing.append(kind)
    for _ in range(5):
        cluster.now += 100
        cluster.rounds.round(stale)
        assert kept(cluster)
    failing.clear()
    cluster.run(WAIT + LOOK_EVERY, every=20)
    assert not kept(cluster)


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.LATE, Fault.CONFLICT])
def test_a_deletion_whose_answer_is_lost_is_looked_at_again(fault: Fault) -> None:
    failed: list[str] = []

    def once(verb: str, kind: str, name: str) -> Fault | None:
        if (verb, kind) != ("delete", "AddressReservation") or failed:
            return None
        failed.append(name)
        return fault

    cluster = Cluster(once)
    let_owner_go(cluster)
    cluster.run(WAIT + 2 * LOOK_EVERY, every=20)
    assert failed
    assert not kept(cluster)


def test_a_late_deletion_spares_a_reservation_that_was_made_again(cluster: Cluster) -> None:
    remove_owner(cluster)
    cluster.run(WAIT - 10, every=10)
    cluster.client.faults = lambda verb, kind, name: Fault.LATE if verb == "delete" else None
    cluster.run(LOOK_EVERY + 10, every=10)
    assert cluster.api.late
    cluster.api.remove(AddressReservation, "web", "ns")
    reserve(cluster.api)
    cluster.api.deliver()
    assert kept(cluster)


def test_the_time_since_when_it_is_gone_goes_with_the_setting(cluster: Cluster) -> None:
    remove_owner(cluster)
    cluster.run(WAIT / 2, every=20)
    assert status(cluster).owner_gone_since
    set_wait(cluster, "")
    cluster.run(10, every=5)
    assert status(cluster).owner_gone_since == ""
    set_wait(cluster)
    cluster.run(WAIT - 20, every=20)
    assert kept(cluster)


def test_the_reservation_of_a_pod_ends_with_it(cluster: Cluster) -> None:
    reserve(cluster.api, "single", "Pod", owner="trainer")
    cluster.api.put(PodObject(metadata=Meta(name="trainer", namespace="ns")))
    cluster.run(2 * LOOK_EVERY, every=10)
    cluster.api.remove(PodObject, "trainer", "ns")
    cluster.run(WAIT + 2 * LOOK_EVERY, every=20)
    (left,) = cluster.api.look_at_all(AddressReservation).items
    assert left.metadata.name == "web"  # its set is there


def test_owners_are_looked_for_sparingly(cluster: Cluster) -> None:
    for number in range(3 * MOST_LOOKS):
        reserve(cluster.api, f"r-{number}", owner=f"set-{number}")
    for _ in range(4):
        cluster.client.calls.clear()
        cluster.round()
        assert cluster.client.calls["get", "StatefulSet"] <= MOST_LOOKS
    cluster.client.calls.clear()
    cluster.run(10, every=2)
    assert not cluster.client.calls["get", "StatefulSet"]  # all were looked for
