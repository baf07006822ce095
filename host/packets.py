"""Sends frames on links of any type, with AF_PACKET sockets (packet(7)).

Python's AF_PACKET addresses have at most 8 bytes, but InfiniBand's have 20 (RFC 4391). So this
module calls sendto(2) with a longer sockaddr_ll.
"""

import ctypes
import os
import socket
import struct
import threading
from contextlib import ExitStack, suppress
from queue import SimpleQueue

from host.netlink.links import Link

ETH_P_ARP = 0x0806  # linux/if_ether.h
ETH_P_IPV6 = 0x86DD
ARPOP_REQUEST = 1  # linux/if_arp.h
ND_OPT_TARGET_LINKADDR = 2  # RFC 4861, 4.6

_libc = ctypes.CDLL(None, use_errno=True)


def octets(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def arp_request(link_type: int, mac: bytes, sender: bytes, target: bytes) -> bytes:
    """An ARP request for the IPv4 address `target`, on a link of that type."""
    header = struct.pack("!HHBBH", link_type, 0x0800, len(mac), 4, ARPOP_REQUEST)
    return header + mac + sender + bytes(len(mac)) + target


def packet_address(link: Link, protocol: int, destination: bytes = b"") -> bytes:
    """A sockaddr_ll for a hardware address of any length, by default the link's broadcast."""
    destination = destination or octets(link.broadcast)
    # packet(7): family, protocol (network order), index, hardware type, packet type, length
    return (
        struct.pack("=H", socket.AF_PACKET)
        + struct.pack("!H", protocol)
        + struct.pack("=iHBB", link.index, link.link_type, 0, len(destination))
        + destination.ljust(8, b"\0")  # at least the size of a sockaddr_ll
    )


def send(sender: socket.socket, payload: bytes, address: bytes) -> None:
    """Send the payload of a frame to a `packet_address`. Raises OSError."""
    sent = _libc.sendto(sender.fileno(), payload, len(payload), 0, address, len(address))
    if sent < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def packet_socket(stack: ExitStack) -> socket.socket:
    """A socket for payloads of frames, in the thread's namespace. It receives only after a bind."""
    sender = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, 0)
    stack.callback(_closer.close, sender)
    return sender


class _Closer:
    """Closes packet sockets in a thread, so that no call waits for a close.

    packet_release (net/packet/af_packet.c) waits ~16 ms for an RCU grace period. The thread does
    not end, because a new thread costs 0.2 ms of CPU, a tenth of an ADD.
    """

    def __init__(self) -> None:
        self._sockets: SimpleQueue[socket.socket] = SimpleQueue()
        self._starting = threading.Lock()
        self._process = 0  # the process that has the thread: a forked child has no thread

    def close(self, sender: socket.socket) -> None:
        """Let the closing thread close the socket, without waiting.

        Call this in the host's namespace: a new thread stays there.
        """
        if self._process != os.getpid() and not self._is_started():
            sender.close()
        else:
            self._sockets.put(sender)

    def _is_started(self) -> bool:
        """Start the thread unless it runs. Returns False if the limit of threads is reached."""
        with self._starting:
            if self._process != os.getpid():
                try:
                    threading.Thread(target=self._work, name="closer", daemon=True).start()
                except RuntimeError:
                    return False
                self._process = os.getpid()
        return True

    def _work(self) -> None:
        while True:
            with suppress(OSError):
                self._sockets.get().close()


_closer = _Closer()
