"""Changes to a VF by root of a pod's namespace do not reach the next pod.

The lists of docs/developers/sriov-behaviour.md, "What a pod may change".
"""

import ctypes
import json
import struct
from pathlib import Path

from pyroute2.netlink.rtnl import RTM_SETLINK
from pyroute2.netlink.rtnl.ifinfmsg import XDP_FLAGS_SKB_MODE

from host import ethtool
from host.namespaces import NetworkNamespace
from host.netlink import links
from host.netlink.messages import LinkMessage, message
from host.netlink.sockets import ChangeRequest, netlink
from tests.kernel import cards
from tests.kernel.cards import Card
from tests.kernel.pods import IP, SriovNode, run

TC, BRIDGE = "/usr/sbin/tc", "/usr/sbin/bridge"
SETTINGS = Path("/proc/sys/net")
_BPF, _PROG_LOAD, _XDP = 321, 5, 6  # linux/bpf.h


def test_settings_that_a_move_keeps_are_restored(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    before = cards.snapshot()
    name = card.netdev(0)
    drivers = _of_the_driver(name)
    assert "ring" in drivers
    sriov.add("c1", pods[0], deviceID=card.vfs[0])
    inside = [IP, "-n", pods[0], "link", "set", "net1"]
    run(*inside, "txqueuelen", "5", "group", "7", "mode", "dormant", "alias", "mine")
    run(*inside, "gso_max_size", "3000", "gso_max_segs", "3", "gro_max_size", "4000")
    run(*inside, "arp", "off", "multicast", "off", "promisc", "on", "allmulticast", "on")
    run(*inside, "broadcast", "02:02:02:02:02:02")
    _attach_a_program(pods[0])
    _shrink_the_rings(pods[0])
    sriov.delete("c1", pods[0], deviceID=card.vfs[0])
    assert cards.snapshot() == before
    assert _of_the_driver(name) == drivers
    (shown,) = json.loads(run(IP, "-j", "-d", "link", "show", name))
    assert "xdp" not in shown


def test_settings_of_a_dead_namespace_are_restored(
    sriov: SriovNode, pods: list[str], card: Card
) -> None:
    before = cards.snapshot()
    sriov.add("c1", pods[0], deviceID=card.vfs[0])
    run(IP, "-n", pods[0], "link", "set", "net1", "txqueuelen", "5", "group", "7", "arp", "off")
    run(IP, "netns", "delete", pods[0])
    sriov.delete("c1", pods[0], deviceID=card.vfs[0])
    assert cards.snapshot() == before
    run(IP, "netns", "add", pods[0])  # the fixture deletes it


def test_what_the_kernel_resets_by_itself(sriov: SriovNode, pods: list[str], card: Card) -> None:
    """Everything above the device belongs to the namespace and is lost in the move."""
    name = card.netdev(0)
    sriov.add("c0", pods[0], deviceID=card.vfs[0])
    sriov.delete("c0", pods[0], deviceID=card.vfs[0])
    before = _above(name)
    sriov.add("c1", pods[0], deviceID=card.vfs[0])
    inside = [IP, "-n", pods[0]]
    run(*inside, "address", "add", "10.9.9.9/24", "dev", "net1")
    run(*inside, "route", "add", "10.8.0.0/16", "dev", "net1")
    run(*inside, "neigh", "add", "10.9.9.1", "lladdr", "02:0:0:0:0:9", "dev", "net1")
    run(*inside, "maddress", "add", "33:33:00:00:12:34", "dev", "net1")
    run(*inside, "link", "set", "net1", "addrgenmode", "none")
    run(*inside, "link", "add", "link", "net1", "name", "tagged", "type", "vlan", "id", "5")
    execute = [IP, "netns", "exec", pods[0]]
    run(*execute, BRIDGE, "fdb", "add", "02:11:22:33:44:55", "dev", "net1")
    run(*execute, TC, "qdisc", "replace", "dev", "net1", "root", "pfifo", "limit", "3")
    run(*execute, TC, "qdisc", "add", "dev", "net1", "clsact")
    for setting in (
        "ipv4/conf/net1/forwarding",
        "ipv6/conf/net1/accept_ra",
        "ipv4/neigh/net1/gc_stale_time",
    ):
        run(*execute, "/bin/sh", "-c", f"echo 2 > {SETTINGS / setting}")
    assert _above("net1", pods[0]) != before
    sriov.delete("c1", pods[0], deviceID=card.vfs[0])
    assert _above(name) == before


def _of_the_driver(name: str) -> dict[str, str]:
    with netlink() as host:
        return ethtool.settings(host, name)


def _above(name: str, netns: str = "") -> dict[str, str]:
    """Addresses, routes, neighbours, filters and so on, and the sysctls of an interface."""
    execute = [IP, "netns", "exec", netns] if netns else []
    listed = {
        " ".join(command): run(*execute, *command, "show", "dev", name)
        for command in (
            (IP, "-o", "address"),
            (IP, "route"),
            (IP, "neigh"),
            (IP, "maddress"),
            (BRIDGE, "fdb"),
            (TC, "qdisc"),
        )
    }
    listed["upper"] = run(*execute, "/bin/sh", "-c", f"ls /sys/class/net/{name} | grep upper_ || :")
    sysctls = f"cd {SETTINGS} && grep -s . ipv?/conf/{name}/* ipv?/neigh/{name}/* || :"
    shown = run(*execute, "/bin/sh", "-c", sysctls)
    listed |= dict.fromkeys(shown.splitlines(), "")
    # The first word may be the interface's index; its name differs in the pod.
    return {what.replace(name, "NAME"): text.replace(name, "NAME") for what, text in listed.items()}


def _attach_a_program(netns: str) -> None:
    """Attach an XDP program that passes every frame."""
    instructions = ctypes.create_string_buffer(
        struct.pack("=BBhi", 0xB7, 0, 0, 2) + struct.pack("=BBhi", 0x95, 0, 0, 0), 16
    )
    licence = ctypes.create_string_buffer(b"GPL")
    load = struct.pack(
        "=IIQQ", _XDP, 2, ctypes.addressof(instructions), ctypes.addressof(licence)
    ).ljust(128, b"\0")
    program = ctypes.CDLL(None, use_errno=True).syscall(_BPF, _PROG_LOAD, load, len(load))
    assert program >= 0, ctypes.get_errno()
    with NetworkNamespace.open(f"/var/run/netns/{netns}") as space, netlink(space) as route:
        link = links.require(route, "net1")
        attached = [("IFLA_XDP_FD", program), ("IFLA_XDP_FLAGS", XDP_FLAGS_SKB_MODE)]
        request = message(LinkMessage, [("IFLA_XDP", {"attrs": attached})], index=link.index)
        route.change(ChangeRequest("attaching a program", RTM_SETLINK, request))
        now = links.require(route, "net1")
    assert now.xdp == ("generic",)


def _shrink_the_rings(netns: str) -> None:
    """Do as `ethtool -G net1 rx 128 tx 128`, and switch TCP segmentation off."""
    with NetworkNamespace.open(f"/var/run/netns/{netns}") as space, netlink(space) as route:
        before = ethtool.settings(route, "net1")
        ring = list(struct.unpack("=8I", bytes.fromhex(before["ring"])))
        ring[4] = ring[7] = 128
        changed = {"ring": struct.pack("=8I", *ring).hex(), "features": "00" * 8}
        ethtool.restore(route, "net1", changed)
        now = ethtool.settings(route, "net1")
        assert now["ring"] != before["ring"]
        assert now["features"] != before["features"]
