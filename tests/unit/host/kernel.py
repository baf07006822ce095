"""The kernel's end of a netlink socket, and the messages that it sends."""

import struct

import pytest

from host.netlink import NetlinkError, NetlinkSocket, Rtnetlink
from host.rtnetlink import RTM_GETLINK

MULTI, TLVS = 0x2, 0x200


class Kernel:
    """The other end of a netlink socket: gives the answers of a test, datagram by datagram."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.route = Rtnetlink()
        self.requests: list[bytes] = []
        self._answers: list[list[bytes | OSError]] = []
        self._waiting: list[bytes | OSError] = []
        self.stands_behind(self.route, monkeypatch)

    def stands_behind(self, ours: NetlinkSocket, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer what goes over that socket."""
        ours.close()  # nothing goes to the real one
        monkeypatch.setattr(ours, "_receive", self._receive)
        monkeypatch.setattr(ours, "_socket", self)

    def answers(self, *datagrams: bytes | OSError) -> None:
        """What the next request that is not answered yet gets."""
        self._answers.append(list(datagrams))

    def send(self, request: bytearray) -> None:
        self.requests.append(bytes(request))
        self._waiting += self._answers.pop(0)

    def _receive(self) -> bytes:
        answer = self._waiting.pop(0)
        if isinstance(answer, OSError):
            raise NetlinkError(answer.errno or 0)
        return answer


def message(kind: int, body: bytes, number: int = 1, flags: int = 0) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, number, 0) + body


def refusal(code: int, number: int = 1, words: bytes = b"") -> bytes:
    request = message(RTM_GETLINK, bytes(16), number)
    body = struct.pack("=i", -code) + request
    if words:
        body += struct.pack("=HH", 4 + len(words), 1) + words + bytes(-len(words) % 4)
    return message(2, body, number, TLVS if words else 0)


def done(number: int = 1, status: int = 0) -> bytes:
    return message(3, struct.pack("=i", status), number, MULTI)
