"""Who opens the files of a store, and for how long.

A process that does one call opens them for one transaction (`PerCall`). An agent keeps them open
(`resident.Resident`). The store does not know which.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from ipam.recovery import FAILURES, LOCK, Report, compact, explained, open_store
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
            finally:
                tables.close()


@contextmanager
def locked(directory: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Hold the lock of the store in `directory`; failures in the block become CNIErrors.

    CNIError 5 and 112, and 11 if another process holds the lock for `timeout` seconds.
    """
    path = directory / LOCK
    try:
        try:
            descriptor = _lock(path, timeout)
        except FileNotFoundError:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = _lock(path, timeout)
    except TimeoutError:
        raise CNIError(
            Code.TRY_AGAIN,
            f"the lock {path} of the address store has been held by another process for "
            f"{timeout:.2g} s: nothing was changed; try again, and see who holds it (fuser {path})",
        ) from None
    except OSError as error:
        raise explained(error, directory) from None
    try:
        yield
    except FAILURES as error:
        raise explained(error, directory) from None
    finally:
        os.close(descriptor)


def _lock(path: Path, timeout: float) -> int:
    """A descriptor that has the lock. Raises TimeoutError and other OSErrors.

    base.locks costs as much as the rest of a transaction, and its file goes away with the lock.
    """
    deadline = time.monotonic() + timeout
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _leads_to(path, descriptor):
                return descriptor
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() >= deadline:
            raise TimeoutError
        time.sleep(_PAUSE)


def _leads_to(path: Path, descriptor: int) -> bool:
    """Whether the locked file is still the one at `path`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
