"""Netlink sockets, and the kernel's answers as exceptions.

This module packs and reads messages itself: pyroute2's classes need four times the CPU that the
kernel needs for the same messages, truncate hardware addresses of InfiniBand, and send too few
bytes of a VF's VLAN. The tests compare the bytes with pyroute2's. The kernel handles a request
within send(2), and its answer is there when that returns.
"""

import errno
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

from host.errors import HostError, explained
from host.namespaces import NetworkNamespace

# linux/netlink.h
NLMSG_ERROR, NLMSG_DONE, NLMSG_OVERRUN = 2, 3, 4
NLM_F_REQUEST, NLM_F_ACK = 0x1, 0x4
NLM_F_DUMP_INTR, NLM_F_CAPPED, NLM_F_ACK_TLVS = 0x10, 0x100, 0x200
NLMSGERR_ATTR_MSG = 1
NLM_F_DUMP = 0x300
NLM_F_EXCL, NLM_F_CREATE, NLM_F_APPEND = 0x200, 0x400, 0x800
SOL_NETLINK, NETLINK_EXT_ACK, NETLINK_GET_STRICT_CHK = 270, 11, 12
HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
ATTRIBUTE = struct.Struct("=HH")  # struct nlattr: length with this header, type
NLA_F_NESTED = 0x8000
NLA_TYPE_MASK = 0x3FFF  # the rest is NLA_F_NESTED, NLA_F_NET_BYTEORDER
U32 = struct.Struct("=I")

SO_BINDTODEVICE = 25  # asm-generic/socket.h

TIMEOUT = 10  # seconds to wait for an answer; only a lost one takes time
# No attribute exceeds 64 KiB, and a link's largest is its list of VFs. The size is below
# malloc(3)'s threshold for mmap(2), so that an allocation is cheap.
BUFFER = 120 << 10
# The kernel has answered when send(2) returns; recv(2) answers the whole length of what it cuts.
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_TRUNC
DUMPS = 20  # attempts to read a table that keeps changing


class NetlinkError(Exception):
    """The kernel refused a request: its errno, and its own words if it sent any."""

    def __init__(self, code: int, words: str = "") -> None:
        super().__init__(code, words)
        self.code = code
        self.words = words


class ChangeRequest(NamedTuple):
    """A request that changes something in the kernel."""

    what: str  # for errors: 'setting "ib0" up'
    kind: int  # the message type, RTM_*
    message: bytes  # what follows the netlink header
    flags: int = 0  # NLM_F_*
    accepted: tuple[int, ...] = ()  # errnos that do not count as failure


class NetlinkSocket:
    """A socket in the namespace where it was created. One thread at a time may use it.

    `protocol` is a NETLINK_* of linux/netlink.h. Raises OSError if the kernel lacks it.
    """

    def __init__(self, protocol: int) -> None:
        self._first = self._sequence = 0
        self._is_strict = False
        self.socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol
        )
        try:
            # Ask for the kernel's words with refusals.
            self.socket.setsockopt(SOL_NETLINK, NETLINK_EXT_ACK, 1)
        except BaseException:
            self.socket.close()
            raise

    def fileno(self) -> int:
        """The descriptor, for ioctl(2), which also works in the socket's namespace."""
        return self.socket.fileno()

    def bind_to_device(self, name: bytes) -> None:
        """Bind the socket to an interface, b"" for none; netlink ignores this. Raises OSError."""
        self.socket.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, name + b"\0")

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def change(self, *changes: ChangeRequest) -> None:
        """Make these changes, in this order. Raises HostError for the first refused one.

        All are sent at once, and the kernel makes those after a refused one too. Only the last is
        acknowledged, and its answer comes after every refusal.
        """
        *others, last = (_encoded(each.kind, each.message, each.flags) for each in changes)
        struct.pack_into("=H", last, 6, changes[-1].flags | NLM_F_REQUEST | NLM_F_ACK)
        try:  # not `trying`: most calls come here
            self.send(*others, last)
            self._answer(changes)
        except NetlinkError as refused:
            raise explained(changes[-1].what, refused.code, refused.words) from None

    def ask(
        self, kind: int, message: bytes, flags: int = 0, after: Sequence[ChangeRequest] = ()
    ) -> tuple[int, bytes]:
        """Send a request that has one answer. Returns that message's type and bytes.

        The bytes include the header. With NLM_F_ACK in `flags` the answer may be only an
        acknowledgement. The changes in `after` are sent before it in the same datagram. Raises
        NetlinkError for the request, and HostError for a change as `change` does.
        """
        before = (_encoded(each.kind, each.message, each.flags) for each in after)
        self.send(*before, _encoded(kind, message, flags))
        reply, part = self._answer(after)
        if reply == NLMSG_ERROR:
            _raise_refusal(part)
        return reply, part

    def _answer(self, changes: Sequence[ChangeRequest]) -> tuple[int, bytes]:
        """The answer to the last request. Raises HostError if a change before it was refused."""
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

    def table(self, kind: int, message: bytes) -> list[tuple[int, bytes]]:
        """A whole table, read again if it changed under the reader. Raises NetlinkError.

        If the table changes during the dump, it is read again. Raises NetlinkError.
        """
        if not self._is_strict:  # so that the kernel filters what it lists
            self.socket.setsockopt(SOL_NETLINK, NETLINK_GET_STRICT_CHK, 1)
            self._is_strict = True
        request = _encoded(kind, message, NLM_F_DUMP)
        for _ in range(DUMPS):
            self.send(request)
            parts = self._dumped()
            if parts is not None:
                return parts
        raise NetlinkError(errno.EAGAIN, f"the table changed during each of {DUMPS} looks at it")

    def _dumped(self) -> list[tuple[int, bytes]] | None:
        """The parts of a dump; None if it is inconsistent or incomplete."""
        whole = True
        parts: list[tuple[int, bytes]] = []
        replies = self._replies()
        while True:
            try:
                _, reply, flags, part = next(replies)
            except NetlinkError as refused:
                if refused.code != errno.ENOBUFS:
                    raise
                whole = False  # the rest of this dump is still to come and must be read
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
                parts.append((reply, part))

    def send(self, *requests: bytearray) -> None:
        """Send requests. The kernel has handled them when this returns."""
        self._first = self._sequence + 1
        for request in requests:
            self._sequence += 1
            struct.pack_into("=I", request, 8, self._sequence)
        try:
            self.socket.send(b"".join(requests))
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO) from None

    def _replies(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Number, type, flags and bytes of each answer to the last `send`.

        Answers to earlier requests, whose reading a signal or timeout interrupted, are skipped.
        """
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
            except BlockingIOError:  # the answer is lost, or the kernel is not as we know it
                self._await_answer()
                datagram = self.socket.recv(BUFFER, _AT_ONCE)
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO) from None
        if len(datagram) > BUFFER:
            raise NetlinkError(errno.EMSGSIZE, f"an answer of more than {BUFFER} bytes")
        return datagram

    def _await_answer(self) -> None:
        look = select.poll()
        look.register(self.socket, select.POLLIN)
        if not look.poll(TIMEOUT * 1000):
            raise NetlinkError(errno.ETIMEDOUT, f"no answer within {TIMEOUT} s")


class Rtnetlink(NetlinkSocket):
    """A socket for links, addresses and routes."""

    def __init__(self) -> None:
        super().__init__(socket.NETLINK_ROUTE)


def netlink(namespace: NetworkNamespace | None = None) -> Rtnetlink:
    """A socket in `namespace`, by default in the calling thread's own. `with` closes it.

    The socket is created in the namespace and used from outside: it keeps its namespace.
    """
    if namespace is None:
        return Rtnetlink()
    with namespace.entered():
        route = Rtnetlink()
    namespace.identify_by(route.socket)
    return route


@contextmanager
def trying(what: str, *accepted: int) -> Iterator[None]:
    """Turn a NetlinkError in the block into a HostError; ignore errnos in `accepted`."""
    try:
        yield
    except NetlinkError as refused:
        if refused.code not in accepted:
            raise explained(what, refused.code, refused.words) from None


def attribute(kind: int, payload: bytes) -> bytes:
    """An encoded attribute with its padding (linux/netlink.h, struct nlattr)."""
    length = ATTRIBUTE.size + len(payload)
    return ATTRIBUTE.pack(length, kind) + payload + bytes(-length % 4)


def attributes(part: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Type, start and end of the payload of each attribute in part[start:end]."""
    while start + ATTRIBUTE.size <= end:
        length, kind = ATTRIBUTE.unpack_from(part, start)
        if length < ATTRIBUTE.size:
            return
        yield kind & NLA_TYPE_MASK, start + ATTRIBUTE.size, min(start + length, end)
        start += length + 3 & ~3


def number(kind: int, unsigned: int) -> bytes:
    """An attribute that is a number of 32 bits."""
    return attribute(kind, U32.pack(unsigned))


def string(kind: int, words: str) -> bytes:
    """An attribute that is a text, which ends with a NUL."""
    return attribute(kind, words.encode(errors="surrogateescape") + b"\0")


def text(payload: bytes) -> str:
    """The text of such an attribute; "" of an empty one."""
    if not payload:
        return ""
    return payload.rstrip(b"\0").decode(errors="surrogateescape")


def value(payload: bytes | None) -> int:
    """The number of such an attribute; 0 if there is none."""
    return 0 if payload is None else int(U32.unpack(payload)[0])


def fields(part: bytes, start: int = 0) -> dict[int, bytes]:
    """The payloads of all attributes from `start` on, by type."""
    # As `attributes`, at a fifth of its cost: a link has some 50.
    payloads = {}
    numbers = memoryview(part)[: len(part) & ~1].cast("H")  # start is even
    end = len(part) - 4
    while start <= end:
        length = numbers[start >> 1]
        if length < 4:
            break
        payloads[numbers[(start >> 1) + 1] & NLA_TYPE_MASK] = part[start + 4 : start + length]
        start += length + 3 & ~3
    return payloads


def _encoded(kind: int, message: bytes, flags: int) -> bytearray:
    length = HEADER.size + len(message)
    return bytearray(HEADER.pack(length, kind, NLM_F_REQUEST | flags, 0, 0) + message)


def _raise_refusal(part: bytes) -> None:
    """Raise NetlinkError unless the message is an acknowledgement."""
    flags, status = struct.unpack_from("=6xH8xi", part)
    if status == 0:
        return
    words = ""
    if flags & NLM_F_ACK_TLVS:
        # struct nlmsgerr: the status, then the request or only its header
        request = HEADER.size + 4
        (length,) = U32.unpack_from(part, request)
        more = request + (HEADER.size if flags & NLM_F_CAPPED else length + 3 & ~3)
        words = text(fields(part, more).get(NLMSGERR_ATTR_MSG, b""))
    raise NetlinkError(-status, words.rstrip("."))
