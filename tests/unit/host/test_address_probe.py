"""Probes as they are sent, and what counts as an answer. tests/host and tests/kernel send them."""

import socket

import pytest

from host import address_probe
from host.netlink.links import ARPHRD_ETHER, ARPHRD_INFINIBAND, Link
from tests.unit.sriov.node import link

MAC = bytes.fromhex("020000000001")
GUID = bytes.fromhex("000000480000000000000000") + bytes.fromhex("0002c90300a1b2c3")
ADDRESS4 = socket.inet_pton(socket.AF_INET, "10.9.0.7")
ADDRESS6 = socket.inet_pton(socket.AF_INET6, "fd00:9::a1:b2c3")
BROADCAST = "00:ff:ff:ff:ff:12:40:1b:80:01:00:00:00:00:00:00:ff:ff:ff:ff"


def _link(link_type: int, mac: bytes, broadcast: str = "ff:ff:ff:ff:ff:ff") -> Link:
    return link("net1", "", link_type=link_type, mac=mac.hex(":"), broadcast=broadcast)


ETHERNET = _link(ARPHRD_ETHER, MAC)
INFINIBAND = _link(ARPHRD_INFINIBAND, GUID, BROADCAST)


def _owner(packet: bytes, where: Link, mine: bytes, address: str) -> bytes | None:
    target = address_probe._target(where, mine, address)
    return address_probe._owner(packet, target, mine)


@pytest.mark.parametrize(
    ("where", "mine", "other"), [(ETHERNET, MAC, b"\x02" * 6), (INFINIBAND, GUID, b"\x02" * 20)]
)
def test_any_arp_packet_from_the_address_counts(where: Link, mine: bytes, other: bytes) -> None:
    head = where.link_type.to_bytes(2, "big") + b"\x08\x00" + bytes((len(mine), 4))
    for operation in (b"\0\1", b"\0\2"):
        packet = head + operation + other + ADDRESS4 + mine + bytes(4)
        assert _owner(packet, where, mine, "10.9.0.7") == other
        assert _owner(packet, where, mine, "10.9.0.8") is None
        assert _owner(packet[:-1], where, mine, "10.9.0.7") is None
    own = head + b"\0\2" + mine + ADDRESS4 + mine + bytes(4)
    assert _owner(own, where, mine, "10.9.0.7") is None


def _advertisement(option: bytes, hops: int = 255, kind: int = 136) -> bytes:
    head = b"\x60\0\0\0" + (24 + len(option)).to_bytes(2, "big") + bytes((58, hops))
    return head + bytes(32) + bytes((kind, 0, 0, 0)) + bytes(4) + ADDRESS6 + option


def test_an_advertisement_of_the_link_counts() -> None:
    def owner(packet: bytes) -> bytes | None:
        return _owner(packet, ETHERNET, MAC, "fd00:9::a1:b2c3")

    assert owner(_advertisement(b"\2\1" + b"\x02" * 6)) == b"\x02" * 6
    assert owner(_advertisement(b"\2\3\0\0" + GUID)) == GUID
    assert owner(_advertisement(b"")) == b""  # without its hardware address
    assert owner(_advertisement(b"", hops=64)) is None
    assert owner(_advertisement(b"", kind=135)) is None
    assert owner(_advertisement(b"")[:60]) is None
    assert _owner(_advertisement(b""), ETHERNET, MAC, "fd00:9::a1:b2c4") is None
