"""Rows of the SQLite store: the tables, and what a row becomes."""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec.structs import asdict, astuple

from ipam.addresses import Interval, parse, text
from ipam.store.block_rows import LeasedBlock
from ipam.store.reservations import Reservation

VERSION = 1
COLUMNS = (
    "domain, address, range, network, container_id, ifname, namespace, pod, uid, boot, since, "
    "segment"
)
BLOCK_COLUMNS = "name, first, last, unprobed, content"
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
# What this node leases of a cluster's addresses, and as whom (ipam.store.block_rows).
BLOCK = """CREATE TABLE block (name TEXT PRIMARY KEY, first BLOB, last BLOB, unprobed INTEGER,
    content TEXT) WITHOUT ROWID"""
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
    domain, address, *rest = astuple(reservation)
    return (domain, key_of(parse(address)), *rest)


def reservation_of(row: tuple[Any, ...]) -> Reservation:
    return Reservation(row[0], text(address_of(row[1])), *row[2:])


def run_row(domain: str, run: Interval) -> tuple[object, ...]:
    return (domain, key_of(run.first), key_of(run.last))


def run_of(row: tuple[Any, ...]) -> Interval:
    return Interval(address_of(row[1]), address_of(row[2]))


def block_row(block: LeasedBlock) -> tuple[object, ...]:
    # The content is all of it: msgspec's JSON has no integers of 128 bits.
    content = json.dumps(asdict(block))
    return block.name, key_of(block.first), key_of(block.last), bool(block.unprobed), content


def block_of(row: tuple[Any, ...]) -> LeasedBlock:
    try:
        block = msgspec.convert(json.loads(row[-1]), LeasedBlock)
    except (TypeError, ValueError) as error:
        raise Damage(f"the row of block {row[0]} cannot be read: {error}") from None
    if block_row(block)[:-1] != row[:-1]:
        raise Damage(f"the row of block {row[0]} contradicts itself")
    return block
