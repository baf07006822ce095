"""What the values of a network configuration of type `sriov` mean, each looked at by itself.

None and "" are as good as not given, and come back as None, "" or (). Every function raises
CNIError 7 (4 of what came by CNI_ARGS) that names the key or place, and the remedy.
"""

import re
from typing import NamedTuple

import msgspec

from cni.spec.config import require_interface_name
from cni.spec.errors import CNIError, Code, invalid_config

VLAN_PROTOCOLS = ("802.1q", "802.1ad")
LINK_STATES = ("auto", "enable", "disable")
HIGHEST_VLAN = 4094
HIGHEST_QOS = 7
HIGHEST_RATE = 0xFFFFFFFF  # Mbit/s, struct ifla_vf_rate
SMALLEST_MTU, LARGEST_MTU = 68, 65535  # of IPv4, and of its length field
CNI_ARGS_MAC = "CNI_ARGS MAC"  # a place, as an error names it


class Vlan(msgspec.Struct, frozen=True):
    """The VLAN a VF's frames are tagged with; id 0 takes the tag off."""

    id: int
    qos: int
    proto: str  # "802.1q", "802.1ad"


class WrittenValue(NamedTuple):
    """A value, and the place it was given at, as an error names it. ("", "") if nowhere."""

    place: str
    value: str


def masters(given: str | list[str] | None) -> tuple[str, ...]:
    """Names of interfaces, each once, as `master` has one or several of them."""
    names = (given,) if isinstance(given, str) else tuple(dict.fromkeys(given or ()))
    if names in ((), ("",)):
        return ()
    for name in names:
        require_interface_name(name, "master")
    return names


def vlan(number: int | None, qos: int | None, proto: str | None) -> Vlan | None:
    """The VLAN of `vlan`, `vlanQoS` and `vlanProto`, of which the first is needed by the others."""
    if number is None:
        for key, value in (("vlanQoS", qos), ("vlanProto", proto)):
            if value not in (None, ""):
                raise invalid_config(f'"{key}" needs "vlan": set that as well, or remove "{key}"')
        return None
    if not 0 <= number <= HIGHEST_VLAN:
        raise invalid_config(
            f'"vlan": {number} is out of range: 1 to {HIGHEST_VLAN}, 0 for no tag; without the '
            "key the VLAN stays as it is"
        )
    qos = qos or 0
    if not 0 <= qos <= HIGHEST_QOS:
        raise invalid_config(f'"vlanQoS": {qos} is out of range: 0 to {HIGHEST_QOS}')
    proto = proto.lower() if proto else VLAN_PROTOCOLS[0]
    if proto not in VLAN_PROTOCOLS:
        raise invalid_config(f'"vlanProto": "{proto}" is not {_either(VLAN_PROTOCOLS)}')
    if number == 0 and qos:
        raise invalid_config(f'"vlanQoS": {qos} needs a "vlan" of 1 to {HIGHEST_VLAN}, not 0')
    if number == 0 and proto != VLAN_PROTOCOLS[0]:
        raise invalid_config(f'"vlanProto": "{proto}" needs a "vlan" of 1 to {HIGHEST_VLAN}, not 0')
    return Vlan(number, qos, proto)


def mac(given: WrittenValue) -> str:
    """A unicast hardware address of Ethernet, "02:00:00:00:00:01"."""
    if not given.value:
        return ""
    address = given.value.lower().replace("-", ":")
    if not re.fullmatch(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", address):
        raise wrong(
            given.place,
            f'"{given.value}" is no MAC address: give 6 bytes such as "02:00:00:00:00:01"',
        )
    if int(address[:2], 16) & 1 or address == "00:00:00:00:00:00":
        raise wrong(
            given.place,
            f"{address} is no interface's own: give a unicast address, whose first byte is even, "
            'and not all zeros, such as "02:00:00:00:00:01"',
        )
    return address


def guid(given: WrittenValue) -> str:
    """A GUID of InfiniBand, "02:00:00:00:00:00:00:01"."""
    if not given.value:
        return ""
    digits = given.value.lower()
    if not re.fullmatch(r"[0-9a-f]{2}(:[0-9a-f]{2}){7}", digits):
        raise wrong(
            given.place,
            f'"{given.value}" is no GUID: give 8 bytes such as "02:00:00:00:00:00:00:01"',
        )
    if set(digits) in ({"0", ":"}, {"f", ":"}):
        raise wrong(given.place, f"{digits} means that there is none: give another, or none")
    return digits


def switch(key: str, given: bool | str | None) -> bool | None:
    """The "on" or "off" of a key, which may be a boolean, too."""
    if given is None or given == "":  # sriov-cni takes "" for "as it is"
        return None
    if isinstance(given, bool):
        return given
    if given not in ("on", "off"):
        raise invalid_config(f'"{key}": "{given}" is not "on" or "off"')
    return given == "on"


def link_state(given: str | None) -> str:
    """What the VF's link is to be: as the PF's ("auto"), up ("enable") or down ("disable")."""
    if given and given not in LINK_STATES:
        raise invalid_config(f'"link_state": "{given}" is not {_either(LINK_STATES)}')
    return given or ""


def rates(lowest: int | None, highest: int | None) -> tuple[int | None, int | None]:
    """The rates of `min_tx_rate` and `max_tx_rate`, in Mbit/s."""
    for key, rate in (("min_tx_rate", lowest), ("max_tx_rate", highest)):
        if rate is not None and not 0 <= rate <= HIGHEST_RATE:
            raise invalid_config(
                f'"{key}": {rate} is out of range: Mbit/s from 1 to {HIGHEST_RATE}, 0 for no limit'
            )
    if highest and (lowest or 0) > highest:
        raise invalid_config(
            f'"min_tx_rate": {lowest} is more than "max_tx_rate", {highest}: it must not be, '
            'unless "max_tx_rate" is 0 for no limit'
        )
    return lowest, highest


def mtu(given: int | None) -> int | None:
    """An MTU that some device may have."""
    if not given:  # as in ipoib, 0 is "as it comes"
        return None
    if not SMALLEST_MTU <= given <= LARGEST_MTU:
        raise invalid_config(
            f'"mtu": {given} is out of range: {SMALLEST_MTU} to {LARGEST_MTU}, and at most '
            "what the PF allows"
        )
    return given


def wrong(place: str, text: str) -> CNIError:
    """The error for what was given at a place."""
    code = Code.INVALID_ENVIRONMENT if place == CNI_ARGS_MAC else Code.INVALID_CONFIG
    return CNIError(code, f"{place}: {text}")


def _either(valid: tuple[str, ...]) -> str:
    quoted = [f'"{one}"' for one in valid]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"
