"""The owner of an address (sandbox, pod, boot), and addresses that a node takes back."""

import pytest

from cni.spec.errors import Code
from tests.unit.ipam.calls import NEXT_BOOT, Calls, How, Json, error_of, request

POOL = {"range": "10.0.0.0/24"}
TINY = {"range": "10.0.0.0/30"}
DUAL = {"ipRanges": [{"range": "192.168.10.1/24"}, {"range": "abcd::1/64"}]}


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ({"pod": "p", "uid": "u1"}, {"pod": "p", "uid": "u1"}, True),
        ({"pod": "p", "uid": "u1"}, {"pod": "p"}, True),
        ({"pod": "p"}, {"pod": "p", "uid": "u1"}, True),
        ({"uid": "u1"}, {"uid": "u1"}, True),
        ({"pod": "p", "uid": "u1"}, {"pod": "p", "uid": "u2"}, False),
        ({"pod": "p"}, {"pod": "q"}, False),
        ({}, {}, False),
        ({"pod": "p"}, {"pod": "p", "ifname": "net2"}, False),
        ({"pod": "p"}, {"pod": "p", "network": "n2"}, False),
    ],
)
def test_a_pod_is_the_same_by_uid_or_else_by_name(
    node: Calls, before: How, after: How, same: bool
) -> None:
    node.add(POOL, "old", **before)
    assert node.addresses(POOL, "new", **after) == ["10.0.0.1/24" if same else "10.0.0.2/24"]


@pytest.mark.parametrize(
    "changed",
    [
        {"exclude": ["10.0.0.1"]},
        {"range_start": "10.0.0.5"},
        {"gateway": "10.0.0.1"},
        {"network_name": "blue", "exclude": ["10.0.0.1-10.0.0.7"]},
    ],
)
def test_an_address_that_is_no_longer_allowed_is_not_kept(node: Calls, changed: Json) -> None:
    node.add(POOL, "old", pod="p")
    assert node.addresses({**POOL, **changed}, "new", pod="p") != ["10.0.0.1/24"]
    node.delete(None, "old")
    node.delete(None, "new")
    assert node.held() == {}


@pytest.mark.parametrize("requested", [{}, {"args": "IP=10.0.0.77"}])
def test_a_second_add_of_a_live_attachment_is_an_error_that_changes_nothing(
    node: Calls, requested: How
) -> None:
    node.add(DUAL)
    held = node.store.reservations()
    error = error_of(lambda: node.add({**POOL, **DUAL}, **requested))
    assert error.code == Code.ALREADY_ATTACHED
    assert "already holds 192.168.10.1, abcd::1" in error.message
    assert "run DEL" in error.message
    assert node.store.reservations() == held


def test_what_an_earlier_boot_left_is_taken_when_nothing_else_is_free(node: Calls) -> None:
    node.add(TINY, "a", pod="p")
    node.add(TINY, "b", pod="q")
    assert error_of(lambda: node.add(TINY, "c", pod="r")).code == Code.NO_FREE_ADDRESS
    assert error_of(lambda: node.status(TINY)).code == Code.UNAVAILABLE
    node.boot = NEXT_BOOT
    node.status(TINY)
    assert node.addresses(TINY, "c", pod="r") == ["10.0.0.1/30"]
    assert node.addresses(TINY, "d", pod="s") == ["10.0.0.2/30"]
    assert error_of(lambda: node.add(TINY, "e", pod="p")).code == Code.NO_FREE_ADDRESS


def test_undo_leaves_what_changed_hands_since(node: Calls) -> None:
    _, grant = node.plugin.reserve(request("ADD", POOL, "old", pod="p"))
    node.add(POOL, "new", pod="p")
    node.plugin.undo(grant)
    node.plugin.undo(grant)
    assert node.held() == {"10.0.0.1": "new"}
