"""The background thread releases empty blocks and publishes their status."""

import math
import threading
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.leases.claim_request import Attempts, Want
from ipam.leases.lessee import CONFIRM_EVERY, Lessee
from ipam.leases.objects import AddressBlock, AddressPool, Condition
from ipam.plugin import AddressPlugin
from ipam.store.store_files import StoreFiles
from ipam.store_choice import Stores
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.calls import range_of, request
from tests.unit.ipam.leases.nodes import (
    RANGE,
    READY,
    ClusterNode,
    blocks_of,
    put_pool,
)
from tests.waiting import join, until

EXHAUSTED = Condition(type="Exhausted", status="True", reason="Full")


def fill(node: ClusterNode, count: int) -> None:
    for number in range(count):
        node.add(f"p{number}")


def test_an_empty_block_of_which_the_pool_excludes_all_is_not_kept(
    server: FakeApi, node: ClusterNode
) -> None:
    fill(node, 1)
    node.delete("p0")
    node.steps(4)
    (block,) = server.look_at_all(AddressBlock).items
    (pool,) = server.look_at_all(AddressPool).items
    exclude = (block.spec.range,)
    server.put(replace(pool, spec=replace(pool.spec, exclude=exclude)))
    node.steps(2, CONFIRM_EVERY + 1)
    assert not blocks_of(server)
    assert not node.rows()


def test_empty_blocks_go_back_and_one_is_kept(server: FakeApi, node: ClusterNode) -> None:
    fill(node, 40)
    assert len(blocks_of(server)) >= 3
    for number in range(40):
        node.delete(f"p{number}")
    node.steps(4)
    assert len(blocks_of(server)) == len(node.rows()) == 1
    node.steps(30, 60.0)
    assert len(blocks_of(server)) == 1
    server.down = True
    assert node.add("again")


def test_an_empty_block_beside_those_in_use_goes_back_after_ten_minutes(
    server: FakeApi, node: ClusterNode
) -> None:
    fill(node, 20)
    blocks = {int(address.rpartition(".")[2]) // 16 for address in node.held()}
    assert len(blocks) == 2
    for held in node.store.reservations():
        if int(held.address.rpartition(".")[2]) // 16 == min(blocks):
            node.delete(held.pod)
    node.steps(3)
    assert len(blocks_of(server)) == 2
    node.steps(11, 60.0)
    assert len(blocks_of(server)) == 1
    assert len(node.rows()) == 1


def test_an_exhausted_pool_gets_every_empty_block_back(server: FakeApi, node: ClusterNode) -> None:
    fill(node, 2)
    node.steps(1)
    put_pool(server, conditions=(READY, EXHAUSTED))
    for number in range(2):
        node.delete(f"p{number}")
    node.steps(40)
    assert blocks_of(server) == []


def test_a_pool_that_becomes_scarce_gets_a_block_back_that_was_kept(
    server: FakeApi, node: ClusterNode
) -> None:
    fill(node, 1)
    node.delete("p0")
    node.steps(4)
    (pool,) = server.look_at_all(AddressPool).items
    blocks = replace(pool.status.blocks, total=16, leased=13)
    server.put(replace(pool, status=replace(pool.status, blocks=blocks)))
    node.steps(1, 20.0)
    assert len(blocks_of(server)) == 1  # not looked at yet
    node.steps(1, 20.0)
    assert blocks_of(server) == []


def test_a_pool_that_cannot_be_read_is_not_asked_for_every_second(
    server: FakeApi, node: ClusterNode
) -> None:
    fill(node, 1)
    node.api.faults = lambda verb, kind, name: (
        Fault.LOST_REQUEST if (verb, kind) == ("get", "AddressPool") else None
    )
    node.delete("p0")
    node.api.calls.clear()
    node.steps(25, 1.0)
    assert node.api.calls["get", "AddressPool"] == 1
    assert len(blocks_of(server)) == 1


def test_blocks_of_one_address_go_back_at_once(server: FakeApi, node: ClusterNode) -> None:
    put_pool(server, "10.1.0.0/28", size=1)
    ipam = {"range": "10.1.0.0/28"}
    for number in range(3):
        node.add(f"p{number}", ipam)
    node.steps(3)
    assert len(blocks_of(server)) == 3  # nothing is leased ahead
    for number in range(3):
        node.delete(f"p{number}")
    node.steps(2)
    assert blocks_of(server) == []


def test_blocks_that_are_held_never_go_back(server: FakeApi, node: ClusterNode) -> None:
    fill(node, 40)
    before = set(blocks_of(server))
    node.lessee.leaving = True
    node.steps(10, 200.0)
    held = {int(address.rpartition(".")[2]) // 16 * 16 for address in node.held()}
    kept = {f"default.10.0.0.{first}-28" for first in held}
    assert set(blocks_of(server)) == kept <= before


@pytest.mark.slow
def test_while_the_api_server_is_away_a_node_keeps_what_it_has(
    server: FakeApi, node: ClusterNode
) -> None:
    """Ten minutes of churn within two blocks, and the agent is restarted meanwhile."""
    fill(node, 20)
    node.steps(2)
    blocks = set(node.rows())
    server.down = True
    for turn in range(120):
        for number in range(20):
            node.delete(f"p{number}", f"p{number}-{turn}" if turn else "")
        if turn == 60:
            node.restart()
        node.steps(1)
        for number in range(20):
            node.add(f"p{number}", container=f"p{number}-{turn + 1}")
    assert list(node.rows().values()).count("returning") <= 1
    assert set(node.rows()) == blocks
    server.down = False
    node.steps(1, 30.0)
    assert (node.lessee.counted().confirmed or 0) <= 30


def test_a_pool_that_is_gone_keeps_no_empty_block(server: FakeApi, node: ClusterNode) -> None:
    fill(node, 1)
    node.delete("p0")
    server.remove(AddressPool, "10.0.0.0-24")
    node.steps(3, 460.0)
    assert blocks_of(server) == []


def test_a_block_that_is_another_s_by_now_is_not_deleted(
    server: FakeApi, node: ClusterNode
) -> None:
    fill(node, 1)
    (name,) = node.rows()
    node.delete("p0")
    node.lessee.leaving = True
    node.api.faults = lambda verb, kind, name: Fault.LOST_ANSWER if verb == "delete" else None
    node.steps(2)
    assert blocks_of(server) == []
    other = ClusterNode(server, node.directory.parent / "b", "node-b")
    first = int(name.removeprefix("default.10.0.0.").partition("-")[0])
    other.add("q0", args=f"IP=10.0.0.{first + 5}")
    node.api.faults = None
    node.steps(2)
    assert blocks_of(server, "node-b") == [name]
    assert node.rows() == {}


def test_the_status_tells_who_holds_what_of_one_block_at_a_time(
    server: FakeApi, node: ClusterNode
) -> None:
    fill(node, 3)
    node.steps(1)
    (name,) = blocks_of(server)
    status = server.look(AddressBlock, name).status
    assert (status.used, len(status.holders), status.seq > 0) == (3, 3, True)
    assert set(status.holders.values()) == {f"ns/p{number} eth0" for number in range(3)}
    writes = node.api.calls["update_status", "AddressBlock"]
    node.steps(100)
    assert node.api.calls["update_status", "AddressBlock"] == writes
    node.delete("p0")
    node.steps(1, 20.0)
    assert server.look(AddressBlock, name).status.used == 2


def test_a_restarted_agent_corrects_the_status(server: FakeApi, node: ClusterNode) -> None:
    node.add("p0")
    node.steps(10)
    (name,) = blocks_of(server)
    assert server.look(AddressBlock, name).status.used == 1
    node.delete("p0")
    node.restart()
    node.steps(10)
    status = server.look(AddressBlock, name).status
    assert (status.used, status.holders) == (0, {})


def test_a_block_is_leased_ahead_before_the_last_address_is_used(
    server: FakeApi, node: ClusterNode
) -> None:
    fill(node, 10)
    node.steps(1, 1.0)
    assert len(node.rows()) == 1
    for number in range(10, 13):
        node.add(f"p{number}")
    node.steps(1, 1.0)
    assert len(node.rows()) == 2
    server.down = True
    for number in range(13, 27):
        node.add(f"p{number}")


def test_pods_that_come_and_go_lease_nothing_ahead(server: FakeApi, node: ClusterNode) -> None:
    """Else the nodes of a busy cluster lease each other's last blocks and give them back."""
    for number in range(60):
        node.add(f"p{number}")
        node.delete(f"p{number}")
        if number % 10 == 0:
            node.steps(1, 1.0)
    node.steps(3, 1.0)
    assert len(node.rows()) == 1


def test_a_pool_that_can_lease_no_more_does_not_keep_another_from_leasing_ahead(
    server: FakeApi, node: ClusterNode, caplog: pytest.LogCaptureFixture
) -> None:
    put_pool(server, "10.4.0.0/24", max_blocks_per_node=1)
    for number in range(13):
        node.add(f"q{number}", {"range": "10.4.0.0/24"})
    fill(node, 13)
    node.steps(1, 1.0)
    assert len(node.rows()) == 3
    assert "lease a block ahead: this node leases as many blocks" in caplog.text


def test_what_is_counted(server: FakeApi, node: ClusterNode) -> None:
    fill(node, 3)
    node.steps(1)
    counted = node.lessee.counted()
    assert (counted.blocks, counted.used, counted.claims, counted.errors) == (1, 3, 1, 0)
    assert counted.free == 13
    server.down = True
    node.steps(3, 500.0)
    assert node.lessee.counted().errors > 0
    assert (node.lessee.counted().confirmed or 0) >= 1500


# --- with its thread ---------------------------------------------------------------------------


def test_many_adds_at_once_share_claims(server: FakeApi, memory_path: Path) -> None:
    server.add_node("node-a")
    api = server.client("node-a")
    with closing(StoreFiles(memory_path / "ipam")) as files:
        lessee = Lessee(api, files, "node-a", "boot-1")
        lessee.start()
        plugin = AddressPlugin(
            Stores(files, lambda: "cluster", lessee, patience=60.0), lambda: "boot-1"
        )
        answers: list[object] = []

        def add(number: int) -> None:
            try:
                asked = request("ADD", {"range": RANGE}, f"c{number}", pod=f"p{number}")
                answers.append(plugin.reserve(asked)[0])
            except CNIError as error:
                answers.append(error)

        threads = [threading.Thread(target=add, args=(number,)) for number in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            join(thread)
        assert [answer for answer in answers if isinstance(answer, CNIError)] == []
        assert len(plugin_held(files)) == 30
        # 30 addresses need 2 or 3 blocks; one more may be leased ahead.
        until(lambda: len(blocks_of(server)) in (2, 3, 4))
        assert api.calls["create", "AddressBlock"] <= 4
        lessee.close()


def plugin_held(files: StoreFiles) -> set[str]:
    with files.transaction() as tables:
        return {held.address for held in tables.all()}


def test_an_add_does_not_wait_until_all_blocks_are_given_back(
    server: FakeApi, memory_path: Path
) -> None:
    put_pool(server, "10.4.0.0/24", size=1)
    node = ClusterNode(server, memory_path / "b", "node-b")
    for number in range(5):
        node.add(f"p{number}", {"range": "10.4.0.0/24"})
    order: list[str] = []
    adds: list[threading.Thread] = []

    def see(verb: str, kind: str, name: str) -> None:
        order.append(verb)
        if verb == "delete" and not adds:
            adds.append(threading.Thread(target=node.add, args=("q",)))
            adds[0].start()
            until(lambda: len(attempts) > 0)

    node.api.faults = see
    attempts = node.lessee._attempts
    for number in range(5):
        node.delete(f"p{number}")
    node.steps(2)
    join(adds[0])
    assert order.index("create") < len(order) - 1 - order[::-1].index("delete")


def test_an_add_waits_for_a_slow_api_server_and_then_gives_up(
    server: FakeApi, memory_path: Path
) -> None:
    server.add_node("node-a")
    held_up = threading.Event()

    def wait(verb: str, kind: str, name: str) -> None:
        held_up.wait()

    with closing(StoreFiles(memory_path / "ipam")) as files:
        lessee = Lessee(server.client("node-a", wait), files, "node-a", "boot-1")
        lessee.start()
        plugin = AddressPlugin(
            Stores(files, lambda: "cluster", lessee, patience=0.05), lambda: "boot-1"
        )
        asked = request("ADD", {"range": RANGE}, "c0", pod="p0")
        with pytest.raises(CNIError, match="did not answer") as failure:
            plugin.reserve(asked)
        assert failure.value.code == Code.TRY_AGAIN
        held_up.set()
        until(lambda: lessee.counted().confirmed is not None)
        lessee.close()


def test_a_claim_that_fails_by_a_defect_is_no_success() -> None:
    """Its ADD would look, find nothing, and claim again, for ever."""

    def fail(want: Want, is_late: object) -> None:
        raise ZeroDivisionError

    range_ = range_of(RANGE)
    attempts = Attempts(fail)
    attempt = attempts.add(Want(range_, (range_.domain, range_.network)), math.inf)
    with pytest.raises(ZeroDivisionError):
        attempts.serve()
    assert attempt.over.is_set()
    assert attempt.error is not None
    assert attempt.error.code == Code.TRY_AGAIN
    assert not attempts


def test_an_add_waits_for_a_pool_that_is_not_there_yet(memory_path: Path) -> None:
    """A definition and its first pod come in one file."""
    server = FakeApi()
    server.add_node("node-a")
    api = server.client("node-a")
    with closing(StoreFiles(memory_path / "ipam")) as files:
        lessee = Lessee(api, files, "node-a", "boot-1")
        lessee.start()
        stores = Stores(files, lambda: "cluster", lessee, patience=60.0, pool_patience=60.0)
        plugin = AddressPlugin(stores, lambda: "boot-1")
        answers: list[object] = []

        def add(number: int) -> None:
            asked = request("ADD", {"range": RANGE}, f"c{number}", pod=f"p{number}")
            answers.append(plugin.reserve(asked)[0])

        threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: api.calls["get", "AddressPool"] >= 2)
        put_pool(server, conditions=())
        put_pool(server)
        for thread in threads:
            join(thread)
        assert len(plugin_held(files)) == len(answers) == 4
        lessee.close()
