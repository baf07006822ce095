"""Confirmations: what lets a node hand out addresses, and what it finds on the API server."""

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import Code
from ipam.addresses import parse
from ipam.leases.block_layout import interval
from ipam.leases.lessee import CONFIRM_EVERY
from ipam.leases.objects import AddressBlock, ReclaimSpec
from ipam.store import repair
from tests.fake_api import FakeApi, Fault, changed_node
from tests.unit.ipam.calls import error_of
from tests.unit.ipam.leases.nodes import Clock, ClusterNode, blocks_of, put_pool

MAX_OFFLINE = 1800.0


@pytest.fixture
def node(server: FakeApi, memory_path: Path) -> ClusterNode:
    """A node with one pod, in a block that is confirmed at 1000 s."""
    node = ClusterNode(server, memory_path / "a")
    node.add("p0")
    return node


def block_of(server: FakeApi) -> AddressBlock:
    (name,) = blocks_of(server)
    return server.look(AddressBlock, name)


def change(server: FakeApi, **changes: object) -> AddressBlock:
    """Change the spec of the only block, as another writer would."""
    block = block_of(server)
    spec = replace(block.spec, **changes)
    return server.put(replace(block, spec=spec))


# --- lost touch --------------------------------------------------------------------------------


def test_new_pods_get_addresses_for_max_offline_and_no_longer(
    server: FakeApi, node: ClusterNode
) -> None:
    server.down = True
    node.clock.now += MAX_OFFLINE - 1
    node.lessee.step()
    (p1,) = node.add("p1")
    node.clock.now += 1
    node.clock.now += 719
    error = error_of(lambda: node.add("p2"))
    assert (error.code, "API server does not answer" in error.message) == (Code.TRY_AGAIN, True)
    (pool,) = {block.spec.pool for block in server.look_at_all(AddressBlock).items}
    assert "last confirmed its lease of AddressBlock" in error.message
    assert "42 minutes ago" in error.message
    assert f"spec.reclaim.maxOffline of AddressPool {pool} (30 minutes)" in error.message
    assert "see that the API server answers on this node" in error.message
    # A pod that comes back has its address still.
    assert node.add("p1", container="p1-2") == [p1]
    node.delete("p0")
    server.down = False
    node.lessee.step()
    assert node.add("p2")


def test_a_node_that_has_room_elsewhere_or_is_in_touch_does_not_speak_of_max_offline(
    server: FakeApi, node: ClusterNode
) -> None:
    server.down = True
    error = error_of(lambda: [node.add(f"p{number}") for number in range(1, 300)])
    assert error.code == Code.TRY_AGAIN
    assert "maxOffline" not in error.message


def test_a_node_that_has_booted_says_that_it_has_confirmed_nothing_since(
    server: FakeApi, node: ClusterNode
) -> None:
    server.down = True
    node.restart(boot="boot-2")
    error = error_of(lambda: node.add("p2"))
    assert error.code == Code.TRY_AGAIN
    assert "has not confirmed" in error.message
    assert "since it booted" in error.message
    assert "see that the API server answers on this node" in error.message


def test_the_time_of_a_confirmation_is_before_its_request(
    server: FakeApi, node: ClusterNode
) -> None:
    def slow(verb: str, kind: str, name: str) -> None:
        node.clock.now += 100

    node.clock.now += CONFIRM_EVERY
    began = node.clock.now
    node.api.faults = slow
    node.lessee.step()
    node.api.faults = None
    server.down = True
    node.clock.now = began + MAX_OFFLINE - 1
    node.add("p1")
    node.clock.now = began + MAX_OFFLINE
    assert error_of(lambda: node.add("p2")).code == Code.TRY_AGAIN


def test_it_confirms_four_times_in_max_offline(server: FakeApi, node: ClusterNode) -> None:
    put_pool(server, reclaim=ReclaimSpec(max_offline="4m"))
    node.clock.now += CONFIRM_EVERY
    node.lessee.step()
    node.api.calls.clear()
    node.steps(24, 10.0)
    assert node.api.calls["list", "AddressBlock"] == 4
    server.down = True
    node.clock.now += 241
    assert error_of(lambda: node.add("p1")).code == Code.TRY_AGAIN


def test_a_block_says_a_longer_max_offline_before_and_a_shorter_one_after(
    server: FakeApi, node: ClusterNode
) -> None:
    """So the controller waits for a node that is cut off at any point."""

    def said_and_used() -> tuple[int, float]:
        (row,) = node.lessee._store.blocks().values()
        return block_of(server).spec.max_offline_seconds, row.max_offline

    assert said_and_used() == (1800, 1800.0)
    put_pool(server, reclaim=ReclaimSpec(max_offline="1h"))
    node.api.faults = lambda verb, kind, name: (
        Fault.LOST_REQUEST if (verb, kind) == ("update", "AddressBlock") else None
    )
    node.steps(1, CONFIRM_EVERY)
    assert said_and_used() == (1800, 1800.0)
    node.api.faults = None
    node.steps(2, CONFIRM_EVERY)
    assert said_and_used() == (3600, 3600.0)
    put_pool(server, reclaim=ReclaimSpec(max_offline="4m"))
    node.steps(1, CONFIRM_EVERY)
    assert said_and_used() == (3600, 240.0)
    node.steps(1, CONFIRM_EVERY)
    assert said_and_used() == (240, 240.0)
    node.api.calls.clear()
    node.steps(3, CONFIRM_EVERY)
    assert not node.api.calls["update", "AddressBlock"]


def test_a_pool_that_cannot_be_used_is_not_looked_at_each_second(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pool(server, exclude=("10.0.0.9-10.0.0.1",))
    node.steps(1, CONFIRM_EVERY)
    assert error_of(lambda: node.add("p1")).code == Code.TRY_AGAIN
    node.api.calls.clear()
    node.steps(100, 1.0)
    assert not node.api.calls["list", "AddressBlock"]


def test_without_a_node_object_nothing_is_confirmed(server: FakeApi, node: ClusterNode) -> None:
    machine = server.machines.pop("node-a")
    node.steps(20, 100.0)
    assert error_of(lambda: node.add("p1")).code == Code.TRY_AGAIN
    server.machines["node-a"] = machine
    node.steps(1, 20.0)
    assert node.add("p1")


def test_a_new_boot_hands_out_nothing_before_a_list_and_names_itself_first(
    server: FakeApi, node: ClusterNode
) -> None:
    server.down = True
    node.restart("boot-2")
    node.clock.now = 5.0
    assert error_of(lambda: node.add("p1")).code == Code.TRY_AGAIN
    assert error_of(lambda: node.add("p0", container="p0-2")).code == Code.TRY_AGAIN
    server.down = False
    before = block_of(server)
    node.clock.now += 30
    node.lessee.step()
    after = block_of(server)
    assert (before.spec.holder.boot, after.spec.holder.boot) == ("boot-1", "boot-2")
    assert (after.spec.epoch, after.metadata.uid) == (before.spec.epoch + 1, before.metadata.uid)
    assert node.add("p0", container="p0-2") == node.add("p0", container="p0-2-again")


def test_an_add_that_comes_first_after_a_boot_leases_no_more_than_it_needs(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pool(server, max_blocks_per_node=1)
    node.restart("boot-2")
    node.add("p0", container="p0-2")
    assert [block_of(server).spec.holder.boot] == ["boot-2"]


def test_a_block_that_may_not_be_written_does_not_keep_the_others_from_use(
    server: FakeApi, node: ClusterNode
) -> None:
    (full,) = node.rows()
    for number in range(1, 20):
        node.add(f"p{number}")
    others = sorted(node.rows().keys() - {full})
    assert others
    node.restart("boot-2")
    node.api.faults = lambda verb, kind, name: (
        Fault.REFUSED if verb == "update" and name == full else None
    )
    node.lessee.step()
    server.down = True
    (address,) = node.add("new")
    with node.files.transaction() as tables:
        confirmed = [row.name for row in tables.blocks() if row.boot == "boot-2"]
    assert sorted(confirmed) == others
    assert address


# --- fences and losses -------------------------------------------------------------------------


def test_a_living_holder_that_sees_a_fence_takes_its_block_back(
    server: FakeApi, node: ClusterNode
) -> None:
    fenced = change(server, state="Reclaiming")
    node.steps(1, CONFIRM_EVERY)
    block = block_of(server)
    assert (block.spec.state, block.spec.epoch) == ("Active", fenced.spec.epoch)
    assert block.metadata.resource_version != fenced.metadata.resource_version
    assert node.add("p1")


def test_a_fence_that_cannot_be_answered_ends_the_hand_outs_in_time(
    server: FakeApi, node: ClusterNode
) -> None:
    change(server, state="Reclaiming")
    node.api.faults = lambda verb, kind, name: Fault.LOST_REQUEST if verb == "update" else None
    node.steps(100, MAX_OFFLINE / 100)
    assert error_of(lambda: node.add("p1")).code == Code.TRY_AGAIN


def test_a_block_that_another_node_has_is_lost_at_once_and_reported(
    server: FakeApi, node: ClusterNode
) -> None:
    name = block_of(server).metadata.name
    server.remove(AddressBlock, name)
    other = ClusterNode(server, node.directory.parent / "b", "node-b")
    first = block_name_first(name)
    other.add("q0", args=f"IP={first}")
    assert blocks_of(server, "node-b") == [name]
    node.steps(1, CONFIRM_EVERY)
    assert node.rows() == {name: "lost"}
    node.steps(1)
    assert {event.reason for event in server.events} == {"AddressBlockLost", "AddressConflict"}
    (pod,) = (event for event in server.events if event.reason == "AddressConflict")
    assert (pod.regarding["kind"], pod.regarding["name"]) == ("Pod", "p0")
    # Its pod does not get the address again, and the row goes when nothing is held.
    (again,) = node.add("p0", container="p0-2")
    assert again not in other.held()
    assert sorted(node.rows().values()) == ["lost", "usable"]
    node.delete("p0")
    node.steps(3)
    assert name not in node.rows()


def block_name_first(name: str) -> str:
    """An address of a block by its name that may be handed out."""
    prefix, _, last = name.removeprefix("default.").rpartition("-")[0].rpartition(".")
    return f"{prefix}.{int(last) + 5}"


def test_a_block_that_was_deleted_is_claimed_again_while_pods_hold_it(
    server: FakeApi, node: ClusterNode
) -> None:
    former = block_of(server)
    server.remove(AddressBlock, former.metadata.name)
    node.steps(1, CONFIRM_EVERY)
    block = block_of(server)
    assert (block.metadata.name, block.spec.holder) == (former.metadata.name, former.spec.holder)
    assert block.metadata.uid != former.metadata.uid
    assert node.add("p1")
    put_pool(server, "10.7.0.0/24")
    error = error_of(lambda: node.add("p2", {"range": "10.7.0.0/24"}))
    assert "lost AddressBlocks" in error.message
    node.steps(1, 121.0)
    assert node.add("p2", {"range": "10.7.0.0/24"})


def test_a_block_that_was_deleted_is_forgotten_if_nothing_of_it_is_held(
    server: FakeApi, node: ClusterNode
) -> None:
    node.delete("p0")
    server.remove(AddressBlock, block_of(server).metadata.name)
    node.steps(1, CONFIRM_EVERY)
    assert node.rows() == {}
    assert blocks_of(server) == []


def test_a_block_that_was_deleted_hands_out_nothing_if_only_the_last_boot_held_it(
    server: FakeApi, node: ClusterNode
) -> None:
    node.restart("boot-2")
    node.steps()
    name = block_of(server).metadata.name
    server.remove(AddressBlock, name)
    node.steps(1, CONFIRM_EVERY)
    assert node.rows() == {name: "lost"}
    node.delete("p0")
    node.steps()
    assert node.rows() == {}


# --- who this store is -------------------------------------------------------------------------


def test_a_block_that_may_not_be_claimed_again_does_not_keep_the_node_from_others(
    server: FakeApi, node: ClusterNode
) -> None:
    gone = block_of(server)
    server.remove(AddressBlock, gone.metadata.name)
    node.api.faults = lambda verb, kind, name: (
        Fault.REFUSED if (verb, name) == ("create", gone.metadata.name) else None
    )
    node.steps(5, CONFIRM_EVERY)
    put_pool(server, "10.7.0.0/24")
    assert node.add("p1", {"range": "10.7.0.0/24"})
    (address,) = node.add("p2")
    block = interval(gone)
    assert not block.first <= parse(address) <= block.last


def test_a_node_object_without_its_machine_yet_does_not_cost_the_blocks(
    server: FakeApi, node: ClusterNode
) -> None:
    before, rows, known = block_of(server), node.rows(), server.machines["node-a"]
    again = replace(known, metadata=replace(known.metadata, uid="again"))
    server.machines["node-a"] = changed_node(again, machine_id="", system_uuid="")
    node.steps(5, CONFIRM_EVERY)
    assert node.rows() == rows
    assert error_of(lambda: node.add("p1")).code == Code.TRY_AGAIN
    server.machines["node-a"] = again
    node.steps(3)
    assert block_of(server).spec.holder.instance == before.spec.holder.instance
    assert node.add("p1")


def test_a_new_machine_under_an_old_name_does_not_get_the_old_blocks(
    server: FakeApi, node: ClusterNode
) -> None:
    old = blocks_of(server)
    del server.machines["node-a"]
    new = ClusterNode(server, node.directory.parent / "new", boot="boot-9", machine="other")
    new.add("q0")
    assert set(new.rows()).isdisjoint(old)
    assert set(old) < set(blocks_of(server))


def test_a_store_that_was_lost_before_a_boot_adopts_its_blocks(
    server: FakeApi, node: ClusterNode
) -> None:
    node.steps(2, 20.0)  # its status is written
    former = block_of(server)
    assert former.status.seq > 0
    shutil.rmtree(node.directory)
    node.restart("boot-2")
    node.lessee.step()
    block = block_of(server)
    assert block.spec.epoch > former.spec.epoch
    assert block.spec.holder.instance != former.spec.holder.instance
    assert node.rows() == {former.metadata.name: "usable"}
    server.down = True
    assert node.add("p1")


def test_a_store_that_was_lost_in_this_boot_adopts_nothing(
    server: FakeApi, node: ClusterNode
) -> None:
    former = block_of(server)
    shutil.rmtree(node.directory)
    node.restart()
    node.add("p1")
    assert former.metadata.name not in node.rows()
    assert server.look(AddressBlock, former.metadata.name).spec.holder == former.spec.holder


def test_a_store_that_was_put_back_hands_out_nothing_until_the_next_boot(
    server: FakeApi, node: ClusterNode
) -> None:
    backup = node.directory.parent / "backup"
    shutil.copytree(node.directory, backup)
    lost = [node.add(f"p{number}")[0] for number in range(1, 6)]
    node.steps(3, 10.0)
    assert block_of(server).status.seq > 0
    shutil.rmtree(node.directory)
    shutil.copytree(backup, node.directory)
    node.restart()
    node.lessee.step()
    assert set(node.rows().values()) == {"unconfirmed"}
    assert node.add("q0")[0] not in lost
    node.steps(30, 600.0)
    assert list(node.rows().values()).count("unconfirmed") == 1
    node.restart("boot-2")
    node.lessee.step()
    assert set(node.rows().values()) == {"usable"}


def test_a_store_that_was_built_again_beside_its_agent_is_confirmed_soon(
    server: FakeApi, node: ClusterNode
) -> None:
    node.steps()
    repair.rebuild(node.directory, lambda line: None)
    assert not node.rows()
    node.steps(5)
    node.api.calls.clear()
    assert node.add("p1")
    assert not node.api.calls
    node.steps(20)
    assert not node.api.calls["list", "AddressBlock"]


# --- pools -------------------------------------------------------------------------------------


def test_a_pool_that_is_drained_hands_out_nothing_and_is_given_back_when_empty(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pool(server, state="Draining")
    node.steps(1, CONFIRM_EVERY)
    assert set(node.rows().values()) == {"draining"}
    assert error_of(lambda: node.add("p1")).code == Code.TRY_AGAIN
    (again,) = node.add("p0", container="p0-2")
    assert again in node.held()
    put_pool(server)
    node.steps(1, CONFIRM_EVERY)
    assert set(node.rows().values()) == {"usable"}
    put_pool(server, state="Draining")
    node.delete("p0", "p0-2")
    node.steps(3, CONFIRM_EVERY)
    assert blocks_of(server) == []


def test_a_pool_that_changed_its_space_after_the_post_gets_its_block_deleted(
    server: FakeApi, memory_path: Path
) -> None:
    node = ClusterNode(server, memory_path / "late", "node-z", clock=Clock())
    node.lessee.step()

    def flips(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("create", "AddressBlock"):
            put_pool(server, size=8)

    node.api.faults = flips
    node.add("p0")
    node.api.faults = None
    (name,) = blocks_of(server, "node-z")
    assert name.endswith("-29")
    assert list(node.rows()) == [name]
