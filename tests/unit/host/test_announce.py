"""Announcements byte for byte, against RFC 826, 4861 and 4391."""

import ipaddress
import struct

from host.announce import gratuitous_arp, neighbour_advertisement
from host.links import Link
from host.packets import ETH_P_ARP, packet_address

MAC = bytes.fromhex("800001010fe80000000000000002001b10000001")[:20]
ADDRESS = ipaddress.IPv4Address("10.1.2.3")
ADDRESS6 = ipaddress.IPv6Address("fd00::3")


def _link(link_type: int, broadcast: bytes) -> Link:
    return Link(
        index=7,
        name="net1",
        kind="",
        link_type=link_type,
        mac=MAC.hex(":"),
        broadcast=broadcast.hex(":"),
        mtu=2044,
        flags=0,
    )


def test_arp_on_infiniband_has_hardware_type_32_and_20_byte_addresses() -> None:
    frame = gratuitous_arp(32, MAC, ADDRESS.packed)
    assert frame[:8] == bytes.fromhex("0020 0800 14 04 0001")
    assert frame[8:28] == MAC
    assert frame[28:32] == ADDRESS.packed
    assert frame[32:52] == bytes(20)
    assert frame[52:] == ADDRESS.packed


def test_arp_on_ethernet_has_hardware_type_1_and_6_byte_addresses() -> None:
    frame = gratuitous_arp(1, MAC[:6], ADDRESS.packed)
    assert frame[:8] == bytes.fromhex("0001 0800 06 04 0001")
    assert len(frame) == 28


def test_advertisement_pads_the_infiniband_address_in_front() -> None:
    message = neighbour_advertisement(MAC, ADDRESS6.packed)
    assert message[:8] == bytes.fromhex("88 00 0000 20000000")
    assert message[8:24] == ADDRESS6.packed
    assert message[24:28] == bytes((2, 3, 0, 0))  # type, units of 8 bytes, padding
    assert message[28:] == MAC


def test_advertisement_on_ethernet_has_one_unit() -> None:
    message = neighbour_advertisement(MAC[:6], ADDRESS6.packed)
    assert message[24:] == bytes((2, 1)) + MAC[:6]


def test_packet_address_is_as_long_as_the_links_addresses() -> None:
    broadcast = bytes.fromhex("00ffffffff12401b80010000000000000ffffffff0")[:20]
    raw = packet_address(_link(32, broadcast), ETH_P_ARP)
    family, protocol, index, hardware, packet, length = struct.unpack("=HHiHBB", raw[:12])
    assert (family, index, hardware, packet, length) == (17, 7, 32, 0, 20)
    assert protocol.to_bytes(2, "little") == bytes.fromhex("0806")
    assert raw[12:] == broadcast


def test_packet_address_is_never_shorter_than_the_kernel_takes() -> None:
    """packet_snd refuses less than a struct sockaddr_ll, which has room for 8 bytes of address."""
    raw = packet_address(_link(1, b"\xff" * 6), ETH_P_ARP)
    assert len(raw) == 20
    assert raw[11:] == bytes((6,)) + b"\xff" * 6 + bytes(2)
