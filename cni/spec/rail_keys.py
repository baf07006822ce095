"""The key "rails" of `ipoib` and `sriov`, and the key "rails" of their "ipam".

{"type": "ipoib", "master": "auto", "rails": "all",
 "ipam": {"type": "podfabric-ipam", "rails": [{"range": "10.0.0.0/24"}, {"range": ...}]}}
"""

from collections.abc import Mapping
from typing import Any

from cni.spec.config import convert
from cni.spec.errors import invalid_config

RAILS, ALL = "rails", "all"
MOST = 32  # entries of "ipam.rails"


def written(keys: Mapping[str, Any]) -> object:
    """The value of "rails", or `None`. As sriov-cni does, ignores the case of the key."""
    return next((keys[key] for key in keys if key.lower() == RAILS), None)


def each(keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configuration of each rail, without "rails". One, unless "ipam" has "rails".

    Raises CNIError 7 if "ipam.rails" is not a list of objects.
    """
    alone = {key: value for key, value in keys.items() if key.lower() != RAILS}
    ipam = keys.get("ipam")
    if written(keys) is None or not isinstance(ipam, dict):
        return [alone]
    return [{**alone, "ipam": of_rail} for of_rail in addresses(ipam)]


def addresses(ipam: dict[str, Any]) -> list[dict[str, Any]]:
    """The "ipam" of each rail: `ipam` with the keys of one entry of "rails"; without "rails", one.

    Raises CNIError 7 if "rails" is not a list of objects, or has more than MOST. Each entry repeats
    the rest of `ipam`, so a long list would need much memory.
    """
    if ipam.get(RAILS) is None:
        return [ipam]
    entries = convert(ipam[RAILS], list[dict[str, Any]], f"ipam.{RAILS}")
    if len(entries) > MOST:
        raise invalid_config(f'"ipam.{RAILS}" has {len(entries)} entries: write at most {MOST}')
    shared = {key: value for key, value in ipam.items() if key != RAILS}
    return [{**shared, **entry} for entry in entries]
