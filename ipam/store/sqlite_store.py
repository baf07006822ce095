"""The address store of one node: SQLite under a file lock.

Every method is one transaction. Raises CNIError 5 if the system refuses an operation, 11 if the
lock is not free in time, 112 if the store is damaged.
"""

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse
from ipam.ranges import Range, RangeSet
from ipam.store.address_choice import Chooser, exhaustion
from ipam.store.reservations import Grant, Owner, RangeUsage, Reservation
from ipam.store.store_files import StoreFiles
from ipam.store.tables import Tables
from ipam.store.usage import usage_of

_WORTH_LOADING = 1000


class SqliteStore:
    """The reservations of this node.

    `files` is the store's directory, which is opened for each call, or an object that opens it.
    `boot` identifies this boot. Reservations of other boots are stale: their pods may get them back
    until a sweep, or a full range, releases them all.
    """

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
        """One address of each set for `owner`, to be used on `segment`: all or none.

        No other domain holds one of them on the same segment. Raises CNIError 103 if the attachment
        holds addresses already, 110 if a set has no free address, AddressTaken if a fixed address
        is held by another owner, and 121 if another network holds an address of a range in `alone`
        on the segment, or if the owner's quota is too small.
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
        """`reserve` from the sets that `seen` returns for the present tables. Reserves nothing if
        `seen` returns no set."""
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
        """Record the results of probes. Addresses in `answered` are not handed out any more."""
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
        """Undo one `reserve`: restore what it replaced, and leave later changes alone."""
        with self._files.transaction() as tables:
            put, drop = [], []
            for reserved in grant.granted:
                reservation = reserved.reservation
                held = tables.at(reservation.domain, parse(reservation.address))
                if held != reservation:
                    continue
                # An earlier sandbox of this boot is gone. Its DEL may have come already: then no
                # call would release the address again.
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
        """Free and return the addresses of `network` whose (container id, ifname) is not in
        `valid`."""
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
        """Free one address for an operator. CNIError 11 if its reservation has changed."""
        with self._files.transaction() as tables:
            if tables.at(reservation.domain, parse(reservation.address)) != reservation:
                raise CNIError(
                    Code.TRY_AGAIN,
                    f"{reservation.address} has changed hands meanwhile: nothing was released",
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
        """Why `reserve` of these sets would fail for a new owner; `None` if it would not."""
        with self._files.handing_out() as tables:
            unused = self._files.unused(tables, sets)
            full = exhaustion(tables, unused)
            if full is not None and self._drop_stale(tables):
                full = exhaustion(tables, unused)
            return full

    def look(self, seen: Callable[[Tables], object]) -> None:
        """Call `seen` with the tables, which it must not change."""
        with self._files.transaction() as tables:
            seen(tables)

    def usage(self, asked: Sequence[Range]) -> list[RangeUsage]:
        """How full these ranges are, and the whole networks of other reserved ranges."""
        with self._files.snapshot() as tables:
            return [] if tables is None else usage_of(tables, asked)

    def reservations(self) -> list[Reservation]:
        with self._files.snapshot() as tables:
            return [] if tables is None else list(tables.all())

    def load(self, reservations: Sequence[Reservation]) -> int:
        """Add the reservations that are missing, all or none; returns how many. CNIError 111 if
        another holder has an address."""
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
                        f"{each.address}: held by {holder.holder}, not by {each.holder}"
                    )
            if conflicts:
                raise CNIError(
                    Code.ADDRESS_TAKEN,
                    f"nothing was imported: {'; '.join(conflicts)}",
                    str(len(conflicts)),
                )
            self._write(tables, put=list(new.values()))
        return len(new)

    def _drop_stale(self, tables: Tables) -> list[Reservation]:
        """Release reservations of other boots: no sandbox outlives its boot."""
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
    """Whether the holder is the one to import. The import may lack the network's name, and the pod
    may have a new sandbox since."""
    if held.attachment == new.attachment:
        return True
    is_unnamed = new.network.startswith(" ") and held.ifname == new.ifname
    is_pod = new.uid != "" and held.uid == new.uid
    return is_unnamed and (is_pod or held.container_id == new.container_id)
