"""Reads and sets a PF's settings of its VFs (IFLA_VFINFO_LIST of rtnetlink).

The structs are those of linux/if_link.h. A request is repeated while the PF's driver is busy. Some
drivers accept a setting and keep the old value. This module does not read settings back.
"""

import errno
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pyroute2.netlink import NLM_F_ACK
from pyroute2.netlink.rtnl import RTM_GETLINK, RTM_SETLINK

from base.interrupts import wait_until
from host.errors import HostError, explained
from host.netlink import links
from host.netlink.links import ARPHRD_INFINIBAND, Link
from host.netlink.messages import LinkMessage, PFMessage, attributes, message
from host.netlink.sockets import NetlinkError, Rtnetlink, trying

PROTOCOLS = {"802.1q": 0x8100, "802.1ad": 0x88A8}  # ETH_P_8021Q, ETH_P_8021AD
LINK_STATES = ("auto", "enable", "disable")  # IFLA_VF_LINK_STATE_*
UNREPORTED = 0xFFFFFFFF  # rtnl_fill_vfinfo's default for settings that a driver does not report

BUSY = (errno.EBUSY, errno.EAGAIN)  # of i40e, ice and similar drivers while a VF resets
BUSY_TIME, PAUSE = 2.0, 0.1  # seconds; a reset takes some hundred milliseconds
UNSUPPORTED = (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)


class VF(msgspec.Struct, frozen=True, kw_only=True):
    """A VF in the PF's IFLA_VFINFO_LIST. `None` is a value that the driver does not report."""

    index: int
    mac: str  # the PF's setting, lower case; on InfiniBand 20 bytes, the PF's own address
    vlan: int  # 0: no VLAN
    qos: int
    proto: str  # "802.1q", "802.1ad"
    min_tx_rate: int  # Mbit/s, 0: no minimum
    max_tx_rate: int
    spoofchk: bool | None
    trust: bool | None
    link_state: str | None  # "auto", "enable", "disable"
    node_guid: str | None  # "00:11:22:33:44:55:66:77"; `None` also for zeros
    port_guid: str | None


def read(route: Rtnetlink, pf: Link, index: int) -> VF:
    """The settings of a VF. Raises HostError if the PF's driver does not report that VF."""
    with trying(f'reading the VFs of "{pf.name}"'):
        answer = route.ask(RTM_GETLINK, links.question(index=pf.index, form=PFMessage))
    return _among(answer, pf, index)


def find(route: Rtnetlink, pf: str, index: int) -> tuple[Link, VF] | None:
    """The interface `pf` and one VF's settings, by one request; `None` if `pf` does not exist."""
    answer = links.message_of(route, pf, PFMessage)
    if answer is None:
        return None
    link = links.of_message(answer)
    return link, _among(answer, link, index)


def set_mac(route: Rtnetlink, pf: Link, index: int, mac: str) -> None:
    """Set the administrative address. Some drivers report the old address for a while."""
    address = bytes.fromhex(mac.replace(":", ""))
    what = _what(f"hardware address {mac}", pf, index)
    _set(route, pf, what, "", ("IFLA_VF_MAC", {"vf": index, "mac": address}))


def set_vlan(route: Rtnetlink, pf: Link, index: int, vlan: int, qos: int, proto: str) -> None:
    """Set the VLAN tag for the VF's frames: VLAN (0 for no tag), priority, protocol."""
    what = _what(f"vlan {vlan}", pf, index)
    tag = {"vf": index, "vlan": vlan, "qos": qos}
    tags = [("IFLA_VF_VLAN_INFO", {**tag, "proto": PROTOCOLS[proto]})]
    refused = _tried(route, pf, ("IFLA_VF_VLAN_LIST", {"attrs": tags}))
    if refused is None:
        return
    if proto != "802.1q":
        raise _failure(what, refused, f"the PF's driver has no {proto}, only 802.1q")
    if refused.code not in UNSUPPORTED:
        raise _failure(what, refused)
    # The driver may have the older attribute, which is only for 802.1q.
    remedy = "the PF's driver cannot set VLANs of VFs, perhaps only in switchdev mode"
    _set(route, pf, what, remedy, ("IFLA_VF_VLAN", tag))


def set_rate(route: Rtnetlink, pf: Link, index: int, minimum: int, maximum: int) -> None:
    """Set the VF's guaranteed and maximum transmit rates in Mbit/s; 0 means no limit."""
    what = _what(f"min_tx_rate {minimum} and max_tx_rate {maximum}", pf, index)
    rates = {"vf": index, "min_tx_rate": minimum, "max_tx_rate": maximum}
    refused = _tried(route, pf, ("IFLA_VF_RATE", rates))
    if refused is None:
        return
    if refused.code == errno.EINVAL and not pf.carrier:
        # igb, ixgbe and i40e compare the rate with the link's speed, and refuse without a speed.
        remedy = f'"{pf.name}" has no carrier: check its cable and the switch'
        if not pf.up:
            remedy = f'"{pf.name}" is down: run `ip link set {pf.name} up`'
        raise _failure(what, refused, f"{remedy} (drivers need the link's speed)", (errno.EINVAL,))
    remedy = "the PF's driver cannot set this rate"
    if minimum:
        remedy = "many drivers, such as Intel's, have no min_tx_rate: remove min_tx_rate"
    raise _failure(what, refused, remedy, (errno.EINVAL, *UNSUPPORTED))


def set_spoofchk(route: Rtnetlink, pf: Link, index: int, on: bool) -> None:
    """Set whether the PF drops frames that the VF sends from another hardware address."""
    what = _what(f"spoofchk {_word(on)}", pf, index)
    remedy = "the PF's driver has no spoofchk: remove spoofchk"
    _set(route, pf, what, remedy, ("IFLA_VF_SPOOFCHK", {"vf": index, "spoofchk": int(on)}))


def set_trust(route: Rtnetlink, pf: Link, index: int, on: bool) -> None:
    """Set whether the VF may, for example, change its hardware address or be promiscuous."""
    what = _what(f"trust {_word(on)}", pf, index)
    remedy = "the PF's driver does not support trusted VFs: remove trust"
    _set(route, pf, what, remedy, ("IFLA_VF_TRUST", {"vf": index, "trust": int(on)}))


def set_link_state(route: Rtnetlink, pf: Link, index: int, state: str) -> None:
    """Set the VF's link: like the PF's ("auto"), up ("enable") or down ("disable")."""
    what = _what(f"link_state {state}", pf, index)
    remedy = f"the PF's driver cannot set a VF's link to \"{state}\""
    value = ("IFLA_VF_LINK_STATE", {"vf": index, "link_state": LINK_STATES.index(state)})
    _set(route, pf, what, remedy, value, against=(errno.EINVAL, *UNSUPPORTED))


def set_guids(route: Rtnetlink, pf: Link, index: int, node: str | None, port: str | None) -> None:
    """Set an InfiniBand VF's GUIDs, "00:11:22:33:44:55:66:77". `None` leaves a GUID unchanged.

    The VF's driver reads GUIDs when it is bound. Each GUID has a separate IFLA_VF_INFO, because the
    kernel sets only the first GUID in an IFLA_VF_INFO (do_setvfinfo).
    """
    guids = [("node", "IFLA_VF_IB_NODE_GUID", node), ("port", "IFLA_VF_IB_PORT_GUID", port)]
    to_set = [(name, kind, guid) for name, kind, guid in guids if guid is not None]
    if not to_set:
        return
    what = _what(" and ".join(f"{name} GUID {guid}" for name, _, guid in to_set), pf, index)
    remedy = "only InfiniBand has GUIDs, and only some drivers can set them (mlx5)"
    values = [
        (kind, {"vf": index, "guid": int(guid.replace(":", ""), 16)}) for _, kind, guid in to_set
    ]
    _set(route, pf, what, remedy, *values)


def _what(setting: str, pf: Link, index: int) -> str:
    return f'setting {setting} of VF {index} of "{pf.name}"'


def _word(on: bool) -> str:
    return "on" if on else "off"


def _set(
    route: Rtnetlink,
    pf: Link,
    what: str,
    remedy: str,
    *values: tuple[str, object],
    against: Sequence[int] = UNSUPPORTED,
) -> None:
    """Set these attributes of VFs. Raises HostError, with `remedy` if `against` has the errno."""
    refused = _tried(route, pf, *values)
    if refused is not None:
        raise _failure(what, refused, remedy, against)


def _failure(
    what: str, refused: NetlinkError, remedy: str = "", against: Sequence[int] = UNSUPPORTED
) -> HostError:
    words = [refused.words, remedy if refused.code in against else ""]
    return explained(what, refused.code, ": ".join(filter(None, words)))


def _tried(route: Rtnetlink, pf: Link, *values: tuple[str, object]) -> NetlinkError | None:
    """Send an RTM_SETLINK, again while the driver is busy. Returns the last refusal, if any."""
    infos = {"attrs": [("IFLA_VF_INFO", {"attrs": [value]}) for value in values]}
    refusal: NetlinkError | None = None

    def is_answered() -> bool:
        nonlocal refusal
        try:
            request = message(LinkMessage, [("IFLA_VFINFO_LIST", infos)], index=pf.index)
            route.ask(RTM_SETLINK, request, NLM_F_ACK)
        except NetlinkError as refused:
            refusal = refused
            return refused.code not in BUSY
        refusal = None
        return True

    wait_until(is_answered, BUSY_TIME, PAUSE)
    return refusal


def _among(answer: PFMessage, pf: Link, index: int) -> VF:
    # The VFs are in the order of their numbers, but some may be missing (rtnl_fill_vf).
    for info in reversed(answer["vfs"][: index + 1]):
        vf = _vf(info, pf)
        if vf.index == index:
            return vf
    raise HostError(f'"{pf.name}" has no VF {index}')


def _vf(info: Any, pf: Link) -> VF:  # noqa: ANN401 - pyroute2 is not typed
    info.decode()
    shown = attributes(info)
    mac = shown["IFLA_VF_MAC"]
    tag = shown["IFLA_VF_VLAN"]
    if "IFLA_VF_VLAN_LIST" in shown:
        tag = shown["IFLA_VF_VLAN_LIST"].get_attr("IFLA_VF_VLAN_INFO", tag)
    state = _setting(shown, "IFLA_VF_LINK_STATE", "link_state")
    rates = shown.get("IFLA_VF_RATE")
    if rates is not None:
        minimum, maximum = rates["min_tx_rate"], rates["max_tx_rate"]
    else:
        minimum, maximum = 0, _setting(shown, "IFLA_VF_TX_RATE", "tx_rate") or 0
    spoofchk = _setting(shown, "IFLA_VF_SPOOFCHK", "spoofchk")
    trust = _setting(shown, "IFLA_VF_TRUST", "trust")
    return VF(
        index=mac["vf"],
        mac=mac["mac"][: 20 if pf.link_type == ARPHRD_INFINIBAND else 6].hex(":"),
        vlan=tag["vlan"],
        qos=tag["qos"],
        proto="802.1ad" if "proto" in tag and tag["proto"] == PROTOCOLS["802.1ad"] else "802.1q",
        min_tx_rate=minimum,
        max_tx_rate=maximum,
        spoofchk=None if spoofchk is None else bool(spoofchk),
        trust=None if trust is None else bool(trust),
        link_state=LINK_STATES[state] if state is not None and state < len(LINK_STATES) else None,
        node_guid=_guid(shown.get("IFLA_VF_IB_NODE_GUID")),
        port_guid=_guid(shown.get("IFLA_VF_IB_PORT_GUID")),
    )


def _setting(shown: Mapping[str, Any], kind: str, name: str) -> int | None:
    """The value in a struct; `None` if the value is absent or not reported."""
    value = int(shown[kind][name]) if kind in shown else UNREPORTED
    return None if value == UNREPORTED else value


def _guid(info: Any) -> str | None:  # noqa: ANN401
    """The text of a GUID from the kernel's number; `None` for zero."""
    number = int(info["guid"]) if info is not None else 0
    return number.to_bytes(8, "big").hex(":") if number else None
