"""The rows that need an interface: `ipoib` on real drivers, in the virtual machine.

A process takes a second or two to start there, so one ADD serves several rows.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance.expect import OK, Err
from tests.conformance.fabric import (
    DUAL,
    PARENT,
    WITH_IPAM,
    WITNESS,
    add,
    addresses,
    delete,
    links,
    routes,
    unchanged_host,
)
from tests.conformance.node import Delegate, Node, inhabitants
from tests.conformance.rows import row
from tests.conformance.subject import FIRST, IPAM, IPOIB, Subject
from tests.netns import ip
from tests.waiting import until

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("no_strays")]


@row(
    *("B10", "B11", "E14", "F10", "G9", "G10", "G11", "G12", "G16", "M6"),
    *("N1", "N2", "N3", "N4", "N5", "N6", "N7"),
    by=[IPOIB],
)
@pytest.mark.as_process
def test_add_answers_what_the_kernel_shows_and_del_takes_it_away(
    node: Node, netns: Path, subject: Subject
) -> None:
    config = subject.config(
        cniVersion="1.1.0",
        ipam=DUAL,
        capabilities={"ips": True},
        **{"vendor.example/x": [1]},
    )
    with unchanged_host():
        with unchanged_host(), announcements(WITNESS) as announced:
            result = add(node, netns, config)
            until(lambda: {"10.9.0.1", "fd00:9::1"} <= announced)
        link = links(netns)["eth0"]
        assert (link["linkinfo"]["info_kind"], link["link_type"]) == ("ipoib", "infiniband")
        assert {"UP", "LOWER_UP"} <= set(link["flags"])
        assert link["linkinfo"]["info_data"]["key"] == "0xffff"
        assert link["mtu"] == links()[PARENT]["mtu"]
        parent = ip("netns", "exec", netns.name, "cat", "/sys/class/net/eth0/iflink")
        assert int(parent) == links()[PARENT]["ifindex"]

        (interface,) = result["interfaces"]
        assert interface.pop("pciID", "")[:1] in ("", "0")  # ibloop's HCAs may be on no bus
        uverbs = Path("/sys/class/infiniband_verbs") / interface.pop("uverbs")
        assert (uverbs / "ibdev").read_text().strip() == interface.pop("rdmaDevice")
        assert interface == {
            "name": "eth0",
            "mac": link["address"],
            "mtu": link["mtu"],
            "sandbox": str(netns),
        }
        assert interface["mac"] == interface["mac"].lower()
        assert [(ip["address"], ip["interface"]) for ip in result["ips"]] == [
            ("10.9.0.1/24", 0),
            ("fd00:9::1/64", 0),
        ]

        present = addresses(netns)
        assert set(present) == {"10.9.0.1/24", "fd00:9::1/64"}
        assert not any(address.get("tentative") for address in present.values())
        assert routes(netns)["default"]["gateway"] == "10.9.0.254"
        assert routes(netns)["10.8.0.0/16"]["gateway"] == "10.9.0.253"
        assert inhabitants(netns) == []
        assert node.processes() == []

        OK.met_by(
            node.call(subject, "CHECK", {**config, "prevResult": result}, CNI_NETNS=str(netns))
        )
        delete(node, netns, config)
        assert list(links(netns)) == ["lo"]


@contextmanager
def announcements(interface: str) -> Iterator[set[str]]:
    """The addresses that gratuitous ARPs and unsolicited NAs announce during the block."""
    seen: set[str] = set()
    over = threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3)) as sniffer:
        sniffer.bind((interface, 3))
        sniffer.settimeout(0.2)
        listener = threading.Thread(target=_listen, args=(sniffer, seen, over))
        listener.start()
        try:
            yield seen
        finally:
            over.set()
            listener.join()


def _listen(sniffer: socket.socket, seen: set[str], over: threading.Event) -> None:
    while not over.is_set():
        try:
            packet, (_, protocol, *_) = sniffer.recvfrom(4096)
        except TimeoutError:
            continue
        if protocol == 0x0806 and packet[4] == 20:
            sender, target = packet[28:32], packet[52:56]
            if sender == target:
                seen.add(socket.inet_ntop(socket.AF_INET, sender))
        elif protocol == 0x86DD and packet[6] == 58 and packet[40] == 136:
            seen.add(socket.inet_ntop(socket.AF_INET6, packet[48:64]))


@row("E16", "E17", "E18", "E21", "I2", "I5", by=[IPOIB])
def test_check_finds_what_is_gone_and_del_does_not_mind(
    node: Node, netns: Path, subject: Subject
) -> None:
    route = {"dst": "10.8.0.0/16", "gw": "10.9.0.253"}
    config = subject.config(ipam={**IPAM.keys["ipam"], "routes": [route]})
    in_pod = ("-netns", netns.name)
    with unchanged_host():
        result = add(node, netns, config)
        previous = {**config, "prevResult": result}

        ip(*in_pod, "address", "add", "10.99.0.1/24", "dev", "eth0")
        ip(*in_pod, "route", "add", "10.98.0.0/16", "via", "10.99.0.2")
        OK.met_by(node.call(subject, "CHECK", previous, CNI_NETNS=str(netns)))

        ip(*in_pod, "route", "delete", route["dst"])
        outcome = node.call(subject, "CHECK", previous, CNI_NETNS=str(netns))
        Err(102, contains="10.8.0.0/16").met_by(outcome)

        ip(*in_pod, "address", "delete", FIRST, "dev", "eth0")
        outcome = node.call(subject, "CHECK", previous, CNI_NETNS=str(netns))
        Err(102, contains=(FIRST, "eth0")).met_by(outcome)

        ip(*in_pod, "link", "delete", "eth0")
        outcome = node.call(subject, "CHECK", previous, CNI_NETNS=str(netns))
        Err(102, contains='"eth0"').met_by(outcome)

        delete(node, netns, config)
        delete(node, netns, config)
    assert node.call(IPAM, CNI_CONTAINERID="c2").addresses == [FIRST]


@row("E20", "J11", by=[IPOIB])
def test_second_add_is_an_error_that_takes_nothing_away(
    node: Node, netns: Path, subject: Subject
) -> None:
    config = subject.config(**WITH_IPAM)
    with unchanged_host():
        result = add(node, netns, config)
        outcome = node.call(subject, config=config, CNI_NETNS=str(netns))
        Err(103, contains="eth0").met_by(outcome)
        assert set(addresses(netns)) == {FIRST}
        # The address is still reserved, and CHECK fails after a manual release.
        Err(103).met_by(node.call(IPAM))
        OK.met_by(node.call(IPAM, "DEL"))
        previous = {**config, "prevResult": result}
        outcome = node.call(subject, "CHECK", previous, CNI_NETNS=str(netns))
        Err(102, contains="10.9.0.1").met_by(outcome)
        delete(node, netns, config)


@row("I3", by=[IPOIB])
@pytest.mark.as_process
def test_del_after_the_namespace_has_gone(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    """The kernel moves an IPoIB child of a dead namespace to the host: DEL must remove it there."""
    config = subject.config(ipam={"type": delegate.name})
    with unchanged_host():
        add(node, netns, config)
        ip("netns", "delete", netns.name)
        delete(node, netns, config)
        assert not netns.exists()
    assert delegate.commands == ["ADD", "DEL"]


@row("I4", by=[IPOIB])
def test_del_without_the_namespace_s_path(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    config = subject.config(ipam={"type": delegate.name})
    with unchanged_host():
        add(node, netns, config)
        delete(node, netns, config, CNI_NETNS=None)
        assert list(links(netns)) == ["lo"]
    assert delegate.commands == ["ADD", "DEL"]


@row("I9", by=[IPOIB])
def test_del_without_the_ipam_key(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    """The journal names the IPAM plugin that the ADD called."""
    with unchanged_host():
        add(node, netns, subject.config(ipam={"type": delegate.name}))
        delete(node, netns, subject.config(master=None))
        assert list(links(netns)) == ["lo"]
    assert delegate.commands == ["ADD", "DEL"]


@row("I8", by=[IPOIB])
def test_del_leaves_the_other_interface_alone(node: Node, netns: Path, subject: Subject) -> None:
    config = subject.config(**WITH_IPAM)
    with unchanged_host():
        add(node, netns, config)
        add(node, netns, config, CNI_IFNAME="eth1")
        delete(node, netns, config, CNI_IFNAME="eth1")
        assert set(addresses(netns)) == {FIRST}
        assert "eth1" not in links(netns)
        delete(node, netns, config)


@row("I11", "I13", by=[IPOIB])
def test_del_removes_the_interface_although_the_delegate_fails(
    node: Node, netns: Path, delegate: Delegate, subject: Subject
) -> None:
    config = subject.config(ipam={"type": delegate.name})
    with unchanged_host():
        add(node, netns, config)
        delegate.fail("DEL", 100, "store not found")
        outcome = node.call(subject, "DEL", config, CNI_NETNS=str(netns))
        Err(104, contains="store absent").met_by(outcome)
        assert list(links(netns)) == ["lo"]
        delegate.answer("DEL")
        delete(node, netns, config)
