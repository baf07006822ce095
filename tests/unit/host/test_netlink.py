"""What goes over the wire, byte for byte, where pyroute2 alone would get it wrong."""

import struct

import pytest

from host import links
from host.links import Link
from host.netlink import LinkMessage, netlink
from host.rtnetlink import ifinfmsg

ADDRESS = bytes(range(20))


def _link_message(address: bytes) -> bytes:
    body = struct.pack("=BxHiII", 0, links.ARPHRD_INFINIBAND, 5, 0, 0)
    body += struct.pack("=HH", 4 + len(address), 1) + address  # IFLA_ADDRESS
    return struct.pack("=IHHII", 16 + len(body), 16, 0, 1, 0) + body


def test_hardware_address_of_20_bytes_is_read_whole() -> None:
    ifinfmsg(_link_message(ADDRESS[:6])).decode()  # the parent class must not decide
    message = LinkMessage(_link_message(ADDRESS))
    message.decode()
    assert message.get_attr("IFLA_ADDRESS") == ADDRESS.hex(":")


def test_sockets_use_the_message_with_whole_addresses() -> None:
    with netlink() as route:
        assert isinstance(route.link("get", index=1)[0], LinkMessage)


def test_ipoib_child_request_carries_pkey_mode_and_umcast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """linux/if_link.h: IFLA_LINKINFO 18, KIND 1, DATA 2; IFLA_IPOIB_PKEY 1, MODE 2, UMCAST 3."""
    requests: list[bytes] = []
    encode = ifinfmsg.encode

    def recorded(self: ifinfmsg) -> None:
        encode(self)
        requests.append(bytes(self.data))

    parent = Link(
        index=7, name="ib0", kind="ipoib", link_type=32, mac="", broadcast="", mtu=2044, flags=0
    )
    made = Link(
        index=9,
        name="x",
        kind="ipoib",
        link_type=32,
        mac="",
        broadcast="",
        mtu=2044,
        flags=0,
        pkey=0x8001,
        mode="connected",
        umcast=True,
    )
    monkeypatch.setattr(ifinfmsg, "encode", recorded)
    monkeypatch.setattr(links, "require", lambda route, name: made)

    with netlink() as route:
        monkeypatch.setattr(
            links, "trying", lambda what, *accepted: _Passing()
        )  # this kernel may lack the driver: the request is what counts
        links.make_ipoib_child(route, "x", parent, 0x8001, "connected", True)

    settings = struct.pack("=HHHxxHHHxxHHHxx", 6, 1, 0x8001, 6, 2, 1, 6, 3, 1)
    kind = struct.pack("=HH6sxx", 10, 1, b"ipoib\0")
    info = kind + struct.pack("=HH", 4 + len(settings), 2) + settings
    assert struct.pack("=HH", 4 + len(info), 18) + info in requests[0]
    assert struct.pack("=HHI", 8, 5, parent.index) in requests[0]  # IFLA_LINK


class _Passing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> bool:
        return True
