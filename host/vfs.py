"""Reads and sets a PF's settings of its VFs (IFLA_VFINFO_LIST of rtnetlink).

The structs are those of linux/if_link.h. Nothing is sent twice but while the PF's driver is busy,
and nothing is read back: some drivers accept a setting and keep the old one, so who needs to know
reads afterwards.
"""

import errno
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from base.waiting import wait_until
from host import links, netlink
from host.errors import HostError, explained
from host.links import ARPHRD_INFINIBAND, Link
from host.netlink import (
    HEADER,
    NLM_F_ACK,
    NetlinkError,
    Rtnetlink,
    attribute,
    attributes,
    trying,
)
from host.rtnetlink import (
    IFINFOMSG,
    IFLA_EXT_MASK,
    RTEXT_FILTER_SKIP_STATS,
    RTM_GETLINK,
    RTM_SETLINK,
)

# linux/if_link.h
IFLA_NUM_VF, IFLA_VFINFO_LIST = 21, 22
IFLA_VF_INFO = 1
IFLA_VF_MAC, IFLA_VF_VLAN, IFLA_VF_TX_RATE, IFLA_VF_SPOOFCHK = 1, 2, 3, 4
IFLA_VF_LINK_STATE, IFLA_VF_RATE, IFLA_VF_TRUST = 5, 6, 9
IFLA_VF_IB_NODE_GUID, IFLA_VF_IB_PORT_GUID, IFLA_VF_VLAN_LIST = 10, 11, 12
IFLA_VF_VLAN_INFO = 1
RTEXT_FILTER_VF = 0x1  # linux/rtnetlink.h

_U32 = struct.Struct("=I")
_MAC = struct.Struct("=I32s")  # struct ifla_vf_mac, MAX_ADDR_LEN bytes of address
_SETTING = struct.Struct("=II")  # ifla_vf_spoofchk, ifla_vf_trust, ifla_vf_link_state, ..._tx_rate
_VLAN = struct.Struct("=III")  # ifla_vf_vlan: VF, VLAN, QoS
_VLAN_INFO = struct.Struct("=III2s2x")  # ifla_vf_vlan_info: the protocol is big endian
_RATE = struct.Struct("=III")  # ifla_vf_rate: VF, minimum, maximum
_GUID = struct.Struct("@IQ")  # ifla_vf_guid: with the compiler's padding before the number

PROTOCOLS = {"802.1q": 0x8100, "802.1ad": 0x88A8}  # ETH_P_8021Q, ETH_P_8021AD
LINK_STATES = ("auto", "enable", "disable")  # IFLA_VF_LINK_STATE_*
UNREPORTED = 0xFFFFFFFF  # rtnl_fill_vfinfo's default for what a driver does not report

BUSY = (errno.EBUSY, errno.EAGAIN)  # i40e, ice and others while a VF resets
BUSY_TIME, PAUSE = 2.0, 0.1  # seconds; a reset takes some hundred milliseconds
UNSUPPORTED = (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)


class VF(msgspec.Struct, frozen=True, kw_only=True):
    """A VF in the PF's IFLA_VFINFO_LIST. None means that the driver does not report it."""

    index: int
    mac: str  # admin MAC, lower case; on InfiniBand 20 bytes, which are the PF's own address
    vlan: int  # 0: no VLAN
    qos: int
    proto: str  # "802.1q", "802.1ad"
    min_tx_rate: int  # Mbit/s, 0: no minimum
    max_tx_rate: int
    spoofchk: bool | None
    trust: bool | None
    link_state: str | None  # "auto", "enable", "disable"
    node_guid: str | None  # "00:11:22:33:44:55:66:77"; None also for zeros
    port_guid: str | None


def read(route: Rtnetlink, pf: Link, index: int) -> VF:
    """The settings of a VF. Raises HostError if the PF's driver does not report that VF.

    GUIDs are reported since Linux 5.5, by drivers with ndo_get_vf_guid (mlx5's IPoIB).
    """
    return _among(_answer(route, pf), pf, index)


def find(route: Rtnetlink, pf: str, index: int) -> tuple[Link, VF] | None:
    """The interface `pf` and what `read` tells of its VF, by one question; None without it."""
    answer = links.message_of(route, pf, RTEXT_FILTER_VF)
    if answer is None:
        return None
    # The list of many VFs has a wrong length, so what is behind it cannot be found.
    link = links.of_message(answer[: _list_in(answer).start])
    return link, _among(answer, link, index)


def every(route: Rtnetlink, pf: Link) -> list[VF]:
    """The settings of all VFs that the PF's driver reports; [] if `pf` is not a PF."""
    return [_vf(fields, pf) for fields in _fields(_answer(route, pf))]


def set_mac(route: Rtnetlink, pf: Link, index: int, mac: str) -> None:
    """Set the administrative hardware address, "aa:bb:cc:dd:ee:ff".

    Some drivers report the old one for a while: read it back.
    """
    address = bytes.fromhex(mac.replace(":", ""))
    what = _what(f"hardware address {mac}", pf, index)
    _set(route, pf, what, "", attribute(IFLA_VF_MAC, _MAC.pack(index, address)))


def set_vlan(route: Rtnetlink, pf: Link, index: int, vlan: int, qos: int, proto: str) -> None:
    """Set the VLAN tag for the VF's frames: VLAN (0 for no tag), priority, "802.1q" or "802.1ad".

    Drivers that refuse IFLA_VF_VLAN_LIST get the older attribute, which is only for 802.1q.
    """
    what = _what(f"vlan {vlan}", pf, index)
    tag = _VLAN_INFO.pack(index, vlan, qos, PROTOCOLS[proto].to_bytes(2, "big"))
    refused = _tried(route, pf, attribute(IFLA_VF_VLAN_LIST, attribute(IFLA_VF_VLAN_INFO, tag)))
    if refused is None:
        return
    if proto != "802.1q":
        raise _failure(what, refused, f"its driver cannot do {proto}, only 802.1q")
    if refused.code not in UNSUPPORTED:
        raise _failure(what, refused)
    remedy = "its driver cannot tag for VFs, or not in switchdev mode"
    _set(route, pf, what, remedy, attribute(IFLA_VF_VLAN, _VLAN.pack(index, vlan, qos)))


def set_rate(route: Rtnetlink, pf: Link, index: int, minimum: int, maximum: int) -> None:
    """Set the VF's guaranteed and maximum transmit rates in Mbit/s; 0 means none."""
    what = _what(f"min_tx_rate {minimum} and max_tx_rate {maximum}", pf, index)
    refused = _tried(route, pf, attribute(IFLA_VF_RATE, _RATE.pack(index, minimum, maximum)))
    if refused is None:
        return
    if refused.code == errno.EINVAL and not pf.carrier:
        # igb, ixgbe and i40e compare the rate with the speed of the link, and refuse without one.
        remedy = f'"{pf.name}" has no carrier: see its cable and the switch'
        if not pf.up:
            remedy = f'"{pf.name}" is down: ip link set {pf.name} up'
        raise _failure(what, refused, f"{remedy} (drivers need the link's speed)", (errno.EINVAL,))
    remedy = "its driver cannot limit a VF to that"
    if minimum:
        remedy = "many drivers, Intel's among them, cannot do min_tx_rate: leave it out"
    raise _failure(what, refused, remedy, (errno.EINVAL, *UNSUPPORTED))


def set_spoofchk(route: Rtnetlink, pf: Link, index: int, on: bool) -> None:
    """Set whether the PF drops frames that the VF sends from another hardware address."""
    what = _what(f"spoofchk {_word(on)}", pf, index)
    remedy = "its driver has no spoofchk: leave it out"
    _set(route, pf, what, remedy, attribute(IFLA_VF_SPOOFCHK, _SETTING.pack(index, on)))


def set_trust(route: Rtnetlink, pf: Link, index: int, on: bool) -> None:
    """Set whether the VF may change its hardware address, be promiscuous and so on."""
    what = _what(f"trust {_word(on)}", pf, index)
    remedy = "its driver does not support trusted VFs: leave trust out"
    _set(route, pf, what, remedy, attribute(IFLA_VF_TRUST, _SETTING.pack(index, on)))


def set_link_state(route: Rtnetlink, pf: Link, index: int, state: str) -> None:
    """Set the VF's link: as the PF's ("auto"), up ("enable") or down ("disable")."""
    what = _what(f"link_state {state}", pf, index)
    remedy = f'its driver cannot set a VF\'s link to "{state}"'
    wanted = attribute(IFLA_VF_LINK_STATE, _SETTING.pack(index, LINK_STATES.index(state)))
    _set(route, pf, what, remedy, wanted, against=(errno.EINVAL, *UNSUPPORTED))


def set_guids(route: Rtnetlink, pf: Link, index: int, node: str | None, port: str | None) -> None:
    """Set an InfiniBand VF's GUIDs, "00:11:22:33:44:55:66:77"; None leaves a GUID unchanged.

    The VF's driver reads them when it binds. Each GUID has an IFLA_VF_INFO of its own in the
    message: if one has two, the kernel sets only the first (do_setvfinfo, net/core/rtnetlink.c).
    """
    guids = [("node", IFLA_VF_IB_NODE_GUID, node), ("port", IFLA_VF_IB_PORT_GUID, port)]
    to_set = [(name, kind, guid) for name, kind, guid in guids if guid is not None]
    if not to_set:
        return
    what = _what(" and ".join(f"{name} GUID {guid}" for name, _, guid in to_set), pf, index)
    remedy = "GUIDs are for InfiniBand, and for drivers that can set them (mlx5)"
    wanted = [
        attribute(kind, _GUID.pack(index, int(guid.replace(":", ""), 16)))
        for _, kind, guid in to_set
    ]
    _set(route, pf, what, remedy, *wanted)


def _what(setting: str, pf: Link, index: int) -> str:
    return f'setting {setting} of VF {index} of "{pf.name}"'


def _word(on: bool) -> str:
    return "on" if on else "off"


def _set(
    route: Rtnetlink,
    pf: Link,
    what: str,
    remedy: str,
    *wanted: bytes,
    against: Sequence[int] = UNSUPPORTED,
) -> None:
    """Set these attributes of VFs. Raises HostError, with the remedy for errnos in `against`."""
    refused = _tried(route, pf, *wanted)
    if refused is not None:
        raise _failure(what, refused, remedy, against)


def _failure(
    what: str, refused: NetlinkError, remedy: str = "", against: Sequence[int] = UNSUPPORTED
) -> HostError:
    words = [refused.words, remedy if refused.code in against else ""]
    return explained(what, refused.code, ": ".join(filter(None, words)))


def _tried(route: Rtnetlink, pf: Link, *wanted: bytes) -> NetlinkError | None:
    """Send one RTM_SETLINK; repeat it while the driver is busy. Returns the last refusal."""
    infos = b"".join(attribute(IFLA_VF_INFO, info) for info in wanted)
    request = IFINFOMSG.pack(0, 0, pf.index, 0, 0) + attribute(IFLA_VFINFO_LIST, infos)
    refusal: NetlinkError | None = None

    def is_answered() -> bool:
        nonlocal refusal
        try:
            route.ask(RTM_SETLINK, request, NLM_F_ACK)
        except NetlinkError as refused:
            refusal = refused
            return refused.code not in BUSY
        refusal = None
        return True

    wait_until(is_answered, BUSY_TIME, PAUSE)
    return refusal


def _among(answer: bytes, pf: Link, index: int) -> VF:
    for fields in _fields(answer):
        if _index(fields) == index:
            return _vf(fields, pf)
    raise HostError(f'"{pf.name}" has no VF {index}')


def _answer(route: Rtnetlink, pf: Link) -> bytes:
    """The PF's link message with its VFs, without statistics."""
    mask = _U32.pack(RTEXT_FILTER_VF | RTEXT_FILTER_SKIP_STATS)
    query = IFINFOMSG.pack(0, 0, pf.index, 0, 0) + attribute(IFLA_EXT_MASK, mask)
    with trying(f'reading the VFs of "{pf.name}"'):
        _, answer = route.ask(RTM_GETLINK, query)
    return answer


class _VFList(NamedTuple):
    """The list of VFs in a link message: how many, and where the first and the last one are."""

    number: int
    start: int
    stop: int


def _list_in(answer: bytes) -> _VFList:
    """The list in a message, an empty one if it has none.

    The kernel writes the list's length modulo 64 KiB (nla_nest_end), which about 300 VFs exceed.
    So the number of VFs ends the list, not its length.
    """
    number = 0
    for kind, start, stop in attributes(answer, HEADER.size + IFINFOMSG.size, len(answer)):
        if kind == IFLA_NUM_VF:
            (number,) = _U32.unpack_from(answer, start)
        elif kind == IFLA_VFINFO_LIST:
            return _VFList(number or len(answer), start, len(answer) if number else stop)
    return _VFList(0, len(answer), len(answer))


def _fields(answer: bytes) -> Iterator[dict[int, bytes]]:
    """The attributes of each VF, by type."""
    number, start, stop = _list_in(answer)
    for _, (entry, first, last) in zip(
        range(number), attributes(answer, start, stop), strict=False
    ):
        if entry != IFLA_VF_INFO:
            return
        yield netlink.fields(answer[first:last])


def _index(fields: Mapping[int, bytes]) -> int:
    """The number of the VF: every struct among its attributes begins with it."""
    return int(_U32.unpack_from(fields[IFLA_VF_MAC])[0])


def _vf(fields: Mapping[int, bytes], pf: Link) -> VF:
    _, mac = _MAC.unpack_from(fields[IFLA_VF_MAC])
    _, vlan, qos = _VLAN.unpack_from(fields[IFLA_VF_VLAN])
    proto = PROTOCOLS["802.1q"]
    tags = fields.get(IFLA_VF_VLAN_LIST, b"")
    for kind, start, _ in attributes(tags, 0, len(tags)):
        if kind == IFLA_VF_VLAN_INFO:
            _, vlan, qos, wire = _VLAN_INFO.unpack_from(tags, start)
            proto = int.from_bytes(wire, "big")
    state = _setting(fields, IFLA_VF_LINK_STATE)
    rates = fields.get(IFLA_VF_RATE)
    if rates is not None:
        _, minimum, maximum = _RATE.unpack_from(rates)
    else:
        minimum, maximum = 0, _setting(fields, IFLA_VF_TX_RATE) or 0
    spoofchk, trust = _setting(fields, IFLA_VF_SPOOFCHK), _setting(fields, IFLA_VF_TRUST)
    return VF(
        index=_index(fields),
        mac=mac[: 20 if pf.link_type == ARPHRD_INFINIBAND else 6].hex(":"),
        vlan=vlan,
        qos=qos,
        proto="802.1ad" if proto == PROTOCOLS["802.1ad"] else "802.1q",
        min_tx_rate=minimum,
        max_tx_rate=maximum,
        spoofchk=None if spoofchk is None else bool(spoofchk),
        trust=None if trust is None else bool(trust),
        link_state=LINK_STATES[state] if state is not None and state < len(LINK_STATES) else None,
        node_guid=_guid(fields.get(IFLA_VF_IB_NODE_GUID)),
        port_guid=_guid(fields.get(IFLA_VF_IB_PORT_GUID)),
    )


def _setting(fields: Mapping[int, bytes], kind: int) -> int | None:
    """The second word of a struct of two; None if it is absent or not reported."""
    field = fields.get(kind)
    if field is None:
        return None
    value = int(_SETTING.unpack_from(field)[1])
    return None if value == UNREPORTED else value


def _guid(field: bytes | None) -> str | None:
    """A GUID as text, big endian, from a number in host order; None for zero."""
    number = int(_GUID.unpack_from(field)[1]) if field is not None else 0
    return number.to_bytes(8, "big").hex(":") if number else None
