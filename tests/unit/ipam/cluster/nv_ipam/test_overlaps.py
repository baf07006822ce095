"""Pools whose addresses overlap: which of them gives an address, and who says so."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import parse, parse_interval
from ipam.cluster.nv_ipam.objects import ExcludedRun, NvIPPool
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.cluster.nodes import Clock
from tests.unit.ipam.cluster.nv_ipam.nodes import (
    NAMESPACE,
    FollowingNode,
    known_to,
    put_cidrpool,
    put_ippool,
    share_of,
)

# Of pools that are made within a second the one whose key is first counts as older: ippool/pool.
ENTRY = {"a": ("10.0.0.1", "10.0.0.4"), "b": ("10.0.0.5", "10.0.0.8")}
TURNED = {"b": ("10.0.0.1", "10.0.0.4"), "a": ("10.0.0.5", "10.0.0.8")}
YOUNG = {"poolName": "young"}


@pytest.fixture
def server() -> FakeApi:
    return FakeApi()


@pytest.fixture
def a(server: FakeApi, memory_path: Path) -> FollowingNode:
    return FollowingNode(server, memory_path, "a")


@pytest.fixture
def b(server: FakeApi, memory_path: Path) -> FollowingNode:
    return FollowingNode(server, memory_path, "b")


def refused(node: FollowingNode, pod: str, **how: Any) -> CNIError:  # noqa: ANN401
    with pytest.raises(CNIError) as caught:
        node.add(pod, YOUNG, **how)
    return caught.value


def add_until_full(node: FollowingNode, pool: str) -> list[str]:
    """The addresses that the pool gives there, until it has none left."""
    found: list[str] = []
    while True:
        try:
            found += node.add(f"{pool}-{len(found)}", {"poolName": pool})
        except CNIError as error:
            assert error.code == Code.NO_FREE_ADDRESS, error
            return found


def events(server: FakeApi) -> list[str]:
    return [event.message for event in server.events if event.reason == "AddressesOverlap"]


def annotate(server: FakeApi, pool: NvIPPool, **annotations: str) -> None:
    written = {f"ipam.podfabric.io/{name}": value for name, value in annotations.items()}
    server.put(replace(pool, metadata=replace(pool.metadata, annotations=written)))


def test_two_pools_of_one_subnet_give_no_address_twice_and_it_is_told(
    server: FakeApi, a: FollowingNode, b: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    put_ippool(server, TURNED, name="young")
    for node in (a, b):
        node.step()
    assert len(add_until_full(a, "pool") + add_until_full(b, "pool")) == 8
    for node in (a, b):
        error = refused(node, "q")
        assert error.code == Code.NO_FREE_ADDRESS
        assert "ippool/pool, which is older" in error.message
        state = node.follower.states["ippool/young"]
        assert (state.entry, state.usable, state.overlap) == (4, 0, 4)
        assert node.follower.states["ippool/pool"].is_plain
    assert len(events(server)) == 2
    assert "ipam.podfabric.io/private=true" in events(server)[0]


@pytest.mark.parametrize("first", ["pool", "zone"])
def test_the_pool_that_was_made_first_is_the_older_one(
    server: FakeApi, a: FollowingNode, first: str
) -> None:
    (second,) = {"pool", "zone"} - {first}
    server.clock = clock = Clock()
    put_ippool(server, ENTRY, name=first)
    clock.now += 60
    put_ippool(server, ENTRY, name=second)
    a.step()
    assert len(add_until_full(a, first)) == 4
    assert not add_until_full(a, second)


def test_what_the_older_pool_excludes_is_the_younger_ones(
    server: FakeApi, a: FollowingNode
) -> None:
    """One subnet, divided between two pools by their exclusions."""
    put_ippool(server, ENTRY, exclusions=(ExcludedRun(start="10.0.0.3", end="10.0.0.254"),))
    put_ippool(
        server, ENTRY, name="young", exclusions=(ExcludedRun(start="10.0.0.0", end="10.0.0.2"),)
    )
    a.step()
    assert add_until_full(a, "pool") == ["10.0.0.1/24", "10.0.0.2/24"]
    assert add_until_full(a, "young") == ["10.0.0.3/24", "10.0.0.4/24"]


def test_a_part_that_overlaps_is_left_to_the_older_pool(server: FakeApi, a: FollowingNode) -> None:
    put_cidrpool(server, {"a": ("10.0.0.0/30", "")}, "10.0.0.0/29")
    put_ippool(server, {"a": ("10.0.0.5", "10.0.0.10")})
    a.step()
    assert add_until_full(a, "pool") == ["10.0.0.8/24", "10.0.0.9/24", "10.0.0.10/24"]


def test_addresses_that_pods_hold_stay_when_pools_come_to_overlap(
    server: FakeApi, a: FollowingNode, b: FollowingNode
) -> None:
    put_ippool(server, {}, "10.1.0.0/24")
    put_ippool(server, {"b": ENTRY["a"]}, name="young")
    for node in (a, b):
        node.step()
    assert b.add("q0", YOUNG) == ["10.0.0.1/24"]
    put_ippool(server, {"a": ENTRY["a"]})
    a.step()
    with pytest.raises(CNIError):
        a.add("p0")  # b has not seen it: all of its entry may be in use
    b.step()
    a.step()
    assert a.add("p0") == ["10.0.0.2/24"]
    assert refused(b, "q1").code == Code.NO_FREE_ADDRESS
    (condition,) = (
        each
        for each in share_of(server, "b", "ippool/young").status.conditions
        if each.status == "True"
    )
    assert condition.type == "Overlap"
    b.delete("q0")
    b.step()
    a.step()
    assert a.add("p1") == ["10.0.0.1/24"]


def test_what_a_pool_gave_stays_its_own_when_the_pool_is_deleted(
    server: FakeApi, a: FollowingNode, b: FollowingNode
) -> None:
    put_ippool(server, {"a": ENTRY["a"]})
    put_ippool(server, {"b": ENTRY["a"]}, name="young")
    for node in (a, b):
        node.step()
    assert a.add("p0") == ["10.0.0.1/24"]
    server.remove(NvIPPool, "pool", NAMESPACE)
    for restarts in (False, True):
        if restarts:
            b.restart()
        b.step()
        assert not known_to_be_free(b, "10.0.0.1")
    a.step()
    b.step()
    assert b.add("q0", YOUNG) == ["10.0.0.2/24"]
    assert not known_to_be_free(b, "10.0.0.1")
    a.delete("p0")
    a.step()
    b.step()
    assert b.add("q1", YOUNG) == ["10.0.0.1/24"]


def test_a_pool_that_comes_leaves_alone_what_pods_have_by_one_that_is_gone(
    server: FakeApi, a: FollowingNode, b: FollowingNode
) -> None:
    """Both are deleted at once, and one is made again before pods of the other have ended."""
    put_ippool(server, {"a": ENTRY["a"]})
    put_ippool(server, {"b": ENTRY["a"]}, name="young")
    for node in (a, b):
        node.step()
    assert a.add("p0") == ["10.0.0.1/24"]
    for name in ("pool", "young"):
        server.remove(NvIPPool, name, NAMESPACE)
    b.step()
    b.restart()
    b.step()
    put_ippool(server, {"b": ENTRY["a"]}, name="young")
    b.step()
    assert not known_to_be_free(b, "10.0.0.1")
    with pytest.raises(CNIError):
        b.add("q0", YOUNG)  # a has not seen it: all of its entry may be in use
    a.step()
    b.step()
    assert b.add("q1", YOUNG) == ["10.0.0.2/24"]


def known_to_be_free(node: FollowingNode, address: str) -> bool:
    """Whether the young pool may give it there."""
    pool = known_to(node)["ippool/young"]
    runs = map(parse_interval, pool.usable)
    return any(run.first <= parse(address) <= run.last for run in runs)


@pytest.mark.parametrize("named", ["pool", "young"])
def test_a_private_pool_has_addresses_of_its_own(
    server: FakeApi, a: FollowingNode, b: FollowingNode, named: str
) -> None:
    pools = {"pool": put_ippool(server, ENTRY), "young": put_ippool(server, TURNED, name="young")}
    annotate(server, pools[named], private="true")
    for node in (a, b):
        node.step()
    assert a.add("p0") == b.add("q0", YOUNG) == ["10.0.0.1/24"]
    assert not events(server)


def test_the_warning_ends_when_a_pool_is_made_private(server: FakeApi, a: FollowingNode) -> None:
    put_ippool(server, ENTRY)
    young = put_ippool(server, ENTRY, name="young")
    a.step()
    assert a.follower.states["ippool/young"].overlap == 4
    annotate(server, young, private="true")
    a.step()
    assert a.follower.states["ippool/young"].is_plain
    assert a.add("p0") == a.add("q0", YOUNG) == ["10.0.0.1/24"]


def test_a_requested_address_of_the_older_pool_is_not_the_younger_ones(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, {"a": ENTRY["a"]})
    put_ippool(server, {"a": ENTRY["b"]}, name="young")
    a.step()
    for wanted in ("10.0.0.200", "10.0.0.5", "10.0.0.1"):
        error = refused(a, "q", config={"args": {"cni": {"ips": [wanted]}}})
        assert error.code == Code.ADDRESS_TAKEN
        assert "ippool/pool" in error.message


def test_the_older_pool_gives_no_requested_address_that_pods_of_the_younger_one_have(
    server: FakeApi, a: FollowingNode, b: FollowingNode
) -> None:
    put_ippool(server, {}, "10.1.0.0/24")
    put_ippool(server, {"b": ENTRY["b"]}, name="young")
    for node in (a, b):
        node.step()
    assert b.add("q0", YOUNG) == ["10.0.0.5/24"]
    put_ippool(server, {"a": ENTRY["a"]})
    for node in (b, a):
        node.step()
    ask = {"args": {"cni": {"ips": ["10.0.0.5"]}}}
    with pytest.raises(CNIError, match="in use on node b by ippool/young"):
        a.add("p0", config=ask)


class Killed(BaseException):
    """The agent is gone."""


@pytest.mark.parametrize("seed", range(12))
def test_no_churn_and_no_kill_gives_an_address_of_two_pools_twice(
    memory_path: Path, seed: int
) -> None:
    """Entries move, exclusions change, pools are deleted and made again, agents die at any call."""
    chance, server = Random(seed), FakeApi()
    server.clock = clock = Clock()  # so which pool is older changes when one is made again

    def dies(verb: str, kind: str, name: str) -> Fault | None:
        if chance.random() < 0.03:
            raise Killed
        return Fault.LOST_ANSWER if chance.random() < 0.03 else None

    nodes = [FollowingNode(server, memory_path, name) for name in "abc"]
    runs = [(f"10.0.0.{first}", f"10.0.0.{first + 3}") for first in (1, 5, 9)]
    pools = ("first", "pool", "young")
    given = 0

    def cut(pool: str) -> None:
        entries = dict(zip("abc", chance.sample(runs, 3), strict=True))
        holes = [f"10.0.0.{chance.randrange(1, 13)}"] if chance.random() < 0.3 else []
        excluded = tuple(ExcludedRun(start=each, end=each) for each in holes)
        subnet = chance.choice(("10.0.0.0/28", "10.0.0.0/27"))
        put_ippool(server, entries, subnet, pool, exclusions=excluded)

    for pool in pools:
        cut(pool)
    for node in nodes:  # each is there while the pools overlap
        node.step()
        node.api.faults = dies
    for turn in range(120):
        node = chance.choice(nodes)
        clock.now += chance.choice((0.0, 0.0, 1.0, 2.0))
        try:
            if chance.random() < 0.6:
                node.step()
            else:
                node.add(f"p{turn}", {"poolName": chance.choice(pools)})
                given += 1
        except Killed:
            node.restart()
        except CNIError as error:
            assert error.code in (Code.NO_FREE_ADDRESS, Code.TRY_AGAIN), error
        holders = Counter(each.address for one in nodes for each in one.store.reservations())
        assert not [address for address, count in holders.items() if count > 1]
        if chance.random() < 0.3:
            for held in node.store.reservations()[:1]:
                node.delete(held.pod)
        if chance.random() < 0.1:
            cut(chance.choice(pools))
        if chance.random() < 0.05:
            pool = chance.choice(pools)
            server.remove(NvIPPool, pool, NAMESPACE)
            for one in nodes:
                if chance.random() < 0.5:
                    try:
                        one.step()
                    except Killed:
                        one.restart()
            cut(pool)
    assert given
