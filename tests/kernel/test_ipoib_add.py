"""The kernel's state after an ADD."""

import ipaddress
import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from host.namespaces import NetworkNamespace
from tests.kernel.pods import IP, Node, ipam, link_in, link_names, pings, run
from tests.runtime import CHECKOUT, definitions
from tests.waiting import PATIENCE

# The examples with `auto`, sticky addresses and nv-ipam need devices or pools:
# tests/cluster/test_examples.py.
EXAMPLES = {
    f"{file.stem}-{definition.name}": definition.config
    for file in sorted((CHECKOUT / "netattach-examples").glob("*.yaml"))
    for definition in definitions(file)
    if definition.config["type"] == "ipoib" and definition.config["master"] != "auto"
    if file.stem not in ("nv-ipam", "sticky")
}


def verbs_below(parent: str) -> tuple[str, str]:
    """The RDMA device whose port has the interface's GUID, and its character device."""
    guid = text(Path("/sys/class/net") / parent / "address").replace(":", "")[-16:]
    (hca,) = (
        device.name
        for device in Path("/sys/class/infiniband").iterdir()
        if text(device / "ports/1/gids/0").replace(":", "").endswith(guid)
    )
    (uverbs,) = (
        device.name
        for device in Path("/sys/class/infiniband_verbs").glob("uverbs*")
        if text(device / "ibdev") == hca
    )
    return hca, uverbs


def text(path: Path) -> str:
    return path.read_text().strip()


def test_child_inherits_pkey_mode_and_mtu_of_its_parent(node: Node, pods: list[str]) -> None:
    run(IP, "link", "set", "ib1", "mtu", "1500")
    try:
        reply = node.add("c1", pods[0], master="ib1")
    finally:
        run(IP, "link", "set", "ib1", "mtu", "2044")
    link = link_in(pods[0])
    assert link is not None
    assert (link.kind, link.pkey, link.mode, link.mtu) == ("ipoib", 0xFFFF, "datagram", 1500)
    assert link.up
    assert link.carrier
    hca, uverbs = verbs_below("ib1")
    interface = {
        "name": "net1",
        "mac": link.mac,
        "mtu": 1500,
        "sandbox": f"/var/run/netns/{pods[0]}",
        "rdmaDevice": hca,
        "uverbs": uverbs,
    }
    assert reply.document == {"cniVersion": "1.1.0", "interfaces": [interface]}
    assert len(bytes.fromhex(link.mac.replace(":", ""))) == 20
    node.delete("c1", pods[0], master="ib1")
    assert node.leftovers() == []


def test_options_reach_the_kernel(node: Node, pods: list[str]) -> None:
    node.add("c1", pods[0], pkey="0x8002", mtu=1400, umcast=True, proxy_arp=True)
    link = link_in(pods[0])
    assert link is not None
    assert (link.pkey, link.mtu, link.umcast) == (0x8002, 1400, True)
    switch = "/proc/sys/net/ipv4/conf/net1/proxy_arp"
    assert run(IP, "netns", "exec", pods[0], "cat", switch).strip() == "1"
    node.delete("c1", pods[0])


def test_proxy_arp_is_off_unless_asked(node: Node, pods: list[str]) -> None:
    node.add("c1", pods[0])
    switch = "/proc/sys/net/ipv4/conf/net1/proxy_arp"
    assert run(IP, "netns", "exec", pods[0], "cat", switch).strip() == "0"
    node.delete("c1", pods[0])


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_attaches_and_detaches(node: Node, pods: list[str], example: str) -> None:
    reply = node.add("c1", pods[0], **EXAMPLES[example])
    assert reply.addresses
    node.delete("c1", pods[0], **EXAMPLES[example])
    assert node.leftovers() == []


def test_connected_mode_can_be_asked_for(node: Node, pods: list[str]) -> None:
    node.add("c1", pods[0], mode="connected")
    link = link_in(pods[0])
    assert link is not None
    assert link.mode == "connected"
    node.delete("c1", pods[0], mode="connected")


def test_queue_length_is_the_drivers_own(node: Node, pods: list[str]) -> None:
    node.add("c1", pods[0])
    (parent,) = json.loads(run(IP, "-j", "link", "show", "ib0"))
    (link,) = json.loads(run(IP, "-n", pods[0], "-j", "link", "show", "net1"))
    assert link["txqlen"] == parent["txqlen"] > 0
    node.delete("c1", pods[0])


def test_first_usable_master_is_taken(node: Node, pods: list[str]) -> None:
    node.add("c1", pods[0], master=["ib7", "lo", "ib1", "ib0"])
    link, parents = link_in(pods[0]), json.loads(run(IP, "-j", "link", "show", "ib1"))
    assert link is not None
    assert link.parent == parents[0]["ifindex"]
    node.delete("c1", pods[0])


def test_route_may_have_a_gateway_beyond_the_interfaces_networks(
    node: Node, pods: list[str]
) -> None:
    routes = [
        {"dst": "10.60.0.0/16", "gw": "10.77.0.1"},
        {"dst": "10.61.0.0/16", "scope": 253},
        {"dst": "10.62.0.0/16", "gw": "10.6.0.9", "table": 100},
    ]
    config: dict[str, Any] = {"ipam": ipam("10.6.0.0/24", gateway="10.6.0.1", routes=routes)}
    reply = node.add("c1", pods[0], **config)
    found = json.loads(run(IP, "-n", pods[0], "-j", "route", "show", "table", "all"))
    by_destination = {route["dst"]: route for route in found if route.get("dev") == "net1"}
    assert by_destination["10.60.0.0/16"]["gateway"] == "10.77.0.1"
    assert "onlink" in by_destination["10.60.0.0/16"]["flags"]
    assert "gateway" not in by_destination["10.61.0.0/16"]
    assert by_destination["10.62.0.0/16"]["table"] == "100"
    assert node.call("CHECK", "c1", pods[0], previous=reply, **config).exit_code == 0
    node.delete("c1", pods[0], **config)


def test_default_route_goes_behind_another_networks(node: Node, pods: list[str]) -> None:
    run(IP, "-n", pods[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
    for name in ("eth0", "eth1"):
        run(IP, "-n", pods[0], "link", "set", name, "up")
    run(IP, "-n", pods[0], "address", "add", "10.0.0.2/24", "dev", "eth0")
    run(IP, "-n", pods[0], "route", "add", "default", "via", "10.0.0.1")
    given = ipam("10.6.0.0/24", gateway="10.6.0.1", routes=[{"dst": "0.0.0.0/0"}])
    config: dict[str, Any] = {"ipam": given}
    reply = node.add("c1", pods[0], **config)
    found = json.loads(run(IP, "-n", pods[0], "-j", "route", "show", "default"))
    assert [route["dev"] for route in found] == ["eth0", "net1"]
    assert node.call("CHECK", "c1", pods[0], previous=reply, **config).exit_code == 0
    node.delete("c1", pods[0], **config)


def test_children_of_one_port_have_link_local_addresses_that_differ(
    node: Node, pods: list[str]
) -> None:
    """The kernel would give all of them the same address, derived from the port's GUID alone."""
    found = []
    for number, netns in enumerate(pods):
        node.add(f"c{number}", netns)
        given = json.loads(run(IP, "-n", netns, "-j", "address", "show", "net1"))[0]["addr_info"]
        (local,) = (address for address in given if address["scope"] == "link")
        assert not local.get("tentative")
        assert not local.get("dadfailed")
        found.append(local["local"])
    assert len(set(found)) == 3
    assert pings(pods[0], f"{found[1]}%net1")
    for number, netns in enumerate(pods):
        node.delete(f"c{number}", netns)


def test_new_address_is_announced_in_infinibands_own_form(node: Node, pods: list[str]) -> None:
    """A gratuitous ARP with hardware type 32 and 20-byte addresses, and an unsolicited NA."""
    node.add("listener", pods[0])
    with NetworkNamespace.open(f"/var/run/netns/{pods[0]}") as space:
        with space.entered():
            sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
            sniffer.bind(("net1", 3))
        sniffer.settimeout(PATIENCE)
        config = {"ipam": {"type": "podfabric-ipam", "ipRanges": [
            {"range": "10.6.0.0/24"}, {"range": "fd00:6::/64"}]}}  # fmt: skip
        reply = node.add("c1", pods[1], **config)
        mac = bytes.fromhex(reply.interface["mac"].replace(":", ""))
        v4, v6 = (ipaddress.ip_address(text).packed for text in reply.addresses)
        arp = struct.pack("!HHBBH", 32, 0x0800, 20, 4, 1) + mac + v4 + bytes(20) + v4
        seen_arp = seen_na = False
        with sniffer:
            while not (seen_arp and seen_na):
                packet, address = sniffer.recvfrom(2048)
                if address[1] == 0x0806 and packet[: len(arp)] == arp:
                    seen_arp = True
                if address[1] == 0x86DD and packet[40] == 136 and packet[48:64] == v6:
                    assert packet[7] == 255  # hop limit
                    assert packet[64:88] == bytes((2, 3, 0, 0)) + mac
                    seen_na = True
    node.delete("c1", pods[1], **config)
    node.delete("listener", pods[0])


def test_name_that_the_host_has_is_free_in_the_pod(node: Node, pods: list[str]) -> None:
    """The kernel refuses the name for a new child, so the child gets the name in the pod."""
    run(IP, "link", "add", "net1", "type", "dummy")
    try:
        node.add("c1", pods[0])
        link = link_in(pods[0])
        assert link is not None
        (parent,) = json.loads(run(IP, "-j", "link", "show", "dev", "ib0"))
        assert (link.kind, link.parent) == ("ipoib", parent["ifindex"])
        node.delete("c1", pods[0])
    finally:
        run(IP, "link", "delete", "net1")
    assert node.leftovers() == []


def test_child_leaves_the_pods_other_interfaces_alone(node: Node, pods: list[str]) -> None:
    """A wrong index would configure another interface of the pod."""
    with NetworkNamespace.open(f"/var/run/netns/{pods[0]}"):
        highest = max(link["ifindex"] for link in json.loads(run(IP, "-j", "link")))
        for index in range(highest + 1, highest + 12):
            interface = ("name", f"d{index}", "index", str(index))
            other = ("name", f"e{index}", "index", str(index + 1000))
            run(IP, "-n", pods[0], "link", "add", *interface, "type", "veth", "peer", *other)
    before = run(IP, "-n", pods[0], "-o", "address")
    reply = node.add("c1", pods[0], ipam=ipam("10.7.0.0/24"))
    link = link_in(pods[0])
    assert link is not None
    assert link.index >= 0x70000000
    after = [line for line in run(IP, "-n", pods[0], "-o", "address").splitlines()
             if " net1 " not in line]  # fmt: skip
    assert after == before.splitlines()
    assert f"{reply.addresses[0]}/24" in run(IP, "-n", pods[0], "address", "show", "net1")
    node.delete("c1", pods[0], ipam=ipam("10.7.0.0/24"))
    assert len(link_names(pods[0])) == 1 + 22


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0", "1.1.0"])
def test_interface_without_addresses_is_a_result_from_0_3_0_on(
    node: Node, pods: list[str], version: str
) -> None:
    reply = node.add("c1", pods[0], cniVersion=version)
    assert reply.document["cniVersion"] == version
    node.delete("c1", pods[0], cniVersion=version)
