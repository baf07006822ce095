"""The files of a store, kept open between the transactions of one process: an agent's form.

Who keeps them has the store to itself, so it must neither keep others out nor trust its memory.
It gives the files up as soon as someone else tries the lock, when they were not used for a
while, and after any error. Before each transaction it looks whether they are as its own last
transaction left them; if not, it opens them anew, with all checks.
"""

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from ctypes import py_object, pythonapi
from pathlib import Path
from typing import NamedTuple, Self

from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from ipam.lock import exclusive
from ipam.lock_watch import Wishes
from ipam.log import Log
from ipam.recovery import (
    DATABASE,
    FAILURES,
    LOCK,
    LOG,
    WAL,
    Report,
    has_content,
    open_store,
    unused_aside,
)
from ipam.store_files import LOCK_TIMEOUT, explaining
from ipam.tables import Tables

IDLE = 5.0  # seconds
_CLOSE_TIME = 2.0  # seconds
_AWAY = 0.02  # seconds that a waiter is given, which looks every few milliseconds (ipam.lock)
_LARGE_WAL = 8 << 20  # bytes; some 300 transactions for one wait for the disk


class Resident:
    """Keeps the files of the store in `directory`. Implements `opening.Opening`, for any thread.

    Without inotify nobody could be noticed: then they are opened for each transaction.
    """

    def __init__(
        self,
        directory: Path,
        *,
        report: Report = note,
        lock_timeout: float = LOCK_TIMEOUT,
        idle: float = IDLE,
    ) -> None:
        self.directory = directory
        self._report = report
        self._lock_timeout = lock_timeout
        self._idle = idle
        self._turn = threading.Condition(threading.Lock())
        self._kept: _Kept | None = None
        self._used = 0.0
        self._away_until = 0.0
        self._is_parents = False
        self._wishes: Wishes | None = None
        with suppress(OSError):
            self._wishes = Wishes()
            # Made here: a thread made in a transaction would keep the network namespace that the
            # calling thread may be in.
            threading.Thread(
                target=self._watch, args=(self._wishes,), name="address store", daemon=True
            ).start()
        _residents.add(self)

    @contextmanager
    def transaction(self) -> Iterator[tuple[Tables, Log]]:
        """See Opening.transaction."""
        deadline = time.monotonic() + self._lock_timeout
        if self._is_parents:  # SQLite would take the parent's locks for its own (howtocorrupt.html)
            raise CNIError(
                Code.TRY_AGAIN,
                f"the address store in {self.directory} is open in the process that this one was "
                "forked from: nothing was changed; use it there",
            )
        if not self._turn.acquire(timeout=self._lock_timeout):
            raise CNIError(
                Code.TRY_AGAIN,
                f"the address store in {self.directory} has been busy with other calls for "
                f"{self._lock_timeout:g} s: nothing was changed; try again",
            )
        try:
            with explaining(self.directory):
                kept = self._open(deadline)
                try:
                    yield kept.tables, kept.log
                except BaseException:
                    kept.take_looks()  # then the WAL is written back: on a full disk it takes room
                    self._give_up()
                    raise
            self._go_on(kept)
        finally:
            self._turn.release()

    def close(self) -> None:
        """Give the files up, and keep none from here on.

        A transaction that is at work for long keeps them, as one that is killed would.
        """
        if not self._turn.acquire(timeout=_CLOSE_TIME):
            return
        try:
            self._wishes = None
            self._give_up()
            self._turn.notify_all()
        finally:
            self._turn.release()

    def _open(self, deadline: float) -> "_Kept":
        if self._kept is not None:
            changed = self._kept.changed()
            if not changed:
                return self._kept
            self._report(
                f"address store: another program changed {', '.join(sorted(changed))} in "
                f"{self.directory}: everything is read anew"
            )
            self._give_up()
        time.sleep(max(0.0, self._away_until - time.monotonic()))
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        remaining = max(0.0, deadline - time.monotonic())
        self._kept = _Kept(self.directory, remaining, self._report, self._wishes)
        self._turn.notify_all()
        return self._kept

    def _go_on(self, kept: "_Kept") -> None:
        """Keep the files, if nothing speaks against it. The transaction is done by now."""
        self._used = time.monotonic()
        if not kept.settle() or self._wishes is None:
            self._give_up()
        elif self._wishes.noticed():
            self._give_way()

    def _give_way(self) -> None:
        self._give_up()
        self._away_until = time.monotonic() + _AWAY

    def _give_up(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def _watch(self, wishes: Wishes) -> None:
        """What ends the keeping between transactions; the whole of a thread."""
        while self._until_kept():
            wishes.wait(self._idle)
            with self._turn:
                if self._kept is None:
                    continue
                if wishes.noticed():
                    self._give_way()
                elif time.monotonic() >= self._used + self._idle:
                    self._give_up()
        wishes.close()

    def _until_kept(self) -> bool:
        """Wait until files are kept; False if there will be none any more."""
        with self._turn:
            self._turn.wait_for(lambda: self._kept is not None or self._wishes is None)
            return self._wishes is not None

    def _after_fork(self) -> None:
        """In a child: what is open is the parent's. Closing it would write to the files."""
        if self._kept is not None:
            pythonapi.Py_IncRef(py_object(self._kept))  # no end of the child may close it
            self._is_parents = True
        self._kept = self._wishes = None
        self._turn = threading.Condition(threading.Lock())


class _Look(NamedTuple):
    """What a file looks like from outside: whoever changes it changes that (stat(2))."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, found: os.stat_result) -> Self:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class _Kept:
    """The lock, the open files, and how they looked after our own last transaction.

    `timeout` is for the lock. Raises what `open_store` does.
    """

    def __init__(
        self, directory: Path, timeout: float, report: Report, wishes: Wishes | None
    ) -> None:
        self._report = report
        self._paths = {name: directory / name for name in (DATABASE, WAL, LOG, LOCK)}
        self._watched = False
        with ExitStack() as opened:
            opened.enter_context(exclusive(directory / LOCK, timeout))
            if wishes is not None:
                with suppress(OSError):  # too many watches: then the files are not kept
                    wishes.begin(directory / LOCK)
                    opened.callback(wishes.end)
                    self._watched = True
            self.tables, self.log = open_store(directory, report)
            opened.enter_context(closing(self.log))
            opened.callback(self._close_tables)
            self._looks = {name: _look(path) for name, path in self._paths.items()}
            self._opened = opened.pop_all()

    def changed(self) -> set[str]:
        """The names of the files that someone else has changed."""
        return {name for name, path in self._paths.items() if _look(path) != self._looks[name]}

    def take_looks(self) -> None:
        """Take what WAL and log look like after a transaction for our own doing.

        A transaction does not write to the database: that is left to `checkpoint`.
        """
        wal = _look(self._paths[WAL])
        if self._is_ours(wal):
            self._looks[WAL] = wal
        self._looks[LOG] = _Look.of(os.fstat(self.log.fileno()))

    def settle(self) -> bool:
        """Take the looks. Whether all of it may be kept."""
        self.take_looks()
        wal = self._looks[WAL]
        if wal is not None and wal.size > _LARGE_WAL:
            return self._checkpoint()
        return self._watched

    def close(self) -> None:
        """Close the files and let the lock go. What fails here shows when they are opened again."""
        with suppress(*FAILURES):
            self._opened.close()

    def _checkpoint(self) -> bool:
        if self.changed():
            return False
        try:
            self.tables.checkpoint()
        except FAILURES:
            return False
        self._looks = {name: _look(path) for name, path in self._paths.items()}
        return self._watched

    def _close_tables(self) -> None:
        """Close the database; as a kill would if someone changed it, for the log knows it all."""
        changed = self.changed()
        if not changed & {DATABASE, WAL}:
            self.tables.close()
            return
        try:
            if DATABASE in changed and has_content(self._paths[DATABASE]):
                self._set_wal_aside()
        finally:
            self.tables.abandon()

    def _set_wal_aside(self) -> None:
        """It belongs to what the database was: SQLite would mix it with what it is now."""
        wal = self._paths[WAL]
        if self._is_ours(_look(wal)):
            aside = wal.rename(unused_aside(wal))
            self._report(f"address store: kept the WAL of the former {DATABASE} as {aside}")

    def _is_ours(self, wal: _Look | None) -> bool:
        """Whether this is the WAL that we write to."""
        ours = self._looks[WAL]
        return wal is not None and ours is not None and wal[:2] == ours[:2]


def _look(path: Path) -> _Look | None:
    """None if there is no such file."""
    try:
        return _Look.of(path.stat())
    except OSError:
        return None


_residents: "weakref.WeakSet[Resident]" = weakref.WeakSet()


def _after_fork() -> None:
    for one in tuple(_residents):
        one._after_fork()


os.register_at_fork(after_in_child=_after_fork)
