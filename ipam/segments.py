"""The link on which the addresses of a foreign interface plugin are used, as its keys name it.

Whoever is on the same link can hear each other, so its addresses must differ. Our own interface
plugins know their link and say it. Others start `podfabric-ipam` with their own configuration,
of which "bridge", "master", "vlan" and "vlanId" are read as far as they are there.
"""

import re

import msgspec

BEFORE = " any"
"""The segment of a reservation that version 1 of the store left: unknown, and it may be any link.

It counts as on every link until its pod comes again, or the node starts again. No link has this
name, and no configuration can say it: that of a link does not begin with a space.
"""

_NAME = re.compile(r"[!-~]{1,128}")
_KEYS = ("bridge", "master", "vlan", "vlanid")
# A key that the plugin itself does not read must not make a link of its own.
_READ_BY = {
    "bridge": ("bridge", "vlan"),
    "ipvlan": ("master",),
    "macvlan": ("master",),
    "vlan": ("master", "vlanid"),
}


def of_config(config: bytes) -> str:
    """Such as "eth0", "br0 vlan 100"; "" where the configuration names no link."""
    # Go's decoder, which others use, does not tell upper and lower case of keys apart.
    written = {
        key.lower(): value
        for key, value in msgspec.json.decode(config, type=dict[str, msgspec.Raw]).items()
    }
    plugin = _value(written.get("type"))
    read = _READ_BY.get(str(plugin), _KEYS)
    named = {key: _value(written[key]) for key in read if key in written}
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


def _value(raw: msgspec.Raw | None) -> str | int | None:
    """A text or a whole number; None for anything else."""
    try:
        return None if raw is None else msgspec.json.decode(raw, type=str | int)
    except msgspec.MsgspecError:
        return None
