"""AddressShares of machines that are dead are freed as blocks are: fence, wait, delete."""

from msgspec.structs import replace

from ipam.cluster.api import Node
from ipam.cluster.objects import AddressShare, Holder, Meta, ShareSpec
from tests.fake_api import Fault
from tests.unit.ipam.cluster.controller.cluster import MARGIN, OFFLINE, Cluster

GONE_AFTER = 600.0  # nv-ipam's pools do not say another time


def put_share(cluster: Cluster, node: Node, instance: str = "", pool: str = "p") -> AddressShare:
    holder = Holder(
        instance=instance or f"store-of-{node.name}",
        node=node.name,
        node_uid=node.uid,
        machine_id=node.machine_id,
        system_uuid=node.system_uuid,
        boot=node.boot_id,
    )
    spec = ShareSpec(
        pool=f"ippool/{pool}",
        node=node.name,
        ranges=("10.0.0.1",),
        holder=holder,
        max_offline_seconds=round(OFFLINE),
    )
    name = f"ippool.{pool}.{node.name}-{holder.instance}"
    return cluster.api.create(AddressShare(metadata=Meta(name=name), spec=spec))


def states(cluster: Cluster) -> dict[str, str]:
    """By the identity of the machine's store, or by node."""
    shares = cluster.api.look_at_all(AddressShare).items
    return {each.holder.instance or each.spec.node: each.spec.state for each in shares}


def test_a_share_goes_after_fence_and_wait_when_its_node_and_all_its_pods_are_gone() -> None:
    cluster = Cluster()
    for name in ("there", "gone", "pods", "back"):
        put_share(cluster, cluster.node(name), name)
    cluster.round()
    for name in ("gone", "pods", "back"):
        cluster.remove_node(name)
    cluster.api.pods["pods"] = 1
    cluster.run(GONE_AFTER - 30, every=10)
    assert set(states(cluster).values()) == {"Active"}
    cluster.node("back")
    cluster.round()
    cluster.remove_node("back")
    cluster.run(60, every=10)
    assert states(cluster) == {
        "there": "Active",
        "gone": "Reclaiming",
        "pods": "Active",
        "back": "Active",
    }
    cluster.run(OFFLINE + MARGIN, every=1)
    assert states(cluster).keys() == {"there", "pods", "back"}
    cluster.api.pods["pods"] = 0
    cluster.run(2 * GONE_AFTER, every=10)
    assert states(cluster) == {"there": "Active"}


def test_a_machine_that_answers_the_fence_keeps_its_share() -> None:
    cluster = Cluster()
    share = put_share(cluster, cluster.node("a"))
    cluster.remove_node("a")
    while states(cluster) == {"store-of-a": "Active"}:
        cluster.run(10, every=10)
    cluster.run(OFFLINE + MARGIN - 5)
    fenced = cluster.api.look(AddressShare, share.metadata.name)
    cluster.api.update(replace(fenced, spec=share.spec))
    cluster.run(30)
    assert states(cluster) == {"store-of-a": "Reclaiming"}  # the Node is away: fenced again
    cluster.node("a")
    fenced = cluster.api.look(AddressShare, share.metadata.name)
    cluster.api.update(replace(fenced, spec=share.spec))
    cluster.run(2 * GONE_AFTER, every=10)
    assert states(cluster) == {"store-of-a": "Active"}


def test_a_new_leader_waits_again() -> None:
    cluster = Cluster()
    put_share(cluster, cluster.node("a"))
    cluster.remove_node("a")
    cluster.run(GONE_AFTER - 30, every=10)
    cluster.new_leader()
    cluster.run(GONE_AFTER - 30, every=10)
    assert states(cluster) == {"store-of-a": "Active"}
    cluster.run(60, every=10)
    assert states(cluster) == {"store-of-a": "Reclaiming"}
    cluster.new_leader()
    cluster.run(GONE_AFTER, every=10)
    assert states(cluster) == {"store-of-a": "Reclaiming"}
    cluster.run(60 + OFFLINE + MARGIN, every=10)
    assert states(cluster) == {}


def test_of_a_machine_that_another_one_replaced_the_share_goes_and_the_others_stays() -> None:
    cluster = Cluster()
    put_share(cluster, cluster.node("a", machine="old"), "old")
    cluster.remove_node("a")
    put_share(cluster, cluster.node("a", machine="new"), "new")
    cluster.run(GONE_AFTER - 10, every=10)
    assert states(cluster) == {"old": "Active", "new": "Active"}
    cluster.run(30 + OFFLINE + MARGIN, every=10)
    assert states(cluster) == {"new": "Active"}


def test_of_a_machine_that_was_installed_again_the_share_stays_until_somebody_says_so() -> None:
    """The machine id differs and the hardware does not: it may be a clone beside the old one."""
    cluster = Cluster()
    node = cluster.node("a", machine="old")
    put_share(cluster, node, "old")
    cluster.change_node("a", machine_id="new", boot_id="boot-2")
    put_share(cluster, cluster.api.machines["a"], "new")
    cluster.run(10 * GONE_AFTER, every=60)
    assert states(cluster) == {"old": "Active", "new": "Active"}


def test_a_lost_store_shows_after_a_boot_by_a_share_of_the_next_store() -> None:
    cluster = Cluster()
    put_share(cluster, cluster.node("a"), "old")
    node = cluster.change_node("a", boot_id="boot-2")
    cluster.run(2 * GONE_AFTER, every=10)
    assert states(cluster) == {"old": "Active"}  # its store may be there
    put_share(cluster, node, "new")
    cluster.run(GONE_AFTER + 60, every=10)
    assert states(cluster) == {"new": "Active"}


def test_a_taint_frees_the_share_without_a_wait() -> None:
    cluster = Cluster()
    put_share(cluster, cluster.node("a"))
    cluster.change_node("a", taints=("node.kubernetes.io/out-of-service",), ready=False)
    cluster.run(90, every=10)
    assert states(cluster) == {}


def test_a_share_of_an_older_agent_stays_as_long_as_its_node_or_pods() -> None:
    cluster = Cluster()
    for name in ("there", "gone"):
        cluster.node(name)
        spec = ShareSpec(pool="ippool/p", node=name, ranges=("10.0.0.1",))
        cluster.api.create(AddressShare(metadata=Meta(name=f"ippool.p.{name}"), spec=spec))
    cluster.remove_node("gone")
    cluster.run(GONE_AFTER + 30, every=10)
    assert states(cluster) == {"there": "Active", "gone": "Reclaiming"}
    cluster.run(1800 + MARGIN, every=10)
    assert states(cluster) == {"there": "Active"}


def test_requests_that_fail_are_made_again() -> None:
    failing = True
    kinds = ("update", "delete")
    cluster = Cluster(
        lambda verb, kind, name: Fault.LOST_ANSWER if failing and verb in kinds else None
    )
    put_share(cluster, cluster.node("a"))
    cluster.remove_node("a")
    cluster.run(GONE_AFTER + 30, every=10)
    assert states(cluster) == {"store-of-a": "Reclaiming"}
    failing = False
    cluster.run(OFFLINE + MARGIN + 30, every=10)
    assert states(cluster) == {}
