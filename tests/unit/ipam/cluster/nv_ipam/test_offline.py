"""A node that has not confirmed its shares for half an hour gives no address to a new pod."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import parse
from ipam.cluster.controller.reclaim import MARGIN
from ipam.cluster.controller.rounds import Rounds, read_world
from ipam.cluster.nv_ipam.shares import MAX_OFFLINE
from ipam.cluster.objects import AddressShare
from tests.fake_api import FakeApi
from tests.unit.ipam.calls import request
from tests.unit.ipam.cluster.nodes import Clock
from tests.unit.ipam.cluster.nv_ipam.nodes import (
    NETWORK,
    FollowingNode,
    broken,
    duplicates,
    put_cidrpool,
    put_ippool,
    share_of,
)

ENTRY = {"a": ("10.0.0.1", "10.0.0.10"), "b": ("10.0.0.11", "10.0.0.20")}
MINUTE = 60.0


@pytest.fixture
def server() -> FakeApi:
    return FakeApi()


@pytest.fixture
def a(server: FakeApi, memory_path: Path) -> FollowingNode:
    return FollowingNode(server, memory_path, "a")


def refused(node: FollowingNode, pod: str = "late", **how: Any) -> str:  # noqa: ANN401
    """The message of error 11, which a new pod gets."""
    with pytest.raises(CNIError) as caught:
        node.add(pod, **how)
    assert caught.value.code == Code.TRY_AGAIN, caught.value
    return caught.value.message


def test_new_pods_get_addresses_for_half_an_hour_after_the_last_confirmation(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    a.add("p0", uid="u0")
    server.down = True
    a.clock.now += MAX_OFFLINE - 1
    a.add("p1", uid="u1")
    a.clock.now += 1
    a.step(0.0)
    message = refused(a)
    assert "for 30 minutes" in message
    assert "longer than maxOffline (30 minutes)" in message
    assert "get Node a: no answer" in message
    assert "nothing was reserved" in message
    # Pods that run keep their addresses, and all that is theirs goes on.
    assert a.add("p1", container="p1-2", uid="u1") == ["10.0.0.2/24"]
    previous = {"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.1/24"}]}
    keys = {"type": "nv-ipam", "poolName": "pool"}
    check = request("CHECK", keys, "p0-1", network=NETWORK, config={"prevResult": previous})
    a.plugin.check(check)
    a.delete("p0")
    assert a.held() == {"10.0.0.2"}
    refused(a, "p0")
    with pytest.raises(CNIError, match="has not confirmed its share") as caught:
        a.plugin.status(request("STATUS", keys, "", network=NETWORK))
    assert caught.value.code == Code.UNAVAILABLE
    # An attachment that holds its address is told so, as ever.
    with pytest.raises(CNIError, match="already holds"):
        a.add("p1", container="p1-2", uid="u1")
    server.down = False
    a.step(2 * MINUTE)
    assert a.add("late") == ["10.0.0.1/24"]


def test_requested_and_gateway_addresses_and_indexes_end_with_it(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY, gateway="10.0.0.3")
    put_cidrpool(server, {"a": ("10.8.0.8/29", "10.8.0.9")})
    a.step()
    ask = {"args": {"cni": {"ips": ["10.0.0.200"]}}}
    assert a.add("asked", config=ask) == ["10.0.0.200/24"]
    a.delete("asked")
    wishes: list[dict[str, object]] = [
        {"ips": ["10.0.0.4"]},
        {"ips": ["10.0.0.200"]},
        {"allocateDefaultGateway": True},
        {"allocateIPWithIndex": 4},
    ]
    server.down = True
    a.clock.now += MAX_OFFLINE
    for wish in wishes:
        refused(a, config={"args": {"cni": wish}})
    routed = {"poolName": "cidrpool/routed"}
    refused(a, ipam=routed)
    refused(a, ipam=routed, config={"args": {"cni": {"allocateDefaultGateway": True}}})
    assert not a.held()


def test_a_restart_of_the_agent_confirms_nothing(server: FakeApi, a: FollowingNode) -> None:
    put_ippool(server, ENTRY)
    a.step()
    server.down = True
    for number in range(5):
        a.clock.now += 5 * MINUTE
        a.restart()
        a.step(0.0)
        a.add(f"p{number}")
    a.clock.now += 5 * MINUTE
    a.restart()
    a.step(0.0)
    refused(a)
    a.restart(follows=False)
    assert "only podfabric's agent confirms it" in refused(a)


def test_a_boot_confirms_nothing_and_then_the_node_goes_on_at_once(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    share = share_of(server, "a")
    server.down = True
    a.boot = "boot-2"
    a.clock.now = 10.0  # since the boot
    a.restart()
    a.step()
    assert "since it booted" in refused(a)
    server.down = False
    a.step(MINUTE)
    assert a.add("p0") == ["10.0.0.1/24"]
    after = share_of(server, "a")
    assert (after.metadata.uid, after.metadata.name) == (share.metadata.uid, share.metadata.name)
    assert after.spec == replace(share.spec, holder=replace(share.holder, boot="boot-2"))


def test_an_api_server_that_has_no_node_object_confirms_nothing(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    node = server.machines.pop("a")
    for _ in range(29):
        a.step(MINUTE)
    a.add("p0")
    a.step(MINUTE)
    assert "there is no Node object a" in refused(a)
    server.machines["a"] = node
    a.step(2 * MINUTE)
    a.add("p1")


def test_a_clock_that_goes_back_ends_it_until_the_next_confirmation(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    a.clock.now -= 500.0
    refused(a)
    a.step(0.0)
    a.add("p0")


def test_the_time_counts_from_before_the_first_request(server: FakeApi, memory_path: Path) -> None:
    """A confirmation whose answers take ten minutes is ten minutes old."""
    slow = False

    def faults(verb: str, kind: str, name: str) -> None:
        if slow:
            clock.now += 5 * MINUTE

    clock = Clock()
    a = FollowingNode(server, memory_path, "a", clock=clock, faults=faults)
    put_ippool(server, ENTRY)
    a.step()
    slow = True
    a.step(6 * MINUTE)
    slow = False
    server.down = True
    a.clock.now += 19 * MINUTE
    a.add("p0")
    a.clock.now += 2 * MINUTE
    assert "for 31 minutes" in refused(a)


def test_a_file_that_was_cut_short_hands_out_nothing_until_it_was_written_again(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    path = a.directory / "nv-ipam.json"
    whole = path.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CNIError) as caught:
            a.add("p0")
        assert caught.value.code == Code.STORE_DAMAGED
        server.down = True
        a.step()
        with pytest.raises(CNIError):
            a.add("p0")
        server.down = False
        for _ in range(2):
            a.step(2 * MINUTE)
        assert not broken(server, [a])
        a.add("p0")
        a.delete("p0")


class Late:
    """Two nodes and the controller: a is cut off, its Node is deleted, b gets its entry."""

    def __init__(self, server: FakeApi, directory: Path) -> None:
        self.server = server
        self.clock = Clock()
        self.a = FollowingNode(server, directory, "a", clock=self.clock)
        self.b = FollowingNode(server, directory, "b", clock=self.clock)
        put_ippool(server, ENTRY)
        for node in (self.a, self.b):
            node.step()
        self.rounds = self.new_leader()
        self.number = 0
        self.taken: list[str] = []  # what b handed out of the entry that was a's

    def new_leader(self) -> Rounds:
        self.rounds = Rounds(self.server.client("controller"), clock=self.clock)
        return self.rounds

    def run(self, minutes: float) -> None:
        """Each half a minute a pod starts on both nodes, as far as it can, and ends."""
        for _ in range(round(2 * minutes)):
            for _ in range(3):
                self.clock.now += 10.0
                self.rounds.round(read_world(self.server, self.clock))
            self.number += 1
            for node in (self.a, self.b):
                node.step(0.0)
                try:
                    node.add(f"p{self.number}-{node.name}")
                except CNIError as error:
                    assert error.code in (Code.TRY_AGAIN, Code.NO_FREE_ADDRESS)
            assert not duplicates((self.a, self.b))
            for node in (self.a, self.b):
                for held in node.store.reservations():
                    first, last = map(parse, ENTRY["b"])
                    if node is self.b and not first <= parse(held.address) <= last:
                        self.taken.append(held.address)
                    node.delete(held.pod)


@pytest.fixture
def late(server: FakeApi, memory_path: Path) -> Late:
    return Late(server, memory_path)


def test_a_node_that_is_cut_off_hands_out_nothing_when_others_may(late: Late) -> None:
    put_ippool(late.server, {"b": ("10.0.0.1", "10.0.0.20")})
    late.a.api.down = True
    late.run(3)
    assert not late.taken
    late.server.machines.pop("a")
    late.run(40)
    assert not late.taken
    refused(late.a)
    late.run(10)
    assert late.taken
    assert share_of(late.server, "a") is None


def test_a_node_that_was_in_touch_for_a_moment_is_waited_for_again(late: Late) -> None:
    """Its Node object was there between two looks of the controller."""
    node = late.server.machines.pop("a")
    late.a.api.down = True
    put_ippool(late.server, {"b": ("10.0.0.1", "10.0.0.20")})
    late.run(40)
    late.server.machines["a"] = node
    put_ippool(late.server, ENTRY)
    late.a.api.down = False
    late.a.step(0.0)
    late.clock.now += 2 * MINUTE
    late.a.step(0.0)
    late.a.add("back")
    late.a.delete("back")
    del late.server.machines["a"]
    late.a.api.down = True
    put_ippool(late.server, {"b": ("10.0.0.1", "10.0.0.20")})
    late.run((MAX_OFFLINE + MARGIN) / MINUTE - 1)
    assert not late.taken
    late.run(12)
    assert late.taken


def test_leaders_and_agents_that_come_and_go_make_it_later_and_never_earlier(late: Late) -> None:
    put_ippool(late.server, {"b": ("10.0.0.1", "10.0.0.20")})
    late.a.api.down = True
    late.server.machines.pop("a")
    late.run(9)
    late.new_leader()
    late.run(20)
    late.a.restart()
    late.new_leader()
    late.run(40)
    assert not late.taken
    late.run(8)
    assert late.taken


def test_a_node_that_comes_back_during_the_wait_answers_the_fence(late: Late) -> None:
    late.a.api.down = True
    node = late.server.machines.pop("a")
    late.run(30)
    assert share_of(late.server, "a").spec.state == "Reclaiming"
    late.server.machines["a"] = node
    late.a.api.down = False
    late.run(6)
    assert share_of(late.server, "a").spec.state == "Active"
    late.run(60)
    assert not late.taken
    late.a.add("p")


def test_without_a_node_object_nothing_answers_the_fence(late: Late) -> None:
    """Also not if the node still reaches the server, and narrows its share there."""
    late.server.machines.pop("a")
    late.run(20)
    assert share_of(late.server, "a").spec.state == "Reclaiming"
    put_ippool(late.server, {"a": ("10.0.0.1", "10.0.0.4"), "b": ENTRY["b"]})
    late.run(5)
    share = share_of(late.server, "a")
    assert (share.spec.state, share.spec.ranges) == ("Reclaiming", ("10.0.0.1-10.0.0.4",))
    late.run(40)
    assert not late.server.look_at_all(AddressShare, {"spec.node": "a"}).items
