"""`"rails": "all"` with four IPoIB parents and with four VFs: all interfaces or none."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cni.attachments import orphans
from cni.attachments.lifecycle import InterfacePlugin
from tests.kernel import rail_pods
from tests.kernel.pods import IP, Node, link_in, link_names, pings, pod, run
from tests.kernel.processes import killed_at
from tests.kernel.rail_pods import RAILS, RailPods
from tests.waiting import until

NAMES = ["net1", "net1-1", "net1-2", "net1-3"]
MORE_THAN_ENOUGH = 1000  # changes


@pytest.fixture(
    scope="module", params=[rail_pods.ipoib_rails, rail_pods.vf_rails], ids=["ipoib", "vfs"]
)
def case(request: pytest.FixtureRequest) -> Iterator[RailPods]:
    with request.param() as made:
        yield made


@pytest.fixture
def node(case: RailPods, tmp_path: Path) -> Node:
    return case.on(tmp_path)


def _require_nothing(case: RailPods, node: Node, netns: str, before: object, step: int = 0) -> None:
    assert (step, link_names(netns)) == (step, {"lo"})
    assert (step, node.leftovers()) == (step, [])
    assert (step, case.state()) == (step, before)


def test_interfaces_are_on_the_hcas_in_order(case: RailPods, node: Node, pods: list[str]) -> None:
    before, config = case.state(), case.of("four")
    reply = node.add("c1", pods[0], **config)
    shown = reply.document["interfaces"]
    assert [each["name"] for each in shown] == NAMES
    assert reply.addresses == [f"10.8.{number}.1" for number in range(RAILS)]
    assert [ip["interface"] for ip in reply.document["ips"]] == list(range(RAILS))
    for number, name in enumerate(NAMES):
        link = link_in(pods[0], name)
        assert link is not None
        assert (link.up, link.mac) == (True, shown[number]["mac"])
        on = shown[number].get("pciID") or shown[number]["rdmaDevice"]
        assert on == case.hcas[number]
    assert node.call("CHECK", "c1", pods[0], previous=reply, **config).document == {}
    assert node.call("ADD", "c1", pods[0], **config).document["code"] == 103
    config["cni.dev/valid-attachments"] = [{"containerID": "c1", "ifname": "net1"}]
    assert node.call("GC", "c1", "", **config).document == {}
    assert link_names(pods[0]) == {"lo", *NAMES}
    assert len(node.reservations()) == RAILS
    node.delete("c1", pods[0], **config)
    _require_nothing(case, node, pods[0], before)


def test_check_finds_a_lost_rail_and_gc_removes_all(
    case: RailPods, node: Node, pods: list[str]
) -> None:
    before, config = case.state(), case.of("four")
    reply = node.add("c1", pods[0], **config)
    for change in (("down",), ("name", "lost")):
        run(IP, "-n", pods[0], "link", "set", "net1-2", *change)
    checked = node.call("CHECK", "c1", pods[0], previous=reply, **config)
    assert '"net1-2" is gone' in checked.text
    config["cni.dev/valid-attachments"] = []
    assert node.call("GC", "c1", "", **config).document == {}
    _require_nothing(case, node, pods[0], before)


def test_rail_that_fails_undoes_all(case: RailPods, node: Node, pods: list[str]) -> None:
    before = case.state()
    with case.broken():
        reply = node.refused("c1", pods[0], **case.of("four"))
    assert ("is down" in reply.text) or ("has no driver" in reply.text)
    _require_nothing(case, node, pods[0], before)


def test_add_killed_at_every_step_then_delete(case: RailPods, node: Node, pods: list[str]) -> None:
    before, config = case.state(), case.of("four")
    for step in range(1, MORE_THAN_ENOUGH):
        killed = killed_at(step, partial(node.add, "c1", pods[0], **config))
        node.delete("c1", pods[0], **config)
        _require_nothing(case, node, pods[0], before, step)
        if not killed:
            assert step > 50, "the injection counts no changes"
            return
    raise AssertionError("there are more changes than are enough")


def test_delete_killed_then_delete(case: RailPods, node: Node, pods: list[str]) -> None:
    before, config = case.state(), case.of("four")
    for step in range(1, MORE_THAN_ENOUGH, 3):
        node.add("c1", pods[0], **config)
        killed = killed_at(step, partial(node.call, "DEL", "c1", pods[0], **config))
        node.delete("c1", pods[0], **config)
        _require_nothing(case, node, pods[0], before, step)
        if not killed:
            return
    raise AssertionError("there are more changes than are enough")


def test_sweep_removes_the_rails_of_a_killed_add_and_a_dead_pod(case: RailPods, node: Node) -> None:
    before, config = case.state(), case.of("four")
    for step in (20, 70, MORE_THAN_ENOUGH):
        with pod("shortlived") as netns:
            killed_at(step, partial(node.call, "ADD", "c1", netns, **config))
        plugin = node.plugin()
        assert isinstance(plugin, InterfacePlugin)

        def swept(plugin: InterfacePlugin = plugin) -> bool:
            """Whether nothing is left: an interface returns from a namespace a little later."""
            orphans.sweep(plugin)
            return node.leftovers() == [] and case.state() == before

        until(swept, what=f"an empty journal after step {step}")


def test_rails_reach_their_peers_and_one_rail_is_an_ordinary_interface(
    case: RailPods, node: Node, pods: list[str]
) -> None:
    before = case.state()
    node.add("c1", pods[0], **case.of("one"))
    assert link_names(pods[0]) == {"lo", "net1"}
    if case.node is Node:  # a VF is in one pod only
        reply = node.add("c2", pods[1], **case.of("four"))
        assert pings(pods[0], reply.addresses[0])
        node.delete("c2", pods[1], **case.of("four"))
    node.delete("c1", pods[0], **case.of("one"))
    _require_nothing(case, node, pods[0], before)
