"""`podfabric ipam reclaim --nv-ipam`: what nv-ipam's pools give to a node that is gone."""

from pathlib import Path

import pytest

from cli import cluster_addresses
from cli.commands import run
from ipam.cluster.api import ClusterApi
from ipam.cluster.controller.machines import OUT_OF_SERVICE
from ipam.cluster.nv_ipam.objects import NvCIDRPool, NvIPPool
from tests.fake_api import Fault
from tests.unit.ipam.cluster.controller.cluster import Cluster
from tests.unit.ipam.cluster.controller.test_shares import put_share, states
from tests.unit.ipam.cluster.nv_ipam.nodes import NAMESPACE, put_cidrpool, put_ippool

POOLS = ("ippool/pool", "cidrpool/routed")
RECLAIM = ["ipam", "reclaim", "--powered-off", "--nv-ipam", NAMESPACE, "--node"]


def allocated(cluster: Cluster) -> dict[str, set[str]]:
    """The nodes that have an entry, by pool."""
    pools: list[NvIPPool | NvCIDRPool] = [
        *cluster.api.look_at_all(NvIPPool).items,
        *cluster.api.look_at_all(NvCIDRPool).items,
    ]
    return {pool.key: {each.node for each in pool.status.allocations or ()} for pool in pools}


def in_both(nodes: set[str]) -> dict[str, set[str]]:
    return dict.fromkeys(POOLS, nodes)


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """nv-ipam's pools give something to two nodes, of which "gone" never had an agent."""
    cluster = Cluster()

    def connect(kubeconfig: Path | None) -> ClusterApi:
        return cluster.client

    monkeypatch.setattr(cluster_addresses, "connect", connect)
    cluster.node("gpu-3")
    given = {"gpu-3": ("10.8.0.0/29", ""), "gone": ("10.8.0.8/29", "")}
    put_cidrpool(cluster.api, given, "10.8.0.0/24", per_node_network_prefix=29)
    put_ippool(cluster.api, {"gpu-3": ("10.0.0.1", "10.0.0.8"), "gone": ("10.0.0.9", "10.0.0.16")})
    assert allocated(cluster) == in_both({"gpu-3", "gone"})
    return cluster


def test_reclaim_removes_the_entries_of_a_node_that_never_had_an_agent(
    entries: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ipam", "reclaim", "--powered-off", "--node", "gone"]) == 0
    assert capsys.readouterr().out == "gone leases no block\n"
    assert allocated(entries) == in_both({"gpu-3", "gone"})
    assert run([*RECLAIM, "gone"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{pool} gives nothing to gone any more" for pool in POOLS
    ]
    assert allocated(entries) == in_both({"gpu-3"})
    assert run([*RECLAIM, "gone"]) == 0
    assert capsys.readouterr().out == "gone leases no block\n"


@pytest.mark.parametrize("ready", [True, False])
def test_reclaim_keeps_the_entries_of_a_node_that_has_a_node_object(
    entries: Cluster, capsys: pytest.CaptureFixture[str], ready: bool
) -> None:
    entries.change_node("gpu-3", ready=ready)
    assert run([*RECLAIM, "gpu-3"]) == 1
    assert "there is a Node gpu-3" in capsys.readouterr().err
    assert allocated(entries) == in_both({"gpu-3", "gone"})
    entries.change_node("gpu-3", taints=(OUT_OF_SERVICE,))
    assert run([*RECLAIM, "gpu-3"]) == (1 if ready else 0)
    assert ("gpu-3" in allocated(entries)["ippool/pool"]) is ready


def test_reclaim_removes_entries_after_the_shares(
    entries: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    put_share(entries, entries.api.machines["gpu-3"], "uses")
    entries.remove_node("gpu-3")
    entries.client.faults = lambda verb, kind, name: (
        Fault.CONFLICT if (verb, kind) == ("delete", "AddressShare") else None
    )
    assert run([*RECLAIM, "gpu-3"]) == 1
    assert allocated(entries) == in_both({"gpu-3", "gone"})
    entries.client.faults = None
    assert run([*RECLAIM, "gpu-3"]) == 0
    assert allocated(entries) == in_both({"gone"})
    assert states(entries) == {}


def test_reclaim_keeps_the_entry_of_a_machine_that_comes_meanwhile(
    entries: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A share of the name shows it."""

    def comes(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("list", "CIDRPool"):
            entries.client.faults = None
            put_share(entries, entries.node("gone"), "new")
            entries.remove_node("gone")

    entries.client.faults = comes
    assert run([*RECLAIM, "gone"]) == 1
    assert "AddressShare" in capsys.readouterr().err
    assert allocated(entries) == {"ippool/pool": {"gpu-3"}, "cidrpool/routed": {"gpu-3", "gone"}}


def test_reclaim_removes_entries_of_a_pool_that_changes_meanwhile(entries: Cluster) -> None:
    faults = [Fault.CONFLICT] * 2
    entries.client.faults = lambda verb, kind, name: (
        faults.pop() if faults and verb == "update_status" else None
    )
    assert run([*RECLAIM, "gone"]) == 0
    assert not faults
    assert allocated(entries) == in_both({"gpu-3"})
