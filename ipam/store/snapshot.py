"""The store's lock, and reads that do not block writers.

Every transaction of a call holds the lock. A reader holds the lock only while it opens and closes
the database. In between, SQLite shows the reader one unchanged state.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from base.locks import Busy, LockFile
from base.paths import boot_id_of
from cni.spec.errors import CNIError, Code
from ipam.store.database import DATABASE, FAILURES, WAL, Damage, explained, has_content
from ipam.store.tables import Tables

LOCK = "lock"
LOCK_TIMEOUT = 30.0  # seconds; kubelet gives a sandbox 2 min
_PAUSE = 0.005  # seconds between two tries to lock; a transaction takes about 3 ms
_LENGTH = 80  # bytes of the line in the lock file


class Noted(NamedTuple):
    """The number of transactions, and whether some were `lost` in this boot."""

    seq: int = 0
    lost: bool = False


class StoreLock(LockFile):
    """SQLite cannot detect a truncated WAL or an older copy of the database. So the lock file has a
    line that counts transactions in this boot. The line is written after a commit, in place and not
    synced. A bad line only disables this check."""

    def __init__(self, directory: Path, *, stay_open: bool = False) -> None:
        super().__init__(
            f"{directory}/{LOCK}",
            "the address store",
            keep=True,
            stay_open=stay_open,
            pause=_PAUSE,
            longest_pause=_PAUSE,
        )

    def noted(self) -> Noted:
        """Read the line. The caller holds the lock."""
        words = os.pread(self.descriptor, _LENGTH, 0).split()
        if len(words) != 3 or words[0] != _boot() or not words[1].isdigit():
            return Noted()
        return Noted(int(words[1]), words[2] == b"1")

    def note(self, noted: Noted) -> None:
        """Replace the line. The caller holds the lock."""
        line = b"%b %d %d" % (_boot(), noted.seq, noted.lost)
        with suppress(OSError):
            os.pwrite(self.descriptor, line.ljust(_LENGTH - 1) + b"\n", 0)


def _boot() -> bytes:
    return boot_id_of(Path("/proc")).encode()


def require_all(tables: Tables, noted: Noted) -> None:
    """Raise Damage if the database has fewer transactions than were counted."""
    if tables.meta.seq < noted.seq:
        raise Damage(
            f"{DATABASE} has {tables.meta.seq} of {noted.seq} changes: the file is an older "
            "copy, or the WAL was lost"
        )


def take(lock: LockFile, directory: Path, timeout: float) -> None:
    """Wait for the lock of the store in `directory`. Raises CNIError 5 or 11."""
    try:
        lock.acquire(timeout)
    except Busy:
        path = f"{directory}/{LOCK}"
        raise CNIError(
            Code.TRY_AGAIN,
            f"another process has held the lock {path} of the address store for "
            f"{timeout:.2g} s: nothing was changed; try again, and find that process "
            f"(fuser {path})",
        ) from None
    except OSError as error:
        raise explained(error, directory) from None


@contextmanager
def locked(directory: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[StoreLock]:
    """Hold the store's lock. Failures become CNIErrors. Raises CNIError 11 after `timeout`
    seconds."""
    lock = StoreLock(directory)
    take(lock, directory, timeout)
    try:
        yield lock
    except FAILURES as error:
        raise explained(error, directory) from None
    finally:
        lock.release()


@contextmanager
def snapshot(directory: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[Tables | None]:
    """Read the present state. Yields `None` without a store. Other processes continue meanwhile.
    Raises CNIError 5, 11 or 112."""
    if not directory.is_dir():
        yield None
        return
    try:
        with ExitStack() as held:
            lock = held.enter_context(locked(directory, timeout))
            tables = opened(directory, kept=True)
            if tables is None:
                if lock.noted().seq:
                    raise Damage(f"{DATABASE} is missing or empty")
                yield None
                return
            try:
                require_all(tables, lock.noted())
                tables.look()
                if tables.is_shared:  # otherwise no other process could open it
                    held.close()
                yield tables
                tables.end()
                if tables.is_shared:
                    held.enter_context(locked(directory, timeout))
                tables.close()  # the last one to close it writes the WAL back
            except BaseException:
                tables.abandon()
                raise
    except FAILURES as error:
        raise explained(error, directory) from None


def opened(directory: Path, *, kept: bool) -> Tables | None:
    """Returns `None` without a database. Raises FAILURES."""
    if has_content(directory / DATABASE):
        return Tables(directory / DATABASE, kept=kept)
    if has_content(directory / WAL):
        raise Damage(f"{DATABASE} is missing or empty, but the WAL has content")
    return None
