"""Opens the store's database, runs transactions in it, and explains failures.

If a process dies, SQLite's WAL keeps or drops a transaction as a whole.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta

from cni.spec.errors import CNIError, Code
from ipam.store.block_rows import Instance

DATABASE = "reservations.db"
WAL = f"{DATABASE}-wal"
BESIDE = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite keeps next to a database."""

VERSION = 1
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
BLOCK = """CREATE TABLE block (name TEXT PRIMARY KEY, first BLOB, last BLOB, unprobed INTEGER,
    content TEXT) WITHOUT ROWID"""
LESSEE = "CREATE TABLE lessee (id INTEGER PRIMARY KEY, instance TEXT, machine TEXT)"
SCHEMA = (META, RESERVATION, RUN, *INDEXES, BLOCK, LESSEE)


class Damage(Exception):
    """The store has lost committed data, or its data is inconsistent.

    The text describes the damage.
    """


class OtherVersion(Damage):
    """Another version of this program wrote the store."""


UNREADABLE = (Damage, sqlite3.Error, UnicodeDecodeError)
"""Errors of a damaged database. sqlite3 raises UnicodeDecodeError for damaged text."""

FAILURES = (*UNREADABLE, OSError, MemoryError)
"""Errors of a store: the system refuses an operation, or the files are damaged."""

UNCHANGED = "nothing was changed"
UNCERTAIN = "it is not certain whether the change was made: call DEL, or repeat this call"

_BUSY_TIMEOUT = 100  # milliseconds; only foreign programs ignore our lock
_MOST_PAGES = 2048  # pages of the WAL before it is written back: 8 MiB, some 300 transactions
_SEEN_LIMIT = 200  # most characters of SQLite's text in an error
_REMEDY = (
    "see that the file system is mounted, writable and not full, and that the process may open "
    "more files"
)


class StoreMeta(NamedTuple):
    store: str
    seq: Annotated[int, Meta(ge=0, le=1 << 60)]


def connect(path: Path, *, shared: bool = False) -> sqlite3.Connection:
    """Open an existing database. Without `shared`, SQLite uses no shared memory. Shared memory
    needs room on the disk. A truncated shared file would end the process (SIGBUS)."""
    uri = f"file:{path.as_posix().replace('%', '%25').replace('?', '%3f')}?mode=rw"
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, check_same_thread=False, timeout=0
    )
    try:
        connection.execute("PRAGMA cell_size_check = ON")
        if not shared:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA user_version").fetchall()
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT}")
    except BaseException:
        connection.interrupt()
        connection.close()
        raise
    return connection


def create(path: Path, meta: StoreMeta, lessee: Instance | None) -> None:
    """Write an empty database at `path`, which does not exist yet."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute("INSERT INTO meta VALUES (1, ?, ?)", meta)
        if lessee is not None:
            connection.execute("INSERT INTO lessee VALUES (1, ?, ?)", lessee)
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
        # `close` does not report a failure to write the WAL back.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()


def has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def remove(database: Path) -> None:
    for suffix in ("", *BESIDE):
        database.with_name(f"{database.name}{suffix}").unlink(missing_ok=True)


class Database:
    """An open database. Raises sqlite3.Error and Damage. A writer holds the store's lock. A `kept`
    database stays open between transactions. `is_shared` says whether other processes can open the
    database."""

    def __init__(self, path: Path, *, kept: bool = False) -> None:
        self.meta: StoreMeta
        self._path = path
        self._kept = kept
        self._open()

    def _open(self) -> None:
        try:
            self.is_shared = self._kept
            self.connection = connect(self._path, shared=self.is_shared)
        except sqlite3.OperationalError:
            # Either another process keeps the database open, or shared memory finds no room.
            self.is_shared = not self._kept
            self.connection = connect(self._path, shared=self.is_shared)
        try:
            self._execute("PRAGMA synchronous = NORMAL")
            self._execute(f"PRAGMA wal_autocheckpoint = {_MOST_PAGES}")
            self._require_version()
            schema = {sql for (sql,) in self._execute("SELECT sql FROM sqlite_schema") if sql}
            if schema != set(SCHEMA):
                raise Damage("its tables are not those of an address store")
            self._read_meta()
        except BaseException:
            self.abandon()  # a damaged file is not written to
            raise

    def close(self) -> None:
        """The last process that closes the database writes the WAL back."""
        self.connection.close()

    def abandon(self) -> None:
        """Close the database like a kill, without writing the WAL back."""
        # sqlite3_interrupt() ends the checkpoint of a close before its first page.
        self.connection.interrupt()
        self.connection.close()

    def look(self) -> None:
        """Begin to read one unchanged state, until `end`. `change` may write in the same
        transaction."""
        self._execute("BEGIN")
        self._read_meta()

    def end(self) -> None:
        """End a `look` without a write."""
        if self.connection.in_transaction:
            self._execute("COMMIT")

    @contextmanager
    def change(self) -> Iterator[None]:
        """Write in one transaction, and count the transaction. Raises CNIError if a failed write
        may still be in the database. After any other error, nothing was changed."""
        seq = self.meta.seq
        try:
            if not self.connection.in_transaction:
                self._execute("BEGIN IMMEDIATE")
            yield
            self._execute("UPDATE meta SET seq = ? WHERE id = 1", (seq + 1,))
            self._commit()
            self.meta = self.meta._replace(seq=seq + 1)
        except BaseException as error:
            if not self._was_undone(seq) and isinstance(error, FAILURES):
                raise explained(error, self._path.parent, UNCERTAIN) from None
            raise

    def _commit(self) -> None:
        self._execute("COMMIT")

    def _was_undone(self, seq: int) -> bool:
        """Whether a failed transaction left no change. SQLite may have rolled the transaction back,
        or may have written it before memory ran out. So this opens the database again, as a later
        process will do."""
        try:
            self.abandon()
            self._open()
        except FAILURES:
            return False
        return self.meta.seq == seq

    def _read_meta(self) -> None:
        rows = self._execute("SELECT store, seq FROM meta").fetchall()
        if len(rows) != 1 or not isinstance(rows[0][1], int):
            raise Damage("the row that identifies the store cannot be read")
        self.meta = StoreMeta(*rows[0])

    def _execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        return self.connection.execute(statement, values)

    def _require_version(self) -> None:
        ((version,),) = self._execute("PRAGMA user_version").fetchall()
        if version == 0:
            raise Damage("the file is not an address store")
        if version != VERSION:
            raise OtherVersion(
                f"the store has version {version}, but this podfabric reads version {VERSION}"
            )


def explained(error: Exception, directory: Path, outcome: str = UNCHANGED) -> CNIError:
    """The CNIError for one of FAILURES. `outcome` is the state of the change."""
    if isinstance(error, OtherVersion):
        return CNIError(
            Code.STORE_DAMAGED,
            f"the address store in {directory} is of another podfabric version ({error}): "
            f"{outcome}; use the version that wrote it",
        )
    if isinstance(error, Damage | UnicodeDecodeError):
        return _damaged(directory, str(error), outcome)
    if isinstance(error, sqlite3.Error):
        return _explained_sqlite(error, directory, outcome)
    if isinstance(error, MemoryError):
        return CNIError(
            Code.IO_FAILURE,
            f"cannot use the address store in {directory}: no memory is left: {outcome}; raise "
            "the memory limit of the process, and try again",
        )
    where = getattr(error, "filename", None) or directory
    reason = getattr(error, "strerror", None) or str(error)
    return CNIError(
        Code.IO_FAILURE, f"cannot use the address store: {where}: {reason}: {outcome}; {_REMEDY}"
    )


def shows_damage(error: BaseException | None, directory: Path) -> bool:
    """Whether the files are damaged. A close must not write the WAL to damaged files."""
    if isinstance(error, CNIError):
        return error.code == Code.STORE_DAMAGED
    if not isinstance(error, FAILURES):
        return False
    return explained(error, directory).code == Code.STORE_DAMAGED


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
            "close that program and try again",
        )
    return _damaged(directory, f"{error} ({name})", outcome)


def _damaged(directory: Path, seen: str, outcome: str) -> CNIError:
    """The error in one line of ASCII, because SQLite may quote many damaged lines."""
    line = " ".join(seen.encode("ascii", "backslashreplace").decode().split())[:_SEEN_LIMIT]
    return CNIError(
        Code.STORE_DAMAGED,
        f"the address store in {directory} is damaged ({line}): {outcome}; the agent builds it "
        "again with the next call, or `podfabric ipam fsck --rebuild` does; both keep the damaged "
        "files",
    )
