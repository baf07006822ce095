"""kill -9 before every single change of ADD and DEL on a VF; afterwards the host is restored."""

import time
from functools import partial
from typing import Any

import pytest

from tests.kernel import cards
from tests.kernel.cards import Card
from tests.kernel.pods import SriovNode, ipam, link_names, pod
from tests.kernel.processes import killed_at

MORE_THAN_ENOUGH = 300  # changes; an ADD makes fewer


@pytest.fixture
def config(card: Card) -> dict[str, Any]:
    """Options of each kind: set at the PF, set at the VF, an address."""
    return {
        "deviceID": card.vfs[0],
        "vlan": 100,
        "trust": "on",
        "mac": "02:ab:cd:00:00:02",
        "mtu": 1400,
        "ipam": ipam("10.4.0.0/24"),
    }


def test_add_killed_at_every_step_then_delete(
    sriov: SriovNode, pods: list[str], config: dict[str, Any]
) -> None:
    before = cards.snapshot()
    for step in range(1, MORE_THAN_ENOUGH):
        killed = killed_at(step, partial(sriov.call, "ADD", "c1", pods[0], **config))
        sriov.delete("c1", pods[0], **config)
        assert (step, sriov.leftovers()) == (step, [])
        assert (step, cards.snapshot()) == (step, before)
        if not killed:
            break
    assert not killed
    assert step > 20, "the injection counts no changes"


def test_delete_killed_at_every_step_then_delete(
    sriov: SriovNode, pods: list[str], config: dict[str, Any]
) -> None:
    before = cards.snapshot()
    for step in range(1, MORE_THAN_ENOUGH):
        sriov.add("c1", pods[0], **config)
        killed = killed_at(step, partial(sriov.call, "DEL", "c1", pods[0], **config))
        sriov.delete("c1", pods[0], **config)
        assert (step, sriov.leftovers()) == (step, [])
        assert (step, cards.snapshot()) == (step, before)
        if not killed:
            break
    assert not killed


def test_add_killed_then_the_device_goes_to_another_pod(
    sriov: SriovNode, pods: list[str], config: dict[str, Any]
) -> None:
    """The kubelet gives the dead pod's device away before that pod's DEL, which comes late."""
    before = cards.snapshot()
    bare = {"deviceID": config["deviceID"], "ipam": config["ipam"]}
    for step in range(3, MORE_THAN_ENOUGH, 3):
        with pod("shortlived") as netns:
            killed = killed_at(step, partial(sriov.call, "ADD", "c1", netns, **config))
        reply = sriov.add("c2", pods[1], **bare)
        assert cards.setting(config["deviceID"], "vlan_list") == [{}]
        sriov.delete("c1", "shortlived", **config)
        assert (step, link_names(pods[1])) == (step, {"lo", "net1"})
        checked = sriov.call("CHECK", "c2", pods[1], previous=reply, **bare)
        assert (step, checked.document) == (step, {})
        sriov.delete("c2", pods[1], **bare)
        assert (step, sriov.leftovers()) == (step, [])
        assert (step, cards.snapshot()) == (step, before)
        if not killed:
            break
    assert not killed


def test_namespace_gone_after_a_killed_delete(sriov: SriovNode, config: dict[str, Any]) -> None:
    before = cards.snapshot()
    for step in range(2, MORE_THAN_ENOUGH, 3):
        with pod("shortlived") as netns:
            sriov.add("c1", netns, **config)
            killed = killed_at(step, partial(sriov.call, "DEL", "c1", netns, **config))
        sriov.delete("c1", "shortlived", **config)
        assert (step, sriov.leftovers()) == (step, [])
        assert (step, cards.snapshot()) == (step, before)
        if not killed:
            break
    assert not killed


def test_add_killed_then_added_again(
    sriov: SriovNode, pods: list[str], config: dict[str, Any]
) -> None:
    """A runtime that calls ADD again without a DEL gets a complete attachment, and only one."""
    before = cards.snapshot()
    for step in range(4, MORE_THAN_ENOUGH, 4):
        killed = killed_at(step, partial(sriov.call, "ADD", "c1", pods[0], **config))
        if not killed:
            sriov.delete("c1", pods[0], **config)
            break
        reply = sriov.call("ADD", "c1", pods[0], **config)
        if reply.exit_code == 1:  # it was killed after the last step that counts: it is attached
            assert (step, reply.document["code"]) == (step, 103)
        else:
            assert sorted(sriov.reservations()) == sorted(reply.addresses)
        assert link_names(pods[0]) == {"lo", "net1"}
        sriov.delete("c1", pods[0], **config)
        assert (step, sriov.leftovers()) == (step, [])
        assert (step, cards.snapshot()) == (step, before)
    assert not killed


def test_add_that_a_dead_agent_had_done_is_undone_by_the_next_agent_s(
    sriov: SriovNode, pods: list[str], config: dict[str, Any]
) -> None:
    before = cards.snapshot()
    sriov.add("c1", pods[0], **config)
    sriov.unanswered_since = int(time.time()) + 1
    assert (
        sriov.call("ADD", "c1", pods[0], **config).document["code"] == 103
    )  # it is older: it lives
    sriov.unanswered_since = int(time.time()) - 60
    reply = sriov.add("c1", pods[0], **config)
    assert sorted(sriov.reservations()) == sorted(reply.addresses)
    assert link_names(pods[0]) == {"lo", "net1"}
    sriov.delete("c1", pods[0], **config)
    assert sriov.leftovers() == []
    assert cards.snapshot() == before
