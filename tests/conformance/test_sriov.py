"""The rows that need a device that survives the pod: `sriov` with a VF of an emulated card."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.expect import OK, Added, Err
from tests.conformance.fabric import addresses, links, unchanged_host
from tests.conformance.node import Node
from tests.conformance.rows import row
from tests.conformance.subject import FIRST, IPAM, SRIOV, Subject
from tests.kernel import cards, igb
from tests.kernel.cards import DEVICES, Card
from tests.netns import ip

pytestmark = pytest.mark.kernel

WITH_IPAM = {"ipam": IPAM.keys["ipam"]}


@pytest.fixture
def card() -> Iterator[Card]:
    """The second card with one VF."""
    with igb.with_addressed_vfs(cards.cards()[1], 1) as ready:
        yield ready


@row("E19", by=[SRIOV])
def test_check_compares_with_the_result_that_a_later_plugin_changed(
    node: Node, netns: Path, subject: Subject, card: Card
) -> None:
    config = subject.config(deviceID=card.vfs[0], trust="on", **WITH_IPAM)
    where = {"CNI_NETNS": str(netns)}
    with unchanged_host():
        added = node.call(subject, "ADD", config, **where)
        Added("1.0.0").met_by(added)
        result = added.document
        assert list(addresses(netns)) == [result["ips"][0]["address"]]
        mac = "02:ab:cd:00:00:19"
        ip("-netns", netns.name, "link", "set", "eth0", "address", mac)
        differing = node.call(subject, "CHECK", {**config, "prevResult": result}, **where)
        Err(102, contains="mac").met_by(differing)
        result["interfaces"][0]["mac"] = mac
        OK.met_by(node.call(subject, "CHECK", {**config, "prevResult": result}, **where))
        OK.met_by(node.call(subject, "DEL", config, **where))
    assert json.loads(ip("-json", "link", "show", card.netdev(0)))[0]["address"] != mac


@row("J7", by=[SRIOV])
def test_error_after_the_move_restores_the_device(
    node: Node, netns: Path, subject: Subject, card: Card
) -> None:
    """The kernel moves the VF, then refuses the MTU in the same message, before the new name."""
    name = card.netdev(0)
    ip("link", "set", name, "alias", "the host's own", "up")
    igb.await_carrier(name)
    config = subject.config(deviceID=card.vfs[0], mtu=60_000, **WITH_IPAM)
    with unchanged_host():
        failed = node.call(subject, "ADD", config, CNI_NETNS=str(netns))
        Err(100, contains="mtu greater than device maximum").met_by(failed)
    assert list(links(netns)) == ["lo"]
    assert cards.netdev_of(card.vfs[0]) == name
    where = {"CNI_NETNS": str(netns)}
    reserved = node.call(IPAM, "ADD", IPAM.config(name="other"), CNI_CONTAINERID="c9", **where)
    assert reserved.addresses == [FIRST]


@row("I7", by=[SRIOV])
def test_del_after_the_device_has_gone(
    node: Node, netns: Path, subject: Subject, card: Card
) -> None:
    config = subject.config(deviceID=card.vfs[0], vlan=7, **WITH_IPAM)
    where = {"CNI_NETNS": str(netns)}
    added = node.call(subject, "ADD", config, **where)
    Added("1.0.0").met_by(added)
    (DEVICES / card.address / "sriov_numvfs").write_text("0")
    assert list(links(netns)) == ["lo"]
    OK.met_by(node.call(subject, "DEL", config, **where))
    OK.met_by(node.call(subject, "DEL", config, **where))
    reserved = node.call(IPAM, "ADD", IPAM.config(name="other"), CNI_CONTAINERID="c9", **where)
    assert reserved.addresses == added.addresses
