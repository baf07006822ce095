"""Checking the store of a node in full, and building it anew from whatever can be read.

The log is the authority: it was written first. Rows of a damaged database that the log never
heard of are kept rather than lost, since an address that is held for nothing costs less than
one that two pods have. What was there before is kept aside, as `*.damaged-<time>`.
"""

import os
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ipam import upgrade
from ipam.addresses import parse
from ipam.log import Header, Key, Record, read_all, write_new
from ipam.recovery import DATABASE, LOG, WAL, build, has_content, unused_aside, verify
from ipam.schema import COLUMNS, UNREADABLE, Damage, Newer, meta_of, reservation_of
from ipam.store import Reservation
from ipam.store_files import locked
from ipam.tables import Tables, connect

Say = Callable[[str], None]


class DatabaseState(msgspec.Struct):
    """The database as it was found. `problem` is "" if all of it is sound."""

    problem: str = ""
    missing: bool = False
    store: str = ""
    seq: int = -1
    rows: list[Reservation] = msgspec.field(default_factory=list)


class LogState(msgspec.Struct):
    """The log, read from the beginning.

    `held` is what its records leave reserved, `ever` everything that they reserved, `lost` the
    number of records that cannot be read or are not there.
    """

    missing: bool = False
    store: str = ""
    last: int = -1
    lost: int = 0
    held: dict[Key, Reservation] = msgspec.field(default_factory=dict)
    ever: set[Reservation] = msgspec.field(default_factory=set)


def check(directory: Path, say: Say) -> bool:
    """Whether the store is sound. Changes nothing; `say` gets what is wrong."""
    with locked(directory), _copied(directory) as copy:
        problems = _problems(_read_database(copy), _read_log(copy / LOG))
    for problem in problems:
        say(problem)
    return not problems


def rebuild(
    directory: Path, say: Say, *, accept_loss: bool = False, extra: Iterable[Reservation] = ()
) -> bool:
    """Build database and log anew from both, and from reservations that are known otherwise.

    Answers whether that was possible without loss, or with one that the caller accepts;
    otherwise nothing was changed.
    """
    with locked(directory):
        with _copied(directory) as copy:
            database, log = _read_database(copy), _read_log(copy / LOG)
        reservations, lost = _merged(database, log, say)
        if lost and not accept_loss:
            say(
                f"{lost} records of the log cannot be read and the database does not have them: "
                "addresses that they reserved would be handed out again. Nothing was changed. "
                "Drain the node, or compare with its pods, and run `podfabric ipam fsck "
                "--rebuild --accept-loss`"
            )
            return False
        for one in extra:
            _keep(one, reservations, say)
        _replace(directory, database, log, reservations.values(), say)
    return True


def _problems(database: DatabaseState, log: LogState) -> list[str]:
    if database.missing and log.missing:
        return []  # a store that nothing was written to yet
    problems = []
    if database.missing or database.problem:
        problems.append(f"{DATABASE}: {database.problem or 'is missing'}")
    if log.missing:
        problems.append(f"{LOG}: is missing")
    elif log.lost:
        problems.append(f"{LOG}: {log.lost} records cannot be read")
    if problems:
        return problems
    if database.store != log.store:
        problems.append(f"{DATABASE} and {LOG} are of different stores")
    elif database.seq != log.last:
        problems.append(f"{DATABASE} is at record {database.seq}, {LOG} at {log.last}")
    elif {(one.domain, one.address): one for one in database.rows} != log.held:
        problems.append(f"{DATABASE} and {LOG} differ about what is reserved")
    return problems


def _merged(database: DatabaseState, log: LogState, say: Say) -> tuple[dict[Key, Reservation], int]:
    """What is reserved as far as both tell, and how many records neither of them has."""
    sound = not database.missing and not database.problem
    rows = {(one.domain, one.address): one for one in database.rows}
    if sound and log.store in ("", database.store) and database.seq >= log.last:
        say(f"{DATABASE} is sound and at record {database.seq}: everything is taken from it")
        return rows, 0
    say(f"{LOG} gives {len(log.held)} reservations, {log.lost} of its records cannot be read")
    reservations = dict(log.held)
    kept = 0
    for one in database.rows:
        if one not in log.ever:
            kept += _keep(one, reservations, say)
    if kept:
        say(f"{DATABASE} gives {kept} more that the log does not know")
    missing = max(0, database.seq - log.last) if not log.missing else 0
    return reservations, log.lost + missing + (1 if log.missing else 0)


def _keep(one: Reservation, reservations: dict[Key, Reservation], say: Say) -> bool:
    """Add a reservation unless its address has a holder."""
    holder = reservations.setdefault((one.domain, one.address), one)
    if holder.attachment != one.attachment:
        say(f"{one.address}: held by {holder.holder}, also claimed by {one.holder}: left as it is")
    return holder is one


def _replace(
    directory: Path,
    database: DatabaseState,
    log: LogState,
    reservations: Iterable[Reservation],
    say: Say,
) -> None:
    """Put both files anew. Killed anywhere, the next call goes on or says to run fsck again."""
    every = sorted(reservations, key=lambda one: (one.domain, parse(one.address)))
    store = database.store or log.store or uuid.uuid4().hex
    seq = max(database.seq, log.last, 0) + 1
    for name in (DATABASE, LOG, WAL):
        file = directory / name
        if file.exists():
            aside = unused_aside(file)
            os.link(file, aside)
            say(f"kept {name} as {aside}")
    # SQLite would apply an old WAL to the new database.
    (directory / WAL).unlink(missing_ok=True)
    build(directory / DATABASE, store, seq, every)
    write_new(directory / LOG, Header(store=store, base=seq), every)
    say(f"wrote {len(every)} reservations to a new {DATABASE} and {LOG}")


def _read_database(directory: Path) -> DatabaseState:
    path = directory / DATABASE
    if not has_content(path):
        return DatabaseState(missing=True)
    try:
        with closing(Tables(path)) as tables:
            state = DatabaseState(store=tables.meta.store, seq=tables.meta.seq)
            verify(tables)
            state.rows = list(tables.all())
            return state
    except Newer:
        raise  # a rebuilt store would lack what only its own program knows
    except UNREADABLE as error:
        rows, seq = salvage(path)
        return DatabaseState(problem=str(error), seq=seq, rows=rows)


def salvage(path: Path) -> tuple[list[Reservation], int]:
    """The rows of a damaged database that still match their checksum, and its sequence number.

    Whatever cannot be read is left out; -1 where the sequence number cannot be.
    """
    found: list[Reservation] = []
    seq = -1
    try:
        connection = connect(path)
    except UNREADABLE:
        return found, seq
    try:
        version, _, seq, _ = meta_of(connection)
        for row in _rows(connection, version):
            try:
                found.append(reservation_of(row))
            except Damage:
                continue
    except UNREADABLE:
        pass
    finally:
        connection.close()
    return found, seq


def _rows(connection: sqlite3.Connection, version: int) -> Iterator[tuple[Any, ...]]:
    """The rows as this version has them. An upgrade would need what cannot be read, too."""
    if version == upgrade.FORMER:
        return upgrade.rows_of(connection)
    return connection.execute(f"SELECT {COLUMNS}, crc FROM reservation")


def _read_log(path: Path) -> LogState:
    state = LogState()
    if not has_content(path):
        state.missing = True
        return state
    previous, unread, unfinished = -1, 0, list[Record]()
    for line in read_all(path):
        if line is None:
            unread += 1
        elif isinstance(line, Header):
            state.store, state.last, previous = line.store, line.base, line.base
        else:
            # Without a header nobody knows what the log began with, unless it is the beginning.
            gap = line.seq - max(previous, 0) - 1
            state.lost += max(gap, unread if state.store or previous >= 0 else unread - 1)
            previous, unread = line.seq, 0
            unfinished.append(line)
            if not line.more:
                _apply(unfinished, state)
    state.lost += unread
    state.missing = state.last < 0
    return state


def _apply(transaction: list[Record], state: LogState) -> None:
    for record in transaction:
        for key in record.drop:
            state.held.pop(key, None)
        for one in record.put:
            state.held[(one.domain, one.address)] = one
            state.ever.add(one)
        state.last = record.seq
    transaction.clear()


@contextmanager
def _copied(directory: Path) -> Iterator[Path]:
    """A copy of the files: SQLite writes to what it opens, and a check must not."""
    with tempfile.TemporaryDirectory(prefix=".fsck-", dir=directory) as name:
        copy = Path(name)
        for file in (DATABASE, WAL, LOG):
            if (directory / file).exists():
                shutil.copyfile(directory / file, copy / file)
        yield copy
