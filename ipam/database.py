"""The database file of the store: open, in a transaction, written back, closed.

What is in it, and when an address is taken, is in `tables`.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ipam.schema import SCHEMA, VERSION, Damage, ForeignWal, OtherVersion, crc_of, meta_of
from ipam.watermark import Progress, Watermark

BESIDE = ("-wal", "-shm", "-journal")
"""What SQLite appends to a database's name for the files that it keeps beside it."""

_BUSY_TIMEOUT = 100  # milliseconds; only programs that are not ours use no lock of ours
_GENERATION_AT = 60  # the offset of user_version in the file (sqlite.org/fileformat2.html)


class StoreMeta(NamedTuple):
    """The store's identity, how many transactions it has had, and how many reservations it has."""

    store: str
    seq: int
    held: int


def connect(path: Path, *, shared: bool = False) -> sqlite3.Connection:
    """Open an existing database, and read only as much as shows that this works.

    Unless it is `shared` with other processes, there is no shared memory: it would need room on the
    disk, and a truncated file would end the process (SIGBUS).
    """
    uri = f"file:{path.as_posix().replace('%', '%25').replace('?', '%3f')}?mode=rw"
    # One thread at a time uses the connection: the one that has the store's lock.
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


def remove(database: Path) -> None:
    """Remove a database and the files that SQLite keeps beside it."""
    for suffix in ("", *BESIDE):
        database.with_name(f"{database.name}{suffix}").unlink(missing_ok=True)


class Database:
    """An open database. The caller holds the store's lock. Raises sqlite3.Error and Damage.

    With a `watermark`, each transaction is counted there too. A database that stays open (`kept`)
    between transactions is shared with other processes; `is_shared` says whether that succeeded.
    """

    def __init__(
        self, path: Path, watermark: Watermark | None = None, *, kept: bool = False
    ) -> None:
        """Open an existing database and read its identity."""
        self._path = path
        self._watermark = watermark
        self._kept = kept
        self._open()

    def _open(self) -> None:
        # Read first: closing a file drops all locks that this process has on it (fcntl(2)).
        self._generation_on_disk = _generation_on_disk(self._path)
        try:
            self.is_shared = self._kept
            self.connection = connect(self._path, shared=self.is_shared)
        except sqlite3.OperationalError:
            # Alone: another process keeps it open. Shared: there is no room for shared memory.
            self.is_shared = not self._kept
            self.connection = connect(self._path, shared=self.is_shared)
        try:
            self._execute("PRAGMA synchronous = NORMAL")
            # Only `checkpoint` and `close` write to the database file.
            self._execute("PRAGMA wal_autocheckpoint = 0")
            self._require_version()
            schema = {sql for (sql,) in self._execute("SELECT sql FROM sqlite_schema") if sql}
            if schema != set(SCHEMA):
                raise Damage("its tables are not those of an address store")
            self.meta = StoreMeta(*meta_of(self.connection)[1:])
            self._look_at_wal()
        except BaseException:
            self._disconnect()  # a damaged file is not written to
            raise

    def close(self) -> None:
        """Close the database. The last process to do so writes the WAL back."""
        try:
            self.connection.close()
        finally:
            self._close_watermark()

    def abandon(self) -> None:
        """Close the database as a kill would: what is in the WAL stays there."""
        try:
            self._disconnect()
        finally:
            self._close_watermark()

    def checkpoint(self) -> bool:
        """Write the WAL back, sync the database and empty the WAL.

        Answers False if another program reads the database, which keeps the WAL.
        """
        (busy, _, _) = self._execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            return False
        self._generation_on_disk = self._generation()
        self._wal_is_new = True
        self._count(synced=True)
        return True

    def count_backup(self) -> None:
        """Note in the mark that the backup copy has all transactions."""
        self._count(saved=True)

    def refresh(self) -> None:
        """Read `meta` again, since another process may have used the store."""
        before, self.meta = self.meta, StoreMeta(*meta_of(self.connection)[1:])
        if self.meta != before:
            self._look_at_wal()

    def look(self) -> None:
        """Begin to read, at one state of the database: SQLite locks once for all that follows.

        `begin` and `commit` make a transaction that writes of it, `end` ends it without.
        """
        self._execute("BEGIN")
        self.refresh()

    def end(self) -> None:
        """End what `look` began, if nothing was written."""
        if self.connection.in_transaction:
            self._execute("COMMIT")

    def begin(self) -> None:
        """Begin to write. The first one of a WAL starts a new generation of the database."""
        if not self.connection.in_transaction:
            self._execute("BEGIN IMMEDIATE")
        if self._wal_is_new:
            self._execute(f"PRAGMA user_version = {self._generation_on_disk + 1}")

    def record(self, seq: int) -> None:
        """Set the number of transactions, within one."""
        self.meta = StoreMeta(self.meta.store, seq, self.meta.held)
        content = (VERSION, *self.meta)
        self._execute(
            "UPDATE meta SET version = ?, store = ?, seq = ?, count = ?, crc = ? WHERE id = 1",
            (*content, crc_of(content)),
        )

    def commit(self) -> None:
        """End the transaction, and count it in the mark. Raises OSError if that fails."""
        self._execute("COMMIT")
        self._wal_is_new = False
        self._count()

    def reopen(self) -> None:
        """Open the database again after a failed transaction, to see what a later process sees.

        SQLite may have rolled the transaction back. It may also have written all of it before it
        ran out of memory.
        """
        self._disconnect()
        self._open()

    @property
    def mark(self) -> Progress | None:
        """What the watermark says, None without one."""
        return None if self._watermark is None else self._watermark.mark

    def _count(self, *, synced: bool = False, saved: bool = False) -> None:
        """Bring the mark up to `meta`."""
        if self._watermark is None or self.mark is None:
            return
        seq, last = self.meta.seq, self.mark
        self._watermark.write(
            Progress(
                last.boot,
                last.store,
                seq,
                self.meta.held,
                seq if synced else last.synced,
                seq if saved else last.saved,
            )
        )

    def _disconnect(self) -> None:
        # sqlite3_interrupt() ends the checkpoint of a close before its first page.
        self.connection.interrupt()
        self.connection.close()

    def _close_watermark(self) -> None:
        if self._watermark is not None:
            self._watermark.close()

    def _generation(self) -> int:
        ((generation,),) = self._execute("PRAGMA user_version").fetchall()
        return int(generation)

    def _look_at_wal(self) -> None:
        """See whether the WAL has a transaction. ForeignWal if it is of another copy of the file.

        SQLite would mix the two. Between checkpoints the file does not change, and the first
        transaction of a WAL adds 1 to the generation: so the WAL has that of its file, or 1 more.
        """
        generation = self._generation()
        if generation - self._generation_on_disk not in (0, 1):
            raise ForeignWal(
                f"its file is of generation {self._generation_on_disk}, and its WAL makes it "
                f"{generation}: another copy was put in its place"
            )
        self._wal_is_new = generation == self._generation_on_disk

    def _execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        return self.connection.execute(statement, values)

    def _require_version(self) -> None:
        version = meta_of(self.connection)[0]
        if version != VERSION:
            raise OtherVersion(f"it has version {version}, this program reads {VERSION}")


def _generation_on_disk(path: Path) -> int:
    """The generation in the header of a database file, without its WAL. Raises OSError."""
    with path.open("rb") as file:
        file.seek(_GENERATION_AT)
        return int.from_bytes(file.read(4), "big", signed=True)
