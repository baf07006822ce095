"""The address store of one node: SQLite and a log under a file lock. See `store` for the words.

Every method is one transaction on files that an `Opening` answers. It writes the log first and
commits then, so that a process may die anywhere in between.
"""

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from ipam import allocation
from ipam.addresses import parse, text
from ipam.allocation import AddressChoice
from ipam.others import Others
from ipam.ranges import Range, RangeSet
from ipam.recovery import FAILURES, UNCERTAIN, explained
from ipam.store import Grant, Owner, Reservation, ReservedAddress, Usage
from ipam.store_files import PerCall, StoreFiles
from ipam.tables import Tables
from ipam.usage import usage_of

_WORTH_LOADING = 1000


class SqliteStore:
    """The reservations of this node. Implements `ipam.store.Store`.

    `files` is the directory they are in, opened for each call, or an opening of it. `boot` is
    this boot's identity: what was reserved in another one is stale.
    """

    def __init__(
        self, files: Path | StoreFiles, boot: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._opening = PerCall(files) if isinstance(files, Path) else files
        self.boot = boot
        self._clock = clock

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._opening.directory

    def reserve(
        self,
        owner: Owner,
        sets: Sequence[RangeSet],
        *,
        segment: str = "",
        alone: Sequence[Range] = (),
    ) -> Grant:
        """See Store.reserve."""
        with self._opening.transaction() as tables:
            others = Others(tables, segment, self.boot)
            others.require_absent(owner, alone)
            choices = allocation.choose(tables, owner, sets, self.boot, others)
            granted = tuple(
                ReservedAddress(
                    choice.range, self._reservation(owner, choice, segment), choice.replaced
                )
                for choice in choices
            )
            self._write(tables, put=[one.reservation for one in granted])
        return Grant(granted)

    def undo(self, grant: Grant) -> None:
        """See Store.undo."""
        with self._opening.transaction() as tables:
            put, drop = [], []
            for one in grant.granted:
                reservation = one.reservation
                held = tables.at(reservation.domain, parse(reservation.address))
                if held != reservation:
                    continue
                # A former sandbox of this boot had to be gone for its pod to get another one, and
                # its DEL may have come already: it would hold the address for ever.
                if one.replaced is None or one.replaced.boot == self.boot:
                    drop.append(reservation)
                else:
                    put.append(one.replaced)
            self._write(tables, put, drop)

    def release(self, attachment: Attachment) -> list[Reservation]:
        """See Store.release."""
        with self._opening.transaction() as tables:
            held = tables.of_attachment(attachment)
            self._write(tables, drop=held)
        return held

    def collect(self, network: str, valid: Collection[tuple[str, str]]) -> list[Reservation]:
        """See Store.collect."""
        with self._opening.transaction() as tables:
            dead = [
                one
                for one in tables.of_network(network)
                if (one.container_id, one.ifname) not in valid
            ]
            self._write(tables, drop=dead)
        return dead

    def forget(self, reservation: Reservation) -> None:
        """Free one address whoever holds it, for an operator who knows better.

        CNIError 11 if it is not held any more as `reservation` says.
        """
        with self._opening.transaction() as tables:
            if tables.at(reservation.domain, parse(reservation.address)) != reservation:
                raise CNIError(
                    Code.TRY_AGAIN,
                    f"{reservation.address} has changed hands meanwhile: nothing was released",
                )
            self._write(tables, drop=[reservation])

    def held_by(self, attachment: Attachment) -> list[Reservation]:
        """See Store.held_by."""
        with self._opening.transaction() as tables:
            held = tables.of_attachment(attachment)
        return sorted(held, key=lambda one: parse(one.address))

    def exhausted(self, sets: Sequence[RangeSet]) -> str:
        """See Store.exhausted."""
        with self._opening.transaction() as tables:
            for one in sets:
                full = "" if one.fixed else allocation.exhaustion(tables, one, self.boot)
                if full:
                    return full
        return ""

    def usage(self, known: tuple[Range, ...], last: Usage) -> Usage:
        """See Store.usage."""
        with self._opening.transaction() as tables:
            state = f"{tables.meta.store} {tables.meta.seq}"
            if (state, known) == (last.state, last.known):
                return last
            return Usage(state, known, usage_of(tables, known))

    def reservations(self) -> list[Reservation]:
        """See Store.reservations."""
        with self._opening.transaction() as tables:
            return list(tables.all())

    def load(self, reservations: Sequence[Reservation]) -> None:
        """See Store.load."""
        with self._opening.transaction() as tables:
            new: dict[tuple[str, str], Reservation] = {}
            for one in reservations:
                key = (one.domain, one.address)
                held = new.get(key) or tables.at(one.domain, parse(one.address))
                if held is not None:
                    raise CNIError(
                        Code.ADDRESS_TAKEN,
                        f"{one.address} is held by {held.holder}: nothing was loaded",
                    )
                new[key] = one
            self._write(tables, put=reservations)

    def _reservation(self, owner: Owner, choice: AddressChoice, segment: str) -> Reservation:
        return Reservation(
            domain=choice.range.domain,
            address=text(choice.address),
            range=str(choice.range.network),
            network=owner.attachment.network,
            container_id=owner.attachment.container_id,
            ifname=owner.attachment.ifname,
            namespace=owner.pod.namespace,
            pod=owner.pod.name,
            uid=owner.pod.uid,
            boot=self.boot,
            since=int(self._clock()),
            segment=segment,
        )

    def _write(
        self,
        tables: Tables,
        put: Sequence[Reservation] = (),
        drop: Sequence[Reservation] = (),
    ) -> None:
        """Change the tables in one transaction."""
        if not put and not drop:
            return
        seq = tables.meta.seq
        try:
            tables.begin()
            for reservation in drop:
                tables.drop(reservation.domain, parse(reservation.address))
            if len(put) < _WORTH_LOADING:
                for reservation in put:
                    tables.put(reservation)
            else:
                tables.load(put)
            tables.record(seq + 1)
            tables.commit()
        except BaseException as error:
            if not _was_undone(tables, seq) and isinstance(error, FAILURES):
                raise explained(error, self.directory, UNCERTAIN) from None
            raise


def _was_undone(tables: Tables, seq: int) -> bool:
    """After a failure: whether the database has nothing of the transaction.

    False also if that cannot be found out.
    """
    try:
        tables.reopen()
    except FAILURES:
        return False
    return tables.meta.seq == seq
