"""What the node knows of addresses in use outside of the store, and those that have no reservation.

A store that was damaged, lost, cut or replaced by an older copy lacks reservations, and nothing in
it may show that. So a process compares it with these facts when it opens it.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from ipam.addresses import parse
from ipam.ranges import Range
from ipam.store import Reservation


class LivingAddress(NamedTuple):
    """An address that an interface in a living network namespace has; `inode` is the namespace's,
    `namespace` a path of it."""

    address: str
    ifname: str
    namespace: str
    inode: int = 0

    @property
    def lasts(self) -> bool:
        """Whether the namespace is still there."""
        try:
            return os.stat(self.namespace).st_ino == self.inode  # noqa: PTH116 - cheaper
        except OSError:
            return False


class NodeFacts(msgspec.Struct, frozen=True):
    """What the attachments' journal and the kernel have in this `boot`.

    `journal` are the addresses of attachments. `begun` are the times (since 1970) at which ADDs
    began whose addresses the journal does not have yet. `unseen` are what could not be looked at.
    """

    boot: str = ""
    journal: tuple[Reservation, ...] = ()
    living: tuple[LivingAddress, ...] = ()
    begun: tuple[float, ...] = ()
    unseen: tuple[str, ...] = ()


FactsOf = Callable[[], NodeFacts]
"""Looks at the node."""


class AddressesInUse:
    """Addresses that interfaces have and nothing reserves: no pod gets them meanwhile."""

    def __init__(self, found: Iterable[LivingAddress] = ()) -> None:
        every = sorted((parse(each.address), each) for each in found)
        self._addresses = [address for address, _ in every]
        self._found = [each for _, each in every]

    def within(self, range_: Range) -> Iterator[LivingAddress]:
        """Those that the range would hand out."""
        first = bisect_left(self._addresses, range_.first)
        last = bisect_right(self._addresses, range_.last)
        for address, each in zip(self._addresses[first:last], self._found[first:last], strict=True):
            if range_.allows(address):
                yield each
