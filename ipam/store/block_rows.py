"""Blocks of a cluster's addresses that this node leases: rows of the store beside reservations.

A row is written before the first address of the block is handed out, and is marked as `returning`
before the lease is given back. `ipam.leases` says when; the store only keeps it.

A node that has vanished without a proof that it is off may be cut off, with its pods running. So
the controller does not free its blocks, but lets go of them: whoever takes one over has each of its
addresses probed before the first use. The main plugin of a pod does that, on the pod's interface,
before the addresses are set there.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from ipam.addresses import Interval, parse
from ipam.ranges import is_within, merged, outside
from ipam.store.reservations import Reservation

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
    `max_offline` seconds from then. `sticky` names the pod that the block is for
    (`ipam.leases.sticky`), "" for any. Each address in `unprobed` is probed before its first use,
    as a lost machine may use it; for those in `answered` one does. Both are sorted.
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
        """Whether it may hand out addresses to new pods at that time of CLOCK_BOOTTIME. A
        confirmation of another boot counts for nothing."""
        is_recent = self.boot == boot and 0 <= now - self.confirmed < self.max_offline
        return self.state == "usable" and is_recent

    def is_to_probe(self, reservation: Reservation) -> bool:
        """Whether this use of one of its addresses is the first."""
        is_here = reservation.domain in self.domains
        return is_here and is_within(parse(reservation.address), self.unprobed)

    def probed(self, seen: Iterable[Interval], answered: Iterable[Interval]) -> "LeasedBlock":
        """The block when addresses were `seen` by probes, and machines `answered` for some."""
        holes = merged(seen)
        return msgspec.structs.replace(
            self,
            unprobed=tuple(part for run in self.unprobed for part in outside(run, holes)),
            answered=merged((*self.answered, *answered)),
        )
