"""Ranges of addresses, and sets of ranges.

`of_network` follows whereabouts (pkg/iphelpers GetIPRange), with the differences that
docs/use/node-addresses.md lists.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import copy
from itertools import pairwise
from operator import attrgetter

import msgspec

from ipam.addresses import MAPPED_FIRST, MAPPED_LAST, Interval, Network, family, text

_last = attrgetter("last")


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses `first` to `last` of `network`, without `excluded` and the gateway."""

    network: Network
    first: int
    last: int
    excluded: tuple[Interval, ...] = ()  # sorted, without overlaps
    gateway: int | None = None
    domain: str = ""  # an address is unique in its domain
    where: str = "ipam.range"  # the JSON path, for error texts
    routes: tuple[str, ...] = ()  # destinations behind the gateway
    parts: tuple[Interval, ...] = ()  # for pods, lowest first; computed before the store is locked

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "parts", tuple(_parts(self)))

    @property
    def family(self) -> int:
        return family(self.network.address)

    @property
    def domain_beside(self) -> str:
        """The range's domain if `enable_overlapping_ranges` had the other value."""
        name, private, _ = self.domain.partition(" ")
        return domain_of(name, self.network, shared=bool(private))

    @property
    def why_private(self) -> str | None:
        """The option that separates the domain from other networks; `None` if no option does."""
        name, private, _ = self.domain.partition(" ")
        if name:
            return '"ipam.network_name"'
        return '"ipam.enable_overlapping_ranges": false' if private else None

    def allows(self, address: int) -> bool:
        return any(True for _ in self.within(Interval(address, address)))

    def within(self, interval: Interval) -> Iterator[Interval]:
        """The parts of `interval` that pods may get, lowest first."""
        for index in range(bisect_left(self.parts, interval.first, key=_last), len(self.parts)):
            part = self.parts[index]
            if part.first > interval.last:
                break
            yield Interval(max(part.first, interval.first), min(part.last, interval.last))

    def restricted(self, intervals: Iterable[Interval]) -> "Range":
        """The same range, limited to the addresses in `intervals`."""
        narrower = copy(self)
        parts = (part for interval in intervals for part in self.within(interval))
        msgspec.structs.force_setattr(narrower, "parts", merged(parts))
        return narrower

    def without(self, addresses: Iterable[int]) -> "Range":
        holes = merged(Interval(each, each) for each in addresses if self.allows(each))
        if not holes:
            return self
        return self.restricted(part for each in self.parts for part in outside(each, holes))

    def __str__(self) -> str:
        return f"{self.network} ({text(self.first)}-{text(self.last)})"


def _parts(range_: Range) -> Iterator[Interval]:
    holes = range_.excluded
    gateway = range_.gateway
    if gateway is not None and range_.first <= gateway <= range_.last:
        holes = merged((*holes, Interval(gateway, gateway)))
    return outside(Interval(range_.first, range_.last), holes)


def outside(interval: Interval, holes: Sequence[Interval]) -> Iterator[Interval]:
    """The parts of `interval` outside of `holes`. `holes` are sorted and do not overlap."""
    cursor = interval.first
    for index in range(bisect_left(holes, interval.first, key=_last), len(holes)):
        hole = holes[index]
        if hole.first > interval.last:
            break
        if hole.first > cursor:
            yield Interval(cursor, hole.first - 1)
        cursor = hole.last + 1
    if cursor <= interval.last:
        yield Interval(cursor, interval.last)


def common(one: Iterable[Interval], other: Iterable[Interval]) -> Iterator[Interval]:
    """The addresses that are in both. Compares each pair of intervals."""
    others = list(other)
    for each in one:
        for part in others:
            first, last = max(each.first, part.first), min(each.last, part.last)
            if first <= last:
                yield Interval(first, last)


def is_within(address: int, parts: Iterable[Interval]) -> bool:
    return any(part.first <= address <= part.last for part in parts)


class RangeSet(msgspec.Struct, frozen=True):
    """Ranges of one family, in order of use. An attachment gets one address of the set."""

    ranges: tuple[Range, ...]
    fixed: bool = False  # the set has only one address

    def without(self, addresses: Collection[int]) -> "RangeSet":
        return RangeSet(tuple(each.without(addresses) for each in self.ranges), self.fixed)

    @property
    def family(self) -> int:
        return self.ranges[0].family


def domain_of(network_name: str, network: Network, *, shared: bool) -> str:
    """With `shared` (`enable_overlapping_ranges`), all ranges of a network_name have one domain.
    Otherwise each range has a separate domain, as in whereabouts."""
    # A network_name has no space, so the two kinds of domains differ.
    return network_name if shared else f"{network_name} {network}"


def of_network(
    network: Network, *, start: int | None = None, end: int | None = None, use_all: bool = False
) -> tuple[int, int]:
    """The first and the last usable address. A start or end at the network or broadcast address
    moves to the nearest usable address. Raises ValueError."""
    for key, bound in (("start", start), ("end", end)):
        if bound is not None and bound not in network:
            raise ValueError(
                f"invalid range {key} for CIDR {network}: {text(bound)} is outside of this CIDR"
            )
    if start is not None and end is not None and start > end:
        raise ValueError(f"range start {text(start)} is after range end {text(end)}: swap them")
    lowest, highest = network.address, network.last
    if not use_all:
        if network.prefix > 126:
            raise ValueError(
                f"net mask is too short, subnet {network} has no usable IP addresses: "
                'set "use_all_addresses": true to use every address of the subnet'
            )
        lowest, highest = lowest + 1, highest - 1
    first = lowest if start is None else min(max(start, lowest), highest)
    last = highest if end is None else max(min(end, highest), lowest)
    return first, last


def merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same addresses as sorted intervals that neither overlap nor touch."""
    result: list[Interval] = []
    for interval in sorted(intervals):
        if result and interval.first <= result[-1].last + 1:
            result[-1] = Interval(result[-1].first, max(result[-1].last, interval.last))
        else:
            result.append(interval)
    return tuple(result)


def written(runs: Iterable[Interval], most: int = 0) -> tuple[str, ...]:
    """Sorted intervals as text: "10.0.0.8", "10.0.0.8-10.0.0.15". Joins the nearest intervals until
    `most` are left; 0 sets no limit."""
    joined = tuple(runs)
    if most and len(joined) > most:
        gaps = sorted(pairwise(joined), key=lambda pair: pair[1].first - pair[0].last)
        kept = sorted(gaps[len(gaps) - most + 1 :])
        firsts = (joined[0].first, *(after.first for _, after in kept))
        lasts = (*(before.last for before, _ in kept), joined[-1].last)
        joined = tuple(map(Interval, firsts, lasts))
    return tuple(
        text(run.first) if run.first == run.last else f"{text(run.first)}-{text(run.last)}"
        for run in joined
    )


def size_of(intervals: Iterable[Interval]) -> int:
    return sum(each.last - each.first + 1 for each in intervals)


def never_usable(network: Network) -> tuple[Interval, ...]:
    """Addresses that pods must not get: the IPv4-mapped part of a large IPv6 network."""
    if network.address <= MAPPED_FIRST and network.last >= MAPPED_LAST and network.prefix < 96:
        return (Interval(MAPPED_FIRST, MAPPED_LAST),)
    return ()
