"""The reservations in the database, and the runs of taken addresses.

Both tables hold the same addresses in two forms, and are compared before an address is handed out
or released: an address that is free among the runs must have no reservation. If the two differ,
that is `Damage`.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from base.pod import Pod
from cni.spec.attachment import Attachment
from ipam.addresses import Interval, parse, text
from ipam.block_tables import BlockTables
from ipam.blocks import Instance
from ipam.database import Database
from ipam.other_domains import DomainQueries
from ipam.schema import (
    COLUMNS,
    RESERVATION_MARKS,
    SCHEMA,
    VERSION,
    Damage,
    address_of,
    key_of,
    reservation_of,
    reservation_row,
    run_of,
    run_row,
    runs_of,
)
from ipam.store import Owner, Reservation


class Tables(Database, DomainQueries, BlockTables):
    """The tables of an open database."""

    @classmethod
    def create(
        cls,
        path: Path,
        store: str,
        seq: int,
        reservations: Iterable[Reservation] = (),
        instance: Instance | None = None,
    ) -> None:
        """Write a new database at `path`, which does not exist yet. It is on disk afterwards."""
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN")
            for statement in SCHEMA:
                connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES (1, ?, ?)", (store, seq))
            connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute("COMMIT")
        finally:
            connection.close()
        tables = cls(path)
        try:
            with tables.change():
                tables.load(reservations)
                if instance is not None:
                    tables.put_instance(instance)
            tables.checkpoint()  # `close` does not report a failure to write the WAL back
        finally:
            tables.close()

    # --- reading -----------------------------------------------------------------------------

    def run_at(self, domain: str, address: int) -> Interval | None:
        """The run that holds `address`, None if no run does."""
        run = self._run_up_to(domain, address)
        return run if run is not None and run.last >= address else None

    def runs_in(self, domain: str, interval: Interval) -> Iterator[Interval]:
        """Runs that touch `interval`, lowest first."""
        before = self._run_up_to(domain, interval.first)
        if before is not None and before.last >= interval.first:
            yield before
        for row in self._execute(
            "SELECT domain, first, last FROM run WHERE domain = ? AND first > ? "
            "AND first <= ? ORDER BY first",
            (domain, key_of(interval.first), key_of(interval.last)),
        ):
            yield run_of(row)

    def at(self, domain: str, address: int) -> Reservation | None:
        """The reservation of `address`."""
        return self._row(domain, key_of(address))

    def lowest_stale(self, domain: str, interval: Interval, boot: str) -> Reservation | None:
        """The lowest reservation in `interval` that was made in another boot than `boot`."""
        lowest: bytes | None = None
        other = ""
        while True:
            # One step for each boot that left something behind, not one for each reservation.
            row = self._execute(
                "SELECT boot FROM reservation INDEXED BY by_boot WHERE boot >= ? "
                "ORDER BY boot LIMIT 1",
                (other,),
            ).fetchone()
            if row is None:
                break
            other = f"{row[0]}\0"
            if row[0] == boot:
                continue
            row_of_boot = self._execute(
                "SELECT address FROM reservation INDEXED BY by_boot WHERE boot = ? AND domain = ? "
                "AND address BETWEEN ? AND ? ORDER BY address LIMIT 1",
                (row[0], domain, key_of(interval.first), key_of(interval.last)),
            ).fetchone()
            if row_of_boot is not None and (lowest is None or row_of_boot[0] < lowest):
                lowest = row_of_boot[0]
        if lowest is None:
            return None
        stale = self._existing(domain, lowest)
        if stale.boot == boot:
            raise Damage("the index of boots does not match the reservations")
        return stale

    def of_attachment(self, attachment: Attachment) -> list[Reservation]:
        """What the attachment holds, by domain and address."""
        keys = self._execute(
            "SELECT domain, address FROM reservation INDEXED BY by_attachment "
            "WHERE network = ? AND container_id = ? AND ifname = ? ORDER BY domain, address",
            (attachment.network, attachment.container_id, attachment.ifname),
        ).fetchall()
        held = [self._existing(*key) for key in keys]
        if any(reservation.attachment != attachment for reservation in held):
            raise Damage("the index of attachments does not match the reservations")
        return held

    def of_network(self, network: str) -> list[Reservation]:
        """What attachments of the network hold."""
        keys = self._execute(
            "SELECT domain, address FROM reservation INDEXED BY by_attachment WHERE network = ?",
            (network,),
        ).fetchall()
        held = [self._existing(*key) for key in keys]
        if any(reservation.network != network for reservation in held):
            raise Damage("the index of attachments does not match the reservations")
        return held

    def of_pod(self, owner: Owner) -> list[Reservation]:
        """What the owner's pod holds for the owner's network and ifname."""
        return [held for held in self.of_whole_pod(owner.pod) if held.held_by_pod_of(owner)]

    def of_whole_pod(self, pod: Pod) -> list[Reservation]:
        """What the pod holds on all its interfaces."""
        keys = set()
        if pod.uid:
            keys |= set(
                self._execute(
                    "SELECT domain, address FROM reservation INDEXED BY by_uid "
                    "WHERE uid = ? AND uid != ''",
                    (pod.uid,),
                )
            )
        if pod.name:
            keys |= set(
                self._execute(
                    "SELECT domain, address FROM reservation INDEXED BY by_name "
                    "WHERE namespace = ? AND pod = ? AND pod != ''",
                    (pod.namespace, pod.name),
                )
            )
        held = [self._existing(*key) for key in sorted(keys)]
        return [reservation for reservation in held if reservation.is_of(pod)]

    def count_of_namespace(self, namespace: str, boot: str) -> int:
        """How many addresses the namespace's pods were given in this boot."""
        (count,) = self._execute(
            "SELECT COUNT(*) FROM reservation INDEXED BY by_name "
            "WHERE namespace = ? AND pod != '' AND boot = ?",
            (namespace, boot),
        ).fetchone()
        return int(count)

    def all(self) -> Iterator[Reservation]:
        """Every reservation, by domain and address."""
        for row in self._execute(f"SELECT {COLUMNS} FROM reservation ORDER BY domain, address"):
            yield reservation_of(row)

    def within(self, domain: str, interval: Interval) -> Iterator[Reservation]:
        """Every reservation of the interval in the domain, by address."""
        for row in self._execute(
            f"SELECT {COLUMNS} FROM reservation WHERE domain = ? AND address BETWEEN ? AND ? "
            "ORDER BY address",
            (domain, key_of(interval.first), key_of(interval.last)),
        ):
            yield reservation_of(row)

    def addresses(self) -> set[int]:
        """Every address that is held in some domain."""
        return {address_of(key) for (key,) in self._execute("SELECT address FROM reservation")}

    def ranges(self) -> list[tuple[str, str]]:
        """Domain and network of each range that a reservation is from, each once."""
        return self._execute(
            "SELECT DISTINCT domain, range FROM reservation ORDER BY domain, range"
        ).fetchall()

    def verify_pages(self) -> None:
        """A tenth of `verify`: the structure. What else does not fit shows when it is used."""
        self._require_ok("quick_check")

    def _require_ok(self, check: str) -> None:
        for (answer,) in self._execute(f"PRAGMA {check}(1)").fetchall():
            if answer != "ok":
                raise Damage(f"{check}: {answer}")

    def verify(self) -> None:
        """Read all of the database. Damage, or sqlite3.Error, if anything in it does not fit."""
        self._require_ok("integrity_check")
        keys = self._execute("SELECT domain, address FROM reservation ORDER BY domain, address")
        runs = self._execute("SELECT domain, first, last FROM run ORDER BY domain, first")
        held = runs_of((domain, address_of(key)) for domain, key in keys)
        if list(held) != [(row[0], run_of(row)) for row in runs]:
            raise Damage("the runs of taken addresses do not match the reservations")
        for _ in self.blocks():
            pass

    # --- writing -----------------------------------------------------------------------------

    def put(self, reservation: Reservation) -> None:
        """Record a reservation; it replaces the one that the address may have."""
        address = parse(reservation.address)
        domain, row = reservation.domain, reservation_row(reservation)
        before, after = self._runs_around(domain, address)
        if before is not None and before.last >= address:
            if self.at(domain, address) is None:
                raise Damage(
                    f"{reservation.address} is free among the reservations and taken among the runs"
                )
            self._execute(f"REPLACE INTO reservation VALUES ({RESERVATION_MARKS})", row)
            return
        try:
            self._execute(f"INSERT INTO reservation VALUES ({RESERVATION_MARKS})", row)
        except sqlite3.IntegrityError:
            raise Damage(
                f"{reservation.address} is held among the reservations and free among the runs"
            ) from None
        self._take(domain, address, before, after)

    def drop(self, domain: str, address: int) -> None:
        """Forget the reservation of an address, if there is one."""
        run = self.run_at(domain, address)
        held = self._execute(
            "DELETE FROM reservation WHERE domain = ? AND address = ?", (domain, key_of(address))
        ).rowcount
        if bool(held) is not (run is not None):
            raise Damage(f"the runs and the reservations differ about {text(address)}")
        if run is None:
            return
        if run.first < address:
            self._put_run(domain, Interval(run.first, address - 1))
        else:
            self._remove_run(domain, run)
        if address < run.last:
            self._put_run(domain, Interval(address + 1, run.last))

    def load(self, reservations: Iterable[Reservation]) -> None:
        """Add many reservations; sqlite3.IntegrityError if an address of them is not free."""
        self.connection.executemany(
            f"INSERT INTO reservation VALUES ({RESERVATION_MARKS})",
            (reservation_row(reservation) for reservation in reservations),
        )
        self._execute("DELETE FROM run")
        keys = self._execute("SELECT domain, address FROM reservation ORDER BY domain, address")
        self.connection.executemany(
            "INSERT INTO run VALUES (?, ?, ?)",
            (
                run_row(domain, run)
                for domain, run in runs_of((domain, address_of(key)) for domain, key in keys)
            ),
        )

    # --- the rows ----------------------------------------------------------------------------

    def _row(self, domain: str, key: bytes) -> Reservation | None:
        row = self._execute(
            f"SELECT {COLUMNS} FROM reservation WHERE domain = ? AND address = ?",
            (domain, key),
        ).fetchone()
        return None if row is None else reservation_of(row)

    def _existing(self, domain: str, key: bytes) -> Reservation:
        reservation = self._row(domain, key)
        if reservation is None:
            raise Damage("an index names a reservation that does not exist")
        return reservation

    def _run_up_to(self, domain: str, address: int) -> Interval | None:
        row = self._execute(
            "SELECT domain, first, last FROM run WHERE domain = ? AND first <= ? "
            "ORDER BY first DESC LIMIT 1",
            (domain, key_of(address)),
        ).fetchone()
        return None if row is None else run_of(row)

    def _runs_around(self, domain: str, address: int) -> tuple[Interval | None, Interval | None]:
        """The last run that begins up to `address`, and the one that begins right behind it."""
        rows = self._execute(
            "SELECT domain, first, last FROM run WHERE domain = ? AND first <= ? "
            "ORDER BY first DESC LIMIT 2",
            (domain, key_of(address + 1)),
        ).fetchall()
        runs = [run_of(row) for row in rows]
        after = runs.pop(0) if runs and runs[0].first > address else None
        return (runs[0] if runs else None), after

    def _take(
        self, domain: str, address: int, before: Interval | None, after: Interval | None
    ) -> None:
        """Add a free address to the runs between these two."""
        first = last = address
        if before is not None and before.last == address - 1:
            first = before.first
        if after is not None:
            last = after.last
            self._remove_run(domain, after)
        self._put_run(domain, Interval(first, last))

    def _put_run(self, domain: str, run: Interval) -> None:
        self._execute("REPLACE INTO run VALUES (?, ?, ?)", run_row(domain, run))

    def _remove_run(self, domain: str, run: Interval) -> None:
        self._execute("DELETE FROM run WHERE domain = ? AND first = ?", (domain, key_of(run.first)))
