"""The store's rows of the blocks that this node leases.

A row is written before a pod gets an address of the block. The row is marked `returning` before the
node returns the lease.

If a node disappears, its pods may still run. So the controller drains the node's blocks instead of
deleting them. The next holder probes each address of these blocks before its first use. The pod's
main plugin sends the probe from the pod's interface, before it sets the address.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from ipam.addresses import Interval, parse
from ipam.ranges import is_within, merged, outside
from ipam.store.reservations import Reservation

State = Literal["usable", "draining", "unconfirmed", "returning", "lost"]
"""`draining`: the pool is draining, so no new pod gets an address. `unconfirmed`: the API server
shows that this store lacks changes. `returning`: this node is returning the lease. `lost`: another
node has the lease."""


class Instance(NamedTuple):
    """The store's identity at the API server. `machine` is the machine that made the identity."""

    id: str
    machine: str


class LeasedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses `first` to `last`, leased by the AddressBlock `name` with this `uid`.

    The block has addresses for `domains`. No pod gets an address in `kept_out`. `confirmed` is the
    time of the last confirmation (CLOCK_BOOTTIME in `boot`). The lease is valid for `max_offline`
    seconds after `confirmed`. `sticky` names the only pod that may use the block, or is "".
    Addresses in `unprobed` are probed before their first use. Another machine answered for
    addresses in `answered`. All intervals are sorted.
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
        return Interval(self.first, self.last)

    @property
    def parts(self) -> tuple[Interval, ...]:
        holes = self.kept_out
        if self.answered:
            holes = merged((*holes, *self.answered))
        return tuple(outside(self.interval, holes))

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    def is_confirmed(self, boot: str, now: float) -> bool:
        """Whether new pods may get addresses at `now`. Confirmations of other boots do not
        count."""
        is_recent = self.boot == boot and 0 <= now - self.confirmed < self.max_offline
        return self.state == "usable" and is_recent

    def is_to_probe(self, reservation: Reservation) -> bool:
        is_here = reservation.domain in self.domains
        return is_here and is_within(parse(reservation.address), self.unprobed)

    def probed(self, seen: Iterable[Interval], answered: Iterable[Interval]) -> "LeasedBlock":
        """The block's row after the addresses in `seen` were probed.

        Another machine answered for addresses in `answered`."""
        holes = merged(seen)
        return msgspec.structs.replace(
            self,
            unprobed=tuple(part for run in self.unprobed for part in outside(run, holes)),
            answered=merged((*self.answered, *answered)),
        )
