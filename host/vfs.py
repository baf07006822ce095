"""The VFs of a PF, as the PF's netlink shows and sets them (IFLA_VFINFO_LIST of rtnetlink).

The structs are those of linux/if_link.h. Nothing is sent twice but while the PF's driver is busy,
and nothing is read back: some drivers accept a setting and keep the old one, so who needs to know
reads afterwards.
"""

import errno
import struct
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

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
_GUID = struct.Struct("@IQ")  # ifla_vf_guid: with the compiler's gap before the number

PROTOCOLS = {"802.1q": 0x8100, "802.1ad": 0x88A8}  # ETH_P_8021Q, ETH_P_8021AD
LINK_STATES = ("auto", "enable", "disable")  # IFLA_VF_LINK_STATE_*
UNREPORTED = 0xFFFFFFFF  # what rtnl_fill_vfinfo presets for drivers that do not tell

BUSY = (errno.EBUSY, errno.EAGAIN)  # i40e, ice and others while a VF resets
ATTEMPTS, PAUSE = 20, 0.1  # seconds: a reset takes some hundred milliseconds
UNSUPPORTED = (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)


class VF(msgspec.Struct, frozen=True, kw_only=True):
    """One VF in the PF's IFLA_VFINFO_LIST. None: the driver does not report it."""

    index: int
    mac: str  # admin MAC, lower case; on InfiniBand 20 bytes, which are the PF's own address
    vlan: int  # 0: none
    qos: int
    proto: str  # "802.1q", "802.1ad"
    min_tx_rate: int  # Mbit/s, 0: none
    max_tx_rate: int
    spoofchk: bool | None
    trust: bool | None
    link_state: str | None  # "auto", "enable", "disable"
    node_guid: str | None  # "00:11:22:33:44:55:66:77", None if all zero, too
    port_guid: str | None


def read(route: Rtnetlink, pf: Link, index: int) -> VF:
    """That VF of the PF. HostError if there is none, or its driver tells nothing of it.

    The kernel reports GUIDs since Linux 5.5, of drivers with ndo_get_vf_guid (mlx5's IPoIB).
    """
    for fields in _fields(_answer(route, pf)):
        if _index(fields) == index:
            return _vf(fields, pf)
    raise HostError(f'"{pf.name}" has no VF {index}')


def every(route: Rtnetlink, pf: Link) -> list[VF]:
    """All VFs of the PF that its driver tells of; none if it is no PF. As `read`."""
    return [_vf(fields, pf) for fields in _fields(_answer(route, pf))]


def set_mac(route: Rtnetlink, pf: Link, index: int, mac: str) -> None:
    """Set the administrative hardware address, "aa:bb:cc:dd:ee:ff".

    Some drivers take it and show the old one for a while: read it back.
    """
    address = bytes.fromhex(mac.replace(":", ""))
    what = _what(f"hardware address {mac}", pf, index)
    _set(route, pf, what, "", attribute(IFLA_VF_MAC, _MAC.pack(index, address)))


def set_vlan(route: Rtnetlink, pf: Link, index: int, vlan: int, qos: int, proto: str) -> None:
    """Have the PF tag what the VF sends: VLAN (0 ends it), priority, "802.1q" or "802.1ad".

    Drivers that refuse IFLA_VF_VLAN_LIST get the older attribute, which is 802.1q's only.
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
    """Set the transmit rates, in Mbit/s: what the VF is promised, and may not exceed; 0: none."""
    what = _what(f"min_tx_rate {minimum} and max_tx_rate {maximum}", pf, index)
    remedy = "its driver cannot limit a VF to that"
    if minimum:
        remedy = "many drivers, Intel's among them, cannot do min_tx_rate: leave it out"
    wanted = attribute(IFLA_VF_RATE, _RATE.pack(index, minimum, maximum))
    _set(route, pf, what, remedy, wanted, against=(errno.EINVAL, *UNSUPPORTED))


def set_spoofchk(route: Rtnetlink, pf: Link, index: int, on: bool) -> None:
    """Have the PF drop what the VF sends from another hardware address, or not."""
    what = _what(f"spoofchk {_word(on)}", pf, index)
    remedy = "its driver has no spoofchk: leave it out"
    _set(route, pf, what, remedy, attribute(IFLA_VF_SPOOFCHK, _SETTING.pack(index, on)))


def set_trust(route: Rtnetlink, pf: Link, index: int, on: bool) -> None:
    """Let the VF change its own hardware address, be promiscuous and the like, or not."""
    what = _what(f"trust {_word(on)}", pf, index)
    remedy = "its driver knows no trusted VFs: leave trust out"
    _set(route, pf, what, remedy, attribute(IFLA_VF_TRUST, _SETTING.pack(index, on)))


def set_link_state(route: Rtnetlink, pf: Link, index: int, state: str) -> None:
    """Set the VF's link as the PF's is ("auto"), up ("enable") or down ("disable")."""
    what = _what(f"link_state {state}", pf, index)
    remedy = f'its driver cannot set a VF\'s link to "{state}"'
    wanted = attribute(IFLA_VF_LINK_STATE, _SETTING.pack(index, LINK_STATES.index(state)))
    _set(route, pf, what, remedy, wanted, against=(errno.EINVAL, *UNSUPPORTED))


def set_guids(route: Rtnetlink, pf: Link, index: int, node: str | None, port: str | None) -> None:
    """Set an InfiniBand VF's GUIDs, "00:11:22:33:44:55:66:77"; None leaves one as it is.

    The VF's driver reads them when it binds. One message with two IFLA_VF_INFO: of two GUIDs in
    one, the kernel sets the first only (do_setvfinfo, net/core/rtnetlink.c).
    """
    guids = [("node", IFLA_VF_IB_NODE_GUID, node), ("port", IFLA_VF_IB_PORT_GUID, port)]
    given = [(name, kind, guid) for name, kind, guid in guids if guid is not None]
    if not given:
        return
    what = _what(" and ".join(f"{name} GUID {guid}" for name, _, guid in given), pf, index)
    remedy = "GUIDs are for InfiniBand, and for drivers that can set them (mlx5)"
    wanted = [
        attribute(kind, _GUID.pack(index, int(guid.replace(":", ""), 16)))
        for _, kind, guid in given
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
    """Have the PF set these attributes. HostError otherwise, with the remedy `against` some."""
    refused = _tried(route, pf, *wanted)
    if refused is not None:
        raise _failure(what, refused, remedy, against)


def _failure(
    what: str, refused: NetlinkError, remedy: str = "", against: Sequence[int] = UNSUPPORTED
) -> HostError:
    words = [refused.words, remedy if refused.code in against else ""]
    return explained(what, refused.code, ": ".join(filter(None, words)))


def _tried(route: Rtnetlink, pf: Link, *wanted: bytes) -> NetlinkError | None:
    """One RTM_SETLINK, for as long as the driver is busy. The kernel's refusal, if it stays."""
    infos = b"".join(attribute(IFLA_VF_INFO, one) for one in wanted)
    request = IFINFOMSG.pack(0, 0, pf.index, 0, 0) + attribute(IFLA_VFINFO_LIST, infos)
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE)
        try:
            route.ask(RTM_SETLINK, request, NLM_F_ACK)
        except NetlinkError as refused:
            last = refused
            if refused.code not in BUSY:
                break
        else:
            return None
    return last


def _answer(route: Rtnetlink, pf: Link) -> bytes:
    """The PF's link message with its VFs, without statistics."""
    mask = _U32.pack(RTEXT_FILTER_VF | RTEXT_FILTER_SKIP_STATS)
    question = IFINFOMSG.pack(0, 0, pf.index, 0, 0) + attribute(IFLA_EXT_MASK, mask)
    with trying(f'reading the VFs of "{pf.name}"'):
        _, answer = route.ask(RTM_GETLINK, question)
    return answer


def _fields(answer: bytes) -> Iterator[dict[int, bytes]]:
    """The attributes of each VF, by type.

    The kernel writes the list's length modulo 64 KiB (nla_nest_end), some 300 VFs, and goes on:
    so their number and what they are made of bounds them, not that length.
    """
    number = 0
    for kind, start, stop in attributes(answer, HEADER.size + IFINFOMSG.size, len(answer)):
        if kind == IFLA_NUM_VF:
            (number,) = _U32.unpack_from(answer, start)
        elif kind == IFLA_VFINFO_LIST:
            entries = attributes(answer, start, len(answer) if number else stop)
            for _, (entry, first, last) in zip(range(number or len(answer)), entries, strict=False):
                if entry != IFLA_VF_INFO:
                    return
                yield {field: answer[a:b] for field, a, b in attributes(answer, first, last)}
            return


def _index(fields: Mapping[int, bytes]) -> int:
    """Whose attributes these are: every struct among them begins with that."""
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
    """The second word of a struct of two; None if it is not there, or not reported."""
    field = fields.get(kind)
    if field is None:
        return None
    value = int(_SETTING.unpack_from(field)[1])
    return None if value == UNREPORTED else value


def _guid(field: bytes | None) -> str | None:
    """A number in host order as text, which is big endian."""
    number = int(_GUID.unpack_from(field)[1]) if field is not None else 0
    return number.to_bytes(8, "big").hex(":") if number else None
