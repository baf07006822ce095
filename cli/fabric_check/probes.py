"""The work of a pod of `podfabric check`: answers other pods, tests them, and writes a report.

All sockets are bound to the tested interface (SO_BINDTODEVICE, without privileges since Linux 5.7).
So IPv4 asks the interface's own link for an address of any network, and answers leave there, too.
"""

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from base.paths import Paths
from base.text import printable
from cli.fabric_check import ring, transfer
from cli.fabric_check.ring import PORT, FailedTest, Neighbour, Orders, PodReport, Rail, RailFacts
from host.netlink import neighbours
from host.netlink.sockets import SO_BINDTODEVICE, NetlinkError
from host.sysfs import attribute_files

TERMINATION_LOG = Path("/dev/termination-log")
_MTU_DISCOVER = {  # linux/in.h, linux/in6.h: the option, and its value *_PMTUDISC_DO
    socket.AF_INET: (socket.IPPROTO_IP, 10, 2),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 2),
}
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}  # bytes: IP and UDP
_INFINIBAND = 20  # bytes of a hardware address
_SMALL = 512  # bytes of a packet that each path carries
_CONNECT, _ANSWER, _PAUSE = 2.0, 1.0, 0.5  # seconds
_TRIES = 3
_BYE = b"bye"


def run() -> int:
    """Follow the orders in the environment. Writes the report for the kubelet, and prints it."""
    orders = msgspec.json.decode(os.environ[ring.VARIABLE], type=Orders)
    report = ring.encoded(FabricProbe(orders, Paths.from_environ(os.environ)).run())
    if TERMINATION_LOG.exists():
        TERMINATION_LOG.write_bytes(report)
    sys.stdout.write(f"{report.decode()}\n")
    sys.stdout.flush()
    return 0


class FabricProbe:
    """The tests and the servers of one pod."""

    def __init__(self, orders: Orders, paths: Paths) -> None:
        self._orders = orders
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._byes = threading.Semaphore(0)
        self._failed: list[FailedTest] = []
        self._facts = [_facts(paths, rail) for rail in orders.rails]
        self._ports = [
            transfer.port_of(paths, rail, number, facts.pkey) if orders.verbs else None
            for number, (rail, facts) in enumerate(zip(orders.rails, self._facts, strict=True))
        ]

    def run(self) -> PodReport:
        """Serve and test. Ends when all other pods have ended their tests, or at the end's time."""
        orders = self._orders
        for serve in self._servers():
            threading.Thread(target=self._serve, args=(serve,), daemon=True).start()
        self._judge_ports()
        with ThreadPoolExecutor(1 + len(orders.peers) + len(orders.foreign)) as pool:
            begun = pool.map(self._test, orders.peers), pool.map(self._watch, orders.foreign)
            for each in begun:
                list(each)
        if orders.foreign:  # whose pods may have started later
            time.sleep(max(0.0, self._left(orders.times.watch * 1.5)))
        for _ in range(orders.incoming):
            self._byes.acquire(timeout=max(0.0, self._left(orders.times.end)))
        self._ended.set()
        facts = (
            msgspec.structs.replace(each, device=port.device if port else "")
            for each, port in zip(self._facts, self._ports, strict=True)
        )
        return PodReport(tuple(facts), tuple(self._failed))

    def _serve(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except OSError as error:
            self._fail(self._orders.pod, ring.START, f"the pod cannot listen: {error.strerror}")

    def _servers(self) -> Iterator[Callable[[], None]]:
        for number, rail in enumerate(self._orders.rails):
            yield lambda rail=rail: self._greet(rail)  # type: ignore[misc]
            yield lambda rail=rail: self._echo(rail)  # type: ignore[misc]
            if port := self._ports[number]:
                for distance in range(1, self._orders.incoming + 1):
                    at = ring.transfer_port(distance, number)
                    yield lambda port=port, at=at: transfer.serve(port, at, self._ended)  # type: ignore[misc]

    def _judge_ports(self) -> None:
        for facts, port in zip(self._facts, self._ports, strict=True):
            if self._orders.verbs and port is None:
                why = f"no HCA for {facts.interface} is in the pod"
                self._fail(self._orders.pod, ring.VERBS, why)
            elif port is not None and port.pkey < 0:
                why = f"the table of {port.device}/{port.number} lacks {facts.pkey}"
                self._fail(self._orders.pod, ring.PKEY, why)

    def _left(self, seconds: float) -> float:
        return self._began + seconds - time.monotonic()

    def _fail(self, pod: str, test: str, why: str) -> None:
        self._failed.append(FailedTest(pod, test, printable(why)[: ring.MOST_WHY]))

    # The servers.

    def _greet(self, rail: Rail) -> None:
        """Tell each caller the run and this pod's name, and count the pods that are done."""
        with _socket(rail, socket.SOCK_STREAM, PORT) as server:
            server.listen(64)
            while True:
                caller, _ = server.accept()
                with caller:
                    caller.settimeout(_ANSWER)
                    try:
                        caller.sendall(_greeting(self._orders.run, self._orders.pod))
                        if caller.recv(len(_BYE)) == _BYE:
                            self._byes.release()
                    except OSError:
                        continue

    def _echo(self, rail: Rail) -> None:
        """Send each packet back, whole."""
        with _socket(rail, socket.SOCK_DGRAM, PORT) as server:
            while True:
                try:
                    packet, sender = server.recvfrom(1 << 16)
                    server.sendto(packet, sender)
                except OSError:  # the packet is larger than this interface's MTU
                    continue

    # The tests.

    def _test(self, peer: Neighbour) -> None:
        orders = self._orders
        for number, (own, there) in enumerate(zip(orders.rails, peer.rails, strict=False)):
            if why := self._no_answer(own, there, peer.pod):
                self._fail(peer.pod, ring.ADDRESS, why)
                continue
            if why := self._too_large(own, there, self._facts[number].mtu):
                self._fail(peer.pod, ring.MTU, why)
            port = self._ports[number]
            if port is None or port.pkey < 0:
                continue
            at, left = ring.transfer_port(peer.distance, number), self._left(orders.times.end)
            if why := transfer.failure(port, at, there.address, left):
                self._fail(peer.pod, ring.VERBS, why)
        _greeted(orders.rails[0], peer.rails[0], _BYE)

    def _no_answer(self, own: Rail, there: Rail, pod: str) -> str:
        """Why the pod does not answer at this address; "" if it does. Waits for its start."""
        expected = _greeting(self._orders.run, pod)
        while True:
            answer = _greeted(own, there)
            if answer == expected:
                return ""
            if self._left(self._orders.times.patience) <= 0:
                break
            time.sleep(_PAUSE)
        if isinstance(answer, OSError):
            why = answer.strerror or str(answer)
            return f"no TCP connection from {own.address} to {there.address}: {why}"
        return f"another one answers at {there.address}: {answer[:60].decode(errors='replace')!r}"

    def _too_large(self, own: Rail, there: Rail, mtu: int) -> str:
        """Why a packet of the interface's MTU does not come back; "" if it does."""
        try:
            if _comes_back(own, there, mtu):
                return ""
            small = _comes_back(own, there, _SMALL)
        except OSError as error:
            return f"a packet of {mtu} bytes to {there.address}: {error.strerror}"
        if small:
            return f"{there.address} answers {_SMALL} bytes, but not {mtu}, this interface's MTU"
        return f"{there.address} answers no UDP packet"

    def _watch(self, other: Neighbour) -> None:
        for own in self._orders.rails:
            for there in other.rails:
                if why := self._breach(own, there, other.pod):
                    self._fail(other.pod, ring.ISOLATION, why)

    def _breach(self, own: Rail, there: Rail, pod: str) -> str:
        """The proof that the two interfaces reach one another; "" if they do not."""
        while True:
            answer = _greeted(own, there)
            if answer == _greeting(self._orders.run, pod):
                return f"{there.address} answers {own.address} over TCP"
            try:
                mac = neighbours.answered(own.interface).get(there.address, "")
            except (NetlinkError, OSError) as error:
                return f"not proved: the neighbours cannot be read: {error}"
            if mac and mac == there.mac.lower():
                return f"{there.address} ({mac}) answers on the link of {own.address}"
            if isinstance(answer, OSError) and answer.errno == errno.ENETUNREACH:
                return f"not proved: {own.interface} has no route to {there.address}"
            if self._left(self._orders.times.watch) <= 0:
                return ""
            time.sleep(_PAUSE)


def _facts(paths: Paths, rail: Rail) -> RailFacts:
    at = f"{paths.sysfs}/class/net/{rail.interface}"
    mtu = attribute_files.number(f"{at}/mtu") or 0
    # An IPoIB child has no file `pkey`, but its broadcast address has the P_Key (RFC 4391, 4).
    octets = attribute_files.text(f"{at}/broadcast").split(":")
    pkey = f"0x{octets[8]}{octets[9]}" if len(octets) == _INFINIBAND else ""
    return RailFacts(rail.interface, rail.address, mtu, pkey)


def _greeting(run_id: str, pod: str) -> bytes:
    return f"podfabric check {run_id} {pod}\n".encode()


def _socket(rail: Rail, kind: socket.SocketKind, port: int = 0) -> socket.socket:
    """A socket that uses only this interface and address. Raises OSError."""
    family = socket.AF_INET6 if ":" in rail.address else socket.AF_INET
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, rail.interface.encode() + b"\0")
        made.setsockopt(*_MTU_DISCOVER[family])
        made.bind((rail.address, port))
    except BaseException:
        made.close()
        raise
    return made


def _greeted(own: Rail, there: Rail, said: bytes = b"ok") -> bytes | OSError:
    """Connect, and return the other pod's first line or the error."""
    try:
        with _socket(own, socket.SOCK_STREAM) as caller:
            caller.settimeout(_CONNECT)
            caller.connect((there.address, PORT))
            with caller.makefile("rb") as lines:
                line = lines.readline(200)
            caller.sendall(said)
            return line
    except OSError as error:
        return error


def _comes_back(own: Rail, there: Rail, size: int) -> bool:
    """Whether a packet of this size, which nobody may fragment, comes back. Raises OSError."""
    with _socket(own, socket.SOCK_DGRAM) as caller:
        caller.settimeout(_ANSWER)
        payload = bytes(max(size - _HEADERS[caller.family], 0))
        for _ in range(_TRIES):
            caller.sendto(payload, (there.address, PORT))
            try:
                if caller.recv(1 << 16) == payload:
                    return True
            except TimeoutError:
                continue
    return False
