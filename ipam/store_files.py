"""The files of a store: who opens them, for how long, and under which lock.

An agent keeps them open between transactions, a process that does one call or command does not.
The lock is held for a transaction only, so other processes use the store in between. SQLite makes
what they commit visible here. It cannot see that a program that is not SQLite replaced or changed a
file: so the files' status is compared before each transaction, and after any difference the store
is opened again, with all checks.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from base.locks import Busy, LockFile
from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from ipam.recovery import (
    DATABASE,
    FAILURES,
    LOCK,
    WAL,
    Report,
    back_up,
    compact,
    compact_early,
    explained,
    is_to_look,
    open_store,
    shows_damage,
)
from ipam.tables import Tables

LOCK_TIMEOUT = 30.0  # seconds; kubelet gives a sandbox 2 min
_PAUSE = 0.005  # seconds between two tries to lock; a transaction takes about 3 ms
_CLOSE_TIME = 2.0  # seconds
_TENDED = 60.0  # seconds for which transactions count on `tend`


class StoreFiles:
    """The files of the store in `directory`, for one transaction at a time, of any thread.

    `kept`: they stay open between transactions, until `close`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        kept: bool = True,
        report: Report = note,
        lock_timeout: float = LOCK_TIMEOUT,
    ) -> None:
        self.directory = directory
        self._database, self._wal = str(directory / DATABASE), str(directory / WAL)
        self._report = report
        self._lock_timeout = lock_timeout
        self.kept = kept
        self._lock = _lock_of(directory, stay_open=kept)
        self._turn = threading.Lock()
        self._tables: Tables | None = None
        self._files: tuple[_FileStatus | None, _FileStatus | None] = (None, None)
        self._process = 0
        self._closed = not kept
        self._tended_at = -math.inf
        self._looked_at = 0  # how many transactions there were

    @contextmanager
    def transaction(self) -> Iterator[Tables]:
        """The open database, locked. CNIError 5, 11 and 112."""
        patience = 2 if time.monotonic() - self._tended_at < _TENDED else 1
        with self._transaction(partial(compact, patience=patience)) as tables:
            yield tables

    def tend(self) -> None:
        """Write the WAL back if that is due, so that no transaction of a call has to. The same."""
        with self._transaction(self._compact_early):
            self._tended_at = time.monotonic()

    def _compact_early(self, directory: Path, tables: Tables, report: Report) -> bool:
        if not is_to_look(tables, self._looked_at):
            return False
        self._looked_at = tables.meta.seq
        return compact_early(directory, tables, report)

    @contextmanager
    def _transaction(self, compact: Callable[[Path, Tables, Report], bool]) -> Iterator[Tables]:
        """A transaction. What `compact` does comes after its end, with the store still locked."""
        deadline = time.monotonic() + self._lock_timeout
        self._require_own_process()
        if not self._turn.acquire(timeout=self._lock_timeout):
            raise CNIError(
                Code.TRY_AGAIN,
                f"the address store in {self.directory} has been busy with other calls for "
                f"{self._lock_timeout:g} s: nothing was changed; try again",
            )
        try:
            _take(self._lock, self.directory, max(0.0, deadline - time.monotonic()))
            try:
                tables = self._open()
                try:
                    yield tables
                    tables.end()
                    self._settle()
                    if compact(self.directory, tables, self._report):
                        self._files = self._status()
                except BaseException as error:
                    self._settle()
                    self._close(error)  # this writes the WAL back: on a full disk it takes room
                    raise
                if self._closed or not tables.is_shared:
                    self._close()
            except FAILURES as error:
                raise explained(error, self.directory) from None
            finally:
                self._lock.release()
        finally:
            self._turn.release()

    def close(self) -> None:
        """Close the files after a backup copy was made, and keep none open from here on.

        A transaction that is still at work keeps them, as a killed one would. May be called again,
        also when the directory is gone: it makes nothing there.
        """
        if self._closed:
            return
        self._closed = True
        if not self._is_own() or not self._turn.acquire(timeout=_CLOSE_TIME):
            return
        try:
            with suppress(CNIError), locked(self.directory, _CLOSE_TIME):
                try:
                    self._back_up()
                except FAILURES as error:
                    self._report(f"address store: no backup copy was made: {error}")
                finally:
                    self._close()
        finally:
            self._lock.close()
            self._turn.release()

    def _open(self) -> Tables:
        if self._tables is not None and self._status() != self._files:
            self._close()
        if self._tables is None:
            self._process = os.getpid()  # first: other threads look at both without a lock
            self._tables = open_store(self.directory, self._report, kept=self.kept)
            self._files = self._status()
        try:
            self._tables.look()
        except BaseException as error:
            self._close(error)
            raise
        return self._tables

    def _settle(self) -> None:
        """Take the WAL's status after a transaction as ours, unless it is another file.

        A transaction does not write to the database file.
        """
        database, wal = self._files
        now = _status_of(self._wal)
        if now is not None and wal is not None and now[:2] == wal[:2]:
            self._files = database, now

    def _close(self, error: BaseException | None = None) -> None:
        """Close the files, after `error` if there was one. A failure shows when they are opened
        again.

        Files that another program changed are not written to: the WAL may not be theirs. Nor are
        damaged ones.
        """
        tables, self._tables = self._tables, None
        if tables is None:
            return
        with suppress(*FAILURES):
            if self._status() == self._files and not shows_damage(error, self.directory):
                tables.close()
            else:
                tables.abandon()

    def _back_up(self) -> None:
        tables = self._tables
        if tables is None or self._status() != self._files:
            return
        if tables.mark is not None and tables.mark.saved != tables.meta.seq:
            tables.refresh()
            tables.checkpoint()
            back_up(self.directory, tables)
            self._files = self._status()

    def _status(self) -> "tuple[_FileStatus | None, _FileStatus | None]":
        return _status_of(self._database), _status_of(self._wal)

    def _is_own(self) -> bool:
        return self._tables is None or self._process == os.getpid()

    def _require_own_process(self) -> None:
        if not self._is_own():  # SQLite would use the parent's locks (sqlite.org/howtocorrupt.html)
            raise CNIError(
                Code.TRY_AGAIN,
                f"the address store in {self.directory} is open in the process that this one was "
                "forked from: nothing was changed; use it there",
            )


class _FileStatus(NamedTuple):
    """What changes when a program writes to a file or puts another one in its place (stat(2))."""

    device: int
    inode: int
    size: int
    modified: int


def _status_of(path: str) -> _FileStatus | None:
    """None if there is no such file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path costs more than the call
    except OSError:
        return None
    return _FileStatus(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@contextmanager
def locked(directory: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Hold the lock of the store in `directory`; failures in the block become CNIErrors.

    CNIError 5 and 112, and 11 if another process holds the lock for `timeout` seconds.
    """
    lock = _lock_of(directory)
    _take(lock, directory, timeout)
    try:
        yield
    except FAILURES as error:
        raise explained(error, directory) from None
    finally:
        lock.release()


def _lock_of(directory: Path, *, stay_open: bool = False) -> LockFile:
    """The lock of the store in `directory`."""
    return LockFile(
        f"{directory}/{LOCK}",
        "the address store",
        keep=True,
        stay_open=stay_open,
        pause=_PAUSE,
        longest_pause=_PAUSE,
    )


def _take(lock: LockFile, directory: Path, timeout: float) -> None:
    """Wait for the lock of the store in `directory`. CNIError 5 and 11."""
    try:
        lock.acquire(timeout)
    except Busy:
        path = f"{directory}/{LOCK}"
        raise CNIError(
            Code.TRY_AGAIN,
            f"the lock {path} of the address store has been held by another process for "
            f"{timeout:.2g} s: nothing was changed; try again, and see who holds it "
            f"(fuser {path})",
        ) from None
    except OSError as error:
        raise explained(error, directory) from None
