"""`macvlan` on real interfaces, whose HCAs are made up.

The host is a network namespace with the interfaces roce0 and roce1.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cni.attachments.orphans import sweep
from cni.macvlan import offspring
from cni.spec import notes
from host.namespaces import NetworkNamespace
from host.netlink import links
from host.netlink.sockets import netlink
from tests.kernel.macvlan_node import HCAS, POD, MacvlanNode
from tests.kernel.pods import Reply, ipam, link_in, link_names, pings
from tests.kernel.processes import killed_at
from tests.netns import IP, ip, namespace

OTHER = POD.replace("0", "1")
EVERY_OPTION = {
    "match_device": [False],
    **{key: ["*"] for key in ("mtu", "promisc", "accept_ra")},
}
MORE_THAN_ENOUGH = 400  # changes; an ADD makes fewer
V4 = ipam("10.9.0.0/24")
BOTH = {"ipRanges": [{"range": "10.9.0.0/24"}, {"range": "fd00:9::/64"}], "type": "podfabric-ipam"}


@pytest.fixture
def pods() -> Iterator[list[str]]:
    """Two pods, and the host, in which the test runs."""
    with ExitStack() as stack:
        host, *names = (stack.enter_context(namespace()).name for _ in range(3))
        for name in ("roce0", "roce1"):
            wire = f"{name}-wire"
            peer = "peer", "name", wire
            ip("-n", host, "link", "add", name, "mtu", "4200", "type", "veth", *peer)
            for end in (name, wire):
                ip("-n", host, "link", "set", end, "up")
        ip("-n", host, "link", "add", "net1", "type", "bridge")  # a name that pods also use
        opened = stack.enter_context(NetworkNamespace.open(f"/var/run/netns/{host}"))
        stack.enter_context(opened.entered())
        yield names


@pytest.fixture
def node(tmp_path: Path) -> MacvlanNode:
    return MacvlanNode(tmp_path)


def of(netns: str) -> tuple[str, str, int, str]:
    """The kind, the mode, the MTU and the hardware address of a pod's interface."""
    link = link_in(netns)
    assert link is not None
    return link.kind, link.mode, link.mtu, link.mac


@pytest.mark.parametrize("mode", ["bridge", "private", "vepa", "passthru"])
def test_an_attachment_lives_from_add_to_del(node: MacvlanNode, pods: list[str], mode: str) -> None:
    config = {"master": "roce0", "mode": mode, "mtu": 1500}
    both: dict[str, Any] = {**config, "ipam": BOTH}
    reply = node.add("c1", pods[0], **both)
    assert of(pods[0]) == ("macvlan", mode, 1500, reply.interface["mac"])
    assert reply.addresses == ["10.9.0.1", "fd00:9::1"]
    assert node.call("CHECK", "c1", pods[0], previous=reply, **both) == Reply(0, {})
    assert node.call("STATUS", "", "", **both) == Reply(0, {})
    ip("-n", pods[0], "link", "set", "net1", "mtu", "1400")
    assert node.call("CHECK", "c1", pods[0], previous=reply, **both).document["code"] == 102
    again = node.call("ADD", "c1", pods[0], **both)
    assert again.document["code"] == 103
    node.delete("c1", pods[0], **both)
    assert (link_names(pods[0]), node.leftovers()) == ({"lo"}, [])
    node.delete("c1", pods[0], **both)


def test_two_pods_reach_each_other(node: MacvlanNode, pods: list[str]) -> None:
    for netns in pods:
        node.add(netns, netns, master="roce0", ipam=V4)
    assert pings(pods[0], "10.9.0.2")
    assert of(pods[0])[1:3] == ("bridge", 4200)
    one = ["cat", *(f"/proc/sys/net/ipv4/conf/net1/{name}" for name in ("arp_ignore", "rp_filter"))]
    assert ip("netns", "exec", pods[0], *one).split() == ["1", "2"]


def test_an_address_is_from_the_runtime_before_cni_args_before_the_definition(
    node: MacvlanNode, pods: list[str]
) -> None:
    macs = [f"02:00:00:00:00:0{number}" for number in range(3)]
    given: dict[str, Any] = {"master": "roce0", "mac": macs[0]}
    for more, mac in (
        ({}, macs[0]),
        ({"args": f"MAC={macs[1]}"}, macs[1]),
        ({"args": f"MAC={macs[1]}", "runtimeConfig": {"mac": macs[2]}}, macs[2]),
    ):
        assert node.add("c1", pods[0], **given, **more).interface["mac"] == mac
        assert of(pods[0])[3] == mac
        node.delete("c1", pods[0], **given)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"master": "roce0", "mode": "l2"}, '"mode": "l2" is not one of'),
        ({"master": "roce0", "mtu": 9000}, '"mtu": 9000 is over the MTU 4200 of master "roce0"'),
        ({"master": "roce0", "mtu": -1}, '"mtu": -1 is negative'),
        ({"master": "roce0", "mac": "02:00"}, '"mac": write a MAC'),
        ({"master": "roce9"}, 'master "roce9" does not exist'),
        ({"master": "lo"}, 'master "lo" has link type loopback'),
        ({"mastre": "roce0"}, 'unknown key "mastre"'),
        ({}, '"master" is missing'),
        ({"master": "auto", "linkInContainer": True}, '"linkInContainer" needs the name'),
        ({"master": "net1"}, 'master "net1" is down'),
    ],
)
def test_a_wrong_configuration_is_refused_and_leaves_nothing(
    node: MacvlanNode, pods: list[str], config: dict[str, Any], said: str
) -> None:
    assert said in node.refused("c1", pods[0], **config).text


def test_dhcp_gets_an_interface_that_is_up(node: MacvlanNode, pods: list[str]) -> None:
    node.paths.cni_bin.mkdir()
    executable = node.paths.cni_bin / "dhcp"
    executable.write_text(
        f"#!/bin/sh\n[ $CNI_COMMAND = ADD ] || exit 0\n{IP} -n {pods[0]} -o link show up net1 |\n"
        'grep -q net1 && echo \'{"cniVersion":"1.1.0","ips":[{"address":"10.9.0.5/24"}]}\'\n'
    )
    executable.chmod(0o755)
    config: dict[str, Any] = {"master": "roce0", "ipam": {"type": "dhcp"}}
    assert node.add("c1", pods[0], **config).addresses == ["10.9.0.5"]
    assert "10.9.0.5/24" in ip("-n", pods[0], "address", "show", "net1")
    node.delete("c1", pods[0], **config)
    assert link_names(pods[0]) == {"lo"}


def test_without_a_master_the_default_route_chooses(node: MacvlanNode, pods: list[str]) -> None:
    ip("route", "add", "default", "dev", "roce1")
    node.add("c1", pods[0])
    (entry,) = node.plugin().journal.entries()  # type: ignore[attr-defined]
    assert b'"master":"roce1"' in bytes(entry.undo)


def test_a_master_in_the_pod(node: MacvlanNode, pods: list[str]) -> None:
    ip("-n", pods[0], "link", "add", "inner", "type", "bridge")
    ip("-n", pods[0], "link", "set", "inner", "up")
    node.give(HCAS[0])  # the master is in the pod already, so no HCA is compared
    node.add("c1", pods[0], master="inner", linkInContainer=True, ipam=V4, args=POD)
    node.delete("c1", pods[0], master="inner", linkInContainer=True, ipam=V4, args=POD)
    assert link_names(pods[0]) == {"lo", "inner"}


def test_auto_is_the_interface_of_the_pods_hca(node: MacvlanNode, pods: list[str]) -> None:
    node.give(HCAS[1])
    reply = node.add("c1", pods[0], master="auto", args=POD)
    assert reply.interface["pciID"] == HCAS[1]
    refused = node.call("ADD", "c2", pods[1], master="roce0", args=POD).document
    assert (refused["code"], f'master "roce0" is on HCA {HCAS[0]}' in refused["msg"]) == (120, True)
    assert "given no HCA" in node.call("ADD", "c2", pods[1], master="auto", args=OTHER).text
    node.allow(use={"devices": ["*"], "vlans": ["*"]}, set={"match_device": [False]})
    node.add("c2", pods[1], master="roce0", match_device=False, args=POD)


def test_a_bond_is_on_the_hcas_of_its_members(node: MacvlanNode, pods: list[str]) -> None:
    ip("link", "add", "bond0", "type", "bridge")
    ip("link", "set", "bond0", "up")
    node.tree.netdev("", "bond0")
    node.tree.write("class/net/bond0/bonding/mode", "802.3ad 4")
    for number in (0, 1):
        node.tree.write(f"class/net/bond0/lower_roce{number}", "")
        (node.tree.root / f"class/net/roce{number}/master").symlink_to("../bond0")
    node.give(HCAS[1])
    for master in ("auto", "bond0"):
        assert node.add("c1", pods[0], master=master, args=POD).interface["pciID"] == HCAS[1]
        node.delete("c1", pods[0], master=master, args=POD)


def test_an_active_port_comes_first(node: MacvlanNode, pods: list[str]) -> None:
    node.give(*HCAS)
    node.tree.write("class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    reply = node.add("c1", pods[0], master="auto", args=POD)
    assert reply.interface["pciID"] == HCAS[1]


def test_a_vlan_is_on_the_hca_under_it(
    node: MacvlanNode, pods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's kernel makes no VLANs, so roce0 is shown as a VLAN on roce1."""
    with netlink() as host:
        shown, under = links.require(host, "roce0"), links.require(host, "roce1")
    vlan = replace(shown, kind="vlan", vlan=7, parent=under.index)
    find = links.find
    monkeypatch.setattr(
        links, "find", lambda route, name: vlan if name == "roce0" else find(route, name)
    )
    node.give(HCAS[1])
    node.allow(use={"devices": [{"ifNames": ["roce1"]}], "vlans": [0, 8]})
    refused = node.refused("c1", pods[0], master="roce0", args=POD)
    assert '"vlan of roce0": 7 is not allowed' in refused.text
    node.allow(use={"devices": [{"ifNames": ["roce1"]}], "vlans": [7]})
    reply = node.add("c1", pods[0], master="roce0", args=POD)
    assert reply.interface["pciID"] == HCAS[1]


def test_rails_are_on_the_hcas_in_order(node: MacvlanNode, pods: list[str]) -> None:
    node.give(*HCAS)
    ranges = [{"range": f"10.9.{number}.0/24"} for number in range(2)]
    rails: dict[str, Any] = {
        "rails": "all",
        "ipam": {"type": "podfabric-ipam", "rails": ranges},
        "args": POD,
    }
    reply = node.add("c1", pods[0], **rails)
    shown = [(each["name"], each["pciID"]) for each in reply.document["interfaces"]]
    assert shown == [("net1", HCAS[0]), ("net1-1", HCAS[1])]
    assert reply.addresses == ["10.9.0.1", "10.9.1.1"]
    assert node.call("CHECK", "c1", pods[0], previous=reply, **rails) == Reply(0, {})
    node.delete("c1", pods[0], **rails)
    assert (link_names(pods[0]), node.leftovers()) == ({"lo"}, [])


def test_the_gid_is_there_before_add_answers(
    node: MacvlanNode, pods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offspring, "GID_TIME", 0.2)
    node.give(HCAS[0])
    config = {"master": "auto", "ipam": V4, "args": POD}
    with notes.collected() as said:
        node.add("c1", pods[0], **config)
        assert said.text == ""  # mlx5_0 has no GID of RoCE
        node.delete("c1", pods[0], **config)
        node.gid(0, 0, "fe80:0000:0000:0000:0000:00ff:fe00:0001")
        node.add("c1", pods[0], **config)
        assert "10.9.0.1/24: RDMA device mlx5_0 has no GID of this address" in said.text
        node.delete("c1", pods[0], **config)
    node.gid(0, 3, "0000:0000:0000:0000:0000:ffff:0a09:0001")
    with notes.collected() as said:
        node.add("c1", pods[0], **config)
    assert said.text == ""


@pytest.mark.parametrize(
    ("rule", "config", "said"),
    [
        ({"use": {"devices": [{"ifNames": ["roce1"]}]}}, {}, '"master": roce0'),
        ({"use": {"devices": ["*"], "vlans": [7]}}, {}, '"vlan of roce0": 0'),
        ({"use": {"devices": ["*"]}}, {"mac": "02:00:00:00:00:01"}, '"mac": 02:00'),
        ({"use": {"devices": ["*"], "vlans": [0]}}, {"mtu": 1500}, '"mtu": 1500'),
        ({"use": {"devices": ["*"]}}, {"mode": "passthru"}, '"mode": passthru'),
        ({"use": {"devices": ["*"]}}, {"accept_ra": True}, '"accept_ra": true'),
        ({"use": {"devices": ["*"]}}, {"match_device": False}, '"match_device": false'),
    ],
)
def test_what_no_rule_allows_is_refused(
    node: MacvlanNode, pods: list[str], rule: dict[str, Any], config: dict[str, Any], said: str
) -> None:
    node.allow(**rule)
    refused = node.refused("c1", pods[0], master="roce0", args=POD, **config)
    assert (refused.document["code"], said in refused.text) == (121, True), refused
    node.allow(use={"devices": ["*"], "vlans": ["*"], "macs": ["*"]}, set=EVERY_OPTION)
    node.add("c1", pods[0], master="roce0", args=POD, **config)


def test_a_rule_fixes_the_mtu(node: MacvlanNode, pods: list[str]) -> None:
    node.allow(use={"devices": ["*"], "vlans": [0]}, fixed={"mtu": 2000})
    node.add("c1", pods[0], master="roce0", args=POD)
    assert of(pods[0])[2] == 2000


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0"])
def test_an_interface_of_the_reference_plugin_is_removed_by_its_name(
    node: MacvlanNode, pods: list[str], version: str
) -> None:
    config: dict[str, Any] = {"master": "roce1", "cniVersion": version}
    node.add("c2", pods[0], master="roce0", ifname="net2")
    ip("link", "add", "link", "roce1", "name", "made", "netns", pods[0], "type", "macvlan")
    ip("-n", pods[0], "link", "set", "made", "name", "net1")
    node.delete("c1", pods[0], master="roce1")  # after an ADD that failed
    assert link_names(pods[0]) == {"lo", "net1", "net2"}
    if version == "0.4.0":
        made = {"interfaces": [{"name": "net1", "sandbox": f"/var/run/netns/{pods[0]}"}]}
        config["prevResult"] = {"cniVersion": version, **made}
    node.delete("c1", pods[0], **config)
    assert link_names(pods[0]) == {"lo", "net2"}


def test_a_renamed_interface_without_an_alias_is_removed(
    node: MacvlanNode, pods: list[str]
) -> None:
    node.add("c1", pods[0], master="roce0")
    ip("-n", pods[0], "link", "set", "net1", "alias", "mine", "name", "other")
    node.delete("c1", pods[0], master="roce0")
    assert link_names(pods[0]) == {"lo"}


def test_the_namespace_is_gone_before_del_or_sweep(node: MacvlanNode, pods: list[str]) -> None:
    for netns in pods:
        node.add(netns, netns, master="roce0", ipam=V4)
        ip("netns", "delete", netns)
    node.delete(pods[0], pods[0], master="roce0", ipam=V4)
    assert node.reservations() == ["10.9.0.2"]
    (outcome,) = sweep(node.plugin())  # type: ignore[arg-type]
    assert outcome.removed
    assert node.leftovers() == []


def test_calls_killed_at_every_step(node: MacvlanNode, pods: list[str]) -> None:
    config: dict[str, Any] = {"master": "roce0", "ipam": V4}
    steps = 0
    for command in ("ADD", "DEL"):
        for step in range(1, MORE_THAN_ENOUGH):
            if command == "DEL":
                node.add("c1", pods[0], **config)
            killed = killed_at(step, partial(node.call, command, "c1", pods[0], **config))
            node.delete("c1", pods[0], **config)
            assert (step, node.leftovers(), link_names(pods[0])) == (step, [], {"lo"})
            if not killed:
                break
            steps += 1
    assert steps > 10, "the injection counts no changes"
