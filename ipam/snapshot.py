"""The store's lock, and reading beside its writers.

Every transaction of a call holds the lock. Who only reads holds it while the database is opened and
closed: SQLite keeps the state that was there at the start for as long as the reader wants.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from base.locks import Busy, LockFile
from cni.spec.errors import CNIError, Code
from ipam.database import DATABASE, FAILURES, WAL, explained, has_content
from ipam.schema import Damage
from ipam.tables import Tables

LOCK = "lock"
LOCK_TIMEOUT = 30.0  # seconds; kubelet gives a sandbox 2 min
_PAUSE = 0.005  # seconds between two tries to lock; a transaction takes about 3 ms


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


@contextmanager
def snapshot(directory: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[Tables | None]:
    """What the store in `directory` holds now, to be read; None if there is no store.

    Other processes go on meanwhile. CNIError 5, 11 and 112.
    """
    if not directory.is_dir():
        yield None
        return
    try:
        with ExitStack() as held:
            held.enter_context(locked(directory, timeout))
            tables = _opened(directory)
            if tables is None:
                yield None
                return
            try:
                tables.look()
                if tables.is_shared:  # else nobody else could open it
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


def _opened(directory: Path) -> Tables | None:
    if has_content(directory / DATABASE):
        return Tables(directory / DATABASE, kept=True)
    if has_content(directory / WAL):
        raise Damage(f"{DATABASE} is missing or empty, and its WAL is not")
    return None
