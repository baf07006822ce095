"""Announces new addresses: gratuitous ARP and unsolicited neighbour advertisements.

On InfiniBand a hardware address has 20 bytes and the ARP hardware type is 32 (RFC 4391).
ipoib_start_xmit silently drops frames made for Ethernet (`packets`).
"""

import errno
import socket
import struct
from contextlib import ExitStack

from base.interrupts import wait_until
from host import packets
from host.namespaces import NetworkNamespace
from host.netlink.links import Link

ND_NEIGHBOR_ADVERT = 136  # RFC 4861, 4.4
ND_NA_FLAG_OVERRIDE = 0x20000000
ALL_NODES = "ff02::1"

LOOK_EVERY = 0.002  # seconds between two tries
ROUTE_TIME = 0.2  # seconds


def announce(namespace: NetworkNamespace, link: Link, addresses: list[str]) -> list[str]:
    """Send one announcement for each address (CIDR) of an interface that has carrier.

    Returns a text for each failure. After a failure, neighbours learn the address later.
    """
    ips = [cidr.partition("/")[0] for cidr in addresses]
    mac = packets.octets(link.mac)
    failures = []
    with ExitStack() as stack, namespace.entered():
        sender = None
        for ip in ips:
            try:
                if ":" in ip:
                    address = socket.inet_pton(socket.AF_INET6, ip)
                    _send_advertisement(link, ip, neighbour_advertisement(mac, address))
                else:
                    sender = sender or packets.packet_socket(stack)
                    address = socket.inet_pton(socket.AF_INET, ip)
                    # A request for our own address (RFC 5227, 2.3).
                    frame = packets.arp_request(link.link_type, mac, address, address)
                    packets.send(sender, frame, packets.packet_address(link, packets.ETH_P_ARP))
            except OSError as error:
                failures.append(f'{ip} on "{link.name}" cannot be announced: {error.strerror}')
    return failures


def neighbour_advertisement(mac: bytes, address: bytes) -> bytes:
    """An unsolicited NA with the override flag (RFC 4861, 7.2.6). The kernel adds the checksum."""
    padding = b"\0\0" if len(mac) == 20 else b""  # on InfiniBand (RFC 4391, 9.3)
    option = padding + mac
    units = (2 + len(option)) // 8
    head = struct.pack("!BBHI", ND_NEIGHBOR_ADVERT, 0, 0, ND_NA_FLAG_OVERRIDE)
    return head + address + bytes((packets.ND_OPT_TARGET_LINKADDR, units)) + option


def _send_advertisement(link: Link, source: str, message: bytes) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as sender:
        sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, link.index)
        sender.bind((source, 0, 0, link.index))
        wait_until(lambda: _has_route(sender, link), ROUTE_TIME, LOOK_EVERY)
        sender.sendto(message, (ALL_NODES, 0, 0, link.index))


def _has_route(sender: socket.socket, link: Link) -> bool:
    """Whether the multicast route exists. The kernel adds the route after it reports carrier."""
    try:
        sender.connect((ALL_NODES, 0, 0, link.index))
    except OSError as error:
        return error.errno != errno.ENETUNREACH
    return True
