"""Upgrades a database of version 1 or 2 in place.

Version 1 did not record on which link an address is used. Such a reservation counts as on every
link until its pod comes again (`segments.BEFORE`). Version 2 knew no leased blocks. The upgrade is
one transaction of SQLite, so a process that is killed in it leaves the former version.
"""

import sqlite3
from typing import Any

from ipam.schema import (
    BLOCK,
    COLUMNS,
    INDEXES,
    LESSEE,
    META,
    RESERVATION,
    RESERVATION_MARKS,
    RUN,
    VERSION,
    Damage,
    crc_of,
)
from ipam.segments import BEFORE

FORMER = (1, 2)
FORMER_COLUMNS = COLUMNS.removesuffix(", segment")
_RESERVATION = RESERVATION.replace("segment TEXT, ", "")
_SCHEMAS = {1: (META, _RESERVATION, RUN, *INDEXES[:-1]), 2: (META, RESERVATION, RUN, *INDEXES)}
_UNSOUND = -1  # not a crc32: a row that did not match its checksum must not match the new one


def upgrade(connection: sqlite3.Connection, version: int) -> None:
    """Upgrade one of the FORMER versions. Raises Damage and sqlite3.Error, with nothing changed."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        schema = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema") if sql}
        if schema != set(_SCHEMAS[version]):
            raise Damage(f"its tables are not those of an address store of version {version}")
        if version == 1:
            _add_segments(connection)
        for statement in (BLOCK, LESSEE):
            connection.execute(statement)
        row = connection.execute("SELECT store, seq, count FROM meta").fetchone()
        content = (VERSION, *row)
        connection.execute(
            "UPDATE meta SET version = ?, crc = ? WHERE id = 1", (VERSION, crc_of(content))
        )
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def upgraded(row: tuple[Any, ...]) -> tuple[object, ...]:
    """A reservation's row of version 1, with its checksum, as one of later versions."""
    *content, crc = row
    new = (*content, BEFORE)
    return (*new, crc_of(new) if crc == crc_of(content) else _UNSOUND)


def _add_segments(connection: sqlite3.Connection) -> None:
    former = connection.execute(f"SELECT {FORMER_COLUMNS}, crc FROM reservation")
    rows = [upgraded(row) for row in former]
    connection.execute("DROP TABLE reservation")
    for statement in (RESERVATION, *INDEXES):
        connection.execute(statement)
    connection.executemany(f"INSERT INTO reservation VALUES ({RESERVATION_MARKS})", rows)
