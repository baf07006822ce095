"""Probes of addresses, answered by the neighbour at the other end of a veth pair."""

import ipaddress
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from uuid import uuid4

import pytest

from host import address_probe
from host.namespaces import NetworkNamespace
from host.netlink import interface_addresses, links
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink, netlink
from tests.waiting import PATIENCE, until

IP = "/usr/sbin/ip"
HOLDER = "02:00:00:00:00:02"


def _run(*arguments: str) -> None:
    subprocess.run([IP, *arguments], check=True)


class Wire:
    """A namespace with the interface `near`, one with `far`, whose hardware address is HOLDER."""

    def __init__(self, stack: ExitStack) -> None:
        self.names = [f"t{uuid4().hex[:10]}" for _ in range(2)]
        for name in self.names:
            _run("netns", "add", name)
            stack.callback(_run, "netns", "delete", name)
        here, there = self.names
        ends = ("near", "type", "veth", "peer", "far", "address", HOLDER, "netns", there)
        _run("-n", here, "link", "add", *ends)
        _run("-n", there, "link", "set", "far", "up")
        self.namespace = stack.enter_context(NetworkNamespace.open(f"/var/run/netns/{here}"))
        self.route: Rtnetlink = stack.enter_context(netlink(self.namespace))

    def give(self, cidr: str) -> None:
        """Give the other end an address, as a pod of podfabric has it."""
        _run("-n", self.names[1], "address", "add", cidr, "dev", "far", "nodad")

    def near(self, *cidrs: str) -> Link:
        """This end, prepared for these addresses, with carrier."""
        link = links.require(self.route, "near")
        up = interface_addresses.configure(
            self.route, self.namespace, link, cidrs, set_addresses=False
        )
        ready = links.await_carrier(self.route, up, PATIENCE)
        assert ready.carrier
        # The kernel raises the two ends one after the other; until then nothing reaches the far
        # one.
        until(self._far_is_up)
        return ready

    def _far_is_up(self) -> bool:
        shown = subprocess.run(
            [IP, "-n", self.names[1], "link", "show", "far"],
            check=True,
            capture_output=True,
            text=True,
        )
        return "state UP" in shown.stdout

    def answers(self, *cidrs: str) -> dict[str, str]:
        """The machines that answer for the addresses."""
        hosts = [str(ipaddress.ip_interface(cidr).ip) for cidr in cidrs]
        return address_probe.answers(self.namespace, self.near(*cidrs), hosts)


@pytest.fixture
def wire() -> Iterator[Wire]:
    with ExitStack() as stack:
        yield Wire(stack)


CIDRS = ("10.9.0.7/24", "fd00:9::7/64")


@pytest.mark.parametrize("cidr", CIDRS)
def test_a_machine_that_has_the_address_is_found(wire: Wire, cidr: str) -> None:
    wire.give(cidr)
    host = cidr.partition("/")[0]
    assert wire.answers(cidr) == {host: HOLDER}


def test_addresses_that_no_machine_has_get_no_answer(wire: Wire) -> None:
    wire.give("10.9.0.8/24")
    wire.give("fd00:9::8/64")
    assert wire.answers(*CIDRS) == {}


def test_answers_for_several_addresses_are_separate(wire: Wire) -> None:
    wire.give("fd00:9::7/64")
    assert wire.answers("10.9.0.7/24", "fd00:9::7/64", "fd00:9::8/64") == {"fd00:9::7": HOLDER}


def test_probes_leave_no_entry_on_either_machine(wire: Wire) -> None:
    wire.give("10.9.0.7/24")
    wire.answers(*CIDRS)
    shown = subprocess.run(
        [IP, "-n", wire.names[1], "neighbour", "show", "10.9.0.7"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == ""
    own = subprocess.run(
        [IP, "-n", wire.names[0], "address", "show", "dev", "near"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "10.9.0.7" not in own.stdout
    assert "fd00:9::7" not in own.stdout
