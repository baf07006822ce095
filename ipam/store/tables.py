"""What is in the database: reservations, the runs of taken addresses, and leased blocks.

The first two hold the same addresses in two forms, and are compared before an address is handed out
or released: an address that is free among the runs must have no reservation. If the two differ,
that is `Damage`.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from base.pod import Pod
from cni.spec.attachment import Attachment
from ipam.addresses import Interval, parse, text
from ipam.store.block_rows import Instance, LeasedBlock
from ipam.store.database import Database
from ipam.store.reservations import Owner, Reservation
from ipam.store.schema import (
    BLOCK_COLUMNS,
    BLOCK_MARKS,
    COLUMNS,
    RESERVATION_MARKS,
    Damage,
    address_of,
    block_of,
    block_row,
    key_of,
    reservation_of,
    reservation_row,
    run_of,
    run_row,
    runs_of,
)


class Tables(Database):
    """The tables of an open database."""

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
        row = self._execute(
            f"SELECT {COLUMNS} FROM reservation WHERE domain = ? AND address = ?",
            (domain, key_of(address)),
        ).fetchone()
        return None if row is None else reservation_of(row)

    def of_other_boots(self, boot: str) -> list[Reservation]:
        """What was reserved in other boots than this one."""
        return [
            *self._indexed(
                "INDEXED BY by_boot WHERE boot < ?", (boot,), lambda row: row.boot < boot
            ),
            *self._indexed(
                "INDEXED BY by_boot WHERE boot > ?", (boot,), lambda row: row.boot > boot
            ),
        ]

    def of_attachment(self, attachment: Attachment) -> list[Reservation]:
        """What the attachment holds, by domain and address."""
        return self._indexed(
            "INDEXED BY by_attachment WHERE network = ? AND container_id = ? AND ifname = ? "
            "ORDER BY domain, address",
            (attachment.network, attachment.container_id, attachment.ifname),
            lambda row: row.attachment == attachment,
        )

    def of_network(self, network: str) -> list[Reservation]:
        """What attachments of the network hold."""
        where = "INDEXED BY by_attachment WHERE network = ?"
        return self._indexed(where, (network,), lambda row: row.network == network)

    def of_pod(self, owner: Owner) -> list[Reservation]:
        """What the owner's pod holds for the owner's network and ifname."""
        of = owner.attachment.network, owner.attachment.ifname
        return [held for held in self.of_whole_pod(owner.pod) if (held.network, held.ifname) == of]

    def of_whole_pod(self, pod: Pod) -> list[Reservation]:
        """What the pod holds on all its interfaces."""
        held: list[Reservation] = []
        if pod.uid:
            where = "INDEXED BY by_uid WHERE uid = ? AND uid != ''"
            held += self._indexed(where, (pod.uid,), lambda row: row.uid == pod.uid)
        if pod.name:
            held += self._indexed(
                "INDEXED BY by_name WHERE namespace = ? AND pod = ? AND pod != ''",
                (pod.namespace, pod.name),
                lambda row: (row.namespace, row.pod) == (pod.namespace, pod.name),
            )
        by_place = sorted(set(held), key=lambda each: (each.domain, parse(each.address)))
        return [reservation for reservation in by_place if reservation.is_of(pod)]

    def count_of_namespace(self, namespace: str, boot: str) -> int:
        """How many addresses the namespace's pods were given in this boot."""
        (count,) = self._execute(
            "SELECT COUNT(*) FROM reservation INDEXED BY by_name "
            "WHERE namespace = ? AND pod != '' AND boot = ?",
            (namespace, boot),
        ).fetchone()
        return int(count)

    def on_segment(self, segment: str, address: int) -> Iterator[tuple[int, str]]:
        """The addresses from `address` on that are held on a segment, lowest first, each with the
        domain; none on an unknown one ("")."""
        for key, domain in self._execute(
            "SELECT address, domain FROM reservation INDEXED BY by_segment "
            "WHERE segment = ? AND segment != '' AND address >= ? ORDER BY address",
            (segment, key_of(address)),
        ):
            yield address_of(key), domain

    def in_domain(self, domain: str, address: int) -> Iterator[tuple[int, str]]:
        """The addresses from `address` on that the domain holds, each with its range."""
        for key, network in self._execute(
            "SELECT address, range FROM reservation WHERE domain = ? AND address >= ? "
            "ORDER BY address",
            (domain, key_of(address)),
        ):
            yield address_of(key), network

    def is_used(self, domain: str, interval: Interval, segment: str, network: str) -> bool:
        """Whether another network and domain hold some of `interval` on `segment`."""
        ((used,),) = self._execute(
            "SELECT EXISTS (SELECT 1 FROM reservation INDEXED BY by_segment WHERE segment = ? "
            "AND segment != '' AND address BETWEEN ? AND ? AND domain != ? AND network != ?)",
            (segment, key_of(interval.first), key_of(interval.last), domain, network),
        ).fetchall()
        return bool(used)

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

    def blocks(self) -> Iterator[LeasedBlock]:
        """Every block, by name."""
        for row in self._execute(f"SELECT {BLOCK_COLUMNS} FROM block ORDER BY name"):
            yield _seen(row)

    def blocks_in(self, domain: str, interval: Interval) -> list[LeasedBlock]:
        """The blocks that give out addresses of the interval in the domain, lowest first."""
        rows = self._execute(
            f"SELECT {BLOCK_COLUMNS} FROM block WHERE first <= ? AND last >= ? ORDER BY first",
            (key_of(interval.last), key_of(interval.first)),
        )
        return [block for block in map(_seen, rows) if domain in block.domains]

    def block(self, name: str) -> LeasedBlock | None:
        """The block of that name."""
        row = self._execute(f"SELECT {BLOCK_COLUMNS} FROM block WHERE name = ?", (name,)).fetchone()
        return None if row is None else _seen(row)

    def unprobed(self) -> list[LeasedBlock]:
        """The blocks of which addresses are to be probed before their first use."""
        rows = self._execute(f"SELECT {BLOCK_COLUMNS} FROM block WHERE unprobed ORDER BY name")
        return list(map(_seen, rows))

    def instance(self) -> Instance | None:
        """Who leases the blocks; None before the first lease."""
        row = self._execute("SELECT instance, machine FROM lessee").fetchone()
        return None if row is None else Instance(*row)

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

    def drop_other_boots(self, boot: str) -> None:
        """Forget what was reserved in other boots than this one."""
        self._execute("DELETE FROM reservation WHERE boot != ?", (boot,))
        self.load(())

    def load(self, reservations: Iterable[Reservation]) -> None:
        """Add many reservations; sqlite3.IntegrityError if an address of them is not free. The runs
        are made again."""
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

    def put_block(self, block: LeasedBlock) -> None:
        """Record a block, or what changed of it."""
        self._execute(f"REPLACE INTO block VALUES ({BLOCK_MARKS})", block_row(block))

    def drop_block(self, name: str) -> None:
        """Forget a block."""
        self._execute("DELETE FROM block WHERE name = ?", (name,))

    def put_instance(self, instance: Instance) -> None:
        """Lease under this identity from here on."""
        self._execute("REPLACE INTO lessee VALUES (1, ?, ?)", instance)

    # --- the rows ----------------------------------------------------------------------------

    def _indexed(
        self, where: str, values: tuple[str, ...], fits: Callable[[Reservation], bool]
    ) -> list[Reservation]:
        """The reservations that an index names. Damage if one of them does not fit."""
        keys = self._execute(f"SELECT domain, address FROM reservation {where}", values).fetchall()
        found = [self.at(domain, address_of(key)) for domain, key in keys]
        held = [each for each in found if each is not None and fits(each)]
        if len(held) < len(keys):
            raise Damage("an index does not match the reservations")
        return held

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


# Who holds the store's lock does not work a row out again.
_seen = lru_cache(1024)(block_of)
