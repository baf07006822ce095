"""Announces new addresses: gratuitous ARP and unsolicited neighbour advertisements.

On InfiniBand a hardware address has 20 bytes and the ARP hardware type is 32 (RFC 4391).
ipoib_start_xmit silently drops frames made for Ethernet. Python's AF_PACKET addresses have at
most 8 bytes, so this module calls sendto(2) with a longer sockaddr_ll.
"""

import _thread
import ctypes
import ipaddress
import os
import socket
import struct
from contextlib import ExitStack

from base.waiting import wait_until
from host import links
from host.errors import HostError, LinkMissing
from host.links import Link
from host.namespaces import NetworkNamespace
from host.netlink import Rtnetlink

ETH_P_ARP = 0x0806
ARPOP_REQUEST = 1
ND_NEIGHBOR_ADVERT = 136  # RFC 4861, 4.4
ND_NA_FLAG_OVERRIDE = 0x20000000
ND_OPT_TARGET_LINKADDR = 2
ALL_NODES = "ff02::1"

_libc = ctypes.CDLL(None, use_errno=True)


def await_carrier(pod: Rtnetlink, link: Link, seconds: float) -> Link:
    """The interface as soon as it has carrier, or as it is when `seconds` are over.

    Raises LinkMissing if it goes away meanwhile.
    """
    latest = link

    def has_carrier() -> bool:
        nonlocal latest
        now = links.by_index(pod, link.index)
        if now is None:
            raise LinkMissing(f'"{link.name}" has gone from the pod while it was configured')
        latest = now
        return now.carrier

    if seconds and not link.carrier:
        wait_until(has_carrier, seconds, pause=0.002)
    return latest


def announce(namespace: NetworkNamespace, link: Link, addresses: list[str]) -> None:
    """Send one announcement for each address (CIDR) of an interface that has carrier."""
    ips = [ipaddress.ip_address(cidr.partition("/")[0]) for cidr in addresses]
    with ExitStack() as stack, namespace.entered():
        sender = _packet_socket(stack) if any(ip.version == 4 for ip in ips) else None
        for address in ips:
            if isinstance(address, ipaddress.IPv4Address):
                assert sender is not None
                arp = gratuitous_arp(link.link_type, _bytes(link.mac), address)
                _send_arp(sender, link, arp)
            else:
                na = neighbour_advertisement(_bytes(link.mac), address)
                _send_advertisement(link, na)


def gratuitous_arp(link_type: int, mac: bytes, address: ipaddress.IPv4Address) -> bytes:
    """An ARP request for our own address (RFC 5227, 2.3), for the link's type of address."""
    header = struct.pack("!HHBBH", link_type, 0x0800, len(mac), 4, ARPOP_REQUEST)
    return header + mac + address.packed + bytes(len(mac)) + address.packed


def neighbour_advertisement(mac: bytes, address: ipaddress.IPv6Address) -> bytes:
    """An unsolicited NA with the override flag (RFC 4861, 7.2.6). The kernel adds the checksum.

    The option has padding before an InfiniBand address (RFC 4391, 9.3): 2 + 2 + 20 bytes.
    """
    padding = b"\0\0" if len(mac) == 20 else b""
    option = padding + mac
    units = (2 + len(option)) // 8
    head = struct.pack("!BBHI", ND_NEIGHBOR_ADVERT, 0, 0, ND_NA_FLAG_OVERRIDE)
    return head + address.packed + bytes((ND_OPT_TARGET_LINKADDR, units)) + option


def packet_address(link: Link) -> bytes:
    """A sockaddr_ll with the link's broadcast address, of that address' length."""
    broadcast = _bytes(link.broadcast)
    # packet(7): family, protocol (network order), index, hardware type, packet type, length
    return (
        struct.pack("=H", socket.AF_PACKET)
        + struct.pack("!H", ETH_P_ARP)
        + struct.pack("=iHBB", link.index, link.link_type, 0, len(broadcast))
        + broadcast.ljust(8, b"\0")  # at least the size of a sockaddr_ll
    )


def _packet_socket(stack: ExitStack) -> socket.socket:
    """A socket that only sends (protocol 0). The stack closes it, outside the namespace."""
    sender = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, 0)
    stack.callback(_close_aside, sender)
    return sender


def _close_aside(sender: socket.socket) -> None:
    """Close a packet socket in a thread, without waiting.

    packet_release (net/packet/af_packet.c) waits for an RCU grace period, ~16 ms, as long as the
    interface's move takes. Call this outside the pod's namespace: a thread starts in its creator's
    namespace and would keep that alive.
    """
    try:
        _thread.start_new_thread(sender.close, ())  # threading.Thread waits until it runs
    except RuntimeError:  # the limit of threads is reached
        sender.close()


def _send_arp(sender: socket.socket, link: Link, frame: bytes) -> None:
    address = packet_address(link)
    sent = _libc.sendto(sender.fileno(), frame, len(frame), 0, address, len(address))
    if sent < 0:
        raise HostError(
            f'announcing an address on "{link.name}": {os.strerror(ctypes.get_errno())}'
        )


def _send_advertisement(link: Link, message: bytes) -> None:
    source = str(ipaddress.IPv6Address(message[8:24]))
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as sender:
            sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
            sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, link.index)
            sender.bind((source, 0, 0, link.index))
            sender.sendto(message, (ALL_NODES, 0, 0, link.index))
    except OSError as error:
        raise HostError(f'announcing {source} on "{link.name}": {error.strerror}') from None


def _bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))
