"""kill -9 before every single change to kernel or disk, of ADD and of DEL; then all is cleaned."""

import time
from functools import partial
from typing import Any

from cni.ipoib.plugin import IPoIB
from tests.kernel.pods import Node, link_names, pod
from tests.kernel.processes import killed_at
from tests.waiting import until

CONFIG: dict[str, Any] = {
    "ipam": {
        "type": "podfabric-ipam",
        "ipRanges": [{"range": "10.2.0.0/24"}, {"range": "fd00:2::/64"}],
        "routes": [{"dst": "10.20.0.0/16", "gw": "10.2.0.9"}],
    }
}
MORE_THAN_ENOUGH = 400  # changes; a fresh ADD makes fewer


def test_add_killed_at_every_step_then_delete(node: Node, pods: list[str]) -> None:
    before = link_names()
    for step in range(1, MORE_THAN_ENOUGH):
        killed = killed_at(step, partial(node.call, "ADD", "c1", pods[0], **CONFIG))
        node.delete("c1", pods[0], **CONFIG)
        assert (step, node.leftovers()) == (step, [])
        assert (step, link_names(pods[0])) == (step, {"lo"})
        if not killed:
            break
    assert not killed
    assert step > 20, "the injection counts no changes"
    assert link_names() == before


def test_delete_killed_at_every_step_then_delete(node: Node, pods: list[str]) -> None:
    for step in range(1, MORE_THAN_ENOUGH):
        node.add("c1", pods[0], **CONFIG)
        killed = killed_at(step, partial(node.call, "DEL", "c1", pods[0], **CONFIG))
        node.delete("c1", pods[0], **CONFIG)
        assert (step, node.leftovers()) == (step, [])
        assert (step, link_names(pods[0])) == (step, {"lo"})
        if not killed:
            break
    assert not killed


def test_add_killed_then_added_again(node: Node, pods: list[str]) -> None:
    """A runtime that calls ADD again without a DEL gets a complete attachment, and only one."""
    for step in range(1, MORE_THAN_ENOUGH, 4):
        killed = killed_at(step, partial(node.call, "ADD", "c1", pods[0], **CONFIG))
        if not killed:
            node.delete("c1", pods[0], **CONFIG)
            break
        reply = node.call("ADD", "c1", pods[0], **CONFIG)
        if reply.exit_code == 1:  # it died after the last step that counts: attached
            assert (step, reply.document["code"]) == (step, 103)
        else:
            assert sorted(node.reservations()) == sorted(reply.addresses)
        assert link_names(pods[0]) == {"lo", "net1"}
        node.delete("c1", pods[0], **CONFIG)
        assert (step, node.leftovers()) == (step, [])
    assert not killed


def test_add_killed_and_namespace_gone_then_delete(node: Node, pods: list[str]) -> None:
    """The pod goes away while the interface is between host and pod."""
    before = link_names()
    for step in range(5, MORE_THAN_ENOUGH, 6):
        with pod("shortlived") as netns:
            killed = killed_at(step, partial(node.call, "ADD", "c1", netns, **CONFIG))
        node.delete("c1", "shortlived", **CONFIG)
        assert (step, node.leftovers()) == (step, [])
        if not killed:
            break
    assert not killed

    def nothing_comes_back() -> bool:
        """A child comes back from a namespace a little later: the next sweep takes it."""
        IPoIB(node.paths).remove_strays()
        return link_names() == before

    until(nothing_comes_back)


def test_add_that_a_dead_agent_had_done_is_undone_by_the_next_agent_s(
    node: Node, pods: list[str]
) -> None:
    before = link_names()
    node.add("c1", pods[0], **CONFIG)
    node.unanswered_since = int(time.time()) + 1
    assert (
        node.call("ADD", "c1", pods[0], **CONFIG).document["code"] == 103
    )  # it is older: it lives
    node.unanswered_since = int(time.time()) - 60
    reply = node.add("c1", pods[0], **CONFIG)
    assert sorted(node.reservations()) == sorted(reply.addresses)
    assert link_names(pods[0]) == {"lo", "net1"}
    node.delete("c1", pods[0], **CONFIG)
    assert node.leftovers() == []
    assert link_names() == before
