"""Opening the store of a node: the database and its log, brought to the same state first.

A call may have died at any line, and any of the files may have been lost, cut or overwritten.
What the two files allow to conclude is done and said on the way (a log that is ahead is applied,
one that is behind is written anew); what they do not is CNIError 112, which hands nothing out
and leaves every file as it is.
"""

import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from base.files import sync_directory
from cni.spec.errors import CNIError, Code
from ipam.addresses import parse
from ipam.log import VERSION, Header, Log, Tail, write_new
from ipam.schema import UNREADABLE, Damage, Newer, runs_of
from ipam.store import Reservation
from ipam.tables import Tables

DATABASE = "reservations.db"
WAL = f"{DATABASE}-wal"
LOG = "reservations.log"
LOCK = "lock"
FAILURES = (*UNREADABLE, OSError, MemoryError)
"""What the use of a store raises where the system refuses, or where the files are damaged."""

UNCHANGED = "nothing was changed"
UNCERTAIN = "it is not certain whether the change was made: call DEL, or this again"

_SEEN_LIMIT = 200  # characters
_REMEDY = (
    "see that the file system is mounted, writable and not full, and that the process may open "
    "more files"
)

Report = Callable[[str], None]


def open_store(directory: Path, report: Report) -> tuple[Tables, Log]:
    """The database and the log below `directory`, which is made if it is new.

    The caller holds the lock and closes both. Raises FAILURES; `explained` makes CNIErrors of
    them.
    """
    database, log_file = directory / DATABASE, directory / LOG
    if not has_content(database):
        _create(directory)
    tables = Tables(database)
    try:
        log = _open_log(log_file, tables, report)
    except BaseException:
        tables.close()
        raise
    return tables, log


def explained(error: Exception, directory: Path, outcome: str = UNCHANGED) -> CNIError:
    """What one of FAILURES means for the store in `directory`; `outcome` is what came of it."""
    if isinstance(error, Newer):
        return CNIError(
            Code.STORE_DAMAGED,
            f"the address store in {directory} is of a newer podfabric ({error}): {outcome}; "
            "use the version that wrote it",
        )
    if isinstance(error, Damage | UnicodeDecodeError):
        return _damaged(directory, str(error), outcome)
    if isinstance(error, sqlite3.Error):
        return _explained_sqlite(error, directory, outcome)
    if isinstance(error, MemoryError):
        return CNIError(
            Code.IO_FAILURE,
            f"cannot use the address store in {directory}: no memory is left: {outcome}; see that "
            "the process may have more, and try again",
        )
    where = getattr(error, "filename", None) or directory
    reason = getattr(error, "strerror", None) or str(error)
    return CNIError(
        Code.IO_FAILURE, f"cannot use the address store: {where}: {reason}: {outcome}; {_REMEDY}"
    )


def verify(tables: Tables) -> None:
    """Read all of the database. Damage, or sqlite3.Error, if anything in it does not fit."""
    for (answer,) in tables.connection.execute("PRAGMA integrity_check(1)").fetchall():
        if answer != "ok":
            raise Damage(f"integrity check: {answer}")
    keys = [(one.domain, parse(one.address)) for one in tables.all()]
    if len(keys) != tables.meta.held:
        raise Damage(f"{len(keys)} reservations where {tables.meta.held} were counted")
    if list(tables.all_runs()) != list(runs_of(keys)):
        raise Damage("the runs of taken addresses do not match the reservations")


def rewrite_log(path: Path, tables: Tables) -> None:
    """Write the log anew: what is reserved now, and nothing of how it came about."""
    write_new(path, Header(store=tables.meta.store, base=tables.meta.seq), tables.all())


def redo(tables: Tables, tail: Tail) -> None:
    """Apply the log's records that the database does not have, in one transaction.

    After a failure the caller closes the database, which ends the transaction.
    """
    tables.begin()
    for record in tail.records:
        for domain, address in record.drop:
            tables.drop(domain, parse(address))
        for reservation in record.put:
            tables.put(reservation)
    tables.record(tail.last)
    tables.commit()


def has_content(path: Path) -> bool:
    """Whether there is a file with anything in it."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def unused_aside(path: Path) -> Path:
    """A name beside `path` for what is kept of it: `<name>.damaged-<time>`."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    first = path.with_name(f"{path.name}.damaged-{stamp}")
    candidates = (first.with_name(f"{first.name}{suffix}") for suffix in ("", ".1", ".2", ".3"))
    return next((one for one in candidates if not one.exists()), first)


def _create(directory: Path) -> None:
    """A new store, unless the log or a WAL says that there was one."""
    database, log_file = directory / DATABASE, directory / LOG
    lost = "is empty" if database.exists() else "is missing"
    if has_content(directory / WAL):
        raise Damage(f"{DATABASE} {lost} and its WAL is there")
    if has_content(log_file):
        log = Log(log_file)
        try:
            if not log.is_unused() or log.header is None:
                raise Damage(f"{DATABASE} {lost} and {LOG} has records")
            store = log.header.store
        finally:
            log.close()
    else:
        store = uuid.uuid4().hex
        write_new(log_file, Header(store=store, base=0), ())
    build(database, store, 0, ())


def build(database: Path, store: str, seq: int, reservations: Iterable[Reservation]) -> None:
    """Put a new database in place in one step; what was there is gone."""
    temporary = database.with_name(f"{database.name}.new")
    _remove(temporary)
    try:
        Tables.create(temporary, store, seq, reservations)
        temporary.chmod(0o600)
        temporary.replace(database)
    except BaseException:
        with suppress(OSError):  # it would take the room that is lacking
            _remove(temporary)
        raise
    sync_directory(database.parent)


def _remove(database: Path) -> None:
    for file in (database, database.with_name(f"{database.name}-wal")):
        file.unlink(missing_ok=True)


def _open_log(path: Path, tables: Tables, report: Report) -> Log:
    """The log, at the sequence number of the database, which catches up first if it must."""
    try:
        log = Log(path)
    except FileNotFoundError:
        unfit = f"{path} is missing"
    else:
        try:
            unfit = _catch_up(log, tables, report)
        except BaseException:
            log.close()
            raise
        if not unfit:
            return log
        log.close()
    # The database has everything that the log lost; that is worth a look at all of it.
    verify(tables)
    rewrite_log(path, tables)
    report(f"address store: {unfit}; {DATABASE} is sound, the log was written anew from it")
    return Log(path)


def _catch_up(log: Log, tables: Tables, report: Report) -> str:
    """Apply what only the log has. Answers why the log is unfit, "" if it is not."""
    seq = tables.meta.seq
    if log.header is not None and log.header.version != VERSION:
        raise Damage(f"{LOG} has version {log.header.version}, this program reads {VERSION}")
    if log.header is not None and log.header.store != tables.meta.store:
        raise Damage(f"{DATABASE} and {LOG} are of different stores")
    tail = log.tail(seq)
    if tail.last > seq or (tail.unread_end and tail.last == seq):
        if tail.problem:
            raise Damage(f"{LOG} is ahead of {DATABASE} and {tail.problem}")
        redo(tables, tail)
        report(
            f"address store: applied {len(tail.records)} records of {LOG} that {DATABASE} "
            "did not have"
        )
    elif tail.problem or tail.last < seq:
        return tail.problem or f"{log.path} ends at record {tail.last} of {seq}"
    if tail.torn:
        log.truncate(tail.end)
        report(f"address store: cut an unfinished record off the end of {LOG}")
    return ""


def _explained_sqlite(error: sqlite3.Error, directory: Path, outcome: str) -> CNIError:
    name = getattr(error, "sqlite_errorname", "") or type(error).__name__
    refused = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")
    if name.startswith(refused):
        return CNIError(
            Code.IO_FAILURE,
            f"cannot use the address store in {directory}: {error} ({name}): {outcome}; {_REMEDY}",
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return CNIError(
            Code.TRY_AGAIN,
            f"{directory / DATABASE} is open in another program ({name}): {outcome}; "
            "close it and try again",
        )
    return _damaged(directory, f"{error} ({name})", outcome)


def _damaged(directory: Path, seen: str, outcome: str) -> CNIError:
    """The error for a store that cannot be trusted. SQLite quotes what it saw, in many lines."""
    line = " ".join(seen.encode("ascii", "backslashreplace").decode().split())[:_SEEN_LIMIT]
    return CNIError(
        Code.STORE_DAMAGED,
        f"the address store in {directory} is damaged ({line}): {outcome}; run "
        "`podfabric ipam fsck`, which keeps the damaged files",
    )
