"""Who opens the files of a store, and for how long.

A process that does one call opens them for one transaction (`PerCall`). An agent keeps them open
(`resident.Resident`). The store does not know which.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from base.locks import Busy, LockFile
from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from ipam.recovery import FAILURES, LOCK, Report, compact, explained, open_store, shows_damage
from ipam.tables import Tables

LOCK_TIMEOUT = 30.0  # seconds; kubelet gives a sandbox 2 min
_PAUSE = 0.005  # seconds between two tries to lock; a transaction takes about 3 ms


class StoreFiles(Protocol):
    """The files of the store in `directory`, for one transaction at a time."""

    @property
    def directory(self) -> Path:
        """Where they are."""

    def transaction(self) -> AbstractContextManager[Tables]:
        """The open database, locked. CNIError 5, 11 and 112."""

    def tend(self) -> None:
        """Write the WAL back if that is due, so that no transaction of a call has to. The same."""


class PerCall:
    """Opens the files for each transaction, and keeps nothing of a store in the process."""

    def __init__(
        self, directory: Path, *, report: Report = note, lock_timeout: float = LOCK_TIMEOUT
    ) -> None:
        self.directory = directory
        self._report = report
        self._lock_timeout = lock_timeout

    @contextmanager
    def transaction(self) -> Iterator[Tables]:
        """See StoreFiles.transaction."""
        with locked(self.directory, self._lock_timeout):
            tables = open_store(self.directory, self._report)
            try:
                yield tables
                compact(self.directory, tables, self._report)
            except BaseException as error:
                if shows_damage(error, self.directory):
                    tables.abandon()
                else:
                    tables.close()
                raise
            tables.close()

    def tend(self) -> None:
        """Nothing: each transaction writes the WAL back."""


@contextmanager
def locked(directory: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Hold the lock of the store in `directory`; failures in the block become CNIErrors.

    CNIError 5 and 112, and 11 if another process holds the lock for `timeout` seconds.
    """
    lock = lock_of(directory)
    take(lock, directory, timeout)
    try:
        yield
    except FAILURES as error:
        raise explained(error, directory) from None
    finally:
        lock.release()


def lock_of(directory: Path, *, stay_open: bool = False) -> LockFile:
    """The lock of the store in `directory`."""
    return LockFile(
        f"{directory}/{LOCK}",
        "the address store",
        keep=True,
        stay_open=stay_open,
        pause=_PAUSE,
        longest_pause=_PAUSE,
    )


def take(lock: LockFile, directory: Path, timeout: float) -> None:
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
