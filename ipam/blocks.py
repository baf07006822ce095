"""Blocks of a cluster's addresses that this node leases: rows of the store beside reservations.

A row is written before the first address of the block is handed out, and is marked as `returning`
before the lease is given back. `ipam.cluster` says when; the store only keeps it.
"""

from typing import Literal, NamedTuple

import msgspec

from ipam.addresses import Interval
from ipam.confirmed import is_recent
from ipam.ranges import merged, outside

State = Literal["usable", "draining", "unconfirmed", "returning", "lost"]
"""`draining`: the pool is, so there are no new hand-outs. `unconfirmed`: the API server shows that
this store lacks changes. `returning`: the lease is being given back. `lost`: it is another's."""


class Instance(NamedTuple):
    """Who the API server knows this store as. `machine` is where the name was made."""

    id: str
    machine: str


class LeasedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses `first` to `last`, leased by the AddressBlock `name` with this `uid`.

    `domains` are those of the store (`ranges.domain_of`) whose addresses it may give out: those of
    the pools in `space`. What is `kept_out` (sorted) no node may hand out.
    It was last `confirmed` at that time of CLOCK_BOOTTIME in `boot`, and hands out addresses for
    `max_offline` seconds from then. `sticky` names
    the pod that the block is for (`ipam.cluster.sticky`), "" for any. Each address in `unprobed` is
    probed before its first use, as a lost machine may use it; for those in `answered` one does
    (`ipam.probes`). Both are sorted.
    """

    name: str
    uid: str
    space: str
    pool: str
    domains: tuple[str, ...]
    first: int
    last: int
    kept_out: tuple[Interval, ...] = ()
    state: State = "usable"
    max_offline: float = 0.0
    boot: str = ""
    confirmed: float = 0.0
    sticky: str = ""
    unprobed: tuple[Interval, ...] = ()
    answered: tuple[Interval, ...] = ()

    @property
    def interval(self) -> Interval:
        """Its addresses."""
        return Interval(self.first, self.last)

    @property
    def parts(self) -> tuple[Interval, ...]:
        """Those of its addresses that may be handed out."""
        holes = self.kept_out
        if self.answered:
            holes = merged((*holes, *self.answered))
        return tuple(outside(self.interval, holes))

    @property
    def size(self) -> int:
        """How many addresses it has."""
        return self.last - self.first + 1

    def is_confirmed(self, boot: str, now: float) -> bool:
        """Whether it may hand out addresses to new pods at that time of CLOCK_BOOTTIME."""
        last = (self.boot, self.confirmed)
        return self.state == "usable" and is_recent(last, self.max_offline, boot, now)


def touch(one: Interval, other: Interval) -> bool:
    """Whether they have an address in common."""
    return one.first <= other.last and other.first <= one.last
