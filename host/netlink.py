"""One netlink socket for each namespace and protocol, and the kernel's errors as ours.

Messages are packed and read here by hand: with pyroute2's classes the messages of one attachment
cost four times the CPU that the kernel needs for them. The kernel does what is asked for within
send(2), and its answer waits when that returns.
"""

import errno
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

PATIENCE = 10  # seconds for an answer, which only a loss can delay
# No attribute exceeds 64 KiB, and the largest of a link, its list of VFs, is one. Less than what
# malloc(3) gets from mmap(2), so that it costs nothing.
BUFFER = 120 << 10
DUMPS = 20  # of a table that changes all the while, before that is an error


class NetlinkError(Exception):
    """The kernel's no to one request: an errno, and its own words where it has any."""

    def __init__(self, code: int, words: str = "") -> None:
        super().__init__(code, words)
        self.code = code
        self.words = words


class Change(NamedTuple):
    """Something for the kernel to do: what it is, for an error, and the request.

    A message is the bytes that follow the netlink header.
    """

    what: str
    kind: int
    message: bytes
    flags: int = 0
    accepted: tuple[int, ...] = ()  # errnos that are no failure


class NetlinkSocket:
    """A socket in the namespace where it was made. One thread at a time may use it.

    `protocol` is a NETLINK_* of linux/netlink.h. OSError where the kernel does not have it.
    """

    def __init__(self, protocol: int) -> None:
        self._first = self._sequence = 0
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol
        )
        try:
            # The kernel's words with a refusal, and dumps of what was asked for only.
            self._socket.setsockopt(SOL_NETLINK, NETLINK_EXT_ACK, 1)
            self._socket.setsockopt(SOL_NETLINK, NETLINK_GET_STRICT_CHK, 1)
            timeout = struct.pack("@ll", PATIENCE, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            self._socket.bind((0, 0))
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """For ioctl(2), which asks about the socket's namespace, too."""
        return self._socket.fileno()

    def bind_to_device(self, name: bytes) -> None:
        """Bind the socket to an interface, which netlink does not heed; b"" to none. OSError."""
        self._socket.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, name + b"\0")

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def change(self, *changes: Change) -> None:
        """Have the kernel do these, in this order. Raises HostError for the first refusal.

        All are sent at once, and those behind a refused one are done none the less. Only the
        last is acknowledged: its answer comes behind every refusal.
        """
        *others, last = (_encoded(one.kind, one.message, one.flags) for one in changes)
        struct.pack_into("=H", last, 6, changes[-1].flags | NLM_F_REQUEST | NLM_F_ACK)
        with trying(changes[-1].what):
            self.send(*others, last)
            self._answer(changes)

    def ask(
        self, kind: int, message: bytes, flags: int = 0, after: Sequence[Change] = ()
    ) -> tuple[int, bytes]:
        """Type and bytes, header included, of the one answer to a request. Raises Refused.

        With NLM_F_ACK among the flags that answer may be a plain acknowledgement. Changes that
        are to be made before are sent with it, and fail as those of `change` do.
        """
        before = (_encoded(one.kind, one.message, one.flags) for one in after)
        self.send(*before, _encoded(kind, message, flags))
        reply, part = self._answer(after)
        if reply == NLMSG_ERROR:
            _raise_refusal(part)
        return reply, part

    def _answer(self, changes: Sequence[Change]) -> tuple[int, bytes]:
        """The answer to the last request sent; refusals of `changes` before it are raised."""
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
        """A whole table, read again if it changed under the reader. Raises Refused.

        As `ask`, type and bytes of each of its entries.
        """
        request = _encoded(kind, message, NLM_F_DUMP)
        for _ in range(DUMPS):
            self.send(request)
            parts = self._dumped()
            if parts is not None:
                return parts
        raise NetlinkError(errno.EAGAIN, f"the table changed during each of {DUMPS} looks at it")

    def _dumped(self) -> list[tuple[int, bytes]] | None:
        """The parts of a dump; None if it is inconsistent, or something of it was lost."""
        whole = True
        parts: list[tuple[int, bytes]] = []
        replies = self._replies()
        while True:
            try:
                _, reply, flags, part = next(replies)
            except NetlinkError as refused:
                if refused.code != errno.ENOBUFS:
                    raise
                whole = False  # the rest of this dump still comes, and must be taken
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
        """Send requests, which the kernel does before this returns."""
        self._first = self._sequence + 1
        for request in requests:
            self._sequence += 1
            struct.pack_into("=I", request, 8, self._sequence)
        try:
            self._socket.send(b"".join(requests))
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO) from None

    def _replies(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Number, type, flags and bytes of each message that answers what was sent last.

        What answers something earlier, of which a signal or a timeout cut off the reading, is
        skipped.
        """
        while True:
            datagram = self._receive()
            offset = 0
            while offset + HEADER.size <= len(datagram):
                length, kind, flags, number, _ = HEADER.unpack_from(datagram, offset)
                if length < HEADER.size:
                    break
                if self._first <= number <= self._sequence:
                    yield number, kind, flags, datagram[offset : offset + length]
                offset += length + 3 & ~3

    def _receive(self) -> bytes:
        try:
            datagram, _, flags, _ = self._socket.recvmsg(BUFFER)
        except BlockingIOError:
            raise NetlinkError(errno.ETIMEDOUT, f"no answer within {PATIENCE} s") from None
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO) from None
        if flags & socket.MSG_TRUNC:
            raise NetlinkError(errno.EMSGSIZE, f"an answer of more than {BUFFER} bytes")
        return datagram


class Rtnetlink(NetlinkSocket):
    """A socket for links, addresses and routes."""

    def __init__(self) -> None:
        super().__init__(socket.NETLINK_ROUTE)


@contextmanager
def netlink(namespace: NetworkNamespace | None = None) -> Iterator[Rtnetlink]:
    """A socket in `namespace`, in the caller's own where none is given.

    The socket is made inside and then driven from here: a netlink socket keeps its namespace.
    """
    if namespace is None:
        route = Rtnetlink()
    else:
        with namespace.entered():
            route = Rtnetlink()
    with route:
        yield route


@contextmanager
def trying(what: str, *accepted: int) -> Iterator[None]:
    """Turn the kernel's refusal of `what` into HostError; errnos in `accepted` pass in silence."""
    try:
        yield
    except NetlinkError as refused:
        if refused.code not in accepted:
            raise explained(what, refused.code, refused.words) from None


def attribute(kind: int, payload: bytes) -> bytes:
    """An attribute, padded to the next (linux/netlink.h, struct nlattr)."""
    length = ATTRIBUTE.size + len(payload)
    return ATTRIBUTE.pack(length, kind) + payload + bytes(-length % 4)


def attributes(part: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Type of each attribute in part[start:end], and where its payload starts and ends."""
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
    """The text of such an attribute."""
    return payload.rstrip(b"\0").decode(errors="surrogateescape")


def value(payload: bytes | None) -> int:
    """The number of such an attribute; 0 if there is none."""
    return 0 if payload is None else int(U32.unpack(payload)[0])


def fields(part: bytes, start: int = 0) -> dict[int, bytes]:
    """The payloads of all attributes from `start` on, by type."""
    payloads = {}
    end, unpack = len(part), ATTRIBUTE.unpack_from  # as `attributes`, at a third of its cost
    while start + 4 <= end:
        length, kind = unpack(part, start)
        if length < 4:
            break
        payloads[kind & NLA_TYPE_MASK] = part[start + 4 : start + length]
        start += length + 3 & ~3
    return payloads


def _encoded(kind: int, message: bytes, flags: int) -> bytearray:
    length = HEADER.size + len(message)
    return bytearray(HEADER.pack(length, kind, NLM_F_REQUEST | flags, 0, 0) + message)


def _raise_refusal(part: bytes) -> None:
    """Nothing for an acknowledgement."""
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
