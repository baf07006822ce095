"""Checks the values in a network configuration of type `sriov`.

`None` and "" mean that a key is not set. Each function raises CNIError 7 (4 for CNI_ARGS).
"""

from typing import Any, NamedTuple

from base import address_text
from cni.spec.config import require_interface_name
from cni.spec.errors import CNIError, Code, invalid_config

VLAN_PROTOCOLS = ("802.1q", "802.1ad")
LINK_STATES = ("auto", "enable", "disable")
HIGHEST_VLAN = 4094
HIGHEST_QOS = 7
HIGHEST_RATE = 0xFFFFFFFF  # Mbit/s, struct ifla_vf_rate
SMALLEST_MTU, LARGEST_MTU = 68, 65535  # IPv4's minimum, and the range of its length field
CNI_ARGS_MAC = "CNI_ARGS MAC"  # the key of a MAC in CNI_ARGS, as errors name it

TAG = ("vlan", "vlanQoS", "vlanProto")
ETHERNET = (*TAG, "mac", "spoofchk", "trust", "min_tx_rate", "max_tx_rate")
"""Options that only an Ethernet PF has for its VFs."""


class WrittenValue(NamedTuple):
    """A value, and its key as error texts name it; ("", "") without a value."""

    key: str
    value: str


def masters(written: str | list[str] | None) -> tuple[str, ...]:
    """The interface names in `master`, without repetitions."""
    names = (written,) if isinstance(written, str) else tuple(dict.fromkeys(written or ()))
    if names in ((), ("",)):
        return ()
    for name in names:
        require_interface_name(name, "master")
    return names


def vlan(number: int | None, qos: int | None, proto: str | None) -> dict[str, Any]:
    """The VLAN's three values by key, or {}. "vlanQoS" and "vlanProto" need "vlan"."""
    if number is None:
        for key, value in (("vlanQoS", qos), ("vlanProto", proto)):
            if value not in (None, ""):
                raise invalid_config(f'"{key}" needs "vlan": set "vlan" as well, or remove "{key}"')
        return {}
    if not 0 <= number <= HIGHEST_VLAN:
        raise invalid_config(
            f'"vlan": {number} is out of range: use 1 to {HIGHEST_VLAN}, or 0 for no tag, or '
            "remove the key to leave the VLAN unchanged"
        )
    qos = qos or 0
    if not 0 <= qos <= HIGHEST_QOS:
        raise invalid_config(f'"vlanQoS": {qos} is out of range: use 0 to {HIGHEST_QOS}')
    proto = proto.lower() if proto else VLAN_PROTOCOLS[0]
    if proto not in VLAN_PROTOCOLS:
        raise invalid_config(f'"vlanProto": "{proto}" is not {_either(VLAN_PROTOCOLS)}')
    if number == 0 and qos:
        raise invalid_config(f'"vlanQoS": {qos} needs a "vlan" of 1 to {HIGHEST_VLAN}, not 0')
    if number == 0 and proto != VLAN_PROTOCOLS[0]:
        raise invalid_config(f'"vlanProto": "{proto}" needs a "vlan" of 1 to {HIGHEST_VLAN}, not 0')
    return dict(zip(TAG, (number, qos, proto), strict=True))


def mac(written: WrittenValue) -> str:
    """A unicast Ethernet address such as "02:00:00:00:00:01"."""
    if not written.value:
        return ""
    try:
        address = address_text.mac(written.value.replace("-", ":"))
    except ValueError:
        raise wrong(
            written.key,
            f'"{written.value}" is not a MAC address: give 6 bytes such as "02:00:00:00:00:01"',
        ) from None
    if address.words[0] & 1 or not int(address):
        raise wrong(
            written.key,
            f"{address} is not a unicast address: give an address with an even first byte, and "
            'not all zeros, such as "02:00:00:00:00:01"',
        )
    return str(address)


def guid(written: WrittenValue) -> str:
    """An InfiniBand GUID such as "02:00:00:00:00:00:00:01"."""
    if not written.value:
        return ""
    try:
        found = address_text.guid(written.value)
    except ValueError:
        raise wrong(
            written.key,
            f'"{written.value}" is not a GUID: give 8 bytes such as "02:00:00:00:00:00:00:01"',
        ) from None
    if int(found) in (0, (1 << 64) - 1):
        raise wrong(
            written.key, f"{found} is not a valid GUID: give another GUID, or remove the key"
        )
    return str(found)


def switch(key: str, written: bool | str | None) -> bool | None:
    """The value of a boolean key, which can also be written as "on" or "off"."""
    if written is None or written == "":  # "" leaves the setting unchanged, as in sriov-cni
        return None
    if isinstance(written, bool):
        return written
    if written not in ("on", "off"):
        raise invalid_config(f'"{key}": "{written}" is not "on" or "off"')
    return written == "on"


def link_state(written: str | None) -> str:
    """The VF's link state: like the PF's ("auto"), up ("enable") or down ("disable")."""
    if written and written not in LINK_STATES:
        raise invalid_config(f'"link_state": "{written}" is not {_either(LINK_STATES)}')
    return written or ""


def rates(lowest: int | None, highest: int | None) -> dict[str, int]:
    """The rates in Mbit/s by key, or {}. If only one rate is set, the other is 0 (no limit)."""
    both = {"min_tx_rate": lowest, "max_tx_rate": highest}
    for key, rate in both.items():
        if rate is not None and not 0 <= rate <= HIGHEST_RATE:
            raise invalid_config(
                f'"{key}": {rate} is out of range: use 1 to {HIGHEST_RATE} Mbit/s, or 0 for no '
                "limit"
            )
    if highest and (lowest or 0) > highest:
        raise invalid_config(
            f'"min_tx_rate" ({lowest}) exceeds "max_tx_rate" ({highest}): lower "min_tx_rate", or '
            'set "max_tx_rate" to 0 for no limit'
        )
    written = {key: rate for key, rate in both.items() if rate is not None}
    return written | {key: 0 for key in both if written and key not in written}


def mtu(written: int | None) -> int | None:
    """The MTU in bytes."""
    if not written:  # 0 leaves the MTU unchanged, as in ipoib
        return None
    if not SMALLEST_MTU <= written <= LARGEST_MTU:
        raise invalid_config(
            f'"mtu": {written} is out of range: use {SMALLEST_MTU} to {LARGEST_MTU}, and at most '
            "the PF's maximum"
        )
    return written


def wrong(key: str, text: str) -> CNIError:
    """The error for a key's value. `key` is the key of a WrittenValue."""
    code = Code.INVALID_ENVIRONMENT if key == CNI_ARGS_MAC else Code.INVALID_CONFIG
    return CNIError(code, f"{key}: {text}")


def _either(valid: tuple[str, ...]) -> str:
    quoted = [f'"{value}"' for value in valid]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"
