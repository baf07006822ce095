"""Names of pools, spaces and blocks: one range, one name; one block, one name.

The name of a block is the lock on its addresses: two claims of equal addresses must collide. So a
name is made from the space and the canonical text of the first address, and nothing else.
"""

import hashlib
import re

from ipam.addresses import text

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_MOST_LABEL = 40  # characters of a network name in an object's name; longer ones are hashed
_HASH = 10


def pool_name(network_name: str, range_: str, *, shared: bool = True) -> str:
    """The AddressPool of a canonical range: "blue-10.64.0.0-16", as whereabouts names its pools."""
    address, _, prefix = range_.partition("/")
    body = f"{_part(address)}-{prefix}"
    name = f"{_label(network_name)}-{body}" if network_name else body
    name = name if shared else f"{name}-private"
    # DNS-1123 subdomain: each part between dots begins with a letter or digit, as ours do.
    return name if name[0].isalnum() else f"p{name}"


def space_name(network_name: str, range_: str, *, shared: bool = True) -> str:
    """Where an address is unique: a network name's whole space, or a private range's own."""
    label = _label(network_name) if network_name else "default"
    return label if shared else f"{label}-{_hash(range_)}"


def block_name(space: str, first: int, prefix: int) -> str:
    """The AddressBlock: "blue.10.64.3.64-27"; IPv6 with "-" for ":"."""
    return f"{space}.{_part(text(first))}-{prefix}"


def _part(address: str) -> str:
    """An address as a part of a name."""
    part = address.replace(":", "-")
    if part.startswith("-"):
        part = f"0{part}"
    return f"{part}0" if part.endswith("-") else part


def _label(network_name: str) -> str:
    if _LABEL.fullmatch(network_name) and len(network_name) <= _MOST_LABEL:
        return network_name
    return f"n-{_hash(network_name)}"


def _hash(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:_HASH]
