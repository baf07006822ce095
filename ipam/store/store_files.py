"""Opens a store's files, checks them, and closes them.

An agent keeps the files open between transactions. The lock is held only during a transaction.
SQLite does not notice that another program replaced or changed a file. So each transaction first
checks whether the files' status has changed.

A process with the node's `facts` checks the database at the first opening, and after another
program changed files. Such a process rebuilds a damaged database (`repair`). If changes were lost
in this boot, each such process compares the store with the facts.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from base import files
from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from ipam.addresses import parse
from ipam.ranges import Range, RangeSet
from ipam.store import repair, snapshot
from ipam.store.database import (
    DATABASE,
    FAILURES,
    UNREADABLE,
    WAL,
    OtherVersion,
    explained,
    has_content,
    shows_damage,
)
from ipam.store.repair import AddressesInUse, FactsOf, NodeFacts, Say
from ipam.store.snapshot import LOCK_TIMEOUT, Noted, StoreLock, locked, require_all, take
from ipam.store.tables import Tables

SETTLE = 5.0  # seconds from a loss until all pods show their addresses
_CLOSE_TIME = 2.0  # seconds


class StoreFiles:
    """The files of a store, for any thread. If `kept`, the files stay open until `close`. Without
    `facts`, a damaged store is an error, and a missing store is made new."""

    def __init__(
        self,
        directory: Path,
        *,
        kept: bool = True,
        facts: FactsOf | None = None,
        report: Say = note,
        lock_timeout: float = LOCK_TIMEOUT,
    ) -> None:
        self.directory = directory
        self._database, self._wal = str(directory / DATABASE), str(directory / WAL)
        self._facts = facts
        self._report = report
        self._lock_timeout = lock_timeout
        self.kept = kept
        self._lock = StoreLock(directory, stay_open=kept)
        self._turn = threading.Lock()
        self._tables: Tables | None = None
        self._files: _Versions = ((), ())
        self._closed = not kept
        self._seq = 0  # the last transaction that this process saw
        self._unchecked = True
        self._has_looked = False
        self._in_use = AddressesInUse()
        self._lost_at: float | None = None  # seconds since 1970

    @contextmanager
    def transaction(self) -> Iterator[Tables]:
        """The open database, locked. Raises CNIError 5, 11 or 112."""
        deadline = time.monotonic() + self._lock_timeout
        if not self._turn.acquire(timeout=self._lock_timeout):
            raise CNIError(
                Code.TRY_AGAIN,
                f"the address store in {self.directory} has been busy with other calls for "
                f"{self._lock_timeout:g} s: nothing was changed; try again",
            )
        try:
            take(self._lock, self.directory, max(0.0, deadline - time.monotonic()))
            try:
                tables = self._open()
                try:
                    yield tables
                    tables.end()
                    self._settle()
                    self._count(tables)
                except BaseException as error:
                    self._settle()
                    self._close(error)  # this writes the WAL back, which takes room
                    raise
                if self._closed or not tables.is_shared:
                    self._close()
            except FAILURES as error:
                raise explained(error, self.directory) from None
            finally:
                self._lock.release()
        finally:
            self._turn.release()

    @contextmanager
    def handing_out(self) -> Iterator[Tables]:
        """A `transaction` that reserves. Raises CNIError 11 while a loss is not settled."""
        with self.transaction() as tables:
            if self._lost_at is not None:
                self._settle_loss(tables, self._lost_at)
            yield tables

    def snapshot(self) -> AbstractContextManager[Tables | None]:
        return snapshot.snapshot(self.directory, self._lock_timeout)

    def unused(self, tables: Tables, sets: Sequence[RangeSet]) -> Sequence[RangeSet]:
        """The sets without the addresses in `AddressesInUse`."""
        if not self._in_use.addresses:
            return sets
        ranges = [range_ for range_set in sets for range_ in range_set.ranges]
        found = [each for range_ in ranges for each in self._in_use.within(range_)]
        if not found:
            return sets
        if self._facts is not None and not all(each.lasts for each in found):
            self._in_use = AddressesInUse(repair.unreserved(tables, self._facts()))
        return [
            RangeSet(
                tuple(self._unused(tables, range_) for range_ in range_set.ranges), range_set.fixed
            )
            for range_set in sets
        ]

    def _unused(self, tables: Tables, range_: Range) -> Range:
        addresses = [parse(each.address) for each in self._in_use.within(range_)]
        # An import may have reserved the address since.
        free = [address for address in addresses if tables.at(range_.domain, address) is None]
        return range_.without(free)

    def _count(self, tables: Tables) -> None:
        """Count the commits in the lock file, before the call answers."""
        if tables.meta.seq > self._seq:
            self._seq = tables.meta.seq
            noted = self._lock.noted()
            if self._seq > noted.seq:
                self._lock.note(Noted(self._seq, noted.lost))

    def close(self) -> None:
        """Close the files, and keep none open from now on. A running transaction keeps its files
        open. Creates no file if the directory is gone."""
        if self._closed:
            return
        self._closed = True
        if not self._turn.acquire(timeout=_CLOSE_TIME):
            return
        try:
            with suppress(CNIError), locked(self.directory, _CLOSE_TIME):
                self._close()
        finally:
            self._lock.close()
            self._turn.release()

    def _open(self) -> Tables:
        if self._tables is not None:
            now = self._versions()
            if now != self._files:
                # Another process of ours adds to the WAL, and rarely writes it back.
                self._unchecked = self._files[0] != now[0] or _is_another(self._files, now)
                self._has_looked &= not self._unchecked
                self._close()
        if self._tables is None:
            self._tables = self._opened()
            self._files = self._versions()
        try:
            self._tables.look()
        except BaseException as error:
            self._close(error)
            raise
        return self._tables

    def _opened(self) -> Tables:
        """Open the database. Checks the database if a check is due, and rebuilds a damaged one."""
        noted = self._lock.noted()
        counted = noted._replace(seq=max(noted.seq, self._seq))
        if self._facts is None:
            tables = open_store(self.directory, kept=self.kept)
            self._checked(tables, lambda: require_all(tables, counted))
            return tables
        # A WAL that a kill left may belong to another copy of the database.
        is_suspect = noted.lost or self._seq > 0 or has_content(self.directory / WAL)
        # The loss is noted before the rebuild, for the next process after a kill.
        lost = not has_content(self.directory / DATABASE) and self._is_known_to_journal()
        if lost:
            self._lock.note(Noted(noted.seq, lost=True))
        try:
            tables = open_store(self.directory, kept=self.kept)
            if self._unchecked:
                self._checked(tables, tables.verify if is_suspect else tables.verify_pages)
        except OtherVersion:
            raise  # a rebuilt store would lack that version's data
        except UNREADABLE as error:
            if not shows_damage(error, self.directory):
                raise
            self._report(f"address store: {explained(error, self.directory).message}")
            repair.replace(self.directory, self._lock, self._report)
            tables, lost = open_store(self.directory, kept=self.kept), True
        self._unchecked = False
        lost = lost or tables.meta.seq < counted.seq
        if lost or (noted.lost and not self._has_looked):
            self._checked(tables, lambda: self._look(tables, lost=lost))
        return tables

    def _checked(self, tables: Tables, check: Callable[[], object]) -> None:
        try:
            check()
        except BaseException:
            tables.abandon()
            raise

    def _is_known_to_journal(self) -> bool:
        """Whether the journal has addresses of this boot."""
        assert self._facts is not None
        facts = self._facts()
        return any(each.boot == facts.boot for each in facts.journal)

    def _look(self, tables: Tables, *, lost: bool) -> None:
        """Compare the store with the facts. If changes were `lost` just now, pods may have
        addresses that the facts do not show yet."""
        assert self._facts is not None
        if lost:
            self._lost_at = time.time()
            self._report(
                f"address store: changes were lost: no address is handed out for {SETTLE:g} s, "
                "until the addresses of pods are visible"
            )
        self._compare(tables, self._facts(), lost=lost)

    def _compare(self, tables: Tables, facts: NodeFacts, *, lost: bool) -> None:
        repair.reconcile(tables, facts, lost=lost)
        self._in_use = AddressesInUse(repair.unreserved(tables, facts))
        self._has_looked = True
        self._seq = tables.meta.seq
        self._lock.note(Noted(self._seq, lost=True))

    def _settle_loss(self, tables: Tables, lost_at: float) -> None:
        """Read the facts again after a loss. Raises CNIError 11 if the facts are incomplete."""
        why = "pods may have addresses that are not visible yet"
        if self._facts is not None and time.time() - lost_at >= SETTLE:
            facts = self._facts()
            if not facts.unseen and not any(begun <= lost_at for begun in facts.begun):
                self._compare(tables, facts, lost=False)
                self._lost_at = None
                return
            why = "an ADD that began before the loss still runs"
            for unseen in facts.unseen[:1]:  # it may name another tenant's attachment
                self._report(f"address store: could not read: {unseen}")
                why = "some attachments could not be read (see the agent's log)"
        raise CNIError(
            Code.TRY_AGAIN,
            f"the address store in {self.directory} lost changes and was built again, but {why}: "
            "no address was handed out; the runtime tries again",
        )

    def _settle(self) -> None:
        """Record the files' status after a transaction, unless the files were replaced."""
        database, wal = self._versions()
        if not _is_another(self._files, (database, wal)):
            self._files = database, wal

    def _close(self, error: BaseException | None = None) -> None:
        """Close the files, after `error` if there was one. Does not write to files that another
        program changed, because the WAL may be of another database. Does not write to damaged
        files, which the next opening reads in full."""
        tables, self._tables = self._tables, None
        if tables is None:
            return
        is_damaged = shows_damage(error, self.directory)
        if is_damaged:
            self._unchecked = True
            self._lock.note(self._lock.noted()._replace(lost=True))
        with suppress(*FAILURES):
            if self._versions() == self._files and not is_damaged:
                tables.close()
            else:
                tables.abandon()

    def _versions(self) -> "_Versions":
        return files.version(self._database), files.version(self._wal)


def open_store(directory: Path, *, kept: bool = False) -> Tables:
    """Open the database, or make a new one. The caller holds the lock. Raises FAILURES."""
    tables = snapshot.opened(directory, kept=kept)
    if tables is None:
        repair.build(directory / DATABASE, repair.new_store())
        tables = Tables(directory / DATABASE, kept=kept)
    return tables


_Versions = tuple[tuple[int, ...], tuple[int, ...]]
"""`files.version` of the database and its WAL."""


def _is_another(left: _Versions, found: _Versions) -> bool:
    """Whether the database or the WAL is now another file."""
    return any(
        len(one) < 2 or one[:2] != other[:2]  # a missing file has no inode
        for one, other in zip(left, found, strict=True)
    )
