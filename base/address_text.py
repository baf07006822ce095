"""Parses written addresses into netaddr's objects, more strictly than netaddr.

netaddr also accepts a network with a netmask or without a prefix length, and a MAC without colons
or leading zeros. This module refuses these forms, because other programs do not accept them.
"""

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from netaddr.core import AddrFormatError
from netaddr.ip import IPAddress, IPNetwork
from netaddr.strategy import eui48, eui64

if TYPE_CHECKING:
    from netaddr.eui import EUI


@lru_cache(1024)  # a call parses the same few addresses several times
def address(written: str) -> IPAddress:
    """Parse an address without a zone. An IPv4-mapped address becomes IPv4. Raises ValueError."""
    try:
        found = IPAddress(written, 6 if ":" in written else 4)
    except (AddrFormatError, ValueError):
        raise ValueError(f"invalid IP address: {written}") from None
    return found.ipv4() if found.is_ipv4_mapped() else found


@lru_cache(1024)
def network(written: str) -> IPNetwork:
    """Parse an address with a prefix length, such as `10.0.0.5/24`. Raises ValueError."""
    host, slash, length = written.partition("/")
    if not slash:
        raise ValueError(f'invalid CIDR "{written}": add a prefix length such as /24')
    address(host)
    most = 128 if ":" in host else 32
    if not re.fullmatch("[0-9]{1,3}", length) or int(length) > most:
        raise ValueError(f'invalid CIDR "{written}": write a prefix length from 0 to {most}')
    found = IPNetwork(written, 6 if ":" in host else 4)
    return found.ipv4() if found.is_ipv4_mapped() and found.prefixlen >= 96 else found


def mac(written: str) -> "EUI":
    """Parse a MAC such as `02:00:00:00:00:01`, in upper or lower case. Raises ValueError."""
    return _eui(written, 48, eui48.mac_unix_expanded, 'a MAC such as "02:00:00:00:00:01"')


def guid(written: str) -> "EUI":
    """Parse a GUID such as `02:00:00:00:00:00:00:01`, in either case. Raises ValueError."""
    expected = 'a GUID such as "02:00:00:00:00:00:00:01"'
    return _eui(written, 64, eui64.eui64_unix_expanded, expected)


def _eui(written: str, bits: int, dialect: type, expected: str) -> "EUI":
    from netaddr.eui import EUI  # takes 12 ms, because it reads the IEEE's registries

    try:
        found = EUI(written, bits, dialect)
    except AddrFormatError:
        raise ValueError(f"write {expected}") from None
    if str(found) != written.lower():
        raise ValueError(f"write {expected}")
    return found
