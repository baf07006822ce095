"""The parts of podfabric's messages that pyroute2's messages lack, byte for byte.

The bytes were worked out from linux/if_link.h, for a little endian machine of 64 bits.
"""

import struct
import subprocess
import sys

import pytest
from pyroute2.netlink.rtnl import RTM_NEWLINK

from host.namespaces import NetworkNamespace
from host.netlink import link_changes, links, vfs
from host.netlink.links import Link
from host.netlink.sockets import HEADER, ChangeRequest
from tests.unit.host.kernel import IFINFOMSG, PF, Kernel, attr, message, refusal

MAC = "02:00:00:00:00:07"
INFINIBAND = bytes(range(20))
LINK = Link(index=7, name="a", kind="", link_type=1, mac=MAC, broadcast="", mtu=1500, flags=0)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def _encoded(change: ChangeRequest) -> str:
    """The attributes of a change."""
    change.message["header"] = {"type": change.kind, "flags": 0}
    change.message.encode()
    return bytes(change.message.data[HEADER.size + 16 :]).hex(" ", -4)


def test_link_that_is_not_dormant_any_more_is_operating() -> None:
    # IFLA_LINKMODE (17) 0, IFLA_OPERSTATE (16) IF_OPER_UP (6)
    change = link_changes.with_settings(LINK, {"mode": 0})
    assert _encoded(change) == "05001100 00000000 05001000 06000000"


def test_settings_of_linux_6_3_are_set() -> None:
    change = link_changes.with_settings(LINK, {"gso_ipv4_max_size": 1, "gro_ipv4_max_size": 2})
    assert _encoded(change) == "08003f00 01000000 08004000 02000000"


def test_address_of_20_bytes_is_set_and_read_whole(kernel: Kernel) -> None:
    change = link_changes.with_settings(LINK, {}, INFINIBAND.hex(":"))
    assert _encoded(change) == "18000200 " + INFINIBAND.hex(" ", -4)  # IFLA_BROADCAST (2)
    body = bytes.fromhex(IFINFOMSG) + attr(3, b"ib0\0")
    body += attr(1, INFINIBAND) + attr(2, INFINIBAND) + attr(54, INFINIBAND)  # IFLA_PERM_ADDRESS
    for number in (1, 2):
        kernel.answers(message(RTM_NEWLINK, body, number))
    link = links.require(kernel.route, "ib0")
    shown = (link.mac, link.broadcast, links.permanent_mac(kernel.route, link))
    assert shown == (INFINIBAND.hex(":"),) * 3


def test_ipoib_child_is_made_and_read(kernel: Kernel) -> None:
    # IFLA_LINKINFO (18): IFLA_INFO_KIND (1), IFLA_INFO_DATA (2): IFLA_IPOIB_PKEY (1),
    # IFLA_IPOIB_MODE (2) connected, IFLA_IPOIB_UMCAST (3)
    info = bytes.fromhex(
        "2c001200 0a000100 69706f69 62000000 1c000200 06000100 01800000 06000200 01000000"
        "06000300 00000000"
    )
    named = attr(3, b"c\0")  # IFLA_IFNAME
    kernel.answers(refusal(0))
    kernel.answers(message(RTM_NEWLINK, bytes.fromhex(IFINFOMSG) + named + info, 2))
    route, netns = kernel.route, NetworkNamespace(9, "/run/netns/pod")
    settings = {"PKEY": 0x8001, "MODE": "connected", "UMCAST": 0}
    named_settings = [(f"IFLA_IPOIB_{key}", value) for key, value in settings.items()]
    of_parent = PF, "ipoib", named_settings
    child = link_changes.make_child(route, route, netns, "c", 0x70ABCDEF, *of_parent)
    assert (child.kind, child.pkey, child.mode, child.umcast) == (
        "ipoib",
        0x8001,
        "connected",
        False,
    )
    request, _ = kernel.requests
    numbers = {5: 7, 28: 9}  # IFLA_LINK, IFLA_NET_NS_FD
    made = b"".join(attr(kind, struct.pack("=I", number)) for kind, number in numbers.items())
    header = struct.pack("=BxHiII", 0, 0, 0x70ABCDEF, 0, 0)  # struct ifinfomsg
    assert request[16:] == header + named + made + info


def test_ipvlan_child_is_made_and_read(kernel: Kernel) -> None:
    # IFLA_LINKINFO (18): IFLA_INFO_KIND (1), IFLA_INFO_DATA (2): IFLA_IPVLAN_MODE (1) l3s (2)
    info = bytes.fromhex("1c001200 0b000100 6970766c 616e0000 0c000200 06000100 02000000")
    named = attr(3, b"c\0")  # IFLA_IFNAME
    kernel.answers(refusal(0))
    kernel.answers(message(RTM_NEWLINK, bytes.fromhex(IFINFOMSG) + named + info, 2))
    route, netns = kernel.route, NetworkNamespace(9, "/run/netns/pod")
    settings = [("IFLA_IPVLAN_MODE", 2)]
    child = link_changes.make_child(route, route, netns, "c", 0x70ABCDEF, PF, "ipvlan", settings)
    assert (child.kind, child.mode) == ("ipvlan", "l3s")
    assert kernel.requests[0].endswith(info)


def test_vlan_id_is_read(kernel: Kernel) -> None:
    # IFLA_INFO_DATA (2): IFLA_VLAN_ID (1) 7
    info = bytes.fromhex("1c001200 09000100 766c616e 00000000 0c000200 06000100 07000000")
    kernel.answers(message(RTM_NEWLINK, bytes.fromhex(IFINFOMSG) + attr(3, b"c\0") + info, 1))
    assert links.require(kernel.route, "c").vlan == 7


def test_new_child_gets_its_name_and_alias_last(kernel: Kernel) -> None:
    kernel.answers(refusal(0))
    link_changes.finish(kernel.route, LINK, "net1", "podfabric:00", 2044)
    mtu = attr(4, struct.pack("=I", 2044))  # IFLA_MTU; then IFLA_IFNAME, IFLA_IFALIAS
    texts = attr(3, b"net1\0") + attr(20, b"podfabric:00\0")
    assert kernel.requests[0].endswith(mtu + texts)


def test_link_local_address_is_not_generated() -> None:
    # IFLA_AF_SPEC (26), AF_INET6 (10), IFLA_INET6_ADDR_GEN_MODE (8): IN6_ADDR_GEN_MODE_NONE (1)
    change = link_changes.no_generated_address(LINK)
    assert _encoded(change) == "10001a00 0c000a00 05000800 01000000"


def test_names_of_any_bytes_are_set_and_read(kernel: Kernel) -> None:
    name = b"\xff\xfe".decode(errors="surrogateescape")
    kernel.answers(refusal(0))
    link_changes.add_altname(kernel.route, LINK, name)
    # IFLA_PROP_LIST (52) | NLA_F_NESTED, IFLA_ALT_IFNAME (53)
    altnames = bytes.fromhex("0c003480 07003500 fffe0000")
    assert kernel.requests[0].endswith(altnames)
    body = bytes.fromhex(IFINFOMSG) + attr(3, b"\xff\xfe\0") + attr(20, b"\xff\xfe\0") + altnames
    kernel.answers(message(RTM_NEWLINK, body, 2))
    link = links.require(kernel.route, "a")
    assert (link.name, link.alias, link.altnames) == (name, name, (name,))


def test_settings_and_programs_are_read(kernel: Kernel) -> None:
    programs = struct.pack("=HHBxxxHHIHHI", 5, 2, 4, 8, 5, 3, 8, 6, 4)  # attached, ids of two modes
    body = bytes.fromhex(IFINFOMSG) + attr(3, b"a\0") + attr(13, struct.pack("=I", 1000))
    body += attr(17, b"\1") + attr(41, struct.pack("=I", 65536)) + attr(43, programs)
    kernel.answers(message(RTM_NEWLINK, body))
    link = links.require(kernel.route, "a")
    assert link.settings == {"txqueuelen": 1000, "mode": 1, "gso_max_size": 65536}
    assert link.xdp == ("generic", "driver")
    # IFLA_XDP | NLA_F_NESTED: IFLA_XDP_FD -1, IFLA_XDP_FLAGS XDP_FLAGS_SKB_MODE
    detached = link_changes.without_xdp(link, "generic")
    assert _encoded(detached) == "14002b80 08000100 ffffffff 08000300 02000000"


def test_vlan_of_a_vf_has_all_bytes_of_the_struct(kernel: Kernel) -> None:
    kernel.answers(refusal(0))
    vfs.set_vlan(kernel.route, PF, 3, 100, 5, "802.1ad")
    # IFLA_VFINFO_LIST (22), IFLA_VF_INFO (1), IFLA_VF_VLAN_LIST (12), IFLA_VF_VLAN_INFO (1):
    # struct ifla_vf_vlan_info, whose protocol is big endian
    expected = "20001600 1c000100 18000c00 14000100 03000000 64000000 05000000 88a80000"
    assert kernel.requests[0].endswith(bytes.fromhex(expected))


def test_address_of_a_vf_has_all_bytes_of_the_struct(kernel: Kernel) -> None:
    kernel.answers(refusal(0))
    vfs.set_mac(kernel.route, PF, 3, MAC)
    # IFLA_VFINFO_LIST (22), IFLA_VF_INFO (1), IFLA_VF_MAC (1): struct ifla_vf_mac
    expected = "30001600 2c000100 28000100 03000000 020000000007" + "00" * 26
    assert kernel.requests[0].endswith(bytes.fromhex(expected))


def test_pyroute2_is_imported_without_what_is_no_message() -> None:
    code = "import host.netlink.vfs, host.netlink.rdma, sys; "
    code += "print('pyroute2.netlink.rtnl.ifinfmsg' in sys.modules,"
    code += " 'pyroute2.iproute' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True False\n"
