"""CHECK finds every difference from the state that ADD set."""

from collections.abc import Callable
from typing import Any

import pytest

from ipam.store.sqlite_store import SqliteStore
from tests.kernel.pods import IP, Node, Reply, ipam, knob, run
from tests.waiting import until

CONFIG: dict[str, Any] = {
    "ipam": ipam("10.3.0.0/24", routes=[{"dst": "10.30.0.0/16", "gw": "10.3.0.9"}])
}


def _without_reservation(node: Node, netns: str) -> None:
    store = SqliteStore(node.paths.ipam, node.paths.boot_id())
    (held,) = store.reservations()
    store.release(held.attachment)


CHANGES: dict[str, tuple[Callable[[Node, str], object], str]] = {
    "interface": (
        lambda node, pod: run(IP, "-n", pod, "link", "delete", "net1"),
        'interface "net1" is gone from the pod',
    ),
    "address": (
        lambda node, pod: run(IP, "-n", pod, "address", "flush", "dev", "net1"),
        "Failed to match addr 10.3.0.1/24 on interface net1",
    ),
    "route": (
        lambda node, pod: run(IP, "-n", pod, "route", "delete", "10.30.0.0/16"),
        "route 10.30.0.0/16 via 10.3.0.9 is gone from the pod",
    ),
    "mtu": (
        lambda node, pod: run(IP, "-n", pod, "link", "set", "net1", "mtu", "1200"),
        'mtu of "net1" is "1200", but the ADD set "2044"',
    ),
    "alias": (
        lambda node, pod: run(IP, "-n", pod, "link", "set", "net1", "alias", "mine"),
        'alias of "net1" is "mine"',
    ),
    "up": (
        lambda node, pod: run(IP, "-n", pod, "link", "set", "net1", "down"),
        'administrative state of "net1" is "down", but the ADD set "up"',
    ),
    "reservation": (_without_reservation, "10.3.0.1 is not reserved"),
    "journal": (lambda node, pod: node.journal_file("c1").unlink(), "journal has no entry"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_difference_is_named(node: Node, pods: list[str], what: str) -> None:
    change, text = CHANGES[what]
    result = node.add("c1", pods[0], **CONFIG)
    assert node.call("CHECK", "c1", pods[0], previous=result, **CONFIG) == Reply(0, {})
    change(node, pods[0])
    reply = node.call("CHECK", "c1", pods[0], previous=result, **CONFIG)
    assert reply.exit_code == 1
    assert text in reply.text
    node.delete("c1", pods[0], **CONFIG)
    assert node.leftovers() == []


def test_port_that_flaps_is_found_down_and_found_up_again(node: Node, pods: list[str]) -> None:
    config: dict[str, Any] = {"master": "ib1"}
    result = node.add("c1", pods[0], **config)
    knob(1, "port").write_text("down")
    try:
        reply = _until(lambda: node.call("CHECK", "c1", pods[0], previous=result, **config), 1)
        assert 'carrier of "net1" is "down", but the ADD set "up"' in reply.text
    finally:
        knob(1, "port").write_text("up")
    _until(lambda: node.call("CHECK", "c1", pods[0], previous=result, **config), 0)
    node.delete("c1", pods[0], **config)


def test_another_sandbox_than_the_results_is_a_difference(node: Node, pods: list[str]) -> None:
    result = node.add("c1", pods[0], **CONFIG)
    reply = node.call("CHECK", "c1", pods[1], previous=result, **CONFIG)
    assert "sandbox in prevResult" in reply.text
    node.delete("c1", pods[0], **CONFIG)


def _until(call: Callable[[], Reply], exit_code: int) -> Reply:
    """Repeat the call until the effect is visible: IPoIB handles port events in a workqueue."""

    def expected() -> Reply | None:
        reply = call()
        return reply if reply.exit_code == exit_code else None

    reply = until(expected)
    assert reply is not None
    return reply
