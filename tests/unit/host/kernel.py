"""A kernel at the other end of a netlink socket, and its messages byte for byte."""

import struct

import pytest
from pyroute2.netlink.rtnl import RTM_GETLINK, RTM_NEWLINK

from host.netlink.links import Link
from host.netlink.sockets import NetlinkError, NetlinkSocket, Rtnetlink

MULTI, CAPPED, TLVS = 0x2, 0x100, 0x200
PF = Link(index=7, name="ens1f0", kind="", link_type=1, mac="", broadcast="", mtu=1500, flags=0)
IB_PF = Link(
    index=7, name="ib0", kind="ipoib", link_type=32, mac="", broadcast="", mtu=2044, flags=0
)

# struct ifinfomsg: family, gap, type, index 7, flags, change
IFINFOMSG = "00 00 0000 07000000 00000000 00000000"


class Kernel:
    """Answers the requests on a socket with prepared datagrams, and keeps the requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.route = Rtnetlink()
        self.requests: list[bytes] = []
        self._answers: list[list[bytes | OSError]] = []
        self._waiting: list[bytes | OSError] = []
        self.stands_behind(self.route, monkeypatch)

    def stands_behind(self, ours: NetlinkSocket, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer the requests on that socket."""
        ours.close()  # nothing goes to the real kernel
        monkeypatch.setattr(ours, "receive", self.receive)
        monkeypatch.setattr(ours, "socket", self)

    def answers(self, *datagrams: bytes | OSError) -> None:
        """Prepare the answer to the next request."""
        self._answers.append(list(datagrams))

    def send(self, request: bytearray) -> None:
        self.requests.append(bytes(request))
        self._waiting += self._answers.pop(0)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Take what a request needs."""

    def receive(self) -> bytes:
        answer = self._waiting.pop(0)
        if isinstance(answer, OSError):
            raise NetlinkError(answer.errno or 0)
        return answer


def message(kind: int, body: bytes, number: int = 1, flags: int = 0) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, number, 0) + body


def refusal(code: int, number: int = 1, words: bytes = b"") -> bytes:
    body = struct.pack("=i", -code) + message(RTM_GETLINK, b"", number)
    if words:
        body += struct.pack("=HH", 4 + len(words), 1) + words + bytes(-len(words) % 4)
    return message(2, body, number, CAPPED | (TLVS if words else 0))


def done(number: int = 1, status: int = 0) -> bytes:
    return message(3, struct.pack("=i", status), number, MULTI)


def attr(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(-len(payload) % 4)


def old_vf_info(index: int, mac: bytes, spoofchk: int = 0xFFFFFFFF) -> bytes:
    """The attributes that Linux 3.10 reports for a VF."""
    info = attr(1, struct.pack("=I", index) + mac.ljust(32, b"\0"))  # ifla_vf_mac
    info += attr(2, struct.pack("=III", index, 20, 1))  # ifla_vf_vlan
    info += attr(3, struct.pack("=II", index, 500))  # ifla_vf_tx_rate
    return info + attr(4, struct.pack("=II", index, spoofchk))  # ifla_vf_spoofchk


def vf_info(index: int, mac: bytes, *, setting: int = 1, state: int = 1, guid: int = 0) -> bytes:
    """The attributes that Linux 6 reports for a VF, in its order (rtnl_fill_vfinfo), with
    statistics.
    """
    counters = b"".join(attr(kind, struct.pack("=Q", 9)) for kind in range(1, 9))
    tag = struct.pack("=III", index, 100, 5) + b"\x88\xa8\0\0"  # ifla_vf_vlan_info
    return (
        attr(1, struct.pack("=I", index) + mac.ljust(32, b"\0"))  # ifla_vf_mac
        + attr(13, b"\xff" * 32)  # ifla_vf_broadcast, without an index
        + attr(2, struct.pack("=III", index, 100, 5))  # ifla_vf_vlan
        + attr(6, struct.pack("=III", index, 50, 1000))  # ifla_vf_rate
        + attr(3, struct.pack("=II", index, 1000))  # ifla_vf_tx_rate
        + attr(4, struct.pack("=II", index, setting))  # ifla_vf_spoofchk
        + attr(5, struct.pack("=II", index, state))  # ifla_vf_link_state
        + attr(7, struct.pack("=II", index, setting))  # ifla_vf_rss_query_en
        + attr(9, struct.pack("=II", index, setting))  # ifla_vf_trust
        + attr(10, struct.pack("=I4xQ", index, guid))  # ifla_vf_guid: node
        + attr(11, struct.pack("=I4xQ", index, guid and guid + 1))  # ifla_vf_guid: port
        + attr(12, attr(1, tag))  # IFLA_VF_VLAN_LIST
        + attr(8, counters)  # IFLA_VF_STATS
    )


def vfs_answer(*infos: bytes, number: int = 1) -> bytes:
    """A link message with these VFs, as the kernel makes it: lengths are of 16 bits."""
    body = struct.pack("=BxHiII", 0, 1, 7, 0, 0) + attr(3, b"ens1f0\0")  # IFLA_IFNAME
    listed = b"".join(attr(1, info) for info in infos)  # IFLA_VF_INFO
    body += attr(21, struct.pack("=I", len(infos)))  # IFLA_NUM_VF
    body += struct.pack("=HH", (4 + len(listed)) & 0xFFFF, 22) + listed  # IFLA_VFINFO_LIST
    return message(RTM_NEWLINK, body + attr(26, bytes(8)), number)  # IFLA_AF_SPEC
