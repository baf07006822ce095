"""What other domains hold of a range, for one request: addresses that it must not get as well.

A domain is where an address is unique. Two domains may still be on one wire: a network makes its
range private by an option, and says nothing of its link by that. So the link decides: an address
is not handed out if another domain holds it on the same segment.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from cni.policy import rules
from cni.spec.errors import CNIError
from ipam.addresses import Interval, Network, parse
from ipam.ranges import Range
from ipam.segments import BEFORE
from ipam.store import Owner, Reservation


class Space(Protocol):
    """What this needs to know of a store."""

    def of_others(
        self, domain: str, interval: Interval, segment: str, beside: str
    ) -> Iterator[Reservation]:
        """What other domains hold on `segment` or BEFORE, and all that `beside` does."""


class Others:
    """Reservations of other domains, looked up once for each range. `segment` "" is unknown."""

    def __init__(self, space: Space, segment: str, boot: str) -> None:
        self._space = space
        self._segment = segment
        self._boot = boot
        self._held: dict[tuple[str, Network, Interval], dict[int, Reservation]] = {}

    def held(self, range_: Range) -> Mapping[int, Reservation]:
        """By address, between the first and the last of the range."""
        interval = Interval(range_.first, range_.last)
        key = (range_.domain, range_.network, interval)
        if key not in self._held:
            beside = range_.domain_beside
            self._held[key] = {
                parse(one.address): one
                for one in self._space.of_others(range_.domain, interval, self._segment, beside)
                if self._counts(one, range_)
            }
        return self._held[key]

    def alive(self, range_: Range) -> set[int]:
        """The addresses among them that were given out in this boot."""
        return {address for address, one in self.held(range_).items() if one.boot == self._boot}

    def require_absent(self, owner: Owner, ranges: Sequence[Range]) -> None:
        """CNIError 121 if another network holds an address of these ranges on the segment."""
        for range_ in ranges:
            for one in self.held(range_).values():
                if self._is_here(one) and one.network != owner.attachment.network:
                    raise _refusal(range_, one)

    def _counts(self, one: Reservation, range_: Range) -> bool:
        """Whether the address is not to be had here.

        A network of the very same range and the other `enable_overlapping_ranges` is on the same
        wire, whatever is known of the link: the option is about *other* ranges, and whereabouts
        keeps one pool for both.
        """
        beside = one.domain == range_.domain_beside and one.range == str(range_.network)
        return beside or self._is_here(one)

    def _is_here(self, one: Reservation) -> bool:
        if one.segment == BEFORE:
            return one.boot == self._boot
        return self._segment != "" and one.segment == self._segment


def _refusal(range_: Range, one: Reservation) -> CNIError:
    link = "an unknown link" if one.segment == BEFORE else f"the same link ({one.segment})"
    return rules.not_allowed(
        f"{range_.why_private}: a range of its own, while another network uses addresses of "
        f"{range_} on {link},",
        "private_ranges",
    )
