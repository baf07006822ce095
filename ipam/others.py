"""The next free address of a range, past those that other domains hold on the same link.

A domain is where an address is unique. Two domains may still be on one wire: a network makes its
range private by an option, and says nothing of its link by that. So the link decides: an address
is not handed out if another domain holds it on the same segment.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval
from ipam.ranges import Range, merged
from ipam.store import Owner, Reservation
from ipam.tables import Tables

_TRIED = 8  # ranges, to name the one that is used in an error


class Walk:
    """Finds the next address that fits, and remembers what it has passed.

    A definition may have hundreds of ranges over the same addresses, and they are searched under
    the store's lock. So a stretch that the search of one range has passed costs the others a step.

    `passed(address, last)` answers the end of a stretch from `address` on that does not fit, None
    if `address` fits. It may stop at `last`. Its answers must not change as long as the walk lives.
    """

    def __init__(self, passed: Callable[[int, int], int | None]) -> None:
        self._passed = passed
        # Stretches that do not fit: they are sorted, and neither overlap nor touch.
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._fitting: set[int] = set()

    def next(self, address: int, last: int) -> int:
        """The lowest address from `address` on that fits; behind `last` if none up to it does."""
        cursor = self._behind(address)
        while cursor <= last and cursor not in self._fitting:
            end = self._passed(cursor, last)
            if end is None:
                self._fitting.add(cursor)
                break
            cursor = self._behind(end + 1)
        if cursor > address:
            self._remember(address, cursor - 1)
        return cursor

    def _behind(self, address: int) -> int:
        """The first address from `address` on that is in no remembered stretch."""
        index = bisect_right(self._firsts, address) - 1
        if index >= 0 and self._lasts[index] >= address:
            return self._lasts[index] + 1
        return address

    def _remember(self, first: int, last: int) -> None:
        begin = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        if begin < end:
            first = min(first, self._firsts[begin])
            last = max(last, self._lasts[end - 1])
        self._firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]


class Others:
    """Finds what is free in a range's own domain and in the others, for one request.

    `segment` "" is unknown. The caller changes nothing in the store meanwhile.
    """

    def __init__(self, tables: Tables, segment: str, boot: str) -> None:
        self._tables = tables
        self._segment = segment
        self._boot = boot
        self._only: dict[str, bool] = {}
        self._walks: dict[tuple[str, str], Walk] = {}
        self._alive: dict[tuple[str, str, int], bool] = {}

    def next_free(self, range_: Range, address: int, last: int) -> int:
        """The lowest address from `address` on that no domain holds; behind `last` if none is.

        Of two walks, networks of one domain share the longer one, over what is on the link.
        """
        domain = range_.domain
        link = self._walks.setdefault((domain, ""), Walk(partial(self._taken_on_link, domain)))
        if self._is_only(domain):
            return link.next(address, last)
        beside = self._walks.setdefault(
            (domain, str(range_.network)), Walk(partial(self._taken_beside, link, range_))
        )
        return beside.next(address, last)

    def is_alive(self, range_: Range, address: int) -> bool:
        """Whether another domain has given the address out in this boot."""
        key = (range_.domain, str(range_.network), address)
        if key not in self._alive:
            held = self._at(range_, address)
            self._alive[key] = any(holder.boot == self._boot for holder in held)
        return self._alive[key]

    def holder(self, range_: Range, address: int) -> Reservation | None:
        """Another domain's reservation of the address."""
        return next(self._at(range_, address), None)

    def require_absent(self, owner: Owner, ranges: Sequence[Range]) -> None:
        """CNIError 121 if another network holds an address of these ranges on the segment."""
        domains: dict[str, list[Range]] = {}
        for range_ in ranges:
            domains.setdefault(range_.domain, []).append(range_)
        for domain, some in domains.items():
            for interval in merged(Interval(range_.first, range_.last) for range_ in some):
                if self._is_used(owner, domain, interval):
                    raise _refusal(self._first_used(owner, interval, some), self._segment)

    def _first_used(self, owner: Owner, interval: Interval, ranges: Iterable[Range]) -> Range:
        """For the error: the first of the ranges that `interval` joins which is used."""
        parts = [range_ for range_ in ranges if interval.first <= range_.first <= interval.last]
        used = (
            part
            for part in parts[:_TRIED]
            if self._is_used(owner, part.domain, Interval(part.first, part.last))
        )
        return next(used, parts[0])

    def _is_used(self, owner: Owner, domain: str, interval: Interval) -> bool:
        return self._tables.is_used(domain, interval, self._segment, owner.attachment.network)

    def _taken_on_link(self, domain: str, address: int, last: int) -> int | None:
        run = self._tables.run_at(domain, address)
        if run is not None:
            return run.last
        if self._is_only(domain):
            return None
        held = self._tables.on_segment(self._segment, address)
        return _end(address, ((each.address, each.domain != domain) for each in held))

    def _taken_beside(self, link: Walk, range_: Range, address: int, last: int) -> int | None:
        """A network of the very same range and the other `enable_overlapping_ranges`.

        It is on the same wire even if the link is unknown: the option is about *other* ranges, and
        whereabouts keeps one pool for both.
        """
        behind = link.next(address, last)
        if behind > address:
            return behind - 1
        cidr = str(range_.network)
        held = self._tables.in_domain(range_.domain_beside, address)
        return _end(address, ((each.address, each.range == cidr) for each in held))

    def _is_only(self, domain: str) -> bool:
        if domain not in self._only:
            self._only[domain] = self._tables.is_only(domain)
        return self._only[domain]

    def _at(self, range_: Range, address: int) -> Iterator[Reservation]:
        if self._is_only(range_.domain):
            return
        beside, cidr = range_.domain_beside, str(range_.network)
        for held in self._tables.of_others(range_.domain, address, self._segment, beside):
            is_here = self._segment != "" and held.segment == self._segment
            if is_here or (held.domain == beside and held.range == cidr):
                yield held


def _refusal(range_: Range, segment: str) -> CNIError:
    return CNIError(
        Code.NOT_ALLOWED,
        f"{range_.why_private}: a range of its own, while another network uses addresses of "
        f"{range_} on the same link ({segment}), is not allowed for this namespace: remove it, or "
        'ask the administrator, who can list it in "set.private_ranges" of a rule',
    )


def _end(address: int, held: Iterable[tuple[int, bool]]) -> int | None:
    """The last address of an unbroken stretch from `address` on that counts; `held` is sorted."""
    end = address - 1
    for other, counts in held:
        if other > end + 1:
            break
        if counts:
            end = other
    return end if end >= address else None
