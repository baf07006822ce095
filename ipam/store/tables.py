"""Reads and writes reservations, runs of taken addresses, and leased blocks.

Reservations and runs have the same addresses in two forms. Each change of an address compares both
forms, and raises Damage if they differ.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import asdict, astuple

from base.pod import Pod
from cni.spec.attachment import Attachment
from ipam.addresses import Interval, parse, text
from ipam.store.block_rows import Instance, LeasedBlock
from ipam.store.database import Damage, Database
from ipam.store.reservations import Owner, Reservation

_COLUMNS = ", ".join(Reservation.__struct_fields__)
_MARKS = ", ".join("?" * len(Reservation.__struct_fields__))
_BLOCK_COLUMNS = "name, first, last, unprobed, content"


class Tables(Database):
    def run_at(self, domain: str, address: int) -> Interval | None:
        run = self._run_up_to(domain, address)
        return run if run is not None and run.last >= address else None

    def runs_in(self, domain: str, interval: Interval) -> Iterator[Interval]:
        """Runs that overlap `interval`, lowest first."""
        before = self._run_up_to(domain, interval.first)
        if before is not None and before.last >= interval.first:
            yield before
        for row in self._execute(
            "SELECT domain, first, last FROM run WHERE domain = ? AND first > ? "
            "AND first <= ? ORDER BY first",
            (domain, _key_of(interval.first), _key_of(interval.last)),
        ):
            yield _run_of(row)

    def at(self, domain: str, address: int) -> Reservation | None:
        row = self._execute(
            f"SELECT {_COLUMNS} FROM reservation WHERE domain = ? AND address = ?",
            (domain, _key_of(address)),
        ).fetchone()
        return None if row is None else _reservation_of(row)

    def of_other_boots(self, boot: str) -> list[Reservation]:
        return [
            *self._indexed(
                "INDEXED BY by_boot WHERE boot < ?", (boot,), lambda row: row.boot < boot
            ),
            *self._indexed(
                "INDEXED BY by_boot WHERE boot > ?", (boot,), lambda row: row.boot > boot
            ),
        ]

    def of_attachment(self, attachment: Attachment) -> list[Reservation]:
        return self._indexed(
            "INDEXED BY by_attachment WHERE network = ? AND container_id = ? AND ifname = ? "
            "ORDER BY domain, address",
            (attachment.network, attachment.container_id, attachment.ifname),
            lambda row: row.attachment == attachment,
        )

    def of_network(self, network: str) -> list[Reservation]:
        where = "INDEXED BY by_attachment WHERE network = ?"
        return self._indexed(where, (network,), lambda row: row.network == network)

    def of_pod(self, owner: Owner) -> list[Reservation]:
        """The pod's reservations for the owner's network and interface name."""
        of = owner.attachment.network, owner.attachment.ifname
        return [held for held in self.of_whole_pod(owner.pod) if (held.network, held.ifname) == of]

    def of_whole_pod(self, pod: Pod) -> list[Reservation]:
        """The pod's reservations on all its interfaces."""
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
        """How many addresses the namespace's pods hold in this boot."""
        (count,) = self._execute(
            "SELECT COUNT(*) FROM reservation INDEXED BY by_name "
            "WHERE namespace = ? AND pod != '' AND boot = ?",
            (namespace, boot),
        ).fetchone()
        return int(count)

    def on_segment(self, segment: str, address: int) -> Iterator[tuple[int, str]]:
        """Held addresses from `address` on, each with its domain, sorted.

        Yields nothing if `segment` is "".
        """
        for key, domain in self._execute(
            "SELECT address, domain FROM reservation INDEXED BY by_segment "
            "WHERE segment = ? AND segment != '' AND address >= ? ORDER BY address",
            (segment, _key_of(address)),
        ):
            yield _address_of(key), domain

    def in_domain(self, domain: str, address: int) -> Iterator[tuple[int, str]]:
        """The held addresses in the domain, from `address` on, each with its range."""
        for key, network in self._execute(
            "SELECT address, range FROM reservation WHERE domain = ? AND address >= ? "
            "ORDER BY address",
            (domain, _key_of(address)),
        ):
            yield _address_of(key), network

    def is_used(self, domain: str, interval: Interval, segment: str, network: str) -> bool:
        """Whether another network in another domain holds an address of `interval` on `segment`."""
        ((used,),) = self._execute(
            "SELECT EXISTS (SELECT 1 FROM reservation INDEXED BY by_segment WHERE segment = ? "
            "AND segment != '' AND address BETWEEN ? AND ? AND domain != ? AND network != ?)",
            (segment, _key_of(interval.first), _key_of(interval.last), domain, network),
        ).fetchall()
        return bool(used)

    def all(self) -> Iterator[Reservation]:
        rows = self._execute(f"SELECT {_COLUMNS} FROM reservation ORDER BY domain, address")
        return map(_reservation_of, rows)

    def within(self, domain: str, interval: Interval) -> Iterator[Reservation]:
        rows = self._execute(
            f"SELECT {_COLUMNS} FROM reservation WHERE domain = ? AND address BETWEEN ? AND ? "
            "ORDER BY address",
            (domain, _key_of(interval.first), _key_of(interval.last)),
        )
        return map(_reservation_of, rows)

    def addresses(self) -> set[int]:
        return {_address_of(key) for (key,) in self._execute("SELECT address FROM reservation")}

    def ranges(self) -> list[tuple[str, str]]:
        """Domain and network of each range that has a reservation."""
        return self._execute(
            "SELECT DISTINCT domain, range FROM reservation ORDER BY domain, range"
        ).fetchall()

    def blocks(self) -> Iterator[LeasedBlock]:
        return map(_seen, self._execute(f"SELECT {_BLOCK_COLUMNS} FROM block ORDER BY name"))

    def blocks_in(self, domain: str, interval: Interval) -> list[LeasedBlock]:
        """The domain's blocks that overlap the interval, lowest first."""
        rows = self._execute(
            f"SELECT {_BLOCK_COLUMNS} FROM block WHERE first <= ? AND last >= ? ORDER BY first",
            (_key_of(interval.last), _key_of(interval.first)),
        )
        return [block for block in map(_seen, rows) if domain in block.domains]

    def block(self, name: str) -> LeasedBlock | None:
        rows = self._execute(f"SELECT {_BLOCK_COLUMNS} FROM block WHERE name = ?", (name,))
        return next(map(_seen, rows), None)

    def unprobed(self) -> list[LeasedBlock]:
        """The blocks with addresses that must be probed before their first use."""
        rows = self._execute(f"SELECT {_BLOCK_COLUMNS} FROM block WHERE unprobed ORDER BY name")
        return list(map(_seen, rows))

    def instance(self) -> Instance | None:
        """Returns `None` before the first lease."""
        row = self._execute("SELECT instance, machine FROM lessee").fetchone()
        return None if row is None else Instance(*row)

    def verify_pages(self) -> None:
        """Check only the structure. This takes a tenth of the time of `verify`."""
        self._require_ok("quick_check")

    def _require_ok(self, check: str) -> None:
        for (answer,) in self._execute(f"PRAGMA {check}(1)").fetchall():
            if answer != "ok":
                raise Damage(f"{check}: {answer}")

    def verify(self) -> None:
        """Read the whole database. Raises Damage or sqlite3.Error."""
        self._require_ok("integrity_check")
        keys = self._execute("SELECT domain, address FROM reservation ORDER BY domain, address")
        runs = self._execute("SELECT domain, first, last FROM run ORDER BY domain, first")
        held = _runs_of((domain, _address_of(key)) for domain, key in keys)
        if held != [(row[0], _run_of(row)) for row in runs]:
            raise Damage("the list of taken addresses does not match the reservations")
        list(self.blocks())

    def put(self, reservation: Reservation) -> None:
        """Record a reservation. Replaces an earlier reservation of the address."""
        address = parse(reservation.address)
        domain, row = reservation.domain, _reservation_row(reservation)
        before, after = self._runs_around(domain, address)
        if before is not None and before.last >= address:
            if self.at(domain, address) is None:
                raise Damage(f"{reservation.address} is listed as taken, but has no reservation")
            self._execute(f"REPLACE INTO reservation VALUES ({_MARKS})", row)
            return
        try:
            self._execute(f"INSERT INTO reservation VALUES ({_MARKS})", row)
        except sqlite3.IntegrityError:
            raise Damage(
                f"{reservation.address} has a reservation, but is not listed as taken"
            ) from None
        self._take(domain, address, before, after)

    def drop(self, domain: str, address: int) -> None:
        run = self.run_at(domain, address)
        held = self._execute(
            "DELETE FROM reservation WHERE domain = ? AND address = ?", (domain, _key_of(address))
        ).rowcount
        if bool(held) is not (run is not None):
            raise Damage(
                f"the list of taken addresses and the reservations differ at {text(address)}"
            )
        if run is None:
            return
        if run.first < address:
            self._put_run(domain, Interval(run.first, address - 1))
        else:
            self._remove_run(domain, run)
        if address < run.last:
            self._put_run(domain, Interval(address + 1, run.last))

    def drop_other_boots(self, boot: str) -> None:
        self._execute("DELETE FROM reservation WHERE boot != ?", (boot,))
        self.load(())

    def load(self, reservations: Iterable[Reservation]) -> None:
        """Add reservations and build the runs again. Raises IntegrityError if an address is
        taken."""
        self.connection.executemany(
            f"INSERT INTO reservation VALUES ({_MARKS})",
            (_reservation_row(reservation) for reservation in reservations),
        )
        self._execute("DELETE FROM run")
        keys = self._execute("SELECT domain, address FROM reservation ORDER BY domain, address")
        self.connection.executemany(
            "INSERT INTO run VALUES (?, ?, ?)",
            (
                _run_row(*run)
                for run in _runs_of((domain, _address_of(key)) for domain, key in keys)
            ),
        )

    def put_block(self, block: LeasedBlock) -> None:
        self._execute("REPLACE INTO block VALUES (?, ?, ?, ?, ?)", _block_row(block))

    def drop_block(self, name: str) -> None:
        self._execute("DELETE FROM block WHERE name = ?", (name,))

    def put_instance(self, instance: Instance) -> None:
        self._execute("REPLACE INTO lessee VALUES (1, ?, ?)", instance)

    def _indexed(
        self, where: str, values: tuple[str, ...], fits: Callable[[Reservation], bool]
    ) -> list[Reservation]:
        """The reservations that an index finds. Raises Damage if one does not fit the index."""
        keys = self._execute(f"SELECT domain, address FROM reservation {where}", values).fetchall()
        found = [self.at(domain, _address_of(key)) for domain, key in keys]
        held = [each for each in found if each is not None and fits(each)]
        if len(held) < len(keys):
            raise Damage("an index does not match the reservations")
        return held

    def _run_up_to(self, domain: str, address: int) -> Interval | None:
        row = self._execute(
            "SELECT domain, first, last FROM run WHERE domain = ? AND first <= ? "
            "ORDER BY first DESC LIMIT 1",
            (domain, _key_of(address)),
        ).fetchone()
        return None if row is None else _run_of(row)

    def _runs_around(self, domain: str, address: int) -> tuple[Interval | None, Interval | None]:
        """The last run that begins at or below `address`, and the run at `address + 1`."""
        rows = self._execute(
            "SELECT domain, first, last FROM run WHERE domain = ? AND first <= ? "
            "ORDER BY first DESC LIMIT 2",
            (domain, _key_of(address + 1)),
        ).fetchall()
        runs = [_run_of(row) for row in rows]
        after = runs.pop(0) if runs and runs[0].first > address else None
        return (runs[0] if runs else None), after

    def _take(
        self, domain: str, address: int, before: Interval | None, after: Interval | None
    ) -> None:
        """Add a free address to the runs. `before` and `after` come from `_runs_around`."""
        first = last = address
        if before is not None and before.last == address - 1:
            first = before.first
        if after is not None:
            last = after.last
            self._remove_run(domain, after)
        self._put_run(domain, Interval(first, last))

    def _put_run(self, domain: str, run: Interval) -> None:
        self._execute("REPLACE INTO run VALUES (?, ?, ?)", _run_row(domain, run))

    def _remove_run(self, domain: str, run: Interval) -> None:
        self._execute(
            "DELETE FROM run WHERE domain = ? AND first = ?", (domain, _key_of(run.first))
        )


def _runs_of(keys: Iterable[tuple[str, int]]) -> list[tuple[str, Interval]]:
    """Sorted (domain, address) pairs as runs."""
    runs: list[tuple[str, Interval]] = []
    for domain, address in keys:
        if runs and runs[-1][0] == domain and runs[-1][1].last + 1 == address:
            runs[-1] = (domain, Interval(runs[-1][1].first, address))
        else:
            runs.append((domain, Interval(address, address)))
    return runs


def _key_of(address: int) -> bytes:
    return address.to_bytes(16, "big")


def _address_of(key: object) -> int:
    if not isinstance(key, bytes) or len(key) != 16:
        raise Damage("an address key is not 16 bytes long")
    return int.from_bytes(key, "big")


def _reservation_row(reservation: Reservation) -> tuple[object, ...]:
    domain, address, *rest = astuple(reservation)
    return (domain, _key_of(parse(address)), *rest)


def _reservation_of(row: tuple[Any, ...]) -> Reservation:
    return Reservation(row[0], text(_address_of(row[1])), *row[2:])


def _run_row(domain: str, run: Interval) -> tuple[object, ...]:
    return (domain, _key_of(run.first), _key_of(run.last))


def _run_of(row: tuple[Any, ...]) -> Interval:
    return Interval(_address_of(row[1]), _address_of(row[2]))


def _block_row(block: LeasedBlock) -> tuple[object, ...]:
    # `content` is the whole block. msgspec's JSON has no integers of 128 bits.
    content = json.dumps(asdict(block))
    return block.name, _key_of(block.first), _key_of(block.last), bool(block.unprobed), content


def _block_of(row: tuple[Any, ...]) -> LeasedBlock:
    try:
        block = msgspec.convert(json.loads(row[-1]), LeasedBlock)
    except (TypeError, ValueError) as error:
        raise Damage(f"the row of block {row[0]} cannot be read: {error}") from None
    if _block_row(block)[:-1] != row[:-1]:
        raise Damage(f"the row of block {row[0]} has columns that do not fit together")
    return block


# Cached, because rows are decoded under the store's lock.
_seen = lru_cache(1024)(_block_of)
