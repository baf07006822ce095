"""The work of a pod of `podfabric check`: answers other pods, tests them, and writes a report.

All sockets are bound to the tested interface (SO_BINDTODEVICE, without privileges since Linux 5.7).
So IPv4 asks the interface's own link for an address of any network, and answers leave there, too.
A pod answers a UDP packet with its name, in a packet of the same size.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from base.paths import Paths
from base.text import printable
from cli.fabric_check import ring, transfer
from cli.fabric_check.ring import Orders, PodReport, Rail, Rails
from cli.fabric_check.transfer import VerbsPort
from host.netlink import links
from host.netlink.sockets import SO_BINDTODEVICE, netlink

TERMINATION_LOG = Path("/dev/termination-log")
PORT = 18514  # UDP; transfers use the TCP ports above
_MTU_DISCOVER = {  # linux/in.h, linux/in6.h: the option, and its value *_PMTUDISC_DO
    socket.AF_INET: (socket.IPPROTO_IP, 10, 2),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 2),
}
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}  # bytes: IP and UDP
_SMALL = 512  # bytes of a packet that each path carries
_LARGEST = 65536  # bytes
_ATF_COM = 0x2  # linux/if_arp.h: the hardware address is known
_ANSWER, _PAUSE = 1.0, 0.5  # seconds
_TRIES = 3
_PATIENCE, _WATCH = 0.5, 0.375  # of a pod's time: other pods start, other networks are called


def run() -> int:
    """Follow the orders in the environment. Writes the report for the kubelet, and prints it."""
    orders = msgspec.json.decode(os.environ[ring.VARIABLE], type=Orders)
    report = msgspec.json.encode(FabricProbe(orders, Paths.from_environ(os.environ)).run())
    if TERMINATION_LOG.exists():
        TERMINATION_LOG.write_bytes(report)
    sys.stdout.write(f"{report.decode()}\n")
    return 0


class FabricProbe:
    """The tests and the servers of one pod."""

    def __init__(self, orders: Orders, paths: Paths) -> None:
        self._orders = orders
        self._paths = paths
        self._began = time.monotonic()
        self._own = self._name(orders.pod)
        self._done = set[bytes]()  # the pods that have tested this pod
        self._failed = dict[str, tuple[str, str]]()
        self._rails = list[tuple[Rail, VerbsPort | None]]()

    def run(self) -> PodReport:
        """Serve and test. Ends when all other pods have ended their tests, or when time is up.

        Raises HostError or OSError if an interface is missing or has another address.
        """
        orders = self._orders
        for number, rail in enumerate(orders.rails):
            self._serve(number, rail)
        with ThreadPoolExecutor(len(orders.peers) + len(orders.rails)) as pool:
            tasks = [pool.submit(self._test, *it) for it in enumerate(orders.peers.items())]
            if orders.foreign:
                tasks += [pool.submit(self._watch, rail) for rail in orders.rails]
        for task in tasks:
            task.result()
        late = _PATIENCE if orders.foreign else 0
        while self._left() > 0 and (len(self._done) < len(orders.peers) or self._left(late) > 0):
            time.sleep(_PAUSE)
        return PodReport(tuple(rail for rail, _ in self._rails), self._failed)

    def _serve(self, number: int, rail: Rail) -> None:
        """Look the interface up, and start its servers."""
        with netlink() as route:
            link = links.require(route, rail.interface)
        port = transfer.port_of(self._paths, link, rail.address, number)
        pkey, device = f"{link.pkey:#06x}" if link.pkey else "", port.device if port else ""
        seen = Rail(rail.interface, rail.address, mtu=link.mtu, pkey=pkey, device=device)
        self._rails.append((seen, port))
        threading.Thread(target=self._answer, args=(_socket(rail, PORT),), daemon=True).start()
        for place in range(len(self._orders.peers) if port else 0):
            served = (port, transfer_port(place, number))
            threading.Thread(target=transfer.serve, args=served, daemon=True).start()

    def _answer(self, server: socket.socket) -> None:
        """Answer each packet, and note the pods that have ended their tests."""
        while True:
            with suppress(OSError):  # the packet is larger than this interface's MTU
                packet, sender = server.recvfrom(_LARGEST)
                if packet.startswith(self._name("")):
                    self._done.add(packet)
                server.sendto(self._own.ljust(len(packet), b"\0"), sender)

    def _left(self, part: float = 1.0) -> float:
        """The seconds until this part of the pod's time is over."""
        return self._began + part * self._orders.seconds - time.monotonic()

    def _fail(self, pod: str, test: str, why: str) -> None:
        """Note the first failed test with a pod."""
        most = ring.MOST_WHY // (1 + len(self._orders.peers) + len(self._orders.foreign))
        self._failed.setdefault(pod, (test, printable(why)[:most]))

    def _test(self, place: int, peer: tuple[str, Rails]) -> None:
        pod, rails = peer
        if failure := next(self._failures(place, pod, rails), None):
            self._fail(pod, *failure)
        _call(self._orders.rails[0], rails[0], said=self._own)

    def _failures(self, place: int, pod: str, rails: Rails) -> Iterator[tuple[str, str]]:
        """Test each interface. Yields the tests that fail, and the reasons."""
        if len(self._rails) != len(rails):
            yield ring.ADDRESS, f"{len(self._rails)} interfaces here, {len(rails)} there"
        for number, (there, (own, port)) in enumerate(zip(rails, self._rails, strict=True)):
            if port and port.pkey < 0:
                yield ring.PKEY, f"the table of {port.device}/{port.number} lacks {own.pkey}"
            tries = max(_TRIES, int(self._left(_PATIENCE) / _ANSWER))
            answer, why = _call(own, there, tries=tries)
            if answer != self._name(pod):
                why = why or f"another one answers: {answer[:60]!r}"
                yield ring.ADDRESS, f"no answer from {there.address} to {own.address}: {why}"
            if why := _call(own, there, own.mtu)[1]:
                size = f"{_SMALL} bytes, but not {own.mtu}, this interface's MTU"
                yield ring.MTU, f"{there.address} answers {size}: {why}"
            if port and (
                why := transfer.failure(port, transfer_port(place, number), there.address)
            ):
                yield ring.VERBS, why
            if self._orders.verbs and port is None:
                yield ring.VERBS, "the pod has no HCA"

    def _watch(self, own: Rail) -> None:
        """Call the pods of the other network, which must not answer.

        A pod whose rp_filter drops the calls still answers ARP, or asks for this pod's address.
        """
        foreign = [(pod, it) for pod, rails in self._orders.foreign.items() for it in rails]
        heard = dict[str, bytes]()  # the names of pods, by address
        try:
            with _socket(own) as caller:
                while self._left(_WATCH) > 0:
                    for _, there in foreign:
                        caller.sendto(b"", (there.address, PORT))
                    with suppress(TimeoutError):
                        for _ in foreign:
                            answer, (address, *_) = caller.recvfrom(_LARGEST)
                            heard[address] = answer
                    macs = _arp(self._paths, own.interface)
                    for pod, there in foreign:
                        name, mac = self._name(pod), macs.get(there.address, "")
                        if mac and there.mac.lower().startswith(mac):
                            heard.setdefault(there.address, name)
                        if heard.get(there.address) == name:
                            why = f"{there.address} ({there.mac}) answers {own.address}"
                            self._fail(pod, ring.ISOLATION, why)
                    time.sleep(_PAUSE)
        except OSError as error:
            for pod, _ in foreign:
                self._fail(pod, ring.ISOLATION, f"not proved from {own.interface}: {error}")

    def _name(self, pod: str) -> bytes:
        return f"podfabric check {self._orders.run} {pod}".encode()


def transfer_port(place: int, rail: int) -> int:
    """The TCP port of a transfer: another one for each pod that tests the same pod."""
    return PORT + 1 + rail * ring.MOST_PEERS + place


def _socket(rail: Rail, port: int = 0) -> socket.socket:
    """A UDP socket that uses only this interface and address. Raises OSError."""
    family = socket.AF_INET6 if ":" in rail.address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, rail.interface.encode() + b"\0")
    made.setsockopt(*_MTU_DISCOVER[family])
    made.bind((rail.address, port))
    made.settimeout(None if port else _ANSWER)
    return made


def _call(
    own: Rail, there: Rail, size: int = _SMALL, said: bytes = b"", tries: int = _TRIES
) -> tuple[bytes, str]:
    """Send a packet of `size` bytes, unfragmented, until a packet of this size comes back.

    Returns the answer, or b"" and the reason.
    """
    why = ""
    with _socket(own) as caller:
        packet = said.ljust(size - _HEADERS[caller.family], b"\0")
        for _ in range(tries):
            try:
                caller.sendto(packet, (there.address, PORT))
                answer = caller.recv(_LARGEST)
            except OSError as error:
                why = error.strerror or str(error)
                continue
            if len(answer) == len(packet):
                return answer.rstrip(b"\0"), ""
    return b"", why


def _arp(paths: Paths, interface: str) -> dict[str, str]:
    """The hardware addresses in the ARP table of an interface, by IPv4 address. Raises OSError.

    Of InfiniBand's 20 bytes the kernel shows 9, with the queue pair's number (net/ipv4/arp.c).
    """
    rows = map(str.split, (paths.proc / "net/arp").read_text().splitlines()[1:])
    return {row[0]: row[3] for row in rows if row[5] == interface and int(row[2], 16) & _ATF_COM}
