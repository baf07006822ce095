"""Rows of the SQLite store: the tables, and reservations and runs to and from them.

SQLite stores no checksums: each row has the crc32 of its content, and a row that does not match it
is `Damage`.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ipam.addresses import Interval, parse, text
from ipam.blocks import Instance, LeasedBlock
from ipam.store import Reservation

VERSION = 6
COLUMNS = (
    "domain, address, range, network, container_id, ifname, namespace, pod, uid, boot, since, "
    "segment"
)
BLOCK_COLUMNS = (
    "name, uid, space, pool, domains, first, last, kept_out, state, max_offline, boot, confirmed, "
    "sticky, unprobed, answered"
)
BLOCK_MARKS = ", ".join("?" * (BLOCK_COLUMNS.count(",") + 2))
RESERVATION_MARKS = ", ".join("?" * (COLUMNS.count(",") + 2))

META = """CREATE TABLE meta (id INTEGER PRIMARY KEY, version INTEGER, store TEXT, seq INTEGER,
    count INTEGER, crc INTEGER)"""
RESERVATION = """CREATE TABLE reservation (domain TEXT, address BLOB, range TEXT, network TEXT,
    container_id TEXT, ifname TEXT, namespace TEXT, pod TEXT, uid TEXT, boot TEXT, since INTEGER,
    segment TEXT, crc INTEGER, PRIMARY KEY (domain, address)) WITHOUT ROWID"""
RUN = """CREATE TABLE run (domain TEXT, first BLOB, last BLOB, crc INTEGER,
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
    sticky TEXT, unprobed TEXT, answered TEXT, crc INTEGER) WITHOUT ROWID"""
LESSEE = """CREATE TABLE lessee (id INTEGER PRIMARY KEY, instance TEXT, machine TEXT,
    crc INTEGER)"""
SCHEMA = (META, RESERVATION, RUN, *INDEXES, BLOCK, LESSEE)


class Damage(Exception):
    """The store does not hold what was written. The text says what was read."""


class OtherVersion(Damage):
    """Another version of this program wrote the store."""


class ForeignWal(Damage):
    """The WAL was not begun on this copy of the database file."""


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


def crc_of(content: Sequence[object]) -> int:
    return zlib.crc32(repr(tuple(content)).encode(errors="backslashreplace"))


def reservation_row(reservation: Reservation) -> tuple[object, ...]:
    content = (
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
    return (*content, crc_of(content))


def reservation_of(row: tuple[Any, ...]) -> Reservation:
    *content, crc = row
    if crc != crc_of(content):
        raise Damage("a reservation does not match its checksum")
    return Reservation(
        domain=content[0],
        address=text(address_of(content[1])),
        range=content[2],
        network=content[3],
        container_id=content[4],
        ifname=content[5],
        namespace=content[6],
        pod=content[7],
        uid=content[8],
        boot=content[9],
        since=content[10],
        segment=content[11],
    )


def meta_of(connection: sqlite3.Connection) -> tuple[int, str, int, int]:
    """Version, identity, last sequence number and number of reservations of a database."""
    rows = connection.execute("SELECT version, store, seq, count, crc FROM meta").fetchall()
    if len(rows) != 1 or rows[0][-1] != crc_of(rows[0][:-1]):
        raise Damage("the row that identifies it does not match its checksum")
    version, store, seq, count, _ = rows[0]
    return version, store, seq, count


def run_row(domain: str, run: Interval) -> tuple[object, ...]:
    content = (domain, key_of(run.first), key_of(run.last))
    return (*content, crc_of(content))


def run_of(row: tuple[Any, ...]) -> Interval:
    *content, crc = row
    if crc != crc_of(content):
        raise Damage("a run of taken addresses does not match its checksum")
    return Interval(address_of(content[1]), address_of(content[2]))


def block_row(block: LeasedBlock) -> tuple[object, ...]:
    content = (
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
    return (*content, crc_of(content))


def block_of(row: tuple[Any, ...]) -> LeasedBlock:
    *content, crc = row
    if crc != crc_of(content):
        raise Damage("a leased block does not match its checksum")
    return LeasedBlock(
        name=content[0],
        uid=content[1],
        space=content[2],
        pool=content[3],
        domains=tuple(json.loads(content[4])),
        first=address_of(content[5]),
        last=address_of(content[6]),
        kept_out=_intervals(content[7]),
        state=content[8],
        max_offline=content[9],
        boot=content[10],
        confirmed=content[11],
        sticky=content[12],
        unprobed=_intervals(content[13]),
        answered=_intervals(content[14]),
    )


def _written(intervals: Iterable[Interval]) -> str:
    return json.dumps([[str(first), str(last)] for first, last in intervals])


def _intervals(written: str) -> tuple[Interval, ...]:
    return tuple(Interval(int(first), int(last)) for first, last in json.loads(written))


def lessee_row(instance: Instance) -> tuple[object, ...]:
    return (1, *instance, crc_of(instance))


def lessee_of(row: tuple[Any, ...]) -> Instance:
    *content, crc = row
    if crc != crc_of(content):
        raise Damage("the identity of the lessee does not match its checksum")
    return Instance(*content)
