"""What following costs the API server and the node while other nodes block many entries."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import parse, text
from ipam.cluster.controller.mirror import Mirror
from ipam.cluster.nv_ipam import objects, shares
from ipam.cluster.nv_ipam.neighbours import SharesWatch
from ipam.cluster.objects import AddressShare, Meta, ShareSpec
from tests.fake_api import FakeApi, Fault, Faults
from tests.unit.ipam.cluster.nodes import Clock
from tests.unit.ipam.cluster.nv_ipam.nodes import FollowingNode, put_ippool
from tests.waiting import until

NODES = 64
SECONDS = 600
SIZE = 8  # addresses of an entry


class WatchingNode(FollowingNode):
    """A node whose watches are real ones. It steps when the follower says, and when it is woken."""

    due = 0.0
    mirror: Mirror[AddressShare] | None = None

    def watched(self, key: str) -> SharesWatch:
        self.mirror = Mirror(self.api, AddressShare, self.woken, fields={"spec.pool": key})
        return self.mirror

    def woken(self) -> None:
        self.due = 0.0

    def work(self) -> None:
        if self.clock.now >= self.due:
            self.due = self.clock.now + self.follower.step()


def first(index: int) -> int:
    return parse("10.0.0.0") + SIZE * (index + 1)


def entries() -> dict[str, tuple[str, str]]:
    return {
        f"n{index}": (text(first(index)), text(first(index) + SIZE - 1)) for index in range(NODES)
    }


def put_share(server: FakeApi, indexes: range, node: str = "old") -> AddressShare:
    """All entries of these nodes are in use elsewhere."""
    ranges = tuple(f"{text(first(i))}-{text(first(i) + SIZE - 1)}" for i in indexes)
    name = Meta(name=f"share-of-{node}")
    return server.put(
        AddressShare(metadata=name, spec=ShareSpec(pool="ippool/pool", node=node, ranges=ranges))
    )


def nodes_of(
    server: FakeApi, directory: Path, faults: Faults | None = None
) -> Iterator[list[WatchingNode]]:
    clock = Clock()
    with ExitStack() as stack:
        made = []
        for index in range(NODES):
            made.append(WatchingNode(server, directory, f"n{index}", clock=clock, faults=faults))
            stack.callback(made[-1].follower.close)
        yield made
        server.down = True  # which ends the watches


@pytest.fixture
def server() -> FakeApi:
    return FakeApi()


@pytest.fixture
def nodes(server: FakeApi, memory_path: Path) -> Iterator[list[WatchingNode]]:
    put_ippool(server, entries(), "10.0.0.0/20")
    put_share(server, range(NODES))
    yield from nodes_of(server, memory_path)


def run(nodes: list[WatchingNode], seconds: int) -> None:
    clock = nodes[0].clock
    for _ in range(seconds):
        clock.now += 1.0
        for node in nodes:
            node.work()


def requests(nodes: list[WatchingNode]) -> Counter[tuple[str, str]]:
    return sum((node.api.calls for node in nodes), Counter())


def follow_all(nodes: list[WatchingNode]) -> None:
    """Wait until each node watches."""
    until(
        lambda: all(node.api.calls["watch", "AddressShare"] for node in nodes),
        what="the watches",
    )


def test_blocked_nodes_ask_a_few_times_in_ten_minutes(
    server: FakeApi, nodes: list[WatchingNode]
) -> None:
    run(nodes, 1)
    follow_all(nodes)
    before = requests(nodes)
    # Each: its Node, its shares, a POST, the others' shares, the condition, an event; and a watch.
    assert before["list", "AddressShare"] == 3 * NODES
    assert before.total() <= 9 * NODES, before
    run(nodes, SECONDS // 2)
    server.end_watches()
    run(nodes, SECONDS // 2)
    until(lambda: requests(nodes)["watch", "AddressShare"] >= 2 * NODES, what="watches again")
    asked = requests(nodes) - before
    # Each: its Node and its shares, twice; and the watch again.
    assert asked["list", "AddressShare"] <= 2 * NODES, asked
    assert asked.total() <= 6 * NODES, asked


def test_one_address_that_becomes_free_costs_one_node_a_request(
    server: FakeApi, nodes: list[WatchingNode]
) -> None:
    run(nodes, 1)
    follow_all(nodes)
    before = requests(nodes)
    put_share(server, range(1, NODES))
    until(
        lambda: all(
            each.spec.ranges[0] == "10.0.0.16-10.0.0.23"
            for node in nodes
            if node.mirror is not None
            for each in node.mirror.items() or ()
            if each.spec.node == "old"
        ),
        what="news everywhere",
    )
    run(nodes, 3)
    assert nodes[0].add("p0") == ["10.0.0.8/20"]
    asked = requests(nodes) - before
    assert asked["list", "AddressShare"] == 1, asked
    assert asked.total() <= 3, asked


def test_a_pod_that_asks_again_and_again_asks_the_api_server_nothing(
    server: FakeApi, nodes: list[WatchingNode]
) -> None:
    run(nodes, 1)
    follow_all(nodes)
    run(nodes, 1)
    node = nodes[0]
    before = Counter(node.api.calls)
    for number in range(50):
        with pytest.raises(CNIError) as caught:
            node.add(f"p{number % 2}")
        assert caught.value.code == Code.NO_FREE_ADDRESS
        node.follower.step()
    asked = node.api.calls - before
    assert asked.keys() <= {("create", "Event")}
    assert asked.total() <= 2


def test_a_server_that_fails_is_asked_less_and_less_and_not_by_all_at_once(
    server: FakeApi, memory_path: Path
) -> None:
    fails = False
    at: Counter[float] = Counter()

    def faults(verb: str, kind: str, name: str) -> Fault | None:
        if not fails:
            return None
        at[made[0].clock.now] += 1
        return Fault.REFUSED

    put_ippool(server, entries(), "10.0.0.0/20")
    for made in nodes_of(server, memory_path, faults):
        run(made, 1)
        fails = True
        put_ippool(
            server,
            {name: (low, text(parse(low) + 5)) for name, (low, _) in entries().items()},
            "10.0.0.0/20",
        )
        for node in made:
            node.due = 0.0
        run(made, SECONDS)
        late = {time: count for time, count in at.items() if time > made[0].clock.now - 120}
        # At most 1.4 times a minute for the share, and for the confirmation.
        assert sum(late.values()) <= NODES * 2 * 2 * 1.4
        assert max(late.values()) <= NODES // 2
        assert len(late) > 20
        # And then all of them find their way back.
        fails = False
        run(made, 80)
        assert {len(node.follower.states) for node in made} == {1}
        listed = server.look_at_all(AddressShare).items
        assert {parse(each.spec.ranges[0].split("-")[1]) % SIZE for each in listed} == {5}


def test_only_what_changed_is_parsed(
    server: FakeApi, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of a thousand entries, of which one is this node's, and shares of as many nodes."""
    parsed: list[str] = []
    run_of = objects._run

    def counted(key: str, low: str, high: str) -> object:
        parsed.append(low)
        return run_of(key, low, high)

    monkeypatch.setattr(objects, "_run", counted)
    shares._parsed.cache_clear()
    base = parse("10.0.0.0")
    many = {f"n{i}": (text(base + 8 * i + 8), text(base + 8 * i + 15)) for i in range(1000)}
    pool = put_ippool(server, many, "10.0.0.0/16")
    for index in range(1, 1000):
        spec = ShareSpec(
            pool="ippool/pool", node=f"n{index}", ranges=("-".join(many[f"n{index}"]),)
        )
        server.put(AddressShare(metadata=Meta(name=f"s{index}"), spec=spec))
    blocking = ShareSpec(pool="ippool/pool", node="old", ranges=("10.0.0.8-10.0.0.9",))
    share = server.put(AddressShare(metadata=Meta(name="old"), spec=blocking))
    node = FollowingNode(server, memory_path, "n0")
    node.step()
    assert parsed == ["10.0.0.8"]
    assert shares._parsed.cache_info().misses <= 1002
    for ranges in (("10.0.0.8",), ("10.0.0.9",), ("10.0.0.8", "10.0.0.9")):
        share = server.put(replace(share, spec=replace(blocking, ranges=ranges)))
        node.step()
    assert node.add("p0") == ["10.0.0.10/16"]
    assert parsed == ["10.0.0.8"]
    assert shares._parsed.cache_info().misses <= 1005
    allocations = tuple(replace(each, end=each.end) for each in pool.status.allocations or ())
    grown = (
        *allocations,
        replace(allocations[0], node="new", start="10.0.200.0", end="10.0.200.7"),
    )
    server.put(replace(pool, status=replace(pool.status, allocations=grown)))
    node.step()
    assert parsed == ["10.0.0.8", "10.0.0.8"]
    # What pods hold outside of the entry is looked for in all entries, once.
    server.put(replace(pool, status=replace(pool.status, allocations=allocations[1:])))
    node.step()
    assert node.follower.states["ippool/pool"].outside == 1
    parsed.clear()
    node.step()
    assert not parsed
