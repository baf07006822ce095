"""A database of version 1 becomes one of this version, in the place where it is.

Version 1 did not know on which link an address is used: it counts as used on every link until its
pod comes again (`segments.BEFORE`). All of it is one transaction of SQLite: whoever is killed in it
leaves version 1, whole. The log needs no change, for a record without the new field is read as one
of BEFORE.
"""

import sqlite3
from collections.abc import Iterator
from typing import Any

from ipam.schema import (
    COLUMNS,
    INDEXES,
    META,
    RESERVATION,
    RESERVATION_MARKS,
    RUN,
    VERSION,
    Damage,
    crc_of,
)
from ipam.segments import BEFORE

FORMER = 1
_COLUMNS = COLUMNS.removesuffix(", segment")
_RESERVATION = RESERVATION.replace("segment TEXT, ", "")
_SCHEMA = (META, _RESERVATION, RUN, *INDEXES[:-1])
_UNSOUND = -1  # no crc32 is negative: what did not match its checksum before still does not


def upgrade(connection: sqlite3.Connection) -> None:
    """Make version 1 this version. Raises Damage and sqlite3.Error; then nothing has changed."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema") if sql}
        if found != set(_SCHEMA):
            raise Damage("its tables are not those of an address store of version 1")
        rows = list(rows_of(connection))
        connection.execute("DROP TABLE reservation")
        for statement in (RESERVATION, *INDEXES):
            connection.execute(statement)
        connection.executemany(f"INSERT INTO reservation VALUES ({RESERVATION_MARKS})", rows)
        row = connection.execute("SELECT store, seq, count FROM meta").fetchone()
        content = (VERSION, *row)
        connection.execute(
            "UPDATE meta SET version = ?, crc = ? WHERE id = 1", (VERSION, crc_of(content))
        )
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def rows_of(connection: sqlite3.Connection) -> Iterator[tuple[object, ...]]:
    """The reservations of a database of version 1, as the rows that they become."""
    return map(_upgraded, connection.execute(f"SELECT {_COLUMNS}, crc FROM reservation"))


def _upgraded(row: tuple[Any, ...]) -> tuple[object, ...]:
    *content, crc = row
    new = (*content, BEFORE)
    return (*new, crc_of(new) if crc == crc_of(content) else _UNSOUND)
