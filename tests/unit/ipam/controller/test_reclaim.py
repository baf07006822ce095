"""Reclaim by proof of death: each proof, what proves nothing, and a controller that dies.

The pool's durations: nodeGoneAfter 10 s, maxOffline 30 s, margin 3 s (rows A7 to A9).
"""

from typing import Any

import pytest
from msgspec.structs import replace

from ipam.controller.death_proofs import OUT_OF_SERVICE
from ipam.controller.reclaim import REBOOTED_FOR, TAINTED_FOR, free_powered_off
from ipam.controller.rounds import COUNTS_EVERY
from ipam.controller.steps import MOST_FAILURES
from ipam.leases.objects import AddressBlock, AddressPool
from kube.resources import Unavailable
from tests.fake_api import Fault
from tests.unit.ipam.controller.cluster import (
    GONE_AFTER,
    MARGIN,
    OFFLINE,
    Cluster,
    read_world,
)

BLOCK = "default.10.64.0.8-29"
WHOLE_WAIT = GONE_AFTER + OFFLINE + MARGIN


def _cluster() -> Cluster:
    """A node with a block, and a controller that has seen both."""
    cluster = Cluster()
    cluster.pool()
    cluster.block("10.64.0.8", cluster.node("gpu-1"))
    cluster.node("gpu-2")
    cluster.round()
    return cluster


def _quarantined(cluster: Cluster) -> int:
    return cluster.pool_now().status.blocks.quarantined


def test_a_deleted_node_loses_its_blocks_after_fence_and_wait() -> None:
    cluster = _cluster()
    cluster.remove_node("gpu-1")
    cluster.round()
    cluster.run(GONE_AFTER - 1)
    assert cluster.blocks() == {BLOCK: "Active"}
    assert _quarantined(cluster) == 1
    cluster.run(1)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}
    cluster.run(OFFLINE + MARGIN - 1)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}
    cluster.run(1)
    assert cluster.blocks() == {}
    assert (cluster.counts.fenced, cluster.counts.freed) == (1, 1)
    cluster.round()
    assert _quarantined(cluster) == 0


def test_a_deleted_node_with_pods_keeps_its_blocks_until_they_are_gone() -> None:
    cluster = _cluster()
    cluster.remove_node("gpu-1")
    cluster.api.pods["gpu-1"] = 2
    cluster.run(10 * WHOLE_WAIT, every=5)
    assert cluster.blocks() == {BLOCK: "Active"}
    cluster.api.pods["gpu-1"] = 0
    cluster.run(GONE_AFTER + WHOLE_WAIT + 1)
    assert cluster.blocks() == {}


def test_the_taint_out_of_service_frees_blocks_without_a_wait() -> None:
    cluster = _cluster()
    cluster.change_node("gpu-1", ready=False, taints=(OUT_OF_SERVICE,))
    cluster.round()
    cluster.run(TAINTED_FOR - 1)
    assert cluster.blocks() == {BLOCK: "Active"}
    cluster.run(3)
    assert cluster.blocks() == {}


def test_a_taint_that_is_taken_away_in_time_frees_nothing() -> None:
    cluster = _cluster()
    cluster.change_node("gpu-1", ready=False, taints=(OUT_OF_SERVICE,))
    cluster.run(TAINTED_FOR - 5)
    cluster.change_node("gpu-1", taints=())
    cluster.run(10)
    cluster.change_node("gpu-1", taints=(OUT_OF_SERVICE,))
    cluster.run(TAINTED_FOR - 5)
    assert cluster.blocks() == {BLOCK: "Active"}


def test_a_taint_on_another_machine_of_the_same_name_proves_nothing_of_the_former() -> None:
    cluster = _cluster()
    cluster.remove_node("gpu-1")
    other = cluster.node("gpu-1", machine="spare")
    cluster.change_node("gpu-1", ready=False, taints=(OUT_OF_SERVICE,))
    theirs = cluster.block("10.64.0.16", other, "store-of-spare").metadata.name
    cluster.round()
    cluster.run(GONE_AFTER - 1)
    assert cluster.blocks() == {BLOCK: "Active", theirs: "Active"}


def test_another_boot_with_another_store_frees_the_blocks_of_the_former_boot() -> None:
    cluster = _cluster()
    again = cluster.change_node("gpu-1", boot_id="boot-2")
    theirs = cluster.block("10.64.0.16", again, "another-store").metadata.name
    cluster.round()
    cluster.run(REBOOTED_FOR - 1, every=10)
    assert cluster.blocks() == {BLOCK: "Active", theirs: "Active"}
    cluster.run(3)
    assert cluster.blocks() == {theirs: "Active"}


@pytest.mark.parametrize(
    ("change", "store"),
    [
        ({"taints": (OUT_OF_SERVICE,)}, ""),  # and Ready
        ({"boot_id": "boot-2"}, ""),
        ({"boot_id": "boot-2"}, "store-of-gpu-1"),  # the same store
        ({"boot_id": "boot-0", "ready": False}, "another-store"),  # perhaps an earlier boot
        ({}, "another-store"),
    ],
)
def test_what_proves_no_death_frees_nothing(change: dict[str, Any], store: str) -> None:
    """`store` leases another block on the machine after the change."""
    cluster = _cluster()
    node = cluster.change_node("gpu-1", **change)
    kept = {BLOCK: "Active"}
    if store:
        kept[cluster.block("10.64.0.16", node, store).metadata.name] = "Active"
    cluster.run(3 * REBOOTED_FOR, every=10)
    assert cluster.blocks() == kept


def test_a_block_is_deleted_only_by_a_proof_that_was_read_after_its_fence() -> None:
    cluster = _cluster()
    cluster.change_node("gpu-1", ready=False, taints=(OUT_OF_SERVICE,))
    cluster.round()
    cluster.run(TAINTED_FOR)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}
    before_the_fence = cluster.now - 1
    cluster.now += 1
    world = read_world(cluster.client, lambda: before_the_fence)
    cluster.rounds.round(world)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}
    cluster.round()
    assert cluster.blocks() == {}


def test_machines_with_the_same_ids_prove_nothing_for_each_other() -> None:
    cluster = _cluster()
    again = cluster.change_node("gpu-1", boot_id="boot-2")
    cluster.node("clone", machine="machine-of-gpu-1", boot="boot-3")
    cluster.block("10.64.0.16", again, "another-store")
    clone = cluster.api.machines["clone"]
    cluster.block("10.64.0.24", clone, "third-store")
    cluster.remove_node("gpu-1")
    cluster.api.machines["clone-2"] = replace(
        clone, metadata=replace(clone.metadata, name="clone-2")
    )
    cluster.run(3 * REBOOTED_FOR, every=10)
    assert cluster.blocks()[BLOCK] == "Active"


@pytest.mark.parametrize("ready", [False, True])
def test_silence_proves_nothing_and_is_counted(ready: bool) -> None:
    cluster = _cluster()
    cluster.change_node("gpu-1", ready=ready)
    cluster.run(86400, every=60)
    assert cluster.blocks() == {BLOCK: "Active"}
    assert _quarantined(cluster) == (0 if ready else 1)
    assert cluster.seen.standings.get("silent", 0) == (0 if ready else 1)


def test_another_machine_under_an_old_name_quarantines_the_blocks_and_then_frees_them() -> None:
    """Row A9."""
    cluster = _cluster()
    cluster.remove_node("gpu-1")
    spare = cluster.node("gpu-1", machine="spare")
    theirs = cluster.block("10.64.0.16", spare, "store-of-spare").metadata.name
    cluster.api.pods["gpu-1"] = 3  # of the new machine
    cluster.round()
    cluster.run(COUNTS_EVERY)
    assert _quarantined(cluster) == 1
    cluster.run(WHOLE_WAIT - COUNTS_EVERY - 1)
    assert cluster.blocks() == {BLOCK: "Reclaiming", theirs: "Active"}
    cluster.run(2)
    assert cluster.blocks() == {theirs: "Active"}


def test_a_machine_that_comes_back_under_another_name_keeps_its_blocks() -> None:
    cluster = _cluster()
    cluster.remove_node("gpu-1")
    cluster.node("renamed", machine="machine-of-gpu-1")
    cluster.run(3 * WHOLE_WAIT)
    assert cluster.blocks() == {BLOCK: "Active"}


def test_a_machine_without_ids_proves_nothing_and_is_quarantined() -> None:
    cluster = Cluster()
    cluster.pool()
    cluster.api.add_node("gpu-1", boot_id="boot-1")
    cluster.block("10.64.0.8", cluster.api.machines["gpu-1"])
    cluster.api.add_node("gpu-1", boot_id="boot-2")  # another Node object, of which machine?
    cluster.run(3 * WHOLE_WAIT)
    assert cluster.blocks() == {BLOCK: "Active"}
    assert _quarantined(cluster) == 1


def test_a_block_that_is_shown_as_it_was_before_the_fence_is_no_answer() -> None:
    cluster = _cluster()
    cluster.remove_node("gpu-1")
    cluster.run(GONE_AFTER - 1)
    before = read_world(cluster.client, lambda: cluster.now)
    cluster.run(2)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}
    cluster.rounds.round(replace(before, polled=before.polled._replace(began=cluster.now)))
    assert cluster.counts.answered == 0
    cluster.run(OFFLINE + MARGIN)  # the wait goes on
    assert cluster.blocks() == {}


def test_an_answer_at_the_last_moment_wins_over_the_end_of_the_lease() -> None:
    answers: list[str] = []

    def faults(verb: str, kind: str, name: str) -> Fault | None:
        if (verb, kind) == ("update_status", "AddressBlock") and not answers:
            answers.append(name)
            cluster.answer(name)
        return None

    cluster = Cluster(faults)
    cluster.pool()
    cluster.block("10.64.0.8", cluster.node("gpu-1"))
    cluster.remove_node("gpu-1")
    while not answers:
        cluster.run(1)
    assert cluster.blocks() == {BLOCK: "Active"}
    assert cluster.counts.freed == 0


def test_a_status_that_the_holder_writes_after_the_fence_begins_the_wait_anew() -> None:
    cluster = _cluster()
    cluster.remove_node("gpu-1")
    cluster.run(GONE_AFTER + 20)
    block = cluster.api.look(AddressBlock, BLOCK)
    assert block.spec.state == "Reclaiming"
    cluster.api.update_status(replace(block, status=replace(block.status, used=3)))
    cluster.round()
    cluster.run(OFFLINE + MARGIN - 1)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}
    cluster.run(2)
    assert cluster.blocks() == {}


@pytest.mark.parametrize("new_leader", [False, True])
def test_a_block_waits_for_the_max_offline_that_it_says(new_leader: bool) -> None:
    """The pool's was shortened while its node was cut off; a new leader never saw the longer."""
    cluster = Cluster()
    pool = cluster.pool()
    cluster.block("10.64.0.8", cluster.node("gpu-1"), max_offline=int(OFFLINE))
    cluster.round()
    reclaim = replace(pool.spec.reclaim, max_offline="1s")
    pool = cluster.pool_now()
    cluster.api.update(replace(pool, spec=replace(pool.spec, reclaim=reclaim)))
    if new_leader:
        cluster.new_leader()
    cluster.remove_node("gpu-1")
    cluster.round()
    cluster.run(WHOLE_WAIT - 1)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}
    cluster.run(2)
    assert cluster.blocks() == {}


def test_a_list_of_nodes_that_takes_long_does_not_stop_reclaim() -> None:
    cluster = _cluster()

    def slow(verb: str, kind: str, name: str) -> Fault | None:
        if (verb, kind) == ("list", "Node"):
            cluster.now += 120
        return None

    cluster.remove_node("gpu-1")
    cluster.client.faults = slow
    for _ in range(4):
        cluster.round()
    assert cluster.blocks() == {}


def test_each_step_of_a_round_fails_alone() -> None:
    """Neither a pool that cannot be made, nor a status that cannot be written, nor a node whose
    pods cannot be listed keeps the blocks of a dead node from being freed."""
    cluster = Cluster()
    cluster.pool()
    cluster.pool("10.65.0.0/24", name="stuck")
    cluster.block("10.64.0.8", cluster.node("gpu-1"))
    cluster.block("10.64.0.16", cluster.node("gpu-2"))
    cluster.round()
    failing = {
        ("create", "AddressPool", "10.70.0.0-24"),
        ("update_status", "AddressPool", "stuck"),
        ("list", "Pod", "gpu-2"),
        ("list", "NetworkAttachmentDefinition", "none"),
    }
    cluster.client.faults = lambda *call: Fault.LOST_REQUEST if call in failing else None
    cluster.define({"type": "whereabouts", "range": "10.70.0.0/24"}, "fails")
    cluster.define({"type": "whereabouts", "range": "10.71.0.0/24"}, "works")
    cluster.remove_node("gpu-1")
    cluster.remove_node("gpu-2")
    cluster.run(WHOLE_WAIT + 2)
    assert cluster.blocks() == {"default.10.64.0.16-29": "Active"}
    assert cluster.condition("Ready", "10.71.0.0-24") == ("True", "Decided")
    assert {str(error).split(":")[0] for error in cluster.errors} == {
        "create AddressPool 10.70.0.0-24",
        "list Pod gpu-2",
    }
    cluster.client.faults = None
    cluster.run(WHOLE_WAIT + 2)
    assert cluster.blocks() == {}
    assert cluster.errors == []


def test_steps_that_fail_give_way_to_the_others() -> None:
    cluster = Cluster()
    for number in range(8):
        cluster.define({"type": "whereabouts", "range": f"10.70.{number}.0/24"}, f"n{number}")
    failing = {f"10.70.{number}.0-24" for number in range(6)}
    cluster.client.faults = lambda verb, kind, name: (
        Fault.LOST_REQUEST if verb == "create" and name in failing else None
    )
    for _ in range(3):
        cluster.round()
        assert len(cluster.errors) == MOST_FAILURES
    made = {pool.metadata.name for pool in cluster.api.look_at_all(AddressPool).items}
    assert made == {"10.70.6.0-24", "10.70.7.0-24"}


def test_a_new_leader_waits_anew() -> None:
    cluster = _cluster()
    cluster.remove_node("gpu-1")
    cluster.run(WHOLE_WAIT - 1)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}
    cluster.new_leader()
    cluster.round()
    cluster.run(WHOLE_WAIT - 1)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}
    cluster.run(2)
    assert cluster.blocks() == {}


def test_what_was_read_too_long_ago_is_not_acted_on() -> None:
    cluster = _cluster()
    cluster.remove_node("gpu-1")
    cluster.run(GONE_AFTER - 1)

    def slow(verb: str, kind: str, name: str) -> Fault | None:
        if (verb, kind) == ("list", "AddressBlock"):
            cluster.now += 30
        return None

    cluster.client.faults = slow
    cluster.run(600, every=5)
    assert cluster.blocks() == {BLOCK: "Active"}
    cluster.client.faults = None
    cluster.run(1)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}


def test_without_an_answer_nothing_is_done_and_then_everything() -> None:
    cluster = _cluster()
    cluster.remove_node("gpu-1")
    cluster.api.down = True
    for _ in range(100):
        cluster.now += 10
        with pytest.raises(Unavailable):
            cluster.round()
    cluster.api.down = False
    cluster.run(WHOLE_WAIT - 1)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}
    cluster.run(3)
    assert cluster.blocks() == {}


def test_a_block_of_a_pool_that_is_gone_waits_for_the_default_duration() -> None:
    cluster = Cluster()
    cluster.block("10.64.0.8", cluster.node("gpu-1"), pool="gone", max_offline=1800)
    cluster.remove_node("gpu-1")
    cluster.round()
    cluster.run(600 + 1800, every=10)
    assert cluster.blocks() == {BLOCK: "Reclaiming"}
    cluster.run(20)
    assert cluster.blocks() == {}


def test_a_holder_that_is_not_off_gets_in_between() -> None:
    def faults(verb: str, kind: str, name: str) -> Fault | None:
        if verb == "delete":
            cluster.answer(name)
        return None

    cluster = Cluster(faults)
    cluster.pool()
    block = cluster.block("10.64.0.8", cluster.node("gpu-1"))
    assert not free_powered_off(cluster.client, block)
    assert cluster.blocks() == {BLOCK: "Active"}
