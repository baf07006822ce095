"""Machines that have one node's name, one after the other: each has shares of its own."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from base import files
from cni.spec.errors import CNIError, Code
from ipam.cluster.controller.rounds import Rounds, read_world
from ipam.cluster.objects import AddressShare, Meta, ShareSpec
from ipam.nv_ipam import pools
from ipam.nv_ipam.pools import NodePool, NodePools, PoolsFile
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.cluster.nodes import Clock
from tests.unit.ipam.cluster.nv_ipam.nodes import (
    FollowingNode,
    broken,
    duplicates,
    put_ippool,
    share_of,
)

ENTRY = {"a": ("10.0.0.1", "10.0.0.10"), "b": ("10.0.0.11", "10.0.0.20")}


@pytest.fixture
def server() -> FakeApi:
    return FakeApi()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def old(server: FakeApi, memory_path: Path, clock: Clock) -> FollowingNode:
    """The machine that has had the name: a pod of it holds an address."""
    put_ippool(server, ENTRY)
    node = FollowingNode(server, memory_path, "a", clock=clock, machine="old")
    node.step()
    node.add("p0")
    return node


def shares(server: FakeApi, node: str = "a") -> dict[str, AddressShare]:
    """By machine."""
    listed = server.look_at_all(AddressShare, {"spec.node": node}).items
    return {each.holder.machine_id: each for each in listed}


def nothing(node: FollowingNode, pod: str = "q") -> str:
    with pytest.raises(CNIError) as caught:
        node.add(pod)
    assert caught.value.code in (Code.NO_FREE_ADDRESS, Code.TRY_AGAIN)
    return caught.value.message


def work(rounds: Rounds, server: FakeApi, clock: Clock, minutes: float) -> None:
    """The controller does rounds for so long."""
    for _ in range(round(6 * minutes)):
        clock.now += 10.0
        rounds.round(read_world(server, clock))


def test_another_machine_of_the_name_narrows_no_share_and_gets_nothing_of_it(
    server: FakeApi, memory_path: Path, old: FollowingNode, clock: Clock
) -> None:
    before = share_of(server, "a")
    del server.machines["a"]
    new = FollowingNode(server, memory_path, "a", clock=clock, machine="new")
    for _ in range(3):
        new.step()
        nothing(new)
    put_ippool(server, {"b": ENTRY["a"]})
    new.step()
    put_ippool(server, ENTRY)
    new.step()
    assert shares(server)["old"] == before
    # Both are told apart, and people are told what to do.
    (blocked,) = (each for each in shares(server)["new"].status.conditions if each.message)
    assert "another machine that was node a" in blocked.message
    assert f"AddressShare {before.metadata.name}: delete it if that machine" in blocked.message
    # The old one runs on its own meanwhile, cut off from the server.
    old.api.down = True
    assert old.add("p1") == ["10.0.0.2/24"]
    assert not duplicates((old, new))
    assert not broken(server, (old, new))
    # Its death is proved in time: another system UUID has its name, and another Node object.
    rounds = Rounds(server.client("controller"), clock=clock)
    work(rounds, server, clock, 44)
    new.step()
    nothing(new)
    work(rounds, server, clock, 3)
    new.step()
    assert shares(server).keys() == {"new"}
    nothing(old)
    assert new.add("q") == ["10.0.0.1/24"]


def test_other_addresses_go_to_the_new_machine_at_once(
    server: FakeApi, memory_path: Path, old: FollowingNode, clock: Clock
) -> None:
    del server.machines["a"]
    new = FollowingNode(server, memory_path, "a", clock=clock, machine="new")
    put_ippool(server, {"a": ("10.0.0.1", "10.0.0.12")})
    new.step()
    assert new.add("q") == ["10.0.0.11/24"]
    ask = {"args": {"cni": {"ips": ["10.0.0.200"]}}}
    assert new.add("r", config=ask) == ["10.0.0.200/24"]
    with pytest.raises(CNIError, match="another machine that was node a"):
        put_ippool(server, {"b": ENTRY["b"]})
        new.step()
        new.add("s", config={"args": {"cni": {"ips": ["10.0.0.5"]}}})
    assert not duplicates((old, new))


def test_a_machine_that_was_installed_again_waits_until_the_old_share_is_deleted(
    server: FakeApi, memory_path: Path, old: FollowingNode, clock: Clock
) -> None:
    """Its machine id differs, its hardware does not: that proves nothing, as with blocks."""
    server.machines["a"] = replace(server.machines["a"], machine_id="new", boot_id="boot-2")
    new = FollowingNode(server, memory_path, "a", clock=clock, machine="new")
    new.boot = "boot-2"
    new.restart()
    new.step()
    nothing(new)
    work(Rounds(server.client("controller"), clock=clock), server, clock, 120)
    new.step()
    nothing(new)
    server.remove(AddressShare, shares(server)["old"].metadata.name)
    new.step()
    assert new.add("q") == ["10.0.0.1/24"]


def test_a_store_that_was_lost_is_forgotten_at_the_next_boot_and_not_before(
    server: FakeApi, old: FollowingNode
) -> None:
    shutil.rmtree(old.directory)
    old.restart()
    old.step()
    nothing(old)  # pods of the lost store run
    listed = server.look_at_all(AddressShare).items
    assert len(listed) == 2
    (message,) = (
        each.message for share in listed for each in share.status.conditions if each.message
    )
    assert "this machine, by a store that is lost" in message
    shutil.rmtree(old.directory)
    old.boot = "boot-2"
    old.restart()
    old.step()
    assert len(server.look_at_all(AddressShare).items) == 1
    assert old.add("q") == ["10.0.0.1/24"]


def test_a_copied_disk_hands_out_nothing_of_the_machine_that_it_is_from(
    server: FakeApi, memory_path: Path, old: FollowingNode, clock: Clock
) -> None:
    shutil.copytree(old.directory, memory_path / "copy")
    del server.machines["a"]
    copy = FollowingNode(server, memory_path, "a", clock=clock, machine="copy")
    nothing(copy)
    for _ in range(3):
        copy.step()
        nothing(copy)
        copy.restart()
    assert not duplicates((old, copy)) or copy.held() == old.held()  # copied reservations
    assert not broken(server, (old, copy))


def older(server: FakeApi, node: FollowingNode) -> AddressShare:
    """What an agent leaves that knows no machines: its share, and its file."""
    for each in server.look_at_all(AddressShare, {"spec.node": node.name}).items:
        server.remove(AddressShare, each.metadata.name)
    usable = ("10.0.0.1-10.0.0.10",)
    spec = ShareSpec(pool="ippool/pool", node=node.name, ranges=usable)
    first, last = ENTRY["a"]
    pool = NodePool(key="ippool/pool", network="10.0.0.0/24", first=first, last=last, usable=usable)
    PoolsFile(node.directory).write(NodePools(node=node.name, pools={"ippool/pool": pool}))
    return server.put(AddressShare(metadata=Meta(name=f"ippool.pool.{node.name}"), spec=spec))


def test_a_share_of_an_older_agent_of_this_machine_is_taken_over(
    server: FakeApi, old: FollowingNode
) -> None:
    former = older(server, old)
    old.restart()
    nothing(old)
    old.step()
    assert old.add("q") == ["10.0.0.2/24"]
    (share,) = server.look_at_all(AddressShare).items
    assert share.metadata.uid != former.metadata.uid
    assert share.holder.machine_id == "old"
    # What comes under the name from now on is of another machine.
    old.step(400.0)
    server.put(former)
    old.step(400.0)
    old.restart()
    old.step(400.0)
    assert former.metadata.name in {
        each.metadata.name for each in server.look_at_all(AddressShare).items
    }


def test_a_share_of_an_older_agent_of_another_machine_is_left_alone(
    server: FakeApi, memory_path: Path, old: FollowingNode, clock: Clock
) -> None:
    former = older(server, old)
    new = FollowingNode(server, memory_path, "a", clock=clock, machine="new")
    for _ in range(3):
        new.step(400.0)
        new.restart()
        nothing(new)
    assert server.look(AddressShare, former.metadata.name) == former


class Killed(BaseException):
    """The process dies."""


Scene = Callable[[FakeApi, Path, Clock], FollowingNode]


def booted(server: FakeApi, directory: Path, clock: Clock) -> FollowingNode:
    node = FollowingNode(server, directory, "a", clock=clock, machine="old")
    node.step()
    node.add("p0")
    node.boot = "boot-2"
    return node


def replaced(server: FakeApi, directory: Path, clock: Clock) -> FollowingNode:
    FollowingNode(server, directory, "a", clock=clock, machine="old").step()
    del server.machines["a"]
    put_ippool(server, {"a": ("10.0.0.1", "10.0.0.12")})
    return FollowingNode(server, directory, "a", clock=clock, machine="new")


def upgraded(server: FakeApi, directory: Path, clock: Clock) -> FollowingNode:
    node = FollowingNode(server, directory, "a", clock=clock, machine="old")
    node.step()
    older(server, node)
    return node


def deleted(server: FakeApi, directory: Path, clock: Clock) -> FollowingNode:
    node = FollowingNode(server, directory, "a", clock=clock, machine="old")
    node.step()
    server.remove(AddressShare, share_of(server, "a").metadata.name)
    other = FollowingNode(server, directory, "b", clock=clock)
    put_ippool(server, {"b": ("10.0.0.1", "10.0.0.2")})
    other.step()
    other.add("q0")
    put_ippool(server, ENTRY)
    return node


def damaged(server: FakeApi, directory: Path, clock: Clock) -> FollowingNode:
    node = FollowingNode(server, directory, "a", clock=clock, machine="old")
    node.step()
    (node.directory / "nv-ipam.json").write_text('{"node":')
    return node


@pytest.mark.parametrize("scene", [booted, replaced, upgraded, deleted, damaged])
@pytest.mark.parametrize("loses_answers", [False, True])
def test_a_kill_at_any_boundary_leaves_nothing_that_another_machine_may_use(
    memory_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scene: Scene,
    loses_answers: bool,
) -> None:
    """Before each request and each write of the file, and after each; then another agent goes on.

    Or the answer to a request is lost, and the agent goes on itself.
    """
    seen = die_at = 0

    def is_now() -> bool:
        nonlocal seen
        seen += 1
        return seen == die_at

    def faults(verb: str, kind: str, name: str) -> Fault | None:
        if not is_now():
            return None
        if loses_answers:
            return Fault.LOST_ANSWER
        raise Killed

    def written(path: str, content: bytes) -> None:
        if not loses_answers and is_now():
            raise Killed
        files.write_atomically(path, content)
        if not loses_answers and is_now():
            raise Killed

    monkeypatch.setattr(pools, "write_atomically", written)
    turn = 0
    while True:
        turn += 1
        die_at = 0
        server, clock = FakeApi(), Clock()
        put_ippool(server, ENTRY)
        node = scene(server, memory_path / str(turn), clock)
        nodes = (node, FollowingNode(server, memory_path / str(turn), "b", clock=clock))
        node.api.faults = faults
        node.restart()
        seen, die_at = 0, turn
        with suppress(Killed):
            node.step(400.0)
        is_over, die_at = seen < turn, 0
        # In one scene somebody has deleted a share: until the node sees that, it goes on.
        assert scene is deleted or not broken(server, nodes), turn
        if not loses_answers:
            node.restart()
        for _ in range(3):
            for each in nodes:
                each.step(100.0)
                assert not broken(server, nodes), turn
                try:
                    each.add(f"n{clock.now}-{each.name}")
                except CNIError as error:
                    assert error.code in (Code.NO_FREE_ADDRESS, Code.TRY_AGAIN)
        assert node.held() - {"10.0.0.1"}, turn  # it goes on in the end
        assert not duplicates(nodes), turn
        if is_over:
            break
    assert turn > (3 if loses_answers else 5)
