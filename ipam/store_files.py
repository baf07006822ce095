"""Who opens the files of a store, and for how long.

A process that does one call opens them for its one transaction (`PerCall`); an agent keeps them
(`resident.Resident`). The store does not know which.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Protocol

from cni.spec.notes import note
from ipam.lock import exclusive
from ipam.log import Log
from ipam.recovery import FAILURES, LOCK, Report, explained, open_store
from ipam.tables import Tables

LOCK_TIMEOUT = 30.0  # seconds; kubelet gives a sandbox 2 min


class StoreFiles(Protocol):
    """The files of the store in `directory`, for one transaction at a time."""

    @property
    def directory(self) -> Path:
        """Where they are."""

    def transaction(self) -> AbstractContextManager[tuple[Tables, Log]]:
        """The open files, locked and at the same state. CNIError 5, 11 and 112."""


class PerCall:
    """Opens the files for each transaction: nothing of a store stays in the process."""

    def __init__(
        self, directory: Path, *, report: Report = note, lock_timeout: float = LOCK_TIMEOUT
    ) -> None:
        self.directory = directory
        self._report = report
        self._lock_timeout = lock_timeout

    @contextmanager
    def transaction(self) -> Iterator[tuple[Tables, Log]]:
        """See Opening.transaction."""
        with locked(self.directory, self._lock_timeout):
            tables, log = open_store(self.directory, self._report)
            with closing(log), closing(tables):
                yield tables, log


@contextmanager
def locked(directory: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Hold the lock of the store in `directory`; what goes wrong in there becomes a CNIError."""
    with explaining(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with exclusive(directory / LOCK, timeout):
            yield


@contextmanager
def explaining(directory: Path) -> Iterator[None]:
    """CNIError 5, 11 or 112 for what the files of the store in `directory` raise."""
    try:
        yield
    except FAILURES as error:
        raise explained(error, directory) from None
