"""Parses the lists of values in a rule.

An item is a value, a range "a-b" (of numbers, VLANs, P_Keys, GUIDs or MACs), or a pattern of names.
In a pattern "*" matches any text and "?" any character. The item "*" alone allows every value.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from base import documents
from base.address_text import guid, mac, network
from base.documents import DocumentError
from cni.spec.config import read_pkey

ANY = "*"
ITEMS = 256  # of one list
LONGEST = 256  # characters of an item

Kind = Literal["number", "switch", "pkey", "vlan", "guid", "mac", "network", "name", "directory"]
Span = tuple[int, int]
_MAPPED = 0xFFFF << 32  # the first IPv4-mapped address, as in ipam.addresses


class Values(msgspec.Struct, frozen=True):
    """The allowed values of a list: numbers in one of `spans`, and texts that match one of `names`.

    Addresses, GUIDs, MACs and booleans are numbers here. Directories are names.
    """

    any: bool = False
    spans: tuple[Span, ...] = ()
    names: tuple[str, ...] = ()

    def allows(self, value: int | str) -> bool:
        """Whether a number, a boolean or a name is allowed."""
        if self.any:
            return True
        if isinstance(value, str):
            return any(fits(name, value) for name in self.names)
        return any(first <= value <= last for first, last in self.spans)

    def allows_all(self, first: int, last: int) -> bool:
        """Whether one span contains all numbers from `first` to `last`."""
        return self.any or any(low <= first and last <= high for low, high in self.spans)


NOTHING = Values()
EVERYTHING = Values(any=True)


def read(items: object, kind: Kind, where: str) -> Values:
    """Parse a list in a document. Raises DocumentError, which names the unreadable item."""
    listed = documents.convert(items, list[object], where)
    if len(listed) > ITEMS:
        raise DocumentError(
            f"{where}: has {len(listed)} items, at most {ITEMS} are allowed: write ranges or "
            "patterns, or add a rule"
        )
    if ANY in listed:
        return EVERYTHING
    spans: list[Span] = []
    names: list[str] = []
    for index, item in enumerate(listed):
        read_one = one(item, kind, f"{where}[{index}]")
        if isinstance(read_one, str):
            names.append(read_one)
        else:
            spans += _without_ipv4(read_one) if kind == "network" else [read_one]
    return Values(spans=tuple(_merged(spans)), names=tuple(dict.fromkeys(names)))


def one(item: object, kind: Kind, where: str) -> Span | str:
    """Parse one item into a span of numbers or a name. Raises DocumentError."""
    # In Python a boolean is also an int.
    if kind == "switch" and isinstance(item, bool):
        return (int(item), int(item))
    if isinstance(item, bool) or not isinstance(item, int | str) or kind == "switch":
        raise DocumentError(f"{where}: {documents.shown(item)}: {_EXPECTED[kind]}")
    # `read_pkey` refuses a text of four digits, so a number gets the prefix 0x.
    text = f"{item:#x}" if kind == "pkey" and isinstance(item, int) else str(item)
    if not 0 < len(text) <= LONGEST:
        raise DocumentError(f"{where}: {documents.shown(item)}: expected 1 to {LONGEST} characters")
    try:
        if kind in _NAMES:
            return _NAMES[kind](text)
        if kind == "network":
            return _network(text)
        return _span(text, _NUMBERS[kind])
    except ValueError as error:
        why = str(error) or _EXPECTED[kind]
        raise DocumentError(f"{where}: {documents.shown(item)}: {why}") from None


def fits(pattern: str, text: str) -> bool:
    """Whether the text matches the pattern ("*" matches any text, "?" any character)."""
    return pattern == text or fnmatchcase(text, pattern.replace("[", "[[]"))


def _merged(spans: Sequence[Span]) -> list[Span]:
    """The sorted spans. Spans that overlap or touch are joined."""
    merged: list[Span] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _span(text: str, number: Callable[[str], int]) -> Span:
    first, dash, last = text.partition("-")
    span = (number(first.strip()), number((last if dash else first).strip()))
    if span[0] > span[1]:
        raise ValueError("ends before it begins: write the smaller value first")
    return span


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise ValueError
    return int(text)


def _vlan(text: str) -> int:
    number = _number(text)
    if number > 4094:
        raise ValueError
    return number


def _network(text: str) -> Span:
    found = network(text if "/" in text else f"{text}/{128 if ':' in text else 32}")
    if found.ip != found.network:
        raise ValueError(f"has host bits set: write {found.cidr}")
    mapped = found.ipv6()
    return mapped.first, mapped.last


def _without_ipv4(span: Span) -> list[Span]:
    """Remove the IPv4-mapped part of an IPv6 network, so that "::/0" does not allow IPv4."""
    first, last = span
    behind = _MAPPED + (1 << 32)
    if first >= _MAPPED or last < _MAPPED:
        return [span]
    return [(first, _MAPPED - 1), (behind, last)] if behind <= last else [(first, _MAPPED - 1)]


def _name(text: str) -> str:
    if text != text.strip() or not text.isprintable():
        raise ValueError
    return text


def _directory(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/") or "\0" in text:
        raise ValueError
    return text


_NUMBERS: Mapping[Kind, Callable[[str], int]] = {
    "number": _number,
    "vlan": _vlan,
    "pkey": read_pkey,
    "guid": lambda text: int(guid(text)),
    "mac": lambda text: int(mac(text)),
}
_NAMES: Mapping[Kind, Callable[[str], str]] = {"name": _name, "directory": _directory}
_EXPECTED: Mapping[Kind, str] = {
    "number": 'write a number or a range such as "1500-9000"',
    "switch": 'write true or false, or "*" for both',
    "vlan": 'write a VLAN from 0 (no tag) to 4094, or a range such as "100-199"',
    "pkey": 'write a P_Key such as "0x8001", or a range such as "0x8010-0x801f"',
    "guid": 'write a GUID such as "02:00:00:00:00:00:00:01", or two GUIDs with "-" between',
    "mac": 'write a MAC such as "02:00:00:00:00:01", or two MACs with "-" between',
    "network": 'write a network such as "10.1.0.0/16"',
    "name": 'write a name, or a pattern with "*" and "?"',
    "directory": 'write an absolute path without ".."',
}
