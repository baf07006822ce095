"""Telling the neighbours of a new address: gratuitous ARP, unsolicited neighbour advertisement.

On InfiniBand the hardware address is 20 bytes and the ARP hardware type 32 (RFC 4391). A frame
made for Ethernet is dropped by ipoib_start_xmit in silence, and Python's AF_PACKET addresses end
at 8 bytes, so sendto(2) is called with a longer sockaddr_ll here.
"""

import _thread
import ctypes
import ipaddress
import os
import socket
import struct
from contextlib import ExitStack

from host.errors import HostError
from host.links import Link
from host.namespaces import NetworkNamespace

ETH_P_ARP = 0x0806
ARPOP_REQUEST = 1
ND_NEIGHBOR_ADVERT = 136  # RFC 4861, 4.4
ND_NA_FLAG_OVERRIDE = 0x20000000
ND_OPT_TARGET_LINKADDR = 2
ALL_NODES = "ff02::1"

_libc = ctypes.CDLL(None, use_errno=True)


def announce(namespace: NetworkNamespace, link: Link, addresses: list[str]) -> None:
    """Send one announcement for each address (CIDR) of an interface that has carrier."""
    found = [ipaddress.ip_address(cidr.partition("/")[0]) for cidr in addresses]
    with ExitStack() as stack, namespace.entered():
        sender = _packet_socket(stack) if any(ip.version == 4 for ip in found) else None
        for address in found:
            if isinstance(address, ipaddress.IPv4Address):
                assert sender is not None
                arp = gratuitous_arp(link.link_type, _bytes(link.mac), address)
                _send_arp(sender, link, arp)
            else:
                na = neighbour_advertisement(_bytes(link.mac), address)
                _send_advertisement(link, na)


def gratuitous_arp(link_type: int, mac: bytes, address: ipaddress.IPv4Address) -> bytes:
    """An ARP request for our own address (RFC 5227, 2.3), with the link's own address form."""
    header = struct.pack("!HHBBH", link_type, 0x0800, len(mac), 4, ARPOP_REQUEST)
    return header + mac + address.packed + bytes(len(mac)) + address.packed


def neighbour_advertisement(mac: bytes, address: ipaddress.IPv6Address) -> bytes:
    """An unsolicited NA with override (RFC 4861, 7.2.6), checksum left to the kernel.

    The option is padded in front of an InfiniBand address (RFC 4391, 9.3): 2 + 2 + 20 bytes.
    """
    padding = b"\0\0" if len(mac) == 20 else b""
    option = padding + mac
    units = (2 + len(option)) // 8
    head = struct.pack("!BBHI", ND_NEIGHBOR_ADVERT, 0, 0, ND_NA_FLAG_OVERRIDE)
    return head + address.packed + bytes((ND_OPT_TARGET_LINKADDR, units)) + option


def packet_address(link: Link) -> bytes:
    """A sockaddr_ll to everybody on the link, as long as its hardware addresses are."""
    broadcast = _bytes(link.broadcast)
    # packet(7): family, protocol (network order), index, hardware type, packet type, length
    return (
        struct.pack("=H", socket.AF_PACKET)
        + struct.pack("!H", ETH_P_ARP)
        + struct.pack("=iHBB", link.index, link.link_type, 0, len(broadcast))
        + broadcast.ljust(8, b"\0")  # a whole sockaddr_ll at least
    )


def _packet_socket(stack: ExitStack) -> socket.socket:
    """A socket that only sends (protocol 0), closed by the stack: outside of the namespace."""
    sender = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, 0)
    stack.callback(_close_aside, sender)
    return sender


def _close_aside(sender: socket.socket) -> None:
    """Close a packet socket without waiting for it.

    packet_release (net/packet/af_packet.c) waits for all CPUs to have seen its end, ~16 ms, as
    long as the interface's whole move. A thread begins in its maker's namespace, and would keep
    the pod's alive: so this is called outside.
    """
    try:
        _thread.start_new_thread(sender.close, ())  # threading.Thread waits until it runs
    except RuntimeError:  # there may be no more threads
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
