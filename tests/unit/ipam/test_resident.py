"""A store that is kept open: by many threads, beside other processes, and given up in time."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from cni.spec.errors import Code
from ipam import fsck, resident
from ipam.log import Log
from ipam.recovery import LOCK, WAL, Report, open_store
from ipam.resident import Resident
from ipam.sqlite_store import SqliteStore
from ipam.tables import Tables
from tests.unit.ipam.calls import BOOT, error_of, owner, range_of, sets_of
from tests.waiting import PATIENCE, until

SETS = sets_of(range_of("10.0.0.0/8"))
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def kept(memory_path: Path) -> Iterator[Resident]:
    with closing(Resident(memory_path / "ipam", idle=10 * PATIENCE)) as kept:
        yield kept


@pytest.fixture
def store(kept: Resident) -> SqliteStore:
    return SqliteStore(kept, BOOT)


def is_kept(directory: Path) -> bool:
    """Whether someone has the files open: SQLite removes the WAL in closing them."""
    return (directory / WAL).exists()


def is_locked(directory: Path) -> bool:
    """Whether someone holds the lock. To open it would be a wish for it."""
    inode = (directory / LOCK).stat().st_ino
    return f":{inode} " in Path("/proc/locks").read_text()


# --- keeping ---------------------------------------------------------------------------------


def test_the_files_are_opened_once_for_many_transactions(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def counted(directory: Path, report: Report) -> tuple[Tables, Log]:
        opened.append(directory)
        return open_store(directory, report)

    monkeypatch.setattr(resident, "open_store", counted)
    for number in range(20):
        store.reserve(owner(f"c{number}"), SETS)
    assert len(opened) == 1
    assert is_kept(store.directory)


def test_idle_files_are_closed_and_what_is_on_disk_is_compact(memory_path: Path) -> None:
    with closing(Resident(memory_path, idle=0.05)) as kept:
        store = SqliteStore(kept, BOOT)
        store.reserve(owner("c1"), SETS)
        assert is_kept(memory_path)
        until(lambda: not is_locked(memory_path))
        assert not is_kept(memory_path)
        store.reserve(owner("c2"), SETS)
        assert is_kept(memory_path)
        assert len(store.reservations()) == 2


def test_nothing_is_kept_after_close(kept: Resident, store: SqliteStore) -> None:
    store.reserve(owner("c1"), SETS)
    kept.close()
    assert not is_kept(kept.directory)
    store.reserve(owner("c2"), SETS)
    assert not is_kept(kept.directory)
    kept.close()
    assert [one.container_id for one in store.reservations()] == ["c1", "c2"]


def test_nothing_is_kept_where_there_is_no_inotify(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(resident, "Wishes", refuse)
    with closing(Resident(memory_path)) as kept:
        store = SqliteStore(kept, BOOT)
        store.reserve(owner("c1"), SETS)
        assert not is_kept(memory_path)
        assert len(store.reservations()) == 1


def test_nothing_is_kept_where_there_are_no_watches_left(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, lock: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ipam.lock_watch.Wishes.begin", refuse)
    store.reserve(owner("c1"), SETS)
    assert not is_kept(store.directory)
    assert len(store.reservations()) == 1


def test_an_error_closes_the_files_and_the_next_call_opens_them_anew(store: SqliteStore) -> None:
    store.reserve(owner("c1"), SETS)
    assert error_of(lambda: store.reserve(owner("c1"), SETS)).code == Code.ALREADY_ATTACHED
    assert not is_kept(store.directory)
    store.reserve(owner("c2"), SETS)
    assert len(store.reservations()) == 2


def test_a_large_wal_is_written_back_and_the_files_stay_open(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "_LARGE_WAL", 200_000)
    reports: list[str] = []
    monkeypatch.setattr(store._opening, "_report", reports.append)
    sizes = []
    for number in range(60):
        store.reserve(owner(f"c{number}"), SETS)
        sizes.append((store.directory / WAL).stat().st_size)
    assert max(sizes) < 300_000
    assert 0 in sizes
    assert reports == []


def test_the_log_is_followed_when_it_is_written_anew(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ipam.sqlite_store._RECORDS_WORTH_COMPACTING", 10)
    reports: list[str] = []
    monkeypatch.setattr(store._opening, "_report", reports.append)
    for number in range(40):
        store.reserve(owner(f"c{number}"), SETS)
        store.release(owner(f"c{number}").attachment)
    store.reserve(owner("last"), SETS)
    assert is_kept(store.directory)
    assert reports == []
    assert fsck.check(store.directory, print)
    assert [one.container_id for one in store.reservations()] == ["last"]


# --- threads ---------------------------------------------------------------------------------


def test_threads_get_addresses_of_their_own_and_release_them(store: SqliteStore) -> None:
    def work(thread: int) -> list[str]:
        addresses = []
        for number in range(100):
            one = owner(f"t{thread}-{number}")
            addresses.append(store.reserve(one, SETS).granted[0].reservation.address)
        return addresses

    def undo(thread: int) -> int:
        return sum(
            len(store.release(owner(f"t{thread}-{number}").attachment)) for number in range(100)
        )

    with ThreadPoolExecutor(16) as threads:
        given = [address for one in threads.map(work, range(16)) for address in one]
        assert len(set(given)) == 1600
        assert {one.address for one in store.reservations()} == set(given)
        assert sum(threads.map(undo, range(16))) == 1600
    assert store.reservations() == []
    assert fsck.check(store.directory, print)


def test_a_thread_waits_for_another_no_longer_than_the_lock_may_take(memory_path: Path) -> None:
    with closing(Resident(memory_path, lock_timeout=0.05)) as kept:
        store = SqliteStore(kept, BOOT)
        with kept.transaction():
            error = error_of(lambda: store.reserve(owner("c1"), SETS))
        assert error.code == Code.TRY_AGAIN
        assert str(memory_path) in error.message
        store.reserve(owner("c1"), SETS)


# --- other processes -------------------------------------------------------------------------


def elsewhere(directory: Path, rounds: int, pause: float = 0.0) -> None:
    """Reservations by another process. One that waits for longer than a lock may take fails."""
    with SPAWN.Pool(1) as pool:
        pool.apply(reserve_each, (directory, rounds, pause))


def reserve_each(directory: Path, rounds: int, pause: float) -> None:
    store = SqliteStore(directory, BOOT)
    for number in range(rounds):
        store.reserve(owner(f"other{number}"), SETS)
        time.sleep(pause)


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
            one = owner(f"t{thread}-{number}")
            self._store.reserve(one, SETS)
            self._store.release(one.attachment)
            number += 1
            self.done += 1

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._pool.shutdown()
        for future in self._futures:
            future.result()


def test_another_process_gets_idle_files_at_once(store: SqliteStore) -> None:
    store.reserve(owner("c1"), SETS)
    elsewhere(store.directory, 1)
    assert not is_kept(store.directory)
    assert len(store.reservations()) == 2
    assert is_kept(store.directory)


def test_a_stream_of_transactions_gives_way_to_another_process_and_goes_on(
    store: SqliteStore,
) -> None:
    with Stream(store, threads=8) as stream:
        elsewhere(store.directory, 50, pause=0.03)
        before = stream.done
        until(lambda: stream.done > before + 50)
    held = {one.container_id for one in store.reservations()}
    assert held == {f"other{number}" for number in range(50)}
    assert fsck.check(store.directory, print)


def test_two_that_keep_the_same_store_take_turns(memory_path: Path) -> None:
    with (
        closing(Resident(memory_path)) as one,
        closing(Resident(memory_path)) as other,
        Stream(SqliteStore(one, BOOT), 1) as left,
        Stream(SqliteStore(other, "another boot"), 1) as right,
    ):
        until(lambda: left.done > 20 and right.done > 20)
    assert SqliteStore(memory_path, BOOT).reservations() == []


def test_a_lock_file_that_is_removed_is_let_go_of(store: SqliteStore) -> None:
    store.reserve(owner("c1"), SETS)
    (store.directory / LOCK).unlink()
    until(lambda: not is_kept(store.directory))
    elsewhere(store.directory, 1)
    assert len(store.reservations()) == 2


# --- fork ------------------------------------------------------------------------------------


def in_child(work: Callable[[], object]) -> None:
    """Do `work` in a forked child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_cannot_use_the_parents_files(store: SqliteStore) -> None:
    def work() -> None:
        for _ in range(2):
            error = error_of(lambda: store.reserve(owner("child"), SETS))
            assert error.code == Code.TRY_AGAIN
            assert "forked" in error.message
        store._opening.close()  # type: ignore[attr-defined]

    store.reserve(owner("c1"), SETS)
    before = looks(store.directory)
    in_child(work)
    assert looks(store.directory) == before
    assert is_locked(store.directory)
    store.reserve(owner("c2"), SETS)
    assert [one.container_id for one in store.reservations()] == ["c1", "c2"]
    assert fsck.check(store.directory, print)


def test_a_child_forked_while_nothing_is_open_has_files_of_its_own(store: SqliteStore) -> None:
    in_child(lambda: store.reserve(owner("child"), SETS))
    store.reserve(owner("c2"), SETS)
    assert [one.container_id for one in store.reservations()] == ["child", "c2"]


def looks(directory: Path) -> set[tuple[str, int, int]]:
    return {(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in directory.iterdir()}


FORK_AND_END = """
import os, sys
from pathlib import Path
from ipam.resident import Resident
from ipam.sqlite_store import SqliteStore
from tests.unit.ipam.calls import BOOT, owner, range_of, sets_of

directory = Path(sys.argv[1])
kept = Resident(directory)
store = SqliteStore(kept, BOOT)
store.reserve(owner("c1"), sets_of(range_of("10.0.0.0/8")))
before = [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in directory.iterdir()]
child = os.fork()
if child == 0:
    sys.exit(7)  # with all that an interpreter does at its end
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
after = [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in directory.iterdir()]
assert before == after, (before, after)
store.reserve(owner("c2"), sets_of(range_of("10.0.0.0/8")))
"""


def test_the_end_of_a_forked_child_writes_nothing(memory_path: Path) -> None:
    status = os.spawnve(
        os.P_WAIT,
        sys.executable,
        [sys.executable, "-c", FORK_AND_END, str(memory_path)],
        {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert status == 0
    assert len(SqliteStore(memory_path, BOOT).reservations()) == 2


def test_no_thread_is_left_after_close(memory_path: Path) -> None:
    before = threading.active_count()
    for _ in range(5):
        with closing(Resident(memory_path)) as kept:
            SqliteStore(kept, BOOT).reservations()
    until(lambda: threading.active_count() <= before)
