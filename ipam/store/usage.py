"""How full ranges are, for the agent's metrics. Counts runs, not reservations."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from ipam.addresses import Network, parse_interface, text
from ipam.ranges import Range, RangeSet, never_usable, of_network, size_of
from ipam.store.address_choice import held_in
from ipam.store.database import Damage
from ipam.store.reservations import RangeUsage
from ipam.store.tables import Tables

MOST = 256  # ranges: each becomes some lines of metrics


class SeenRanges:
    """The ranges of recent network configurations, for any thread."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._ranges: OrderedDict[tuple[object, ...], Range] = OrderedDict()

    def see(self, sets: Iterable[RangeSet]) -> None:
        """Remember the ranges of a network. Forgets the ranges that were not seen for longest."""
        with self._lock:
            for range_set in sets:
                for range_ in range_set.ranges:
                    key = (range_.domain, range_.network, range_.first, range_.last)
                    self._ranges[key] = range_
                    self._ranges.move_to_end(key)
            while len(self._ranges) > self._most:
                self._ranges.popitem(last=False)

    def all(self) -> tuple[Range, ...]:
        with self._lock:
            return tuple(self._ranges.values())


def usage_of(tables: Tables, asked: Sequence[Range]) -> list[RangeUsage]:
    """The usage of the ranges in `asked`, and of whole networks for other reserved ranges.

    With too many ranges, those without a reservation are left out first. The cost is a step for
    each run of taken addresses and a step of SQLite for each reservation.
    """
    named = {(range_.domain, range_.network) for range_ in asked}
    ranges = {(range_.domain, _spelling(range_)): range_ for range_ in asked}
    for range_ in _others(tables, named):
        ranges.setdefault((range_.domain, _spelling(range_)), range_)
    counted = list[RangeUsage]()
    for (domain, spelling), range_ in ranges.items():
        used = held_in(tables, range_)
        counted.append(RangeUsage(domain, spelling, used, size_of(range_.parts) - used))
    shown = sorted(counted, key=lambda count: count.used == 0)[:MOST]
    return sorted(shown, key=lambda count: (count.domain, count.range))


def _others(tables: Tables, named: set[tuple[str, Network]]) -> Iterator[Range]:
    for domain, cidr in tables.ranges():
        try:
            network = parse_interface(cidr)[1]
        except ValueError:
            raise Damage(f"a reservation is from the range {cidr!r}") from None
        if (domain, network) in named or network.prefix == 128:  # a single address
            continue
        first, last = of_network(network, use_all=network.prefix == 127)
        yield Range(
            network=network, first=first, last=last, excluded=never_usable(network), domain=domain
        )


def _spelling(range_: Range) -> str:
    """`10.0.0.0/24`, or `10.0.0.5-10.0.0.99/24` for a part, as in a configuration."""
    network = range_.network
    if range_.first <= network.address + 1 and range_.last >= network.last - 1:
        return str(network)
    return f"{text(range_.first)}-{text(range_.last)}/{network.family_prefix}"
