"""Asks the link whether another machine has an address, before the address is set here.

IPv4 uses ARP probes (RFC 5227, 2.1.1). IPv6 uses the neighbour solicitations of duplicate address
detection (RFC 4862, 5.4). These packets have no sender address, so no neighbour stores a wrong
entry. A probe takes one second, because RFC 5227's 9 seconds are too long for a pod.
"""

import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from base import interrupts
from host import packets
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink.links import ARPHRD_INFINIBAND, Link

PROBES = 3  # as in RFC 5227: PROBE_NUM
_BETWEEN = 0.3  # seconds
_LISTEN = 0.4  # seconds after the last probe
_LOOK_EVERY = 0.1  # seconds between two checks whether the call was cancelled

_ICMPV6, _HOPS = 58, 255
_ND_SOLICIT, _ND_ADVERT = 135, 136  # RFC 4861, 4.3 and 4.4
_UNSPECIFIED = bytes(16)
_SOLICITED_NODE = bytes.fromhex("ff0200000000000000000001ff")  # RFC 4291, 2.7.1: /104


class _Target(msgspec.Struct, frozen=True):
    """An address in bytes, and the packet that asks for it."""

    address: bytes
    protocol: int
    payload: bytes
    destination: bytes  # the hardware address of a multicast group; empty for broadcast


def answers(namespace: NetworkNamespace, link: Link, addresses: Sequence[str]) -> dict[str, str]:
    """The addresses that other machines on the link have, with their hardware addresses.

    The interface needs carrier, and IPv6 for IPv6 addresses. It must not have the addresses yet.
    Raises HostError.
    """
    mine = packets.octets(link.mac)
    targets = {address: _target(link, mine, address) for address in addresses}
    found: dict[str, str] = {}
    try:
        with ExitStack() as stack:
            sockets: dict[int, socket.socket] = {}
            with namespace.entered():
                for protocol in {target.protocol for target in targets.values()}:
                    sockets[protocol] = packets.packet_socket(stack)
                    sockets[protocol].bind((link.name, protocol))
            for number in range(PROBES):
                for address, target in targets.items():
                    if address not in found:
                        where = packets.packet_address(link, target.protocol, target.destination)
                        packets.send(sockets[target.protocol], target.payload, where)
                last = number == PROBES - 1
                with interrupts.waiting():
                    _listen(sockets, targets, mine, _LISTEN if last else _BETWEEN, found)
    except OSError as error:
        raise HostError(
            f'cannot probe {", ".join(addresses)} on "{link.name}": {error.strerror}'
        ) from None
    return found


def _listen(
    sockets: dict[int, socket.socket],
    targets: dict[str, _Target],
    mine: bytes,
    seconds: float,
    found: dict[str, str],
) -> None:
    """Put owners of addresses into `found`, until the time is over or all owners are found."""
    end = time.monotonic() + seconds
    protocols = {opened.fileno(): protocol for protocol, opened in sockets.items()}
    poll = select.poll()
    for descriptor in protocols:
        poll.register(descriptor, select.POLLIN)
    while len(found) < len(targets) and (left := end - time.monotonic()) > 0:
        interrupts.checkpoint()
        for descriptor, _ in poll.poll(1000 * min(left, _LOOK_EVERY)):
            protocol = protocols[descriptor]
            try:
                payload = sockets[protocol].recv(2048, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            for address, target in targets.items():
                if target.protocol == protocol:
                    owner = _owner(payload, target, mine)
                    if owner is not None:
                        found[address] = owner.hex(":") or "unknown"


def _target(link: Link, mine: bytes, address: str) -> _Target:
    if ":" not in address:
        packed = socket.inet_pton(socket.AF_INET, address)
        # With 0.0.0.0 as the sender's address (RFC 5227, 1.1).
        probe = packets.arp_request(link.link_type, mine, bytes(4), packed)
        return _Target(packed, packets.ETH_P_ARP, probe, b"")
    packed = socket.inet_pton(socket.AF_INET6, address)
    group = _SOLICITED_NODE + packed[-3:]
    return _Target(packed, packets.ETH_P_IPV6, solicitation(packed), _multicast(link, group))


def solicitation(address: bytes) -> bytes:
    """An IPv6 packet: a neighbour solicitation without sender address and options (RFC 4861)."""
    group = _SOLICITED_NODE + address[-3:]
    message = struct.pack("!BBHI", _ND_SOLICIT, 0, 0, 0) + address
    pseudo = _UNSPECIFIED + group + struct.pack("!II", len(message), _ICMPV6)  # RFC 8200, 8.1
    words = struct.unpack(f"!{(len(pseudo) + len(message)) // 2}H", pseudo + message)
    total = sum(words)
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    message = message[:2] + struct.pack("!H", checksum) + message[4:]
    return (
        struct.pack("!IHBB", 6 << 28, len(message), _ICMPV6, _HOPS) + _UNSPECIFIED + group + message
    )


def _multicast(link: Link, group: bytes) -> bytes:
    """The hardware address of an IPv6 multicast group on the link (RFC 2464, 7; RFC 4391, 4)."""
    if link.link_type != ARPHRD_INFINIBAND:
        return b"\x33\x33" + group[-4:]
    # Like ipv6_ib_mc_map (include/net/if_inet6.h): scope and P_Key are the broadcast group's.
    broadcast = packets.octets(link.broadcast)
    scope = 0x10 | (broadcast[5] & 0xF)
    return b"\0\xff\xff\xff\xff" + bytes((scope, 0x60, 0x1B)) + broadcast[8:10] + group[6:]


def _owner(payload: bytes, target: _Target, mine: bytes) -> bytes | None:
    """The hardware address of the machine that has the target IP address.

    `None` if the packet does not show it.
    """
    if target.protocol == packets.ETH_P_ARP:
        return _owner_by_arp(payload, target.address, mine)
    return _owner_by_advertisement(payload, target.address)


def _owner_by_arp(payload: bytes, address: bytes, mine: bytes) -> bytes | None:
    """The sender's hardware address, if the sender has `address` or probes it; otherwise `None`."""
    size = len(mine)
    if len(payload) < 16 + 2 * size or payload[4] != size or payload[5] != 4:
        return None
    operation = int.from_bytes(payload[6:8], "big")
    sender, rest = payload[8 : 8 + size], payload[8 + size :]
    source, target = rest[:4], rest[4 + size : 8 + size]
    is_probe = operation == packets.ARPOP_REQUEST and source == bytes(4) and target == address
    return sender if sender != mine and (source == address or is_probe) else None


def _owner_by_advertisement(payload: bytes, address: bytes) -> bytes | None:
    """The hardware address in an advertisement of `address`; b"" if the option is missing.

    Returns `None` for other packets, and for packets from behind a router (hop limit below 255).
    """
    if len(payload) < 64 or payload[6:8] != bytes((_ICMPV6, _HOPS)):
        return None
    if payload[40] != _ND_ADVERT or payload[48:64] != address:
        return None
    option = payload[64:]
    if len(option) < 8 or option[0] != packets.ND_OPT_TARGET_LINKADDR:
        return b""
    # Before an InfiniBand address come two bytes of padding (RFC 4391, 9.3).
    return option[4:24] if option[1] == 3 else option[2:8]
