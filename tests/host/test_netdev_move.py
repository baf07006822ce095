"""Interfaces moved into a namespace and back, checked in the kernel.

The host is a namespace too, so that no name of this machine interferes.
"""

import ipaddress
import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from pyroute2.netlink.rtnl import RTM_SETLINK

from host import netdev_move
from host.errors import HostError, LinkMissing
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark, NameTaken, Origin
from host.netlink import interface_addresses, link_changes, links
from host.netlink.interface_addresses import Sysctl
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink, netlink
from tests.waiting import PATIENCE, until

IP = "/usr/sbin/ip"
SYSCTL = ("/usr/sbin/sysctl", "-qw")
MARK = Mark("0123456789abcdef0123456789abcdef")
MAC = "02:00:00:00:00:01"
# RFC 4861, 4.2 and 4.6.2: a router for 1,800 s, with a prefix for autonomous addresses.
ADVERTISEMENT = (
    struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0)
    + struct.pack("!BBBBIII", 3, 4, 64, 0xC0, 3600, 3600, 0)
    + ipaddress.ip_address("2001:db8:1::").packed
)


class Fabric:
    """A host and a pod; the interface "eth7" of the host is one end of a veth pair."""

    def __init__(self, stack: ExitStack) -> None:
        self.host_name, self.pod_name = (f"t{uuid4().hex[:10]}" for _ in range(2))
        for name in (self.host_name, self.pod_name):
            run("netns", "add", name)
            stack.callback(run, "netns", "delete", name)
        self.host("link", "add", "eth7", "address", MAC, "type", "veth", "peer", "name", "peer7")
        self.host("link", "set", "eth7", "mtu", "1400", "alias", "uplink", "up")
        self.host("link", "set", "peer7", "up")
        self.namespace = stack.enter_context(NetworkNamespace.open(self._path(self.pod_name)))
        home = stack.enter_context(NetworkNamespace.open(self._path(self.host_name)))
        self.inside = stack.enter_context(netlink(self.namespace))
        stack.enter_context(home.entered())  # this thread is in the host's namespace
        self.outside = stack.enter_context(netlink())
        self.origin = netdev_move.origin_of(links.require(self.outside, "eth7"))

    def host(self, *arguments: str) -> str:
        return run("-n", self.host_name, *arguments)

    def pod(self, *arguments: str) -> str:
        return run("-n", self.pod_name, *arguments)

    def shown(self, where: str, name: str) -> dict[str, Any]:
        (found,) = json.loads(run("-n", where, "-d", "-j", "address", "show", "dev", name))
        assert isinstance(found, dict)
        return found

    def sysctl(self, name: str) -> str:
        with self.namespace.entered():
            return Path("/proc/sys/net", name).read_text().strip()

    def advertisements(self) -> int:
        """The number of router advertisements that the pod has received."""
        with self.namespace.entered():
            lines = Path("/proc/thread-self/net/snmp6").read_text().splitlines()
        return int(dict(map(str.split, lines))["Icmp6InRouterAdvertisements"])

    def attach(self) -> Link:
        link = links.require(self.outside, "eth7")
        return netdev_move.move_in(self.outside, self.inside, self.namespace, link, "net1", MARK)

    def detach(self, pod: Rtnetlink | None = None, origin: Origin | None = None) -> bool:
        inside = self.inside if pod is None else pod
        return netdev_move.restore(self.outside, inside, "net1", origin or self.origin, MARK)

    def assert_restored(self) -> None:
        shown = self.shown(self.host_name, "eth7")
        assert (shown["address"], shown["mtu"], shown["ifalias"]) == (MAC, 1400, "uplink")
        assert "UP" in shown["flags"]
        assert [
            address["local"] for address in shown["addr_info"] if address["family"] == "inet"
        ] == []
        assert netdev_move.origin_of(links.require(self.outside, "eth7")) == self.origin
        assert {link.name for link in links.every(self.inside)} == {"lo"}

    @staticmethod
    def _path(name: str) -> str:
        return f"/var/run/netns/{name}"


def run(*arguments: str) -> str:
    return subprocess.run([IP, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with ExitStack() as stack:
        yield Fabric(stack)


def test_interface_is_moved_configured_and_comes_back_as_it_was(fabric: Fabric) -> None:
    moved = fabric.attach()
    assert (moved.name, moved.alias, moved.mac) == ("net1", MARK.alias, MAC)
    ready = interface_addresses.configure(
        fabric.inside,
        fabric.namespace,
        moved,
        ["10.1.2.3/24", "fd00::3/64"],
        [Sysctl(4, "arp_notify", "1")],
    )
    assert ready.up
    shown = fabric.shown(fabric.pod_name, "net1")
    assert "UP" in shown["flags"]
    present = {address["local"]: address for address in shown["addr_info"]}
    assert {"10.1.2.3", "fd00::3"} <= set(present)
    assert present["fd00::3"].get("nodad") and not present["fd00::3"].get("tentative")
    assert fabric.sysctl("ipv4/conf/net1/arp_notify") == "1"
    assert fabric.sysctl("ipv6/conf/net1/disable_ipv6") == "0"
    assert fabric.detach()
    fabric.assert_restored()
    assert fabric.detach()  # again: nothing is left to do
    fabric.assert_restored()


def test_users_addresses_and_routes_are_distinguished_from_the_kernels(fabric: Fabric) -> None:
    link = links.require(fabric.outside, "eth7")
    until(
        lambda: len(interface_addresses.of(fabric.outside, link)) == 1,
        what="the link-local address",
    )
    assert interface_addresses.of_users(fabric.outside, link) == []
    fabric.host("route", "add", "198.51.100.0/24", "dev", "eth7")
    fabric.host("route", "add", "2001:db8::/64", "dev", "eth7")
    fabric.host("route", "add", "203.0.113.0/24", "dev", "peer7")
    assert interface_addresses.of_users(fabric.outside, link) == [
        "198.51.100.0/24",
        "2001:db8::/64",
    ]
    fabric.host("address", "add", "192.0.2.7/24", "dev", "eth7")
    assert interface_addresses.of_users(fabric.outside, link)[0] == "192.0.2.7/24"


def test_link_local_address_replaces_the_kernels(fabric: Fabric) -> None:
    moved = fabric.attach()
    interface_addresses.configure(
        fabric.inside, fabric.namespace, moved, ["10.1.2.3/24"], link_local="fe80::7/64"
    )
    shown = fabric.shown(fabric.pod_name, "net1")
    assert {address["local"] for address in shown["addr_info"]} == {"10.1.2.3", "fe80::7"}


@pytest.mark.parametrize(
    ("cidr", "accept_ra", "followed"),
    [("fd00::3/64", False, False), ("fd00::3/64", True, True), ("10.1.2.3/24", False, True)],
)
def test_router_advertisements_are_followed_only_without_an_ipv6_address_or_where_asked(
    fabric: Fabric, cidr: str, accept_ra: bool, followed: bool
) -> None:
    moved = fabric.attach()
    interface_addresses.configure(
        fabric.inside, fabric.namespace, moved, [cidr], accept_ra=accept_ra
    )
    fabric.host("address", "add", "fe80::1/64", "dev", "peer7", "nodad")
    scope = socket.if_nametoindex("peer7")  # this thread is in the host's namespace
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as router:
        router.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        router.bind(("fe80::1", 0, 0, scope))
        for _ in range(2):  # once the second is counted, the kernel has handled the first
            router.sendto(ADVERTISEMENT, ("ff02::1", 0, 0, scope))
    until(lambda: fabric.advertisements() >= 2)
    routes = json.loads(fabric.pod("-6", "-j", "route", "show", "default"))
    assert [route["protocol"] for route in routes] == (["ra"] if followed else [])
    present = {
        each["local"].startswith("2001:db8:1:")
        for each in fabric.shown(fabric.pod_name, "net1")["addr_info"]
    }
    assert any(present) == followed


@pytest.mark.parametrize("why", ["a sysctl", "the MTU"])
def test_interface_without_ipv6_gets_no_link_local_address(fabric: Fabric, why: str) -> None:
    moved = fabric.attach()
    if why == "the MTU":
        fabric.pod("link", "set", "net1", "mtu", "1000")
    else:
        run("netns", "exec", fabric.pod_name, *SYSCTL, "net.ipv6.conf.net1.disable_ipv6=1")
    ready = interface_addresses.configure(
        fabric.inside, fabric.namespace, moved, ["10.1.2.3/24"], link_local="fe80::7/64"
    )
    assert ready.up
    shown = fabric.shown(fabric.pod_name, "net1")
    assert [address["local"] for address in shown["addr_info"]] == ["10.1.2.3"]


def test_one_message_moves_it_each_way(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each move holds the kernel's lock for ~16 ms, and all pods of the node share it."""
    asked: list[int] = []
    send = Rtnetlink.send

    def counted(self: Rtnetlink, *requests: bytearray) -> None:
        asked.extend(int.from_bytes(request[4:6], sys.byteorder) for request in requests)
        send(self, *requests)

    monkeypatch.setattr(Rtnetlink, "send", counted)
    moved = fabric.attach()
    assert asked.count(RTM_SETLINK) == 1
    interface_addresses.configure(fabric.inside, fabric.namespace, moved, ["10.1.2.3/24"])
    assert asked.count(RTM_SETLINK) == 2  # up
    fabric.detach()
    assert asked.count(RTM_SETLINK) == 3
    fabric.assert_restored()


def test_name_in_use_is_refused_before_the_move(fabric: Fabric) -> None:
    netdev_move.require_free(fabric.inside, "net1")
    fabric.pod("link", "add", "net1", "type", "veth", "peer", "name", "other")
    with pytest.raises(NameTaken, match='the pod already has a link of kind veth named "net1"'):
        netdev_move.require_free(fabric.inside, "net1")


def test_name_taken_during_the_move_leaves_a_restorable_interface(fabric: Fabric) -> None:
    """The kernel moves the interface before it finds that the name is taken."""
    fabric.pod("link", "add", "net1", "type", "veth", "peer", "name", "other")
    with pytest.raises(HostError, match=r'moving "eth7" .* as "net1": File exists'):
        fabric.attach()
    assert links.find(fabric.outside, "eth7") is None
    assert netdev_move.restore(fabric.outside, fabric.inside, "eth7", fabric.origin, MARK)
    assert links.find(fabric.inside, "net1") is not None
    assert netdev_move.origin_of(links.require(fabric.outside, "eth7")) == fabric.origin


def test_another_interface_that_has_the_old_name_is_left_alone(fabric: Fabric) -> None:
    fabric.attach()
    fabric.host("link", "add", "eth7", "type", "veth", "peer", "name", "new7")
    for _ in range(2):  # the second call finds it on the host
        with pytest.raises(NameTaken, match=f'is named "{MARK.temporary_name}"'):
            fabric.detach()
        waiting = fabric.shown(fabric.host_name, MARK.temporary_name)
        assert (waiting["address"], waiting["ifalias"]) == (MAC, MARK.alias)
        assert fabric.shown(fabric.host_name, "eth7")["address"] != MAC
    fabric.host("link", "delete", "eth7")
    assert fabric.detach()
    fabric.assert_restored()


def test_interface_without_its_mark_is_found_by_name_kind_and_address(
    fabric: Fabric,
) -> None:
    fabric.attach()
    fabric.pod("link", "set", "net1", "alias", "mine")
    assert fabric.detach()
    fabric.assert_restored()


def test_interface_of_another_attachment_is_left_alone(fabric: Fabric) -> None:
    fabric.attach()
    other = Mark("f" * 32)
    fabric.pod("link", "set", "net1", "alias", other.alias)
    assert not fabric.detach()
    assert fabric.shown(fabric.pod_name, "net1")["address"] == MAC


def test_interface_that_was_not_up_stays_down(fabric: Fabric) -> None:
    fabric.host("link", "set", "eth7", "down", "alias", "")
    origin = netdev_move.origin_of(links.require(fabric.outside, "eth7"))
    assert (origin.up, origin.alias) == (False, "")
    interface_addresses.configure(fabric.inside, fabric.namespace, fabric.attach(), [])
    assert fabric.detach(origin=origin)
    assert netdev_move.origin_of(links.require(fabric.outside, "eth7")) == origin


def test_alternative_name_that_a_pod_gave_does_not_hinder_the_way_back(fabric: Fabric) -> None:
    fabric.attach()
    fabric.pod("link", "property", "add", "dev", "net1", "altname", "peer7")
    fabric.pod("link", "property", "add", "dev", "net1", "altname", "eth7")
    assert fabric.detach()
    fabric.assert_restored()


def test_half_restored_interface_is_restored_on_the_host(fabric: Fabric) -> None:
    """The interface as a dead namespace returns it: with the pod's name and its mark, down."""
    fabric.attach()
    fabric.pod("link", "set", "net1", "mtu", "800")
    with NetworkNamespace.open("/proc/thread-self/ns/net") as home:
        moved = links.require(fabric.inside, "net1")
        link_changes.move(fabric.inside, moved, home, "dev3", moved.alias)
    assert netdev_move.restore(fabric.outside, None, "net1", fabric.origin, MARK)
    fabric.assert_restored()


def test_refusal_of_the_old_mtu_leaves_it_on_the_host_for_the_next_call(fabric: Fabric) -> None:
    """After a setting that fails after the move, the interface can still be found."""
    fabric.attach()
    impossible = msgspec.structs.replace(fabric.origin, mtu=70_000)
    for _ in range(2):
        with pytest.raises(HostError, match="setting mtu 70000"):
            fabric.detach(origin=impossible)
        assert {link.name for link in links.every(fabric.inside)} == {"lo"}
    assert fabric.detach()
    fabric.assert_restored()


def test_missing_interface_is_reported(fabric: Fabric) -> None:
    fabric.attach()
    fabric.pod("link", "delete", "net1")
    assert not fabric.detach()


def test_interface_that_was_never_moved_is_left_as_it_is(fabric: Fabric) -> None:
    assert fabric.detach()
    fabric.assert_restored()


def test_many_threads_move_at_once(fabric: Fabric) -> None:
    """pyroute2's message classes are shared by all threads, sockets are not."""
    failures: list[BaseException] = []
    home = NetworkNamespace.open("/proc/thread-self/ns/net")

    def work(number: int) -> None:
        name = f"v{number}"
        try:
            with home.entered(), netlink() as host, netlink(fabric.namespace) as pod:
                for _ in range(3):
                    link = links.require(host, name)
                    origin, mark = netdev_move.origin_of(link), Mark(f"{number:032x}")
                    moved = netdev_move.move_in(host, pod, fabric.namespace, link, name, mark)
                    interface_addresses.configure(
                        pod, fabric.namespace, moved, [f"10.1.{number}.1/24"]
                    )
                    assert netdev_move.restore(host, pod, name, origin, mark)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            failures.append(error)

    for number in range(8):
        fabric.host("link", "add", f"v{number}", "type", "veth", "peer", "name", f"w{number}")
    with home:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert failures == []
    assert len([link for link in links.every(fabric.outside, "veth") if not link.alias]) == 17


def test_refused_address_is_an_error_that_names_it(fabric: Fabric) -> None:
    moved = fabric.attach()
    with pytest.raises(HostError, match=r'adding address ff02::7/64 to "net1": '):
        interface_addresses.configure(
            fabric.inside, fabric.namespace, moved, ["10.1.2.3/24", "ff02::7/64", "10.1.2.4/24"]
        )


def test_existing_address_is_accepted(fabric: Fabric) -> None:
    moved = fabric.attach()
    for _ in range(2):
        interface_addresses.configure(
            fabric.inside, fabric.namespace, moved, ["10.1.2.3/24", "fd00::3/64"]
        )


def test_identify_agrees_with_find(fabric: Fabric) -> None:
    link, peer = (links.require(fabric.outside, name) for name in ("eth7", "peer7"))
    seen = links.identify(fabric.outside, "eth7")
    assert seen is not None
    assert (seen.index, seen.link_type, seen.mac[:6].hex(":")) == (link.index, 1, MAC)
    assert seen.is_of(link) and not seen.is_of(peer)
    infiniband = bytes(range(20))
    child = msgspec.structs.replace(link, link_type=32, mac=infiniband.hex(":"))
    assert links.LinkIdentity(1, 32, infiniband[:14]).is_of(child)
    assert not links.LinkIdentity(1, 32, infiniband[1:15]).is_of(child)


def test_interface_that_lost_its_mark_during_configuration_is_an_error(
    fabric: Fabric,
) -> None:
    moved = fabric.attach()
    fabric.pod("link", "set", "net1", "alias", "mine")
    with pytest.raises(LinkMissing, match='"net1" has gone from the pod'):
        interface_addresses.configure(fabric.inside, fabric.namespace, moved, ["10.1.2.3/24"])


@pytest.mark.parametrize("name", ["eth7", "long-name-of-eth7", "none", "none-of-such-a-long-name"])
def test_has_name_agrees_with_find(fabric: Fabric, name: str) -> None:
    fabric.host("link", "property", "add", "dev", "eth7", "altname", "long-name-of-eth7")
    there = links.find(fabric.outside, name) is not None
    assert links.has_name(fabric.outside, name) == there == ("eth7" in name)
    assert not links.has_name(fabric.inside, name)


def test_missing_interface_is_link_missing(fabric: Fabric) -> None:
    with pytest.raises(LinkMissing, match='interface "none" does not exist'):
        links.require(fabric.outside, "none")
