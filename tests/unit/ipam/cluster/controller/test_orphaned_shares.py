"""AddressShares of nodes that are gone are deleted, late enough."""

from ipam.cluster.controller.orphaned_shares import GONE_FOR
from ipam.cluster.objects import AddressShare, Meta, ShareSpec
from tests.unit.ipam.cluster.controller.cluster import Cluster


def _share(cluster: Cluster, node: str) -> None:
    spec = ShareSpec(pool="ippool/p", node=node, ranges=("10.0.0.1",))
    cluster.api.create(AddressShare(metadata=Meta(name=f"ippool.p.{node}"), spec=spec))


def _left(cluster: Cluster) -> list[str]:
    return [each.spec.node for each in cluster.api.look_at_all(AddressShare).items]


def test_a_share_goes_when_its_node_and_all_its_pods_have_been_gone_for_long() -> None:
    cluster = Cluster()
    for node in ("there", "gone", "pods", "back"):
        cluster.node(node)
        _share(cluster, node)
    cluster.round()
    for node in ("gone", "pods", "back"):
        cluster.remove_node(node)
    cluster.api.pods["pods"] = 1
    cluster.run(GONE_FOR - 30, every=10)
    assert _left(cluster) == ["back", "gone", "pods", "there"]
    cluster.node("back")
    cluster.round()
    cluster.remove_node("back")
    cluster.run(60, every=10)
    assert _left(cluster) == ["back", "pods", "there"]
    cluster.api.pods["pods"] = 0
    cluster.run(GONE_FOR + 120, every=10)
    assert _left(cluster) == ["there"]


def test_a_new_leader_waits_anew() -> None:
    cluster = Cluster()
    _share(cluster, "gone")
    cluster.run(GONE_FOR - 30, every=10)
    cluster.new_leader()
    cluster.run(GONE_FOR - 30, every=10)
    assert _left(cluster) == ["gone"]
    cluster.run(60, every=10)
    assert _left(cluster) == []
