"""A store that is kept open: by many threads, beside other processes."""

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from cni.spec.errors import Code
from ipam.store import database, repair, store_files
from ipam.store.database import DATABASE, WAL
from ipam.store.snapshot import LOCK, LOCK_TIMEOUT
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles, open_store
from ipam.store.tables import Tables
from tests.unit.ipam.calls import BOOT, error_of, owner, range_of, sets_of
from tests.waiting import PATIENCE, until

SETS = sets_of(range_of("10.0.0.0/8"))
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def kept(memory_path: Path) -> Iterator[StoreFiles]:
    with closing(StoreFiles(memory_path / "ipam", lock_timeout=PATIENCE)) as kept:
        yield kept


@pytest.fixture
def store(kept: StoreFiles) -> SqliteStore:
    return SqliteStore(kept, BOOT)


def is_kept(directory: Path) -> bool:
    """Whether a process has the files open: the last one to close them removes the WAL."""
    return (directory / WAL).exists()


# --- keeping ---------------------------------------------------------------------------------


def test_the_files_are_opened_once_for_many_transactions(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def counted(directory: Path, *, kept: bool = False) -> Tables:
        opened.append(directory)
        return open_store(directory, kept=kept)

    monkeypatch.setattr(store_files, "open_store", counted)
    for number in range(20):
        store.reserve(owner(f"c{number}"), SETS)
    assert len(opened) == 1
    assert is_kept(store.directory)


def test_nothing_is_kept_after_close(kept: StoreFiles, store: SqliteStore) -> None:
    store.reserve(owner("c1"), SETS)
    kept.close()
    assert not is_kept(kept.directory)
    store.reserve(owner("c2"), SETS)
    assert {path.name for path in kept.directory.iterdir()} == {LOCK, DATABASE}
    kept.close()
    assert [reservation.container_id for reservation in store.reservations()] == ["c1", "c2"]


def test_an_error_closes_the_files_and_the_next_call_opens_them_again(store: SqliteStore) -> None:
    store.reserve(owner("c1"), SETS)
    assert error_of(lambda: store.reserve(owner("c1"), SETS)).code == Code.ALREADY_ATTACHED
    assert not is_kept(store.directory)
    store.reserve(owner("c2"), SETS)
    assert len(store.reservations()) == 2


# --- readers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("others", ["kept open", "opened for each call"])
def test_who_reads_holds_up_nobody_and_sees_one_moment(memory_path: Path, others: str) -> None:
    with closing(StoreFiles(memory_path)) as kept:
        store = SqliteStore(kept if others == "kept open" else memory_path, BOOT)
        store.reserve(owner("c1"), SETS)
        with StoreFiles(memory_path, kept=False).snapshot() as tables:
            assert tables is not None
            store.reserve(owner("c2"), SETS)
            store.release(owner("c1").attachment)
            assert [held.container_id for held in tables.all()] == ["c1"]
        assert [held.container_id for held in store.reservations()] == ["c2"]
    assert repair.check(memory_path, print)
    assert not is_kept(memory_path)


def test_a_reader_keeps_the_wal_and_a_call_does_not_wait_for_it(
    kept: StoreFiles, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def size_after(holder: str) -> int:
        store.reserve(owner(holder), SETS)
        return (store.directory / WAL).stat().st_size

    monkeypatch.setattr(database, "_MOST_PAGES", 1)
    size_after("c1")
    with StoreFiles(store.directory, kept=False).snapshot():
        sizes = [size_after(f"c{number}") for number in range(2, 9)]
        assert sizes[0] < sizes[-1]
    assert size_after("c9") == size_after("c10")  # it begins at the front again


# --- threads ---------------------------------------------------------------------------------


def test_threads_get_addresses_of_their_own_and_release_them(store: SqliteStore) -> None:
    def work(thread: int) -> list[str]:
        addresses = []
        for number in range(100):
            holder = owner(f"t{thread}-{number}")
            addresses.append(store.reserve(holder, SETS).granted[0].reservation.address)
        return addresses

    def undo(thread: int) -> int:
        return sum(
            len(store.release(owner(f"t{thread}-{number}").attachment)) for number in range(100)
        )

    with ThreadPoolExecutor(16) as threads:
        given = [address for answer in threads.map(work, range(16)) for address in answer]
        assert len(set(given)) == 1600
        assert {reservation.address for reservation in store.reservations()} == set(given)
        assert sum(threads.map(undo, range(16))) == 1600
    assert store.reservations() == []
    assert repair.check(store.directory, print)


def test_a_thread_waits_for_another_no_longer_than_the_lock_may_take(memory_path: Path) -> None:
    with closing(StoreFiles(memory_path, lock_timeout=0.05)) as kept:
        store = SqliteStore(kept, BOOT)
        with kept.transaction():
            error = error_of(lambda: store.reserve(owner("c1"), SETS))
        assert error.code == Code.TRY_AGAIN
        assert str(memory_path) in error.message
        store.reserve(owner("c1"), SETS)


# --- other processes -------------------------------------------------------------------------


def elsewhere(directory: Path, rounds: int, pause: float = 0.0) -> list[float]:
    """Reservations by another process, each with the seconds it took."""
    with SPAWN.Pool(1) as pool:
        return pool.apply(reserve_each, (directory, rounds, pause))


def reserve_each(directory: Path, rounds: int, pause: float) -> list[float]:
    store = SqliteStore(directory, BOOT)
    seconds = []
    for number in range(rounds):
        started = time.monotonic()
        store.reserve(owner(f"other{number}"), SETS)
        seconds.append(time.monotonic() - started)
        time.sleep(pause)
    return seconds


class Stream:
    """Transactions without a pause from several threads, as long as the block lasts."""

    def __init__(self, store: SqliteStore, threads: int) -> None:
        self.done = 0
        self._store = store
        self._stopped = False
        self._pool = ThreadPoolExecutor(threads)
        self._futures = [self._pool.submit(self._work, number) for number in range(threads)]

    def _work(self, thread: int) -> None:
        number = 0
        while not self._stopped:
            holder = owner(f"t{thread}-{number}")
            self._store.reserve(holder, SETS)
            self._store.release(holder.attachment)
            number += 1
            self.done += 1

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._pool.shutdown()
        for future in self._futures:
            future.result()


@pytest.mark.slow
def test_another_process_gets_in_beside_a_stream_of_transactions(
    store: SqliteStore,
) -> None:
    with Stream(store, threads=8) as stream:
        seconds = elsewhere(store.directory, 50, pause=0.03)
        assert statistics.median(seconds) < LOCK_TIMEOUT / 10
        before = stream.done
        until(lambda: stream.done > before + 50)
    held = {reservation.container_id for reservation in store.reservations()}
    assert held == {f"other{number}" for number in range(50)}
    assert repair.check(store.directory, print)


def test_a_lock_file_that_is_removed_is_made_again(store: SqliteStore) -> None:
    store.reserve(owner("c1"), SETS)
    (store.directory / LOCK).unlink()
    elsewhere(store.directory, 1)
    assert len(store.reservations()) == 2
