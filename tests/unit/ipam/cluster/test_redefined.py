"""Ranges and slices of whereabouts that change: our addresses have placeholders there soon.

The clock moves by much less than from one confirmation to the next.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from ipam.cluster.api import NotFound
from ipam.cluster.lessee import FOREIGN_EVERY, HEED_AFTER
from ipam.cluster.objects import AddressPool
from ipam.cluster.whereabouts.objects import IPPool
from ipam.cluster.whereabouts.redefined import Redefined
from tests.fake_api import FakeApi
from tests.unit.ipam.cluster.beside import leased, put_slices, told
from tests.unit.ipam.cluster.beside import server as server  # fixtures
from tests.unit.ipam.cluster.nodes import ClusterNode, put_pool
from tests.waiting import until

WIDER = "10.0.0.0/16"


@pytest.fixture
def node(server: FakeApi, memory_path: Path) -> Iterator[ClusterNode]:
    yield (node := ClusterNode(server, memory_path / "a", compat="Coexist"))
    node.lessee.close()
    server.end_watches()


@pytest.fixture
def working(node: ClusterNode) -> ClusterNode:
    """A node whose agent runs, and which has leased a block."""
    node.patience = 60.0
    node.lessee.start()
    node.add("p0")
    return node


def soon(node: ClusterNode, condition: Callable[[], bool]) -> None:
    """Wait until it is so, when the node may confirm once more."""
    node.clock.now += HEED_AFTER
    assert node.clock.now - 1000.0 < FOREIGN_EVERY / 4  # no confirmation is due of itself
    until(condition)


def is_told(server: FakeApi, ippool: str) -> bool:
    """Whether each leased address has a placeholder in that IPPool."""
    names = {each.metadata.name for each in server.look_at_all(IPPool).items}
    return ippool in names and told(server, ippool) == leased(server)


def test_a_range_that_overlaps_gets_placeholders_within_seconds(
    server: FakeApi, working: ClusterNode
) -> None:
    confirmed = working.api.calls["list", "AddressBlock"]
    soon(working, lambda: working.api.calls["list", "AddressBlock"] > confirmed)  # a new block
    put_pool(server, WIDER)
    soon(working, lambda: is_told(server, "10.0.0.0-16"))


def test_a_slice_that_goes_to_another_node_gets_placeholders_within_seconds(
    server: FakeApi, working: ClusterNode
) -> None:
    put_slices(server, "1", "2", "3", "new")
    soon(working, lambda: is_told(server, "new-10.0.0.192-26"))
    put_slices(server, "1", "2", "3", "newer")
    soon(working, lambda: is_told(server, "newer-10.0.0.192-26"))


@pytest.fixture
def redefined(node: ClusterNode) -> Iterator[Redefined]:
    """What the agent of a node follows that has a block, which it has seen."""
    node.add("p0")
    with closing(Redefined(node.api, node.lessee._pools, node.lessee._objects)) as redefined:
        redefined.follow()
        until(redefined.has_changed)
        until(lambda: kinds_listed(node) == 2)
        assert not redefined.has_changed()
        yield redefined


def kinds_listed(node: ClusterNode) -> int:
    return sum(node.api.calls["watch", kind] > 0 for kind in ("AddressPool", "NodeSlicePool"))


def test_what_lies_elsewhere_is_no_news(server: FakeApi, redefined: Redefined) -> None:
    put_pool(server, "10.1.0.0/16")
    put_pool(server, WIDER, name="blue")
    put_slices(server, "theirs", "theirs too")
    pools = server.look(AddressPool, "10.0.0.0-24")
    server.put(replace(pools, status=replace(pools.status, high_water=7)))
    last = server.put(replace(pools, status=replace(pools.status, high_water=8)))
    assert redefined._mirrors is not None
    mirrored, slices = redefined._mirrors
    until(lambda: last in (mirrored.items() or ()))
    until(slices.items)
    assert not redefined.has_changed()
    put_pool(server, WIDER)
    until(redefined.has_changed)
    assert not redefined.has_changed()


def test_a_block_that_is_new_is_news_once(node: ClusterNode, redefined: Redefined) -> None:
    for number in range(1, 17):
        node.add(f"p{number}")
    assert redefined.has_changed()
    assert not redefined.has_changed()


def test_a_compat_that_changes_is_news(server: FakeApi, redefined: Redefined) -> None:
    put_pool(server, compat="Read")
    until(redefined.has_changed)


def test_a_node_without_a_block_beside_whereabouts_follows_nothing(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pool(server, compat="Read")
    node.add("p0")
    with closing(Redefined(node.api, node.lessee._pools, node.lessee._objects)) as redefined:
        redefined.follow()
        assert redefined._mirrors is None
        assert not redefined.has_changed()


def test_slices_count_though_their_kind_is_installed_later(
    server: FakeApi, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ipam.cluster.whereabouts.redefined.KIND_EVERY", 0.01)
    installed = threading.Event()

    def faults(verb: str, kind: str, name: str) -> None:
        if kind == "NodeSlicePool" and not installed.is_set():
            raise NotFound(f"{verb} {kind}: no such kind")

    node = ClusterNode(server, memory_path / "a", compat="Coexist", faults=faults)
    node.add("p0")
    with closing(Redefined(node.api, node.lessee._pools, node.lessee._objects)) as redefined:
        redefined.follow()
        until(redefined.has_changed)
        until(lambda: node.api.calls["list", "NodeSlicePool"] > 5)
        assert not redefined.has_changed()
        put_slices(server, "1", "2", "3", "new")
        installed.set()
        until(redefined.has_changed)
    server.end_watches()
