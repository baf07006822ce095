"""IP addresses as integers of one ordered space, and the text that configurations hold.

An address is an `int` of 128 bits; IPv4 is in its IPv4-mapped place (::ffff:0:0/96), so that
both families share one key space and 10.0.0.1 and ::ffff:10.0.0.1 are one address, as for the
kernel. Text is read as whereabouts reads it (k8s.io/utils/net ParseIPSloppy): leading zeros of
IPv4 octets are decimal.
"""

import ipaddress
from functools import lru_cache
from typing import NamedTuple

_LONGEST = 45  # characters of an address; with more zeros a tenant can make one of any length
MAPPED_FIRST = 0xFFFF << 32
MAPPED_LAST = MAPPED_FIRST | 0xFFFF_FFFF


class Interval(NamedTuple):
    """Addresses from `first` to `last`, both included."""

    first: int
    last: int


class Network(NamedTuple):
    """A network by its first address and its prefix length in 128 bits (IPv4: 96 and more)."""

    address: int
    prefix: int

    @property
    def last(self) -> int:
        """The highest address: IPv4's broadcast address."""
        return self.address | ((1 << (128 - self.prefix)) - 1)

    @property
    def family_prefix(self) -> int:
        """The prefix length as the address's family writes it."""
        return self.prefix - 96 if family(self.address) == 4 else self.prefix

    def __contains__(self, address: object) -> bool:
        return isinstance(address, int) and self.address <= address <= self.last

    def __str__(self) -> str:
        return f"{text(self.address)}/{self.family_prefix}"


def family(address: int) -> int:
    """4 or 6."""
    return 4 if MAPPED_FIRST <= address <= MAPPED_LAST else 6


@lru_cache(1024)  # a call asks for the same few several times
def text(address: int) -> str:
    """The canonical text (RFC 5952 for IPv6)."""
    if family(address) == 4:
        return ".".join(map(str, (address - MAPPED_FIRST).to_bytes(4, "big")))
    return str(ipaddress.IPv6Address(address))


def parse(written: str) -> int:
    """The address that `written` names. ValueError if it is not an address; no prefix, no zone."""
    return _parse(written) if len(written) <= _LONGEST else _parse.__wrapped__(written)


@lru_cache(1024)
def _parse(written: str) -> int:
    if ":" not in written:
        octets = written.split(".")
        if not all(octet.isascii() and octet.isdigit() for octet in octets):
            raise ValueError(f"invalid IP address: {written}")
        return _v4([int(octet.lstrip("0")[:4] or "0") for octet in octets], written)
    try:
        address = ipaddress.IPv6Address(written)
    except ValueError:
        raise ValueError(f"invalid IP address: {written}") from None
    if address.scope_id is not None:
        raise ValueError(f"invalid IP address: {written}: an address of a pool has no zone")
    return int(address)


def parse_interface(written: str) -> tuple[int, Network]:
    """`10.0.0.5/24` as the address and the network it is in. ValueError if it is not a CIDR."""
    host, slash, prefix = written.partition("/")
    if not slash:
        raise ValueError(f"invalid CIDR {written}: no prefix length, as in {written}/24")
    address = parse(host)
    is_v4_text = ":" not in host
    digits = prefix.isascii() and prefix.isdigit() and len(prefix) <= 3
    if not digits or int(prefix) > (32 if is_v4_text else 128):
        raise ValueError(f"invalid CIDR {written}: invalid prefix length {prefix}")
    length = int(prefix) + (96 if is_v4_text else 0)
    if family(address) == 4 and length < 96:
        raise ValueError(f"invalid CIDR {written}: an IPv4-mapped network needs /96 or longer")
    return address, Network(address >> (128 - length) << (128 - length), length)


def parse_interval(written: str) -> Interval:
    """A network, one address, or `A-B`, as the addresses it covers. ValueError otherwise."""
    first_text, dash, last_text = written.partition("-")
    if dash:
        first, last = parse(first_text.strip()), parse(last_text.strip())
        if family(first) != family(last):
            raise ValueError(f"{written} begins in one address family and ends in the other")
        if first > last:
            raise ValueError(f"{written} ends before it begins")
        return Interval(first, last)
    if "/" in written:
        network = parse_interface(written)[1]
        return Interval(network.address, network.last)
    address = parse(written)
    return Interval(address, address)


def _v4(octets: list[int], written: str) -> int:
    if len(octets) != 4 or max(octets) > 255:
        raise ValueError(f"invalid IP address: {written}")
    return MAPPED_FIRST | int.from_bytes(octets, "big")
