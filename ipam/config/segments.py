"""Finds the link on which another project's interface plugin uses the addresses.

Addresses on one link must differ. Our interface plugins pass the name of the link. Other plugins
name the link by "bridge", "master", "vlan" and "vlanId" in their configurations.
"""

import re

from cni.spec.config import NetworkConfig

_NAME = re.compile(r"[!-~]{1,128}")
_KEYS = ("bridge", "master", "vlan", "vlanid")
# The keys that each plugin reads. Another key must not give one link two names.
_READ_BY = {
    "bridge": ("bridge", "vlan"),
    "ipvlan": ("master",),
    "macvlan": ("master",),
    "vlan": ("master", "vlanid"),
}


def of_config(network: NetworkConfig) -> str:
    """The link's name, such as "eth0" or "br0 vlan 100"; "" if the configuration names none."""
    return network.derived(_named)


def _named(network: NetworkConfig) -> str:
    # Go's decoder, which other plugins use, ignores the case of keys.
    written = {key.lower(): value for key, value in network.keys.items()}
    plugin = written.get("type")
    read = _READ_BY.get(str(plugin), _KEYS)
    named = {key: written[key] for key in read if key in written}
    if plugin == "bridge":
        named.setdefault("bridge", "cni0")  # the reference plugin's default
    names = [
        name
        for key in ("bridge", "master")
        if isinstance(name := named.get(key), str) and _NAME.fullmatch(name)
    ]
    vlans = [
        vlan
        for key in ("vlan", "vlanid")
        if type(vlan := named.get(key)) is int and 0 < vlan < 4096
    ]
    if not names:
        return ""
    return " ".join((*names, *(f"vlan {vlan}" for vlan in vlans)))
