"""Link messages in which the kernel tells of VFs."""

import struct

from host.links import Link
from tests.unit.host.kernel import message

RTM_NEWLINK = 16
PF = Link(index=7, name="ens1f0", kind="", link_type=1, mac="", broadcast="", mtu=1500, flags=0)
IB_PF = Link(
    index=7, name="ib0", kind="ipoib", link_type=32, mac="", broadcast="", mtu=2044, flags=0
)

# struct ifinfomsg: family, gap, type, index 7, flags, change
IFINFOMSG = "00 00 0000 07000000 00000000 00000000"


def attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(-len(payload) % 4)


def vf_info(index: int, mac: bytes, *, setting: int = 1, state: int = 1, guid: int = 0) -> bytes:
    """What Linux 6 tells of a VF, in its order (rtnl_fill_vfinfo), with statistics."""
    counters = b"".join(attribute(kind, struct.pack("=Q", 9)) for kind in range(1, 9))
    tag = struct.pack("=III", index, 100, 5) + b"\x88\xa8\0\0"  # ifla_vf_vlan_info
    return (
        attribute(1, struct.pack("=I", index) + mac.ljust(32, b"\0"))  # ifla_vf_mac
        + attribute(13, b"\xff" * 32)  # ifla_vf_broadcast, without an index
        + attribute(2, struct.pack("=III", index, 100, 5))  # ifla_vf_vlan
        + attribute(6, struct.pack("=III", index, 50, 1000))  # ifla_vf_rate
        + attribute(3, struct.pack("=II", index, 1000))  # ifla_vf_tx_rate
        + attribute(4, struct.pack("=II", index, setting))  # ifla_vf_spoofchk
        + attribute(5, struct.pack("=II", index, state))  # ifla_vf_link_state
        + attribute(7, struct.pack("=II", index, setting))  # ifla_vf_rss_query_en
        + attribute(9, struct.pack("=II", index, setting))  # ifla_vf_trust
        + attribute(10, struct.pack("=I4xQ", index, guid))  # ifla_vf_guid: node
        + attribute(11, struct.pack("=I4xQ", index, guid and guid + 1))  # ifla_vf_guid: port
        + attribute(12, attribute(1, tag))  # IFLA_VF_VLAN_LIST
        + attribute(8, counters)  # IFLA_VF_STATS
    )


def with_vfs(*infos: bytes, number: int = 1) -> bytes:
    """A link message with these VFs, as the kernel makes it: lengths are of 16 bits."""
    body = struct.pack("=BxHiII", 0, 1, 7, 0, 0) + attribute(3, b"ens1f0\0")  # IFLA_IFNAME
    listed = b"".join(attribute(1, info) for info in infos)  # IFLA_VF_INFO
    body += attribute(21, struct.pack("=I", len(infos)))  # IFLA_NUM_VF
    body += struct.pack("=HH", (4 + len(listed)) & 0xFFFF, 22) + listed  # IFLA_VFINFO_LIST
    return message(RTM_NEWLINK, body + attribute(26, bytes(8)), number)  # IFLA_AF_SPEC
