"""`podfabric ipam ... --cluster`, and `podfabric controller` as a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from cli import cluster_ipam
from cli.commands import run
from ipam.leases.objects import AddressBlock, BlockStatus, StickySpec
from kube.client import ClusterApi
from tests.fake_api import Fault
from tests.unit.ipam.controller.cluster import Cluster
from tests.waiting import PATIENCE

_CHECKOUT = Path(__file__).parents[3]
_CONTROLLER = (sys.executable, "-c", "from cli.main import main; main()", "controller")
BLOCK = "default.10.64.0.8-29"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A pool, a node with a block of it, another node."""
    cluster = Cluster()
    cluster.pool()
    block = cluster.block("10.64.0.8", cluster.node("gpu-1"))
    used = BlockStatus(used=1, free=7, holders={"3": "team-a/trainer-0 net1"})
    cluster.api.update_status(replace(block, status=used))
    cluster.node("gpu-2")
    cluster.round()

    def connect(kubeconfig: Path | None) -> ClusterApi:
        return cluster.client

    monkeypatch.setattr(cluster_ipam, "connect", connect)
    return cluster


def test_show_names_the_pod_and_the_node_of_an_address(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ipam", "show", "10.64.0.11", "--cluster"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split("  ") == [
        *("10.64.0.11", "team-a/trainer-0 net1", "gpu-1", BLOCK, "Active", "pool")
    ]
    assert run(["ipam", "show", "10.64.0.77", "--cluster"]) == 1
    assert "no node leases 10.64.0.77: it is free in pool" in capsys.readouterr().err
    assert run(["ipam", "show", "10.65.0.1", "--cluster"]) == 1
    assert "no pool has it" in capsys.readouterr().err
    assert run(["ipam", "show", "nonsense", "--cluster"]) == 1
    assert "invalid IP address: nonsense" in capsys.readouterr().err


def test_reclaim_frees_the_blocks_of_a_node_that_is_off_at_once(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = cluster.block("10.64.0.16", cluster.api.machines["gpu-2"]).metadata.name
    cluster.change_node("gpu-1", ready=False)
    assert run(["ipam", "reclaim", "--node", "gpu-1", "--powered-off"]) == 0
    assert capsys.readouterr().out == f"freed {BLOCK}, which gpu-1 leased\n"
    assert cluster.blocks() == {kept: "Active"}
    assert run(["ipam", "reclaim", "--node", "gpu-1", "--powered-off"]) == 0
    assert capsys.readouterr().out == "gpu-1 leases no block\n"


def test_reclaim_keeps_the_blocks_of_a_node_that_is_ready(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ipam", "reclaim", "--node", "gpu-1", "--powered-off"]) == 1
    assert "kept: the node gpu-1 is Ready" in capsys.readouterr().err
    assert cluster.blocks() == {BLOCK: "Active"}


@pytest.mark.parametrize("ready", [True, False])
def test_reclaim_frees_the_blocks_of_the_former_machine_of_a_name_only(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], ready: bool
) -> None:
    cluster.remove_node("gpu-1")
    theirs = cluster.block("10.64.0.16", cluster.node("gpu-1", machine="spare"), "new-store")
    cluster.change_node("gpu-1", ready=ready)
    assert run(["ipam", "reclaim", "--node", "gpu-1", "--powered-off"]) == 1
    assert cluster.blocks() == {theirs.metadata.name: "Active"}
    if not ready:
        assert "if that machine is off, too, repeat the command" in capsys.readouterr().err
        assert run(["ipam", "reclaim", "--node", "gpu-1", "--powered-off"]) == 0
        assert cluster.blocks() == {}


def test_reclaim_needs_the_word_that_the_machine_is_off(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["ipam", "reclaim", "--node", "gpu-1"])
    assert ended.value.code == 2
    assert "--powered-off" in capsys.readouterr().err


def test_reclaim_goes_on_after_a_change_and_after_a_lost_answer(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.change_node("gpu-1", ready=False)
    faults = [Fault.CONFLICT]
    cluster.client.faults = lambda verb, kind, name: (
        faults.pop() if faults and verb in ("update", "delete") else None
    )
    assert run(["ipam", "reclaim", "--node", "gpu-1", "--powered-off"]) == 0
    cluster.block("10.64.0.8", cluster.api.machines["gpu-1"])
    faults.append(Fault.LOST_ANSWER)
    assert run(["ipam", "reclaim", "--node", "gpu-1", "--powered-off"]) == 1
    assert "no answer" in capsys.readouterr().err
    assert run(["ipam", "reclaim", "--node", "gpu-1", "--powered-off"]) == 0
    assert cluster.blocks() == {}


def test_a_reserved_address_that_no_node_has_is_not_reclaimed(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    sticky = StickySpec(reservation="team-a/web", pod="web-0", ifname="net1", address="10.64.0.11")
    block = cluster.api.look(AddressBlock, BLOCK)
    cluster.api.put(replace(block, spec=replace(block.spec, sticky=sticky, state="Draining")))
    cluster.remove_node("gpu-1")
    assert run(["ipam", "reclaim", "--node", "gpu-1", "--powered-off"]) == 0
    assert capsys.readouterr().out == "gpu-1 leases no block\n"
    assert run(["ipam", "fsck", "--cluster"]) == 0
    assert "look:" not in capsys.readouterr().out
    assert cluster.blocks() == {BLOCK: "Draining"}


def test_fsck_reports_contradictions_and_suspects_and_repairs_nothing(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ipam", "fsck", "--cluster"]) == 0
    assert capsys.readouterr().out == "1 pools, 1 blocks: no contradiction\n"
    cluster.remove_node("gpu-1")
    gpu_2 = cluster.api.machines["gpu-2"]
    cluster.block("10.64.0.0", gpu_2, prefix=28)
    cluster.block("10.99.0.0", gpu_2)
    cluster.block("10.64.0.32", gpu_2, pool="none")
    right = cluster.api.look(AddressBlock, BLOCK)
    misnamed = replace(
        right, metadata=replace(right.metadata, name="default.10.64.0.64-29", uid="u")
    )
    cluster.api.put(misnamed)
    before = cluster.blocks()
    assert run(["ipam", "fsck", "--cluster"]) == 1
    said = capsys.readouterr().out
    for text in (
        f"wrong: default.10.64.0.0-28 of node gpu-2 and {BLOCK} of node gpu-1 have addresses",
        "wrong: default.10.99.0.0-29: it is not in the pool's range 10.64.0.0/24",
        "wrong: default.10.64.0.32-29: there is no pool none",
        f"wrong: default.10.64.0.64-29: a block of these addresses is named {BLOCK}",
        "wrong: default.10.64.0.0-28: it has 16 addresses, a block of the pool has 8",
        f"look: {BLOCK} is Active and leased by gpu-1: its node is gone",
    ):
        assert text in said
    assert cluster.blocks() == before


def test_an_api_server_that_is_away_is_an_error(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.api.down = True
    for words in (["show", "10.0.0.1"], ["fsck"]):
        assert run(["ipam", *words, "--cluster"]) == 1
        assert "no answer" in capsys.readouterr().err


def test_a_controller_without_a_cluster_says_so() -> None:
    environment = {key: value for key, value in os.environ.items() if "KUBERNETES" not in key}
    ended = subprocess.run(
        _CONTROLLER,
        cwd=_CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 1
    assert "podfabric controller: no API server in this pod" in ended.stderr
