"""Opening the store of a node, its backup copy, and what its failures mean.

A call may have died at any line, and any file may have been lost, cut or replaced. SQLite's WAL
keeps a transaction whole or drops it. What SQLite cannot see, the high-water mark shows
(`watermark`): then it is CNIError 112, no address is given out, and every file stays as it is.
"""

import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path

from base.files import sync_directory
from cni.spec.errors import CNIError, Code
from ipam.addresses import parse
from ipam.blocks import NO_LEASES, Leases
from ipam.database import BESIDE, StoreMeta, remove
from ipam.schema import UNREADABLE, Damage, OtherVersion, runs_of
from ipam.store import Reservation
from ipam.tables import Tables
from ipam.watermark import Progress, Watermark, boot_id, read

DATABASE = "reservations.db"
WAL = f"{DATABASE}-wal"
MARK = "reservations.mark"
BACKUP = "reservations.backup"
LOCK = "lock"
FAILURES = (*UNREADABLE, OSError, MemoryError)
"""What the use of a store raises where the system refuses, or where the files are damaged."""

UNCHANGED = "nothing was changed"
UNCERTAIN = "it is not certain whether the change was made: call DEL, or this again"

_CHANGES_WORTH_A_CHECKPOINT = 1000
_LARGE_WAL = 8 << 20  # bytes; some 300 transactions
_LOOK_AT_WAL = 16  # transactions between two looks at its size
_CHEAP_TO_COPY = 2_000  # reservations: less than 100 ms, under the store's lock
_MOST_TO_COPY = 50_000  # reservations: less than 3 s
_SEEN_LIMIT = 200  # characters
_REMEDY = (
    "see that the file system is mounted, writable and not full, and that the process may open "
    "more files"
)

Report = Callable[[str], None]


def open_store(directory: Path, report: Report, *, kept: bool = False) -> Tables:
    """The database below `directory`, which is made if it is new; `kept` as for Tables.

    The caller holds the lock and closes the database. Raises FAILURES; `explained` makes CNIErrors
    of them.
    """
    database = directory / DATABASE
    if not has_content(database):
        _create(directory)
    watermark = Watermark(directory / MARK)
    try:
        tables = Tables(database, watermark, kept=kept)
    except BaseException:
        watermark.close()
        raise
    try:
        _reach(tables.meta, watermark)
    except BaseException:
        tables.abandon()
        raise
    return tables


def missing_changes(meta: StoreMeta, mark: Progress | None) -> str | None:
    """Why the database does not have all changes that the mark counts, None if it has them."""
    if mark is None:
        return None
    if mark.store != meta.store:
        return f"{DATABASE} and {MARK} are of different stores"
    reached = mark.seq if mark.boot == boot_id() else mark.synced
    if meta.seq < reached:
        return (
            f"{DATABASE} has {meta.seq} changes of {reached}: it is an older copy, or its WAL "
            "was lost"
        )
    return None


def compact(directory: Path, tables: Tables, report: Report, *, patience: int = 1) -> bool:
    """Write the WAL back, and make a backup copy, once much has changed since the last time: with
    `patience`, so many times as much. This may take as long as ten transactions.

    Answers whether it tried. The transaction is over and will be answered: a failure is left to a
    later call.
    """
    # A reader may keep the WAL: then the next try is later.
    if tables.meta.seq % _LOOK_AT_WAL or not _is_due(directory, tables, patience):
        return False
    _compact(directory, tables, report)
    return True


def is_to_look(tables: Tables, last: int) -> bool:
    """Whether there were enough transactions since the one with that number, the last look."""
    return abs(tables.meta.seq - last) >= _LOOK_AT_WAL


def compact_early(directory: Path, tables: Tables, report: Report) -> bool:
    """As `compact`, for a thread that does nothing else with the store, and knows when to look."""
    if not _is_due(directory, tables, 1):
        return False
    _compact(directory, tables, report)
    return True


def _compact(directory: Path, tables: Tables, report: Report) -> None:
    try:
        saved = 0 if tables.mark is None else tables.mark.saved
        is_old = tables.meta.seq - saved >= _CHANGES_WORTH_A_CHECKPOINT
        if tables.checkpoint() and is_old and tables.meta.held <= _CHEAP_TO_COPY:
            back_up(directory, tables)
    except FAILURES as error:
        reason = explained(error, directory, "the store is as it was")
        report(f"address store: no backup copy was made: {reason}")


def back_up(directory: Path, tables: Tables) -> None:
    """Replace the backup copy by one of this database that was read in full. Raises FAILURES."""
    if tables.meta.held > _MOST_TO_COPY:
        return
    backup = directory / BACKUP
    temporary = directory / f"{BACKUP}.new"
    remove(temporary)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            with closing(sqlite3.connect(temporary, isolation_level=None)) as copy:
                copy.execute("PRAGMA journal_mode = OFF")
                copy.execute("PRAGMA synchronous = OFF")  # once, below
                tables.connection.backup(copy)
            with closing(Tables(temporary)) as copied:
                verify(copied)
            os.fsync(file.fileno())
        temporary.replace(backup)
    except BaseException:
        with suppress(OSError):  # it would take the room that is lacking
            remove(temporary)
        raise
    sync_directory(directory)
    tables.count_backup()


def explained(error: Exception, directory: Path, outcome: str = UNCHANGED) -> CNIError:
    """What one of FAILURES means for the store in `directory`; `outcome` is what came of it."""
    if isinstance(error, OtherVersion):
        return CNIError(
            Code.STORE_DAMAGED,
            f"the address store in {directory} is of another podfabric ({error}): {outcome}; "
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


def shows_damage(error: BaseException | None, directory: Path) -> bool:
    """Whether the files cannot be trusted after it. Then they are left as they are: the close of a
    database would write its WAL back."""
    if not isinstance(error, FAILURES):
        return False
    return explained(error, directory).code == Code.STORE_DAMAGED


def verify(tables: Tables) -> None:
    """Read all of the database. Damage, or sqlite3.Error, if anything in it does not fit."""
    for (answer,) in tables.connection.execute("PRAGMA integrity_check(1)").fetchall():
        if answer != "ok":
            raise Damage(f"integrity check: {answer}")
    keys = [(held.domain, parse(held.address)) for held in tables.all()]
    if len(keys) != tables.meta.held:
        raise Damage(f"{len(keys)} reservations where {tables.meta.held} were counted")
    if list(tables.all_runs()) != list(runs_of(keys)):
        raise Damage("the runs of taken addresses do not match the reservations")
    tables.instance()
    for _ in tables.blocks():  # each is compared with its checksum
        pass


def has_content(path: Path) -> bool:
    """Whether there is a file with anything in it."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def is_store(directory: Path) -> bool:
    """Whether the directory has a file of a store, be it the only one that is left."""
    return any((directory / name).exists() for name in (DATABASE, WAL, MARK, BACKUP))


def unused_aside(path: Path) -> Path:
    """A name beside `path` for what is kept of it: `<name>.damaged-<time>`."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    first = path.with_name(f"{path.name}.damaged-{stamp}")
    candidates = (first.with_name(f"{first.name}{suffix}") for suffix in ("", ".1", ".2", ".3"))
    return next((path for path in candidates if not path.exists()), first)


def build(
    database: Path,
    store: str,
    seq: int,
    reservations: Iterable[Reservation],
    leases: Leases = NO_LEASES,
) -> None:
    """Put a new database in place in one step. The old one and its WAL are gone."""
    temporary = database.with_name(f"{database.name}.new")
    remove(temporary)
    try:
        Tables.create(temporary, store, seq, reservations, leases)
        temporary.chmod(0o600)
        # SQLite would apply them to the new database.
        for suffix in BESIDE:
            database.with_name(f"{database.name}{suffix}").unlink(missing_ok=True)
        temporary.replace(database)
    except BaseException:
        with suppress(OSError):  # it would take the room that is lacking
            remove(temporary)
        raise
    sync_directory(database.parent)


def _create(directory: Path) -> None:
    """Make a new store, unless another file shows that there was one."""
    database = directory / DATABASE
    lost = "is empty" if database.exists() else "is missing"
    if has_content(directory / WAL):
        raise Damage(f"{DATABASE} {lost} and its WAL is not")
    if has_content(directory / BACKUP):
        raise Damage(f"{DATABASE} {lost} and {BACKUP} is not")
    mark = read(directory / MARK)
    if mark is None and has_content(directory / MARK):
        raise Damage(f"{DATABASE} {lost} and {MARK} cannot be read")
    if mark is not None and mark.seq > 0:
        raise Damage(f"{DATABASE} {lost} and had {mark.seq} changes")
    build(database, uuid.uuid4().hex if mark is None else mark.store, 0, ())


def _reach(meta: StoreMeta, watermark: Watermark) -> None:
    """Compare database and mark, and bring the mark up to the database."""
    mark = watermark.mark
    problem = missing_changes(meta, mark)
    if problem is not None:
        raise Damage(problem)
    synced, saved = (0, 0) if mark is None else (mark.synced, mark.saved)
    watermark.write(Progress(boot_id(), meta.store, meta.seq, meta.held, synced, saved))


def _is_due(directory: Path, tables: Tables, patience: int) -> bool:
    synced = 0 if tables.mark is None else tables.mark.synced
    if tables.meta.seq - synced >= patience * _CHANGES_WORTH_A_CHECKPOINT:
        return True
    try:
        size = os.stat(f"{directory}/{WAL}").st_size  # noqa: PTH116 - a Path costs more
        return size > patience * _LARGE_WAL
    except OSError:
        return False


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
