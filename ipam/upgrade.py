"""Upgrades a database of an earlier version in place.

Version 1 did not record on which link an address is used. Such a reservation counts as on every
link until its pod comes again (`segments.BEFORE`). Version 2 knew no leased blocks. In version 3
the table of blocks got columns from build to build, in version 4 none says which addresses are to
be probed. The upgrade is one transaction of SQLite, so a process that is killed in it leaves the
former version.

An agent of version 3 or 4 that is replaced may still end a call in the upgraded database, and
writes its own version then. So a database of such a version may also have the tables of this one.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any

from ipam.schema import (
    BLOCK,
    BLOCK_COLUMNS,
    BLOCK_MARKS,
    COLUMNS,
    INDEXES,
    LESSEE,
    META,
    RESERVATION,
    RESERVATION_MARKS,
    RUN,
    SCHEMA,
    VERSION,
    Damage,
    crc_of,
)
from ipam.segments import BEFORE

FORMER = (1, 2, 3, 4)
FORMER_COLUMNS = COLUMNS.removesuffix(", segment")
_RESERVATION = RESERVATION.replace("segment TEXT, ", "")
_SCHEMAS = {1: (META, _RESERVATION, RUN, *INDEXES[:-1]), 2: (META, RESERVATION, RUN, *INDEXES)}
_LATER = {
    "kept_out": "[]",
    "rails": "[]",
    "sticky": "",
    "cover": "",
    "ceded": "[]",
    "unprobed": "[]",
    "answered": "[]",
}
"""What a block has in the columns that came later: none of its addresses is kept out, and so on."""
_FIRST_BLOCK_COLUMNS = tuple(column for column in BLOCK_COLUMNS.split(", ") if column not in _LATER)
_UNSOUND = -1  # not a crc32: a row that did not match its checksum must not match the new one


def upgrade(connection: sqlite3.Connection, version: int) -> None:
    """Upgrade one of the FORMER versions. Raises Damage and sqlite3.Error, with nothing changed."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not _is_of(connection, version):
            raise Damage(f"its tables are not those of an address store of version {version}")
        if version == 1:
            _add_segments(connection)
        if version < 3:
            for statement in (BLOCK, LESSEE):
                connection.execute(statement)
        else:
            _widen_blocks(connection)
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


def block_columns(connection: sqlite3.Connection) -> tuple[str, ...]:
    """The columns of its table of blocks but for the checksum, or of this version's if it has none.

    sqlite3.Error.
    """
    rows = connection.execute("SELECT name FROM pragma_table_info('block')").fetchall()
    return tuple(name for (name,) in rows if name != "crc") or tuple(BLOCK_COLUMNS.split(", "))


def upgraded_block(columns: Sequence[str], row: tuple[Any, ...]) -> tuple[object, ...]:
    """A block's row of these columns, with its checksum, as one of this version. Damage."""
    *content, crc = row
    known = {**_LATER, **dict(zip(columns, content, strict=True))}
    wanted = BLOCK_COLUMNS.split(", ")
    if known.keys() != set(wanted):
        raise Damage("the table of blocks has other columns")
    new = tuple(known[column] for column in wanted)
    return (*new, crc_of(new) if crc == crc_of(content) else _UNSOUND)


def _is_of(connection: sqlite3.Connection, version: int) -> bool:
    """Whether the database has the tables of one of the FORMER versions."""
    rows = connection.execute("SELECT name, sql FROM sqlite_schema").fetchall()
    schema = {name: sql for name, sql in rows if sql}
    if version < 3:
        return set(schema.values()) == set(_SCHEMAS[version])
    others = {sql for name, sql in schema.items() if name != "block"}
    if "block" not in schema or others != set(SCHEMA) - {BLOCK}:
        return False
    columns = set(block_columns(connection))
    return columns >= set(_FIRST_BLOCK_COLUMNS) and columns <= set(BLOCK_COLUMNS.split(", "))


def _widen_blocks(connection: sqlite3.Connection) -> None:
    columns = block_columns(connection)
    former = connection.execute(f"SELECT {', '.join(columns)}, crc FROM block").fetchall()
    connection.execute("DROP TABLE block")
    connection.execute(BLOCK)
    connection.executemany(
        f"INSERT INTO block VALUES ({BLOCK_MARKS})",
        [upgraded_block(columns, row) for row in former],
    )


def _add_segments(connection: sqlite3.Connection) -> None:
    former = connection.execute(f"SELECT {FORMER_COLUMNS}, crc FROM reservation")
    rows = [upgraded(row) for row in former]
    connection.execute("DROP TABLE reservation")
    for statement in (RESERVATION, *INDEXES):
        connection.execute(statement)
    connection.executemany(f"INSERT INTO reservation VALUES ({RESERVATION_MARKS})", rows)
