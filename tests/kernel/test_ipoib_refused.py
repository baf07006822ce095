"""Impossible configurations are refused before anything is made, with an error that names a
remedy."""

import json
from typing import Any

import pytest

from policy import rules
from tests.kernel.pods import IP, Node, ipam, knob, link_in, link_names, run


@pytest.mark.parametrize(
    ("config", "code", "texts"),
    [
        ({"master": "ib9"}, 7, ['parent "ib9" does not exist', "ib0, ib1 found"]),
        ({"master": "lo"}, 7, ["link type loopback, not infiniband", "ib0, ib1 found"]),
        ({"master": ["ib8", "lo"]}, 7, ['"ib8" does not exist', "loopback"]),
        ({"mtu": 2045}, 7, ['"mtu": 2045', "limit of 2044"]),
        ({"pkey": "0x8123"}, 7, ["0x8123", "ibloop0 port 1", "0xffff, 0x8001, 0x8002, 0x8003"]),
        ({"pkey": "0x8000"}, 7, ['"pkey"', "out of range"]),
        ({"mode": "bridge"}, 7, ['"mode": "bridge"', "datagram"]),
        ({"mac": "02:00:00:00:00:01"}, 7, ['"mac"', "queue pair number"]),
        ({"runtimeConfig": {"mac": "02:00:00:00:00:01"}}, 7, ['"runtimeConfig.mac"']),
        ({"ipam": {"type": "dhcp"}}, 7, ["dhcp plugin cannot serve IPoIB"]),
        ({"pkeys": "0x8001"}, 7, ['unknown key "pkeys"', '"pkey"']),
        ({"ipam": {"type": "absent"}}, 7, ['failed to find plugin "absent"']),
        ({"ipam": {"type": "bridge"}}, 121, ['"ipam.type": bridge', '"use.ipamTypes"']),
        ({"cniVersion": "0.2.0"}, 7, ["cannot convert: no valid IP addresses"]),
        ({"wait_carrier": 1000}, 7, ['"wait_carrier": 1000']),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_configuration_that_cannot_work(
    node: Node, pods: list[str], config: dict[str, Any], code: int, texts: list[str]
) -> None:
    node.policy = rules.of({"use": {"ipamTypes": ["absent"]}}, "config.yaml")
    reply = node.refused("c1", pods[0], **config)
    assert reply.document["code"] == code
    for text in texts:
        assert text in reply.text
    assert link_names(pods[0]) == {"lo"}


def test_ethernet_and_macvlan_masters_are_explained(node: Node, pods: list[str]) -> None:
    run(IP, "link", "add", "eth7", "type", "veth", "peer", "name", "eth8")
    run(IP, "link", "add", "mv7", "link", "eth7", "type", "macvlan")
    try:
        assert "link type ether, not infiniband" in node.refused("c1", pods[0], master="eth7").text
        assert "is a macvlan" in node.refused("c1", pods[0], master="mv7").text
    finally:
        run(IP, "link", "delete", "eth7")


def test_child_of_a_child_is_explained(node: Node, pods: list[str]) -> None:
    run(IP, "link", "add", "ib0.8001", "link", "ib0", "type", "ipoib", "pkey", "0x8001")
    try:
        reply = node.refused("c1", pods[0], master="ib0.8001")
        assert 'set "master" to the parent of "ib0.8001", and "pkey" to "0x8001"' in reply.text
    finally:
        run(IP, "link", "delete", "ib0.8001")


def test_parent_that_is_down_is_explained(node: Node, pods: list[str]) -> None:
    run(IP, "link", "set", "ib1", "down")
    try:
        reply = node.refused("c1", pods[0], master="ib1")
        assert (reply.document["code"], "ip link set ib1 up" in reply.text) == (11, True)
    finally:
        run(IP, "link", "set", "ib1", "up")


def test_no_carrier_is_explained_by_the_ports_state(node: Node, pods: list[str]) -> None:
    knob(1, "port").write_text("down")
    try:
        config = {"master": "ib1", "wait_carrier": 0.5, "ipam": ipam("10.9.0.0/24")}
        reply = node.refused("c1", pods[0], **config)
        assert reply.document["code"] == 11
        assert "has no carrier after 0.5 s: port 1 of ibloop1 is DOWN" in reply.text
        assert link_names(pods[0]) == {"lo"}
        status = node.call("STATUS", "", "", master="ib1")
        assert (status.document["code"], "DOWN" in status.text) == (50, True)
    finally:
        knob(1, "port").write_text("up")


def test_no_carrier_can_be_accepted(node: Node, pods: list[str]) -> None:
    knob(1, "port").write_text("down")
    try:
        node.add("c1", pods[0], master="ib1", wait_carrier=0)
        link = link_in(pods[0])
        assert link is not None
        assert link.up
        assert not link.carrier
        node.delete("c1", pods[0], master="ib1")
    finally:
        knob(1, "port").write_text("up")
    assert node.leftovers() == []


def test_name_that_the_kernel_refuses_leaves_nothing(node: Node, pods: list[str]) -> None:
    """`net%` passes the specification's rule; the kernel answers EINVAL."""
    node.refused("c1", pods[0], ifname="net%", ipam=ipam("10.9.0.0/24"))
    assert link_names(pods[0]) == {"lo"}


def test_address_that_the_kernel_refuses_undoes_everything(node: Node, pods: list[str]) -> None:
    """The pod has no IPv6: the reservation and the child must be removed again."""
    run(IP, "netns", "exec", pods[0], "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
    config = {"ipam": {"type": "podfabric-ipam", "range": "10.9.0.0/24",
                       "routes": [{"dst": "10.99.0.0/16", "gw": "10.77.0.1", "table": 0,
                                   "scope": 254}]}}  # fmt: skip
    reply = node.refused("c1", pods[0], **config)
    assert reply.document["code"] == 100
    assert "10.99.0.0/16" in reply.text
    assert link_names(pods[0]) == {"lo"}


def test_private_range_over_the_addresses_of_another_network_on_the_partition_is_refused(
    node: Node, pods: list[str]
) -> None:
    node.add("c1", pods[0], name="theirs", pkey="0x8002", ipam=ipam("10.9.0.0/24"))
    evil = ipam("10.9.0.0/24", network_name="evil")
    reply = node.call("ADD", "c2", pods[1], name="mine", pkey="0x0002", ipam=evil)
    assert reply.document["code"] == 121
    assert "ib0 0x8002" in reply.text
    assert link_names(pods[1]) == {"lo"}
    assert node.add("c3", pods[2], name="mine", pkey="0x8003", ipam=evil).addresses == ["10.9.0.1"]
