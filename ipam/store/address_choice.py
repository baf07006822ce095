"""Which address an attachment gets, or the error of a full range, over the store's tables.

Never one that another domain holds on the same link (`link_conflicts`). Of the rest in this order,
for all sets of a request before anything is changed: addresses that the same pod holds from a
former sandbox; then the lowest free address. The cost is a lookup for each gap between exclusions
and what others hold, for any size of the range and the number of its own reservations.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse, text
from ipam.ranges import Range, RangeSet, size_of, written
from ipam.store.link_conflicts import Others
from ipam.store.reservations import AddressTaken, Owner, Reservation
from ipam.store.tables import Tables

_DESCRIBED = 4  # ranges of a set in an error


class AddressChoice(NamedTuple):
    """An address for a set: the range it comes from, and the reservation that it replaces."""

    range: Range
    address: int
    replaced: Reservation | None = None


def choose(
    tables: Tables, owner: Owner, sets: Sequence[RangeSet], boot: str, others: Others
) -> list[AddressChoice]:
    """One address for each set, in their order. CNIError 103, 110 or 111; changes nothing."""
    former = _former(tables, owner, boot)
    chosen: dict[int, AddressChoice] = {}
    # What is bound goes first, so that no other set takes its address.
    bound_first = sorted(enumerate(sets), key=lambda each: not each[1].fixed)
    for index, range_set in bound_first:
        choice = _kept(range_set, former, chosen.values(), others)
        if choice is not None:
            chosen[index] = choice
    for index, range_set in bound_first:
        if index not in chosen:
            chosen[index] = _chosen(tables, range_set, chosen.values(), others)
    return [chosen[index] for index in range(len(sets))]


def held_in(tables: Tables, range_: Range) -> int:
    """How many of the addresses that the range allows are held."""
    if not range_.parts:
        return 0
    whole = Interval(range_.parts[0].first, range_.parts[-1].last)
    return sum(size_of(range_.within(run)) for run in tables.runs_in(range_.domain, whole))


def exhaustion(tables: Tables, range_set: RangeSet) -> str | None:
    """Why the set has no address for a new owner; None if it has one."""
    for range_ in range_set.ranges:
        for part in range_.parts:
            run = tables.run_at(range_.domain, part.first)
            # Touching runs are merged: the address after a run is free.
            if run is None or run.last < part.last:
                return None
    return _descriptions(tables, range_set.ranges)


def _former(tables: Tables, owner: Owner, boot: str) -> list[tuple[int, Reservation]]:
    """What the owner held before, by address: in an earlier sandbox of its pod, or boot."""
    own = tables.of_attachment(owner.attachment)
    alive = [reservation for reservation in own if reservation.boot == boot]
    if alive:
        held = ", ".join(reservation.address for reservation in alive)
        raise CNIError(
            Code.ALREADY_ATTACHED,
            f"{alive[0].holder} already holds {held}: nothing was changed; run DEL for it "
            "before another ADD",
        )
    former = dict.fromkeys([*own, *tables.of_pod(owner)])
    return [(parse(reservation.address), reservation) for reservation in former]


def _kept(
    range_set: RangeSet,
    former: Sequence[tuple[int, Reservation]],
    chosen: Iterable[AddressChoice],
    others: Others,
) -> AddressChoice | None:
    """A former address that the set still allows, from the same range if there is one."""
    if not former:
        return None
    avoid = {choice.address for choice in chosen}
    for same_range in (True, False):
        for range_ in range_set.ranges:
            network = str(range_.network)
            for address, held in former:
                if (
                    held.domain == range_.domain
                    and (held.range == network) is same_range
                    and address not in avoid
                    and range_.allows(address)
                    and not others.is_alive(range_, address)
                ):
                    return AddressChoice(range_, address, held)
    return None


def _chosen(
    tables: Tables, range_set: RangeSet, chosen: Iterable[AddressChoice], others: Others
) -> AddressChoice:
    used = {choice.address for choice in chosen}
    for range_ in range_set.ranges:
        address = _lowest(range_, used, others)
        if address is not None:
            return AddressChoice(range_, address)
    if range_set.fixed:
        raise _taken(tables, range_set.ranges[0], used, others)
    raise CNIError(
        Code.NO_FREE_ADDRESS,
        "no free address in "
        + _descriptions(tables, range_set.ranges)
        + ". Delete pods that no longer need one, or widen the range",
    )


def _lowest(range_: Range, used: Collection[int], others: Others) -> int | None:
    """The lowest address that the range allows, nobody holds and `used` has not."""
    for part in range_.parts:
        address = others.next_free(range_, part.first, part.last)
        while address in used:
            address = others.next_free(range_, address + 1, part.last)
        if address <= part.last:
            return address
    return None


def _taken(tables: Tables, range_: Range, used: Collection[int], others: Others) -> AddressTaken:
    address = text(range_.first)
    if range_.first in used:
        return AddressTaken(f"{range_.where}: {address} is asked for twice")
    holders = [tables.at(range_.domain, range_.first), *others.holders(range_, range_.first)]
    holder = next(filter(None, holders), None)
    return AddressTaken(
        f"{range_.where}: address {address} is in use by another attachment: nothing was "
        "reserved; ask for another address",
        f"{address} is held by {holder.holder}" if holder else "",
    )


def _descriptions(tables: Tables, ranges: Sequence[Range]) -> str:
    """A few ranges, as counting takes time under the store's lock."""
    held: dict[tuple[str, tuple[Interval, ...]], int] = {}
    texts = []
    for range_ in ranges[:_DESCRIBED]:
        key = (range_.domain, range_.parts)
        if key not in held:
            held[key] = held_in(tables, range_)
        texts.append(_description(range_, held[key]))
    more = len(ranges) - _DESCRIBED
    if more > 0:
        texts.append(f"and {more} more range{'s' if more > 1 else ''}")
    return "; ".join(texts)


def _description(range_: Range, held: int) -> str:
    excluded = ", ".join(written(range_.excluded))
    without = f" without {excluded}" if excluded else ""
    return f'"{range_.where}": {range_}{without}, of which {held} are held'
