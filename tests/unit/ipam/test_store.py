"""The store on a system that refuses: locks, permissions, full disks, other programs."""

import fcntl
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.store import repair
from ipam.store.database import UNCERTAIN
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from ipam.store.tables import Tables
from tests.unit.ipam.calls import BOOT, error_of, owner, range_of, reservation, sets_of

SETS = sets_of(range_of("10.0.0.0/24"))


@pytest.fixture(params=["opened for each call", "kept open"])
def store(memory_path: Path, request: pytest.FixtureRequest) -> Iterator[SqliteStore]:
    directory = memory_path / "ipam"
    if request.param == "opened for each call":
        yield SqliteStore(StoreFiles(directory, lock_timeout=0.05, kept=False), BOOT)
        return
    with closing(StoreFiles(directory, lock_timeout=0.05)) as kept:
        yield SqliteStore(kept, BOOT)


def test_everything_is_for_root_alone(store: SqliteStore) -> None:
    os.umask(previous := os.umask(0))
    try:
        os.umask(0)
        store.reserve(owner("c1"), SETS)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in store.directory.iterdir()}
    assert set(modes.values()) == {0o600}
    assert {"lock", "reservations.db"} <= modes.keys()


def test_a_lock_that_is_held_is_named_and_waited_for_no_longer_than_said(
    store: SqliteStore,
) -> None:
    store.reserve(owner("c1"), SETS)
    with (store.directory / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        error = error_of(lambda: store.reserve(owner("c2"), SETS))
    assert error.code == Code.TRY_AGAIN
    assert str(store.directory / "lock") in error.message
    store.reserve(owner("c2"), SETS)


def test_a_directory_that_cannot_be_made_is_named(memory_path: Path) -> None:
    (memory_path / "file").write_text("")
    store = SqliteStore(memory_path / "file" / "ipam", BOOT)
    error = error_of(lambda: store.reserve(owner("c1"), SETS))
    assert error.code == Code.IO_FAILURE
    assert str(memory_path / "file") in error.message


def test_commit_that_fails_once_it_is_made_is_not_certain_and_del_releases_it(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.reserve(owner("c1"), SETS)

    def refuse(self: Tables) -> None:
        real(self)
        raise OSError(5, "Input/output error")

    real = Tables._commit
    with monkeypatch.context() as patched:
        patched.setattr(Tables, "_commit", refuse)
        error = error_of(lambda: store.reserve(owner("c2"), SETS))
    assert error.code == Code.IO_FAILURE
    assert UNCERTAIN in error.message
    store.release(owner("c2").attachment)
    assert [held.container_id for held in store.reservations()] == ["c1"]
    assert repair.check(store.directory, print)


def test_an_interrupted_transaction_leaves_no_trace(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(self: Tables) -> None:
        raise Interrupted

    store.reserve(owner("c1"), SETS)
    before = store.reservations()
    with monkeypatch.context() as patched:
        patched.setattr(Tables, "_commit", interrupt)
        with pytest.raises(Interrupted):
            store.reserve(owner("c2"), SETS)
    reports: list[str] = []
    files = StoreFiles(store.directory, report=reports.append, kept=False)
    assert SqliteStore(files, BOOT).reservations() == before
    assert reports == []


def test_a_database_that_another_program_holds_is_try_again(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(memory_path, BOOT)
    store.reserve(owner("c1"), SETS)
    other = sqlite3.connect(store.directory / "reservations.db", isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(
            "ipam.store.database.sqlite3.connect", partial(sqlite3.connect, timeout=0.05)
        )
        error = error_of(lambda: store.reserve(owner("c2"), SETS))
    finally:
        other.close()
    assert error.code == Code.TRY_AGAIN
    assert "another program" in error.message


def test_loading_is_all_or_nothing(store: SqliteStore) -> None:
    store.load([reservation("10.0.0.5", "c1")])
    error = error_of(
        lambda: store.load([reservation("10.0.0.4", "c2"), reservation("10.0.0.5", "c3")])
    )
    assert error.code == Code.ADDRESS_TAKEN
    twice = [reservation("10.0.0.6", "c2"), reservation("10.0.0.6", "c3")]
    assert error_of(lambda: store.load(twice)).code == Code.ADDRESS_TAKEN
    assert [reservation.address for reservation in store.reservations()] == ["10.0.0.5"]


@pytest.mark.parametrize("size", [3, 1500])
def test_loaded_addresses_are_never_handed_out(store: SqliteStore, size: int) -> None:
    store.reserve(owner("c1"), sets_of(range_of("10.0.0.0/8")))
    addresses = (f"10.0.{n // 200}.{2 + n % 200}" for n in range(size))
    store.load([reservation(address, f"loaded-{address}") for address in addresses])
    given = store.reserve(owner("c2"), sets_of(range_of("10.0.0.0/8"))).granted[0]
    assert given.reservation.address == ("10.0.0.5" if size == 3 else "10.0.0.202")
    assert repair.check(store.directory, print)


def test_a_forgotten_reservation_must_still_be_the_same(store: SqliteStore) -> None:
    reserved = store.reserve(owner("c1"), SETS).granted[0].reservation
    store.release(owner("c1").attachment)
    store.reserve(owner("c2"), SETS)
    with pytest.raises(CNIError, match="has another reservation now"):
        store.forget(reserved)
