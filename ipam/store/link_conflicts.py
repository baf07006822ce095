"""Finds the next address that no domain holds on a link, and the holders in other domains.

A domain is where an address is unique. Two domains may still be on one wire: a network makes its
range private by an option, and says nothing of its link by that. So the link decides: an address
is not handed out if another domain holds it on the same segment.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval
from ipam.ranges import Range, merged
from ipam.store.reservations import Owner, Reservation
from ipam.store.tables import Tables


class Others:
    """For one request, whose addresses are used on `segment`; "" is unknown.

    The caller changes nothing in the store meanwhile.
    """

    def __init__(self, tables: Tables, segment: str, boot: str) -> None:
        self._tables = tables
        self._segment = segment
        self._boot = boot
        self._behind: dict[tuple[str, str], dict[int, int]] = {}

    def next_free(self, range_: Range, address: int, last: int) -> int:
        """The lowest address from `address` on that no domain holds; behind `last` if none is.

        A definition may have hundreds of ranges over the same addresses, and they are searched
        under the store's lock. So what the search of one has passed costs the others a step.
        """
        behind_each = self._behind.setdefault((range_.domain, str(range_.network)), {})
        passed: list[int] = []
        while address <= last:
            behind = behind_each.get(address)
            if behind is None:
                passed.append(address)
                if (run := self._tables.run_at(range_.domain, address)) is not None:
                    behind = run.last + 1
                else:
                    held = self._stretch(range_, address)
                    passed += held
                    behind = held.stop
            if behind == address:
                break
            address = behind
        behind_each.update(dict.fromkeys(passed, address))
        return address

    def is_alive(self, range_: Range, address: int) -> bool:
        """Whether another domain has given the address out in this boot."""
        return any(holder.boot == self._boot for holder in self.holders(range_, address))

    def holders(self, range_: Range, address: int) -> list[Reservation]:
        """The reservations of the address in other domains."""
        rows = self._tables.on_segment(self._segment, address)
        here = takewhile(lambda row: row[0] == address, rows)
        held = [self._tables.at(domain, address) for _, domain in here if domain != range_.domain]
        beside = self._tables.at(range_.domain_beside, address)
        if beside is not None and beside.range == str(range_.network):
            held.append(beside)
        return [each for each in held if each is not None]

    def require_absent(self, owner: Owner, ranges: Sequence[Range]) -> None:
        """CNIError 121 if another network holds an address of these ranges on the segment."""
        network = owner.attachment.network
        for domain in dict.fromkeys(range_.domain for range_ in ranges):
            own = [range_ for range_ in ranges if range_.domain == domain]
            for interval in merged(Interval(range_.first, range_.last) for range_ in own):
                if self._tables.is_used(domain, interval, self._segment, network):
                    first = next(each for each in own if each.first == interval.first)
                    raise _refusal(first, self._segment)

    def _stretch(self, range_: Range, first: int) -> range:
        """The addresses from `first` on that are held: on the segment, or beside.

        A network of the very same range and the other `enable_overlapping_ranges` is on the same
        wire even if the link is unknown: the option is about *other* ranges, and whereabouts keeps
        one pool for both.
        """
        domain, cidr = range_.domain, str(range_.network)
        on_segment = self._tables.on_segment(self._segment, first)
        beside = self._tables.in_domain(range_.domain_beside, first)
        return _unbroken(first, ((held, other != domain) for held, other in on_segment)) or (
            _unbroken(first, ((held, network == cidr) for held, network in beside))
        )


def _unbroken(first: int, held: Iterable[tuple[int, bool]]) -> range:
    """The addresses from `first` on that are held and count; `held` is sorted."""
    behind = first
    for address, counts in held:
        if address > behind:
            break
        if counts:
            behind = address + 1
    return range(first, behind)


def _refusal(range_: Range, segment: str) -> CNIError:
    return CNIError(
        Code.NOT_ALLOWED,
        f"{range_.why_private}: a range of its own, while another network uses addresses of "
        f"{range_} on the same link ({segment}), is not allowed for this namespace: remove it, or "
        'ask the administrator, who can list it in "set.private_ranges" of a rule',
    )
