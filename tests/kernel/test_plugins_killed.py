"""kill -9 before every change to kernel or disk, of ADD and of DEL; then all state is restored."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cni.ipoib.plugin import IPoIB
from tests.kernel import cards, igb
from tests.kernel import infiniband_vfs as ib
from tests.kernel.pods import Node, SriovNode, ipam, link_in, link_names, pod
from tests.kernel.processes import killed_at
from tests.waiting import until

GUID = "02:00:00:00:00:00:00:ab"
OTHER_GUID = "02:00:00:00:00:00:00:cd"
MORE_THAN_ENOUGH = 400  # changes; an ADD makes fewer


class Case(NamedTuple):
    """A plugin with options of each kind; `state` is all host state that it may change."""

    node: type[Node]
    config: dict[str, Any]
    state: Callable[[], object]
    other: dict[str, Any]  # the same device, for another pod


@pytest.fixture(scope="module", params=["ipoib", "sriov", "infiniband"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    match request.param:
        case "ipoib":
            routes = [{"dst": "10.20.0.0/16", "gw": "10.2.0.9"}]
            addresses = [{"range": "10.2.0.0/24"}, {"range": "fd00:2::/64"}]
            config = {"type": "podfabric-ipam", "ipRanges": addresses, "routes": routes}
            yield Case(Node, {"ipam": config}, link_names, {})
        case "sriov":
            with igb.with_addressed_vfs(cards.cards()[0], 3) as card:
                bare = {"deviceID": card.vfs[0], "ipam": ipam("10.4.0.0/24")}
                of_vf = {"vlan": 100, "trust": "on", "mac": "02:ab:cd:00:00:02", "mtu": 1400}
                yield Case(SriovNode, bare | of_vf, cards.snapshot, bare)
        case "infiniband":  # without addresses, whose steps the other cases have
            with ib.with_infiniband_vfs(1) as card, igb.exclusive_rdma():
                ib.set_guids(card, 0, "02:00:00:00:00:00:01:00", "02:00:00:00:00:00:01:01")
                ib.rebind(card.vfs[0])
                isolated = {"deviceID": card.vfs[0], "link_state": "enable", "rdmaIsolation": True}
                state = partial(ib.state, card)
                other = isolated | {"guid": OTHER_GUID}
                yield Case(SriovNode, isolated | {"guid": GUID}, state, other)
                assert cards.driver_of(card.vfs[0]) == ib.DRIVER


@pytest.fixture
def plugin(case: Case, tmp_path: Path) -> Node:
    return case.node(tmp_path)


VFS = pytest.mark.parametrize("case", ["sriov", "infiniband"], indirect=True, scope="module")
WITH_ADDRESSES = pytest.mark.parametrize("case", ["ipoib", "sriov"], indirect=True, scope="module")


def _at_each(steps: range, attempt: Callable[[int], bool]) -> int:
    """Kill a process before each of these changes, until one survives; returns the last change."""
    for step in steps:
        if not attempt(step):
            return step
    raise AssertionError("there are more changes than are enough")


def test_add_killed_at_every_step_then_delete(case: Case, plugin: Node, pods: list[str]) -> None:
    before = case.state()

    def attempt(step: int) -> bool:
        killed = killed_at(step, partial(plugin.call, "ADD", "c1", pods[0], **case.config))
        plugin.delete("c1", pods[0], **case.config)
        assert (step, plugin.leftovers()) == (step, [])
        assert (step, link_names(pods[0])) == (step, {"lo"})
        assert (step, case.state()) == (step, before)
        return killed

    last = _at_each(range(1, MORE_THAN_ENOUGH), attempt)
    assert last > 10, "the injection counts no changes"


def test_delete_killed_at_every_step_then_delete(case: Case, plugin: Node, pods: list[str]) -> None:
    before = case.state()

    def attempt(step: int) -> bool:
        plugin.add("c1", pods[0], **case.config)
        killed = killed_at(step, partial(plugin.call, "DEL", "c1", pods[0], **case.config))
        plugin.delete("c1", pods[0], **case.config)
        assert (step, plugin.leftovers()) == (step, [])
        assert (step, link_names(pods[0])) == (step, {"lo"})
        assert (step, case.state()) == (step, before)
        return killed

    _at_each(range(1, MORE_THAN_ENOUGH), attempt)


@WITH_ADDRESSES
def test_add_killed_then_added_again(case: Case, plugin: Node, pods: list[str]) -> None:
    """A runtime that calls ADD again without a DEL gets exactly one complete attachment."""
    before = case.state()

    def attempt(step: int) -> bool:
        if not killed_at(step, partial(plugin.call, "ADD", "c1", pods[0], **case.config)):
            plugin.delete("c1", pods[0], **case.config)
            return False
        reply = plugin.call("ADD", "c1", pods[0], **case.config)
        if reply.exit_code == 1:  # it died after its last relevant step: attached
            assert (step, reply.document["code"]) == (step, 103)
        else:
            assert sorted(plugin.reservations()) == sorted(reply.addresses)
        assert link_names(pods[0]) == {"lo", "net1"}
        plugin.delete("c1", pods[0], **case.config)
        assert (step, plugin.leftovers()) == (step, [])
        assert (step, case.state()) == (step, before)
        return True

    _at_each(range(1, MORE_THAN_ENOUGH, 4), attempt)


@pytest.mark.parametrize("case", ["ipoib"], indirect=True, scope="module")
def test_add_killed_in_a_pod_that_ends(case: Case, plugin: Node) -> None:
    """The kernel gives the child back to the host, with or without its alias."""
    before = case.state()

    def attempt(step: int) -> bool:
        with pod("shortlived") as netns:
            killed = killed_at(step, partial(plugin.call, "ADD", "c1", netns, **case.config))
        plugin.delete("c1", netns, **case.config)
        assert (step, plugin.leftovers()) == (step, [])
        assert (step, case.state()) == (step, before)
        return killed

    _at_each(range(1, MORE_THAN_ENOUGH, 2), attempt)


@VFS
def test_add_killed_then_the_device_goes_to_another_pod(
    case: Case, plugin: Node, pods: list[str]
) -> None:
    """The kubelet gives the dead pod's device to another pod before the late DEL."""
    before = case.state()

    def attempt(step: int) -> bool:
        with pod("shortlived") as netns:
            killed = killed_at(step, partial(plugin.call, "ADD", "c1", netns, **case.config))
        reply = plugin.add("c2", pods[1], **case.other)
        link = link_in(pods[1])
        assert link is not None
        if "guid" in case.other:
            assert (step, link.mac[-23:]) == (step, OTHER_GUID)
        else:
            assert cards.setting(case.other["deviceID"], "vlan_list") == [{}]
        plugin.delete("c1", "shortlived", **case.config)
        assert (step, link_names(pods[1])) == (step, {"lo", "net1"})
        checked = plugin.call("CHECK", "c2", pods[1], previous=reply, **case.other)
        assert (step, checked.document) == (step, {})
        plugin.delete("c2", pods[1], **case.other)
        assert (step, plugin.leftovers()) == (step, [])
        assert (step, case.state()) == (step, before)
        return killed

    _at_each(range(3, MORE_THAN_ENOUGH, 4), attempt)


@VFS
def test_namespace_gone_after_a_killed_delete(case: Case, plugin: Node) -> None:
    before = case.state()

    def attempt(step: int) -> bool:
        with pod("shortlived") as netns:
            plugin.add("c1", netns, **case.config)
            killed = killed_at(step, partial(plugin.call, "DEL", "c1", netns, **case.config))
        plugin.delete("c1", "shortlived", **case.config)
        assert (step, plugin.leftovers()) == (step, [])
        assert (step, case.state()) == (step, before)
        return killed

    _at_each(range(2, MORE_THAN_ENOUGH, 4), attempt)


@pytest.mark.parametrize("case", ["ipoib"], indirect=True, scope="module")
def test_namespace_gone_after_a_killed_add(case: Case, plugin: Node, pods: list[str]) -> None:
    """The pod is deleted while the interface is between host and pod."""
    before = case.state()

    def attempt(step: int) -> bool:
        with pod("shortlived") as netns:
            killed = killed_at(step, partial(plugin.call, "ADD", "c1", netns, **case.config))
        plugin.delete("c1", "shortlived", **case.config)
        assert (step, plugin.leftovers()) == (step, [])
        return killed

    _at_each(range(5, MORE_THAN_ENOUGH, 6), attempt)

    def nothing_comes_back() -> bool:
        """Whether the next sweep finds nothing: a child returns from a namespace a little later."""
        IPoIB(plugin.paths).remove_strays()
        return case.state() == before

    until(nothing_comes_back)


@WITH_ADDRESSES
def test_add_that_a_dead_agent_had_done_is_undone_by_the_next_agent_s(
    case: Case, plugin: Node, pods: list[str]
) -> None:
    before = case.state()
    plugin.add("c1", pods[0], **case.config)
    plugin.unanswered_since = int(time.time()) + 1
    refused = plugin.call("ADD", "c1", pods[0], **case.config)
    assert refused.document["code"] == 103  # it is older and alive
    plugin.unanswered_since = int(time.time()) - 60
    reply = plugin.add("c1", pods[0], **case.config)
    assert sorted(plugin.reservations()) == sorted(reply.addresses)
    assert link_names(pods[0]) == {"lo", "net1"}
    plugin.delete("c1", pods[0], **case.config)
    assert plugin.leftovers() == []
    assert case.state() == before
