"""The operations of the address store. Each method is one transaction.

Raises CNIError 5 if the system refuses an operation. Raises CNIError 11 if the lock is not free in
time. Raises CNIError 112 if the store is damaged.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, Network, parse, parse_interface, text
from ipam.ranges import Range, RangeSet, never_usable, of_network, size_of
from ipam.store.address_choice import Chooser, exhaustion, held_in
from ipam.store.database import Damage
from ipam.store.reservations import Grant, Owner, RangeUsage, Reservation
from ipam.store.store_files import StoreFiles
from ipam.store.tables import Tables

_WORTH_LOADING = 1000
MOST = 256  # ranges in the metrics


class SqliteStore:
    """The reservations of this node. If `files` is a directory, each call opens the store. `boot`
    identifies this boot. Reservations of other boots are stale. Pods may get stale reservations
    back, until a sweep or a full range releases them."""

    def __init__(
        self, files: Path | StoreFiles, boot: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._files = StoreFiles(files, kept=False) if isinstance(files, Path) else files
        self.boot = boot
        self._clock = clock

    @property
    def directory(self) -> Path:
        return self._files.directory

    def reserve(
        self,
        owner: Owner,
        sets: Sequence[RangeSet],
        *,
        segment: str = "",
        alone: Sequence[Range] = (),
    ) -> Grant:
        """Reserve one address of each set for `owner`, or no address.

        No other domain holds these addresses on `segment`. Raises CNIError 103 if the attachment
        already holds addresses. Raises CNIError 110 if a set has no free address. Raises
        AddressTaken if another owner holds a fixed address. Raises CNIError 121 if the quota is too
        small, or another network on the segment holds an address of `alone`.
        """
        return self.reserve_seen(owner, lambda tables: sets, segment=segment, alone=alone)

    def reserve_seen(
        self,
        owner: Owner,
        seen: Callable[[Tables], Sequence[RangeSet]],
        *,
        segment: str = "",
        alone: Sequence[Range] = (),
    ) -> Grant:
        """Like `reserve`, with the sets from `seen`. Reserves nothing if there are no sets."""
        with self._files.handing_out() as tables:
            sets = self._files.unused(tables, seen(tables))
            if not sets:
                return Grant()
            chooser = Chooser(tables, owner, segment, self.boot, int(self._clock()))
            try:
                granted = chooser.choose(sets, alone)
            except CNIError as error:
                wants_room = error.code in (Code.NO_FREE_ADDRESS, Code.ADDRESS_TAKEN)
                if not wants_room or not self._drop_stale(tables):
                    raise
                chooser = Chooser(tables, owner, segment, self.boot, int(self._clock()))
                granted = chooser.choose(sets, alone)
            reservations = [reserved.reservation for reserved in granted]
            blocks = tables.unprobed()
            unprobed = tuple(
                each.address
                for each in reservations
                if any(block.is_to_probe(each) for block in blocks)
            )
            self._write(tables, put=reservations)
        return Grant(granted, unprobed)

    def settle_probes(
        self, silent: Collection[Reservation], answered: Collection[Reservation]
    ) -> None:
        """Record the results of probes. No later pod gets an address in `answered`."""
        with self._files.transaction() as tables:
            changed = []
            for block in tables.unprobed():
                seen = [each for each in (*silent, *answered) if block.is_to_probe(each)]
                taken = [each for each in seen if each in answered]
                if seen:
                    changed.append(block.probed(map(_interval, seen), map(_interval, taken)))
            if changed:
                with tables.change():
                    for block in changed:
                        tables.put_block(block)

    def undo(self, grant: Grant) -> None:
        """Undo one `reserve`. Restores replaced reservations of other boots. Keeps later
        changes."""
        with self._files.transaction() as tables:
            put, drop = [], []
            for reserved in grant.granted:
                reservation = reserved.reservation
                held = tables.at(reservation.domain, parse(reservation.address))
                if held != reservation:
                    continue
                # The DEL of an earlier sandbox of this boot may have run. Then no call would
                # release a restored address.
                if reserved.replaced is None or reserved.replaced.boot == self.boot:
                    drop.append(reservation)
                else:
                    put.append(reserved.replaced)
            self._write(tables, put, drop)

    def release(self, attachment: Attachment) -> list[Reservation]:
        with self._files.transaction() as tables:
            held = tables.of_attachment(attachment)
            self._write(tables, drop=held)
        return held

    def collect(self, network: str, valid: Collection[tuple[str, str]]) -> list[Reservation]:
        """Release the network's reservations, except those of attachments in `valid`."""
        with self._files.transaction() as tables:
            dead = [
                reservation
                for reservation in tables.of_network(network)
                if (reservation.container_id, reservation.ifname) not in valid
            ]
            self._write(tables, drop=dead)
        return dead

    def release_stale(self) -> list[Reservation]:
        with self._files.transaction() as tables:
            return self._drop_stale(tables)

    def forget(self, reservation: Reservation) -> None:
        """Free one address for an operator. Raises CNIError 11 if its reservation has changed."""
        with self._files.transaction() as tables:
            if tables.at(reservation.domain, parse(reservation.address)) != reservation:
                raise CNIError(
                    Code.TRY_AGAIN,
                    f"{reservation.address} has another reservation now: nothing was released",
                )
            self._write(tables, drop=[reservation])

    def revise(self, revised: Callable[[Tables], Sequence[Reservation]]) -> None:
        """Replace reservations by those that `revised` returns for the same addresses."""
        with self._files.transaction() as tables:
            new = revised(tables)
            old = [tables.at(each.domain, parse(each.address)) for each in new]
            self._write(tables, new, [each for each in old if each is not None])

    def held_by(self, attachment: Attachment) -> list[Reservation]:
        """The attachment's reservations, lowest address first."""
        with self._files.transaction() as tables:
            held = tables.of_attachment(attachment)
        return sorted(held, key=lambda reservation: parse(reservation.address))

    def exhausted(self, sets: Sequence[RangeSet]) -> str | None:
        """The reason why `reserve` of these sets would fail for a new owner, or `None`."""
        with self._files.handing_out() as tables:
            unused = self._files.unused(tables, sets)
            full = exhaustion(tables, unused)
            if full is not None and self._drop_stale(tables):
                full = exhaustion(tables, unused)
            return full

    def look(self, seen: Callable[[Tables], object]) -> None:
        """Call `seen`, which must not change the tables."""
        with self._files.transaction() as tables:
            seen(tables)

    def usage(self, asked: Sequence[Range]) -> list[RangeUsage]:
        """The usage of these ranges, and of other networks with reservations."""
        with self._files.snapshot() as tables:
            return [] if tables is None else usage_of(tables, asked)

    def reservations(self) -> list[Reservation]:
        with self._files.snapshot() as tables:
            return [] if tables is None else list(tables.all())

    def load(self, reservations: Sequence[Reservation]) -> int:
        """Add all missing reservations, or none after an error. Returns their number. Raises
        CNIError 111 if another holder has an address."""
        new: dict[tuple[str, str], Reservation] = {}
        conflicts = []
        with self._files.transaction() as tables:
            for each in reservations:
                key = (each.domain, each.address)
                holder = new.get(key) or tables.at(each.domain, parse(each.address))
                if holder is None:
                    new[key] = each
                elif not _is_same(holder, each):
                    conflicts.append(
                        f"{each.address} (held by {holder.holder}, not by {each.holder})"
                    )
            if conflicts:
                raise CNIError(
                    Code.ADDRESS_TAKEN,
                    f"nothing was imported, because addresses are taken: {'; '.join(conflicts)}",
                    str(len(conflicts)),
                )
            self._write(tables, put=list(new.values()))
        return len(new)

    def _drop_stale(self, tables: Tables) -> list[Reservation]:
        """Release reservations of other boots, because no sandbox outlives its boot."""
        stale = tables.of_other_boots(self.boot)
        if stale:
            with tables.change():
                tables.drop_other_boots(self.boot)
        return stale

    def _write(
        self, tables: Tables, put: Sequence[Reservation] = (), drop: Sequence[Reservation] = ()
    ) -> None:
        if not put and not drop:
            return
        with tables.change():
            for reservation in drop:
                tables.drop(reservation.domain, parse(reservation.address))
            if len(put) < _WORTH_LOADING:
                for reservation in put:
                    tables.put(reservation)
            else:
                tables.load(put)


def _interval(reservation: Reservation) -> Interval:
    address = parse(reservation.address)
    return Interval(address, address)


def _is_same(held: Reservation, new: Reservation) -> bool:
    """Whether both reservations have the same holder.

    An imported reservation may lack the network's name, and its pod may have a new sandbox now."""
    if held.attachment == new.attachment:
        return True
    is_unnamed = new.network.startswith(" ") and held.ifname == new.ifname
    is_pod = new.uid != "" and held.uid == new.uid
    return is_unnamed and (is_pod or held.container_id == new.container_id)


class SeenRanges:
    """The ranges of recent network configurations, for any thread."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._ranges: OrderedDict[tuple[object, ...], Range] = OrderedDict()

    def see(self, sets: Iterable[RangeSet]) -> None:
        """Record the ranges of a network. Drops the least recent ranges."""
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
    """The usage of each range in `asked`, and of each other network with reservations. Shows at
    most MOST ranges, first those with reservations."""
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
            raise Damage(f"a reservation has the unreadable range {cidr!r}") from None
        if (domain, network) in named or network.prefix == 128:  # a single address
            continue
        first, last = of_network(network, use_all=network.prefix == 127)
        yield Range(
            network=network, first=first, last=last, excluded=never_usable(network), domain=domain
        )


def _spelling(range_: Range) -> str:
    """The range as in a configuration: `10.0.0.0/24`, or the part `10.0.0.5-10.0.0.99/24`."""
    network = range_.network
    if range_.first <= network.address + 1 and range_.last >= network.last - 1:
        return str(network)
    return f"{text(range_.first)}-{text(range_.last)}/{network.family_prefix}"
