"""Our messages are pyroute2's, byte for byte, and we read of its messages what it wrote."""

import struct
from typing import Any, cast

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from host import link_changes, links
from host.links import Link
from host.netlink import HEADER, ChangeRequest, Rtnetlink
from host.rtnetlink import RTM_NEWLINK

MAC = "02:00:00:00:00:07"
LINK = Link(index=7, name="a", kind="", link_type=1, mac=MAC, broadcast="", mtu=1500, flags=0)


class Recorder:
    """Stands in for a socket: keeps what is sent, and answers one link."""

    def __init__(self) -> None:
        self.changes: list[ChangeRequest] = []
        self.questions: list[bytes] = []
        self.link = b""

    @property
    def route(self) -> Rtnetlink:
        """Itself, as what it stands in for."""
        return cast("Rtnetlink", self)

    def change(self, *changes: ChangeRequest) -> None:
        self.changes += changes

    def ask(self, kind: int, message: bytes, **more: Any) -> tuple[int, bytes]:  # noqa: ANN401
        self.questions.append(message)
        return RTM_NEWLINK, self.link

    def table(self, kind: int, message: bytes) -> list[tuple[int, bytes]]:
        self.questions.append(message)
        return []


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def _encoded(message: Any, kind: int = 0) -> bytes:  # noqa: ANN401 - pyroute2 is not typed
    message["header"] = {"type": kind}
    message.encode()
    data: bytearray = message.data
    return bytes(data[HEADER.size :])


def _link_message(index: int, flags: int, change: int, *attributes: Any) -> bytes:  # noqa: ANN401
    message = ifinfmsg()
    message["index"], message["flags"], message["change"] = index, flags, change
    message["attrs"] = list(attributes)
    return _encoded(message)


def test_link_that_is_not_dormant_any_more_is_operating() -> None:
    change = link_changes.with_settings(LINK, {"mode": 0})
    expected = _link_message(7, 0, 0, ("IFLA_LINKMODE", 0), ("IFLA_OPERSTATE", "UP"))
    assert change.message == expected


def test_settings_and_programs_are_read(recorder: Recorder) -> None:
    programs = struct.pack("=HHBxxxHHIHHI", 5, 2, 4, 8, 5, 3, 8, 6, 4)  # attached, ids of two modes
    recorder.link = bytes(HEADER.size) + _link_message(
        7,
        0,
        0,
        ("IFLA_IFNAME", "a"),
        ("IFLA_TXQLEN", 1000),
        ("IFLA_LINKMODE", 1),
        ("IFLA_GSO_MAX_SIZE", 65536),
    )
    recorder.link += struct.pack("=HH", 4 + len(programs), 43) + programs  # IFLA_XDP
    link = links.require(recorder.route, "a")
    assert link.settings == {"txqueuelen": 1000, "mode": 1, "gso_max_size": 65536}
    assert link.xdp == ("generic", "driver")
    # IFLA_XDP | NLA_F_NESTED: IFLA_XDP_FD -1, IFLA_XDP_FLAGS XDP_FLAGS_SKB_MODE
    nested = struct.pack("=HHHHiHHI", 20, 0x8000 | 43, 8, 1, -1, 8, 3, 2)
    assert link_changes.without_xdp(link, "generic").message == _link_message(7, 0, 0) + nested
