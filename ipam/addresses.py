"""IP addresses as integers, and their text in configurations.

An address is an `int` of 128 bits. An IPv4 address is the same as its IPv4-mapped IPv6 address
(::ffff:0:0/96). An IPv4 octet with leading zeros is decimal, as in whereabouts (k8s.io/utils/net
ParseIPSloppy).
"""

import re
import socket
from functools import lru_cache
from typing import NamedTuple

from base import address_text

_ZEROS = re.compile(r"\b0+(?=[0-9])")
MAPPED_FIRST = 0xFFFF << 32
MAPPED_LAST = MAPPED_FIRST | 0xFFFF_FFFF


class Interval(NamedTuple):
    """Addresses from `first` to `last`, both included."""

    first: int
    last: int


class Network(NamedTuple):
    """The first address, and the prefix length counted in 128 bits.

    An IPv4 /24 has the prefix 120.
    """

    address: int
    prefix: int

    @property
    def last(self) -> int:
        """The highest address: in IPv4, the broadcast address."""
        return self.address | ((1 << (128 - self.prefix)) - 1)

    @property
    def family_prefix(self) -> int:
        """The prefix length after the "/" in text: at most 32 for IPv4, at most 128 for IPv6."""
        return self.prefix - 96 if family(self.address) == 4 else self.prefix

    def __contains__(self, address: object) -> bool:
        return isinstance(address, int) and self.address <= address <= self.last

    def __str__(self) -> str:
        return f"{text(self.address)}/{self.family_prefix}"


def family(address: int) -> int:
    return 4 if MAPPED_FIRST <= address <= MAPPED_LAST else 6


@lru_cache(1024)
def text(address: int) -> str:
    """The canonical text (RFC 5952 for IPv6)."""
    if family(address) == 4:
        return socket.inet_ntop(socket.AF_INET, (address - MAPPED_FIRST).to_bytes(4, "big"))
    return socket.inet_ntop(socket.AF_INET6, address.to_bytes(16, "big"))


def parse(written: str) -> int:
    """Read one address. Raises ValueError for a prefix length, a zone or other text."""
    found = address_text.address(_without_zeros(written))
    return int(found) + _offset(found.version)


def parse_interface(written: str) -> tuple[int, Network]:
    """Read an address with its network, such as `10.0.0.5/24`. Raises ValueError for other text."""
    found = address_text.network(_without_zeros(written))
    if found.is_ipv4_mapped():
        raise ValueError(
            f"invalid CIDR {written}: write a prefix length from 96 to 128, because the "
            "address is IPv4-mapped"
        )
    offset = _offset(found.version)
    host_bits = (found.size - 1).bit_length()
    return int(found.ip) + offset, Network(found.first + offset, 128 - host_bits)


def parse_interval(written: str) -> Interval:
    """Read an interval, written as a network, one address, or `A-B`.

    Raises ValueError for other text.
    """
    first_text, dash, last_text = written.partition("-")
    if dash:
        first, last = parse(first_text.strip()), parse(last_text.strip())
        if family(first) != family(last):
            raise ValueError(f"{written} mixes IPv4 and IPv6: write two addresses of one family")
        if first > last:
            raise ValueError(f"{written} ends before it begins: write the lower address first")
        return Interval(first, last)
    if "/" in written:
        network = parse_interface(written)[1]
        return Interval(network.address, network.last)
    address = parse(written)
    return Interval(address, address)


def _offset(version: int) -> int:
    return MAPPED_FIRST if version == 4 else 0


def _without_zeros(written: str) -> str:
    return written if ":" in written else _ZEROS.sub("", written)
