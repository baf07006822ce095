"""Netlink sockets, which raise the kernel's refusals as exceptions.

Does not use pyroute2's sockets, which start an event loop in each thread and take 0.3 ms for each
request. The kernel handles a request within send(2), so the answer can be read at once.
"""

import errno
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

from pyroute2.netlink import (
    NETLINK_EXT_ACK,
    NETLINK_GET_STRICT_CHK,
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_DUMP_INTR,
    NLM_F_REQUEST,
    NLMSG_DONE,
    NLMSG_ERROR,
    NLMSG_OVERRUN,
    SOL_NETLINK,
    nlmsg,
)

from host.errors import HostError, explained
from host.namespaces import NetworkNamespace
from host.netlink.messages import NETLINK_CAP_ACK, ErrorMessage

HEADER = struct.Struct("".join(form for _, form in nlmsg.header))
SO_BINDTODEVICE = 25  # asm-generic/socket.h

TIMEOUT = 10  # seconds to wait for an answer; only a lost answer takes time
# No attribute exceeds 64 KiB. Below malloc(3)'s threshold for mmap(2), an allocation is cheap.
BUFFER = 120 << 10
# The kernel has answered when send(2) returns; recv(2) returns the whole length of a cut datagram.
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_TRUNC
DUMPS = 20  # attempts to read a table that keeps changing


class NetlinkError(Exception):
    """The kernel refused a request. Has the kernel's errno, and its words if it sent any."""

    def __init__(self, code: int, words: str = "") -> None:
        super().__init__(code, words)
        self.code = code
        self.words = words


class ChangeRequest(NamedTuple):
    """A request that changes something in the kernel."""

    what: str  # the request in errors: 'setting "ib0" up'
    kind: int  # the message type, RTM_*
    message: nlmsg
    flags: int = 0  # NLM_F_*
    accepted: tuple[int, ...] = ()  # errnos that do not count as failures


class NetlinkSocket:
    """A socket of a NETLINK_* protocol, for one thread at a time. It stays in one namespace."""

    def __init__(self, protocol: int) -> None:
        self._first = self._sequence = 0
        self._is_strict = False
        self.socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol
        )
        try:
            # With these options a refusal contains the kernel's words, but not the request.
            self.socket.setsockopt(SOL_NETLINK, NETLINK_EXT_ACK, 1)
            self.socket.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
        except BaseException:
            self.socket.close()
            raise

    def fileno(self) -> int:
        """The descriptor. ioctl(2) on this descriptor works in the socket's namespace."""
        return self.socket.fileno()

    def bind_to_device(self, name: bytes) -> None:
        """Bind the socket to an interface, or with b"" to none. Raises OSError."""
        self.socket.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, name + b"\0")

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def change(self, *changes: ChangeRequest) -> None:
        """Make these changes, in this order. Raises HostError for the first refused change.

        A refused change does not stop the next changes. The kernel acknowledges only the last
        change.
        """
        *others, last = changes
        with trying(last.what, *last.accepted):
            self.ask(last.kind, last.message, last.flags | NLM_F_ACK, after=others)

    def ask(
        self, kind: int, message: nlmsg, flags: int = 0, after: Sequence[ChangeRequest] = ()
    ) -> Any:  # noqa: ANN401 - a message of the same class
        """Send a request. Returns the decoded answer, or `None` for an acknowledgement.

        The changes in `after` are sent first, in the same datagram. Raises HostError for a refused
        change in `after`, NetlinkError for a refused request.
        """
        before = (_encoded(change.kind, change.message, change.flags) for change in after)
        self.send(*before, _encoded(kind, message, flags))
        reply, part = self._answer(after)
        if reply != NLMSG_ERROR:
            return _decoded(message, part)
        _raise_refusal(part)
        return None

    def _answer(self, changes: Sequence[ChangeRequest]) -> tuple[int, bytes]:
        """The answer to the last request.

        Raises HostError if the kernel refused an earlier change.
        """
        failure: HostError | None = None
        first = self._first
        for number, reply, _, part in self._replies():
            if reply == NLMSG_ERROR and number - first < len(changes):
                change = changes[number - first]
                try:
                    _raise_refusal(part)
                except NetlinkError as refused:
                    if refused.code not in change.accepted and failure is None:
                        failure = explained(change.what, refused.code, refused.words)
            if number == self._sequence:
                break
        if failure is not None:
            raise failure
        return reply, part

    def table(self, kind: int, message: nlmsg) -> list[Any]:
        """A whole table, decoded. If the table changes, reads it again. Raises NetlinkError."""
        if not self._is_strict:  # so that the kernel filters what it lists
            self.socket.setsockopt(SOL_NETLINK, NETLINK_GET_STRICT_CHK, 1)
            self._is_strict = True
        request = _encoded(kind, message, NLM_F_DUMP)
        for _ in range(DUMPS):
            self.send(request)
            parts = self._dumped()
            if parts is not None:
                return [_decoded(message, part) for part in parts]
        raise NetlinkError(errno.EAGAIN, f"the kernel's table changed during all {DUMPS} reads")

    def _dumped(self) -> list[bytes] | None:
        """The parts of a dump; `None` if the dump is inconsistent or incomplete."""
        whole = True
        parts: list[bytes] = []
        replies = self._replies()
        while True:
            try:
                _, reply, flags, part = next(replies)
            except NetlinkError as refused:
                if refused.code != errno.ENOBUFS:
                    raise
                whole = False  # the rest of this dump must still be read
                replies = self._replies()
                continue
            whole = whole and not flags & NLM_F_DUMP_INTR and reply != NLMSG_OVERRUN
            if reply == NLMSG_ERROR:
                _raise_refusal(part)
            elif reply == NLMSG_DONE:
                (status,) = struct.unpack_from("=i", part, HEADER.size)
                if status < 0:
                    raise NetlinkError(-status)
                return parts if whole else None
            else:
                parts.append(part)

    def send(self, *requests: bytearray) -> None:
        """Send requests. The kernel has handled the requests when this function returns."""
        self._first = self._sequence + 1
        for request in requests:
            self._sequence += 1
            struct.pack_into("=I", request, 8, self._sequence)
        try:
            self.socket.send(b"".join(requests))
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO) from None

    def _replies(self) -> Iterator[tuple[int, int, int, bytes]]:
        """The sequence number, type, flags and bytes of each answer to the last `send`."""
        while True:
            datagram = self.receive()
            offset = 0
            while offset + HEADER.size <= len(datagram):
                length, kind, flags, number, _ = HEADER.unpack_from(datagram, offset)
                if length < HEADER.size:
                    break
                if self._first <= number <= self._sequence:
                    yield number, kind, flags, datagram[offset : offset + length]
                offset += length + 3 & ~3

    def receive(self) -> bytes:
        try:
            try:
                datagram = self.socket.recv(BUFFER, _AT_ONCE)
            except BlockingIOError:  # the answer is lost, or this kernel answers later
                poll = select.poll()
                poll.register(self.socket, select.POLLIN)
                if not poll.poll(TIMEOUT * 1000):
                    raise NetlinkError(errno.ETIMEDOUT, f"no answer within {TIMEOUT} s") from None
                datagram = self.socket.recv(BUFFER, _AT_ONCE)
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO) from None
        if len(datagram) > BUFFER:
            raise NetlinkError(errno.EMSGSIZE, f"an answer of more than {BUFFER} bytes")
        return datagram


class Rtnetlink(NetlinkSocket):
    """A socket for links, addresses and routes."""

    def __init__(self) -> None:
        super().__init__(socket.NETLINK_ROUTE)


def netlink(namespace: NetworkNamespace | None = None) -> Rtnetlink:
    """A socket in `namespace`, by default in the thread's namespace."""
    if namespace is None:
        return Rtnetlink()
    with namespace.entered():
        route = Rtnetlink()
    namespace.identify_by(route.socket)
    return route


@contextmanager
def trying(what: str, *accepted: int) -> Iterator[None]:
    """Turn a NetlinkError in the block into a HostError, unless `accepted` has its errno."""
    try:
        yield
    except NetlinkError as refused:
        if refused.code not in accepted:
            raise explained(what, refused.code, refused.words) from None


def _encoded(kind: int, message: nlmsg, flags: int) -> bytearray:
    message["header"] = {"type": kind, "flags": NLM_F_REQUEST | flags}
    message.encode()
    encoded: bytearray = message.data
    return encoded


def _decoded(message: nlmsg, part: bytes) -> nlmsg:
    answer = type(message)(part)
    answer.decode()
    return answer


def _raise_refusal(part: bytes) -> None:
    """Raise NetlinkError unless the message is an acknowledgement."""
    (status,) = struct.unpack_from("=i", part, HEADER.size)
    if status:
        words = _decoded(ErrorMessage(), part).get_attr("NLMSGERR_ATTR_MSG", "")
        raise NetlinkError(-status, words.rstrip("."))
