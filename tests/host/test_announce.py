"""Announcements as the neighbour at the other end of a veth pair sees them."""

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import uuid4

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import IFF_LOWER_UP

from host import announce
from host.errors import LinkMissing
from host.namespaces import NetworkNamespace
from host.netlink import interface_addresses, link_changes, links
from host.netlink.links import Link
from host.netlink.sockets import netlink
from tests.waiting import PATIENCE, until

IP = "/usr/sbin/ip"
MAC = "02:00:00:00:00:01"
ETH_P_ALL = 3


class Cable:
    """A namespace with both ends of a veth pair; `end` sends and a socket listens at the other."""

    def __init__(self, stack: ExitStack) -> None:
        name = f"t{uuid4().hex[:10]}"
        _run("netns", "add", name)
        stack.callback(_run, "netns", "delete", name)
        _run("-n", name, "link", "add", "near", "address", MAC, "type", "veth", "peer", "far")
        _run("-n", name, "link", "set", "far", "up")
        self.namespace = stack.enter_context(NetworkNamespace.open(f"/var/run/netns/{name}"))
        self._name = name
        self.inode = Path(f"/var/run/netns/{name}").stat().st_ino
        self.route = stack.enter_context(netlink(self.namespace))
        with self.namespace.entered():
            self._listener = stack.enter_context(
                socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
            )
        self._listener.bind(("far", ETH_P_ALL))
        self._listener.settimeout(PATIENCE)

    def configured(self, *cidrs: str) -> Link:
        link = links.require(self.route, "near")
        interface_addresses.configure(self.route, self.namespace, link, cidrs)
        return links.require(self.route, "near")

    def set(self, *arguments: str) -> None:
        _run("-n", self._name, "link", "set", "near", *arguments)

    def unplug(self) -> None:
        _run("-n", self._name, "link", "set", "far", "down")

    def plug(self) -> None:
        _run("-n", self._name, "link", "set", "far", "up")

    def heard(self, part: bytes) -> bytes:
        """The first frame that contains these bytes."""
        while True:
            frame = self._listener.recv(2048)
            if part in frame:
                return frame


def _run(*arguments: str) -> None:
    subprocess.run([IP, *arguments], check=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    with ExitStack() as stack:
        yield Cable(stack)


def test_neighbour_on_ethernet_hears_of_every_address(cable: Cable) -> None:
    link = cable.configured("10.1.2.3/24", "10.1.2.4/24", "fd00::3/64")
    announce.announce(cable.namespace, link, ["10.1.2.3/24", "10.1.2.4/24", "fd00::3/64"])
    for last in (3, 4):
        frame = cable.heard(bytes((10, 1, 2, last)) + bytes(6) + bytes((10, 1, 2, last)))
        assert frame[:14] == b"\xff" * 6 + bytes.fromhex("020000000001 0806")
    frame = cable.heard(socket.inet_pton(socket.AF_INET6, "fd00::3"))
    assert frame[:2] == b"\x33\x33"  # to all nodes


def test_closing_the_socket_does_not_block_and_leaves_nothing(cable: Cable) -> None:
    """The kernel needs as long to close a packet socket as to move an interface."""
    link = cable.configured("10.1.2.3/24")
    pod = cable.inode
    before, descriptors = _threads(), _descriptors()
    announce.announce(cable.namespace, link, ["10.1.2.3/24"])
    threads = _threads()  # includes the closing thread, which lasts
    assert len(threads - before) <= 1
    for thread in threads:  # a thread in the pod would keep the namespace alive
        with suppress(OSError):
            assert Path(f"/proc/self/task/{thread}/ns/net").stat().st_ino != pod

    def is_quick() -> bool:
        started = time.monotonic()
        announce.announce(cable.namespace, link, ["10.1.2.3/24"])
        return time.monotonic() - started < 0.010

    until(is_quick)  # eventually true on a busy machine, never if closing waited
    until(lambda: _threads() <= threads and _descriptors() <= descriptors)


def test_carrier_that_comes_later_is_awaited(cable: Cable) -> None:
    cable.unplug()
    link = cable.configured("10.1.2.3/24")
    assert link.up
    assert not link.carrier
    assert not links.await_carrier(cable.route, link, 0.05).carrier
    later = threading.Timer(0.05, cable.plug)
    later.start()
    assert links.await_carrier(cable.route, link, PATIENCE).carrier
    later.join()


def test_link_without_carrier_for_the_network_layer_is_awaited_and_fails_nothing(
    cable: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment LOWER_UP is shown already, and the route for IPv6 multicast is missing."""
    cable.set("mode", "dormant")
    link = cable.configured("fd00::3/64", "10.1.2.3/24")
    until(lambda: links.require(cable.route, "near").flags & IFF_LOWER_UP)
    assert not links.await_carrier(cable.route, link, 0.05).carrier
    (failure,) = announce.announce(cable.namespace, link, ["fd00::3/64", "10.1.2.3/24"])
    assert failure == 'fd00::3 on "near" cannot be announced: Network is unreachable'
    monkeypatch.setattr(announce, "ROUTE_TIME", PATIENCE)
    later = threading.Timer(0.05, lambda: cable.set("state", "up"))
    later.start()
    assert announce.announce(cable.namespace, link, ["fd00::3/64"]) == []
    later.join()
    assert links.await_carrier(cable.route, link, PATIENCE).carrier
    cable.heard(socket.inet_pton(socket.AF_INET6, "fd00::3"))


def test_interface_that_goes_while_carrier_is_awaited_is_an_error_at_once(cable: Cable) -> None:
    cable.unplug()
    link = cable.configured("10.1.2.3/24")
    link_changes.delete(cable.route, link)
    with pytest.raises(LinkMissing, match="has gone from the pod"):
        links.await_carrier(cable.route, link, 1000 * PATIENCE)


def _threads() -> set[int | None]:
    """Python's threads. gRPC, from earlier tests, starts and ends its own threads at any time."""
    return {thread.native_id for thread in threading.enumerate()}


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
