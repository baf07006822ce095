"""`podfabric ipam hand-back`: what it prints, and its exit code."""

from pathlib import Path

import pytest

from cli import cluster_addresses
from cli.commands import run
from ipam.cluster.api import ClusterApi
from ipam.cluster.nv_ipam.objects import NvIPPool
from tests.unit.ipam.cluster.nv_ipam.nodes import NAMESPACE
from tests.unit.ipam.cluster.nv_ipam.test_hand_back import moved_over
from tests.unit.ipam.cluster.nv_ipam.test_own import World

HAND_BACK = ["ipam", "hand-back", "--nv-ipam", NAMESPACE, "--node"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = moved_over(tmp_path)

    def connect(kubeconfig: Path | None) -> ClusterApi:
        return world.controller.client

    monkeypatch.setattr(cluster_addresses, "connect", connect)
    return world


def entries(world: World) -> list[tuple[str, str, str]]:
    (pool,) = world.server.look_at_all(NvIPPool, namespace=NAMESPACE).items
    return [(each.node, each.start, each.end) for each in pool.status.allocations or ()]


def test_a_node_is_handed_back_and_may_be_taken_over_again(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*HAND_BACK, "a"]) == 0
    ((node, first, last),) = entries(world)
    said = f"ippool/pool: a has {first} to {last}, for nv-ipam's daemon\n"
    assert (node, capsys.readouterr().out) == ("a", said)
    assert run([*HAND_BACK, "a", "--revoke"]) == 0
    assert "joins when its store has" in capsys.readouterr().out
    assert run([*HAND_BACK, "a", "--revoke"]) == 0
    assert capsys.readouterr().out == f"there is nothing of a in the IPPools of {NAMESPACE}\n"


def test_what_is_refused_changes_nothing_and_says_why(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*HAND_BACK, "nowhere"]) == 1
    assert capsys.readouterr().err.startswith("podfabric ipam: there is no Node nowhere")
    assert entries(world) == []
