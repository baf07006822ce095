"""Addresses of leased blocks that a lost machine may still use: what probes of them have shown.

A node that has vanished without a proof that it is off may be cut off, with its pods running. So
the controller does not free its blocks, but lets go of them: whoever takes one over has each of its
addresses probed before the first use. The main plugin of a pod does that, on the pod's interface,
before the addresses are set there.
"""

from collections.abc import Collection, Iterable
from functools import partial

from msgspec.structs import replace

from ipam.addresses import Interval, parse
from ipam.blocks import LeasedBlock
from ipam.ranges import is_within, merged, outside
from ipam.store import Reservation
from ipam.tables import Tables


def to_probe(tables: Tables, reservations: Iterable[Reservation]) -> tuple[str, ...]:
    """The addresses of these reservations whose first use this is."""
    blocks = tables.unprobed()
    if not blocks:
        return ()
    return tuple(each.address for each in reservations if any(map(partial(_is_open, each), blocks)))


def settled(
    tables: Tables, silent: Collection[Reservation], answered: Collection[Reservation]
) -> Iterable[LeasedBlock]:
    """The blocks as they are after the probes: no machine answered for the `silent` reservations,
    one did for the `answered` ones. Those that do not change are left out."""
    for block in tables.unprobed():
        here = [each for each in (*silent, *answered) if _is_open(each, block)]
        if not here:
            continue
        seen = merged(map(_address, here))
        taken = [_address(each) for each in answered if _is_open(each, block)]
        yield replace(
            block,
            unprobed=tuple(part for run in block.unprobed for part in outside(run, seen)),
            answered=merged((*block.answered, *taken)),
        )


def looked_at_again(block: LeasedBlock) -> LeasedBlock:
    """The block whose answered addresses are probed again before they are handed out."""
    return replace(block, answered=(), unprobed=merged((*block.unprobed, *block.answered)))


def _is_open(reservation: Reservation, block: LeasedBlock) -> bool:
    is_here = reservation.domain in block.domains
    return is_here and is_within(parse(reservation.address), block.unprobed)


def _address(reservation: Reservation) -> Interval:
    address = parse(reservation.address)
    return Interval(address, address)
