"""Rows of the SQLite store: the tables, and what a row becomes."""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

from ipam.addresses import Interval, parse, text
from ipam.blocks import LeasedBlock
from ipam.store import Reservation

VERSION = 1
COLUMNS = (
    "domain, address, range, network, container_id, ifname, namespace, pod, uid, boot, since, "
    "segment"
)
BLOCK_COLUMNS = (
    "name, uid, space, pool, domains, first, last, kept_out, state, max_offline, boot, confirmed, "
    "sticky, unprobed, answered"
)
BLOCK_MARKS = ", ".join("?" * (BLOCK_COLUMNS.count(",") + 1))
RESERVATION_MARKS = ", ".join("?" * (COLUMNS.count(",") + 1))

META = "CREATE TABLE meta (id INTEGER PRIMARY KEY, store TEXT, seq INTEGER)"
RESERVATION = """CREATE TABLE reservation (domain TEXT, address BLOB, range TEXT, network TEXT,
    container_id TEXT, ifname TEXT, namespace TEXT, pod TEXT, uid TEXT, boot TEXT, since INTEGER,
    segment TEXT, PRIMARY KEY (domain, address)) WITHOUT ROWID"""
RUN = """CREATE TABLE run (domain TEXT, first BLOB, last BLOB,
    PRIMARY KEY (domain, first)) WITHOUT ROWID"""
INDEXES = (
    "CREATE INDEX by_attachment ON reservation (network, container_id, ifname)",
    "CREATE INDEX by_boot ON reservation (boot)",
    "CREATE INDEX by_name ON reservation (namespace, pod) WHERE pod != ''",
    "CREATE INDEX by_uid ON reservation (uid) WHERE uid != ''",
    "CREATE INDEX by_segment ON reservation (segment, address) WHERE segment != ''",
)
# What this node leases of a cluster's addresses, and as whom (ipam.blocks).
BLOCK = """CREATE TABLE block (name TEXT PRIMARY KEY, uid TEXT, space TEXT, pool TEXT, domains TEXT,
    first BLOB, last BLOB, kept_out TEXT, state TEXT, max_offline REAL, boot TEXT, confirmed REAL,
    sticky TEXT, unprobed TEXT, answered TEXT) WITHOUT ROWID"""
LESSEE = "CREATE TABLE lessee (id INTEGER PRIMARY KEY, instance TEXT, machine TEXT)"
SCHEMA = (META, RESERVATION, RUN, *INDEXES, BLOCK, LESSEE)


class Damage(Exception):
    """The store does not hold what was written. The text says what was read."""


class OtherVersion(Damage):
    """Another version of this program wrote the store."""


# What reading a damaged database raises. UnicodeDecodeError comes from messages of sqlite3, which
# quote what it could not parse.
UNREADABLE = (Damage, sqlite3.Error, UnicodeDecodeError)


def runs_of(keys: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Interval]]:
    """Sorted (domain, address) pairs as runs."""
    current: tuple[str, Interval] | None = None
    for domain, address in keys:
        if current is not None and current[0] == domain and current[1].last + 1 == address:
            current = (domain, Interval(current[1].first, address))
            continue
        if current is not None:
            yield current
        current = (domain, Interval(address, address))
    if current is not None:
        yield current


def key_of(address: int) -> bytes:
    return address.to_bytes(16, "big")


def address_of(key: object) -> int:
    if not isinstance(key, bytes) or len(key) != 16:
        raise Damage("an address has not 16 bytes")
    return int.from_bytes(key, "big")


def reservation_row(reservation: Reservation) -> tuple[object, ...]:
    return (
        reservation.domain,
        key_of(parse(reservation.address)),
        reservation.range,
        reservation.network,
        reservation.container_id,
        reservation.ifname,
        reservation.namespace,
        reservation.pod,
        reservation.uid,
        reservation.boot,
        reservation.since,
        reservation.segment,
    )


def reservation_of(row: tuple[Any, ...]) -> Reservation:
    return Reservation(
        domain=row[0],
        address=text(address_of(row[1])),
        range=row[2],
        network=row[3],
        container_id=row[4],
        ifname=row[5],
        namespace=row[6],
        pod=row[7],
        uid=row[8],
        boot=row[9],
        since=row[10],
        segment=row[11],
    )


def run_row(domain: str, run: Interval) -> tuple[object, ...]:
    return (domain, key_of(run.first), key_of(run.last))


def run_of(row: tuple[Any, ...]) -> Interval:
    return Interval(address_of(row[1]), address_of(row[2]))


def block_row(block: LeasedBlock) -> tuple[object, ...]:
    return (
        block.name,
        block.uid,
        block.space,
        block.pool,
        json.dumps(block.domains),
        key_of(block.first),
        key_of(block.last),
        _written(block.kept_out),
        block.state,
        block.max_offline,
        block.boot,
        block.confirmed,
        block.sticky,
        _written(block.unprobed),
        _written(block.answered),
    )


def block_of(row: tuple[Any, ...]) -> LeasedBlock:
    try:
        return _block_of(row)
    except (TypeError, ValueError) as error:
        raise Damage(f"the row of block {row[0]} cannot be read: {error}") from None


def _block_of(row: tuple[Any, ...]) -> LeasedBlock:
    return LeasedBlock(
        name=row[0],
        uid=row[1],
        space=row[2],
        pool=row[3],
        domains=tuple(json.loads(row[4])),
        first=address_of(row[5]),
        last=address_of(row[6]),
        kept_out=_intervals(row[7]),
        state=row[8],
        max_offline=row[9],
        boot=row[10],
        confirmed=row[11],
        sticky=row[12],
        unprobed=_intervals(row[13]),
        answered=_intervals(row[14]),
    )


def _written(intervals: Iterable[Interval]) -> str:
    return json.dumps([[str(first), str(last)] for first, last in intervals])


def _intervals(written: str) -> tuple[Interval, ...]:
    return tuple(Interval(int(first), int(last)) for first, last in json.loads(written))
