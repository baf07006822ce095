"""Our messages are pyroute2's, byte for byte, and we read of its messages what it wrote."""

import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import pytest
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from host import addresses, link_changes, links
from host.addresses import Hop
from host.links import Link
from host.namespaces import NetworkNamespace
from host.netlink import HEADER, ChangeRequest, Rtnetlink
from host.rtnetlink import RTM_NEWADDR, RTM_NEWLINK, RTM_NEWROUTE

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


def test_move_with_name_alias_mtu_address_and_up(recorder: Recorder) -> None:
    with NetworkNamespace.open("/proc/self/ns/net") as target:
        link_changes.move(recorder.route, LINK, target, "net1", "mark", mtu=1400, mac=MAC, up=True)
        (change,) = recorder.changes
        assert change.message == _link_message(
            7,
            1,
            1,
            ("IFLA_NET_NS_FD", target.descriptor),
            ("IFLA_IFNAME", "net1"),
            ("IFLA_IFALIAS", "mark"),
            ("IFLA_MTU", 1400),
            ("IFLA_ADDRESS", MAC),
        )


@pytest.mark.parametrize(
    ("act", "attribute"),
    [
        (lambda route: link_changes.rename(route, LINK, "b"), ("IFLA_IFNAME", "b")),
        (lambda route: link_changes.set_alias(route, LINK, ""), ("IFLA_IFALIAS", "")),
        (lambda route: link_changes.set_mtu(route, LINK, 9000), ("IFLA_MTU", 9000)),
        (
            lambda route: link_changes.add_altname(route, LINK, "enp1s0"),
            ("IFLA_PROP_LIST", {"attrs": [("IFLA_ALT_IFNAME", "enp1s0")]}),
        ),
        (
            lambda route: route.change(link_changes.no_generated_address(LINK)),
            (
                "IFLA_AF_SPEC",
                {"attrs": [("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", 1)]})]},
            ),
        ),
    ],
)
def test_one_setting_of_a_link(
    recorder: Recorder,
    act: Callable[[Rtnetlink], object],
    attribute: object,
) -> None:
    act(recorder.route)
    (change,) = recorder.changes
    assert change.message == _link_message(7, 0, 0, attribute)


def test_settings_of_a_link_in_one_message() -> None:
    wanted = {"gso_max_segs": 3, "txqueuelen": 1000, "group": 7}
    change = link_changes.with_settings(LINK, wanted, "ff:ff:ff:ff:ff:ff")
    assert change.message == _link_message(
        7,
        0,
        0,
        ("IFLA_TXQLEN", 1000),
        ("IFLA_GROUP", 7),
        ("IFLA_GSO_MAX_SEGS", 3),
        ("IFLA_BROADCAST", "ff:ff:ff:ff:ff:ff"),
    )
    for words in ("gso_max_segs 3", "txqueuelen 1000", "broadcast ff:ff"):
        assert words in change.what


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


def test_questions_about_links(recorder: Recorder) -> None:
    mask = ("IFLA_EXT_MASK", 8)
    recorder.link = bytes(HEADER.size) + _link_message(7, 0, 0, ("IFLA_IFNAME", "a"))
    links.find(recorder.route, "a")
    links.find(recorder.route, "a-name-of-more-than-15")
    links.by_index(recorder.route, 7)
    links.every(recorder.route, "ipoib")
    assert recorder.questions == [
        _link_message(0, 0, 0, mask, ("IFLA_IFNAME", "a")),
        _link_message(0, 0, 0, mask, ("IFLA_ALT_IFNAME", "a-name-of-more-than-15")),
        _link_message(7, 0, 0, mask),
        _link_message(0, 0, 0, mask, ("IFLA_LINKINFO", {"attrs": [("IFLA_INFO_KIND", "ipoib")]})),
    ]


def test_link_is_read_as_it_was_written(recorder: Recorder) -> None:
    settings = [("IFLA_IPOIB_PKEY", 0x8001), ("IFLA_IPOIB_MODE", 1), ("IFLA_IPOIB_UMCAST", 1)]
    info = [("IFLA_INFO_KIND", "ipoib"), ("IFLA_INFO_DATA", {"attrs": settings})]
    recorder.link = bytes(HEADER.size) + _link_message(
        7,
        0x10001,
        0,
        ("IFLA_IFNAME", "ib0.8001"),
        ("IFLA_ADDRESS", MAC),
        ("IFLA_BROADCAST", "ff:ff:ff:ff:ff:ff"),
        ("IFLA_MTU", 4092),
        ("IFLA_LINK", 3),
        ("IFLA_IFALIAS", "an alias"),
        ("IFLA_LINKINFO", {"attrs": info}),
        ("IFLA_PROP_LIST", {"attrs": [("IFLA_ALT_IFNAME", "x"), ("IFLA_ALT_IFNAME", "y")]}),
        ("IFLA_PARENT_DEV_NAME", "0000:01:00.0"),
    )
    assert links.by_index(recorder.route, 7) == Link(
        index=7,
        name="ib0.8001",
        kind="ipoib",
        link_type=0,
        mac=MAC,
        broadcast="ff:ff:ff:ff:ff:ff",
        mtu=4092,
        flags=0x10001,
        alias="an alias",
        parent=3,
        device="0000:01:00.0",
        altnames=("x", "y"),
        pkey=0x8001,
        mode="connected",
        umcast=True,
    )


@pytest.mark.parametrize("cidr", ["10.0.0.5/24", "fd00::5/64"])
def test_address(cidr: str) -> None:
    change = addresses.addition(LINK, cidr)
    address, _, length = cidr.partition("/")
    message = ifaddrmsg()
    message["index"], message["prefixlen"] = 7, int(length)
    if ":" in cidr:
        message["family"], message["flags"] = socket.AF_INET6, addresses.IFA_F_NODAD
        message["attrs"] = [("IFA_ADDRESS", address)]
    else:
        message["family"] = socket.AF_INET
        message["attrs"] = [("IFA_LOCAL", address), ("IFA_ADDRESS", address)]
    assert (change.kind, change.message) == (RTM_NEWADDR, _encoded(message))


def test_route_with_everything(recorder: Recorder) -> None:
    hop = Hop(destination="10.9.0.0/16", gateway="10.1.0.1", table=1000, priority=7, mtu=1400)
    addresses.add_routes(recorder.route, LINK, [hop, Hop(destination="::/0", scope=0, table=5)])
    first, second = recorder.changes
    message = rtmsg()
    message["family"], message["dst_len"], message["proto"], message["type"] = 2, 16, 4, 1
    message["flags"] = addresses.RTNH_F_ONLINK
    message["attrs"] = [
        ("RTA_OIF", 7),
        ("RTA_TABLE", 1000),
        ("RTA_DST", "10.9.0.0"),
        ("RTA_GATEWAY", "10.1.0.1"),
        ("RTA_PRIORITY", 7),
        ("RTA_METRICS", {"attrs": [("RTAX_MTU", 1400)]}),
    ]
    assert (first.kind, first.message) == (RTM_NEWROUTE, _encoded(message))
    message = rtmsg()
    message["family"], message["proto"], message["type"], message["table"] = 10, 4, 1, 5
    message["attrs"] = [("RTA_OIF", 7), ("RTA_TABLE", 5)]
    assert second.message == _encoded(message)
