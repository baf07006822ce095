"""A process killed at any line, or any moment: whoever comes next finds all that was answered."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from cni.spec.errors import Code
from ipam.store import database, repair, store_files
from ipam.store.database import DATABASE
from ipam.store.repair import LivingAddress, NodeFacts
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from ipam.store.tables import Tables
from tests.unit.ipam.calls import BOOT, error_of, owner, range_of, reservation, sets_of
from tests.unit.ipam.kills import SETS, copied, fail, held, kill_at, lines_of, quiet

pytestmark = pytest.mark.slow


def reserve(directory: Path) -> None:
    quiet(directory).reserve(owner("victim", pod="p"), SETS)


def release(directory: Path) -> None:
    quiet(directory).release(owner("c1").attachment)


def collect(directory: Path) -> None:
    quiet(directory).collect("n1", {("c0", "eth0")})


def undo(directory: Path) -> None:
    quiet(directory).undo(quiet(directory).reserve(owner("victim", pod="p1"), SETS))


def load(directory: Path) -> None:
    quiet(directory).load([reservation(f"10.0.0.{n}", "loaded") for n in range(100, 120)])


def read(directory: Path) -> None:
    with StoreFiles(directory, kept=False).snapshot() as tables:
        assert tables is not None
        assert list(tables.all())


@contextmanager
def keeping(directory: Path) -> Iterator[SqliteStore]:
    kept = StoreFiles(directory, report=lambda text: None)
    try:
        yield SqliteStore(kept, BOOT)
    finally:
        kept.close()


def reserve_twice(directory: Path) -> None:
    with keeping(directory) as store:
        store.reserve(owner("victim1", pod="p"), SETS)
        store.reserve(owner("victim2"), SETS)


def change(directory: Path) -> None:
    with (
        keeping(directory) as store,
        mock.patch.object(database, "_MOST_PAGES", 3),
    ):
        store.reserve(owner("victim"), SETS)
        store.release(owner("victim").attachment)
        store.reserve(owner("victim", pod="p"), SETS)


def compact(directory: Path) -> None:
    with (
        keeping(directory) as store,
        mock.patch.object(database, "_MOST_PAGES", 1),
    ):
        store.release(owner("c1").attachment)
        store.reserve(owner("victim"), SETS)


IN_ONE_CALL = (reserve, release, collect, undo, load, read)
KEPT_OPEN = (reserve_twice, change, compact)


@pytest.mark.parametrize("work", [*IN_ONE_CALL, *KEPT_OPEN])
def test_a_kill_at_any_line_leaves_a_state_between_two_transactions(
    memory_path: Path, work: Callable[[Path], None]
) -> None:
    base = memory_path / "base"
    for number in range(3):
        quiet(base).reserve(owner(f"c{number}", pod=f"p{number}"), SETS)
    states = [held(base), *states_of(work, base)]
    # Opening a store that is as it should be changes nothing: those lines are left out.
    opening = lines_of(partial(held, copied(base)))
    for line, count in lines_of(partial(work, copied(base))).items():
        if line in opening and not (work in KEPT_OPEN and line[0] == store_files.__file__):
            continue
        directory = copied(base)
        kill_at(count, partial(work, directory))
        now = held(directory)
        assert now in states, f"line {line}"
        newcomer = quiet(directory).reserve(owner("newcomer"), SETS)
        addresses = {granted.reservation.address for granted in newcomer.granted}
        assert not addresses & set(now), f"line {line}"
        assert repair.check(directory, fail), f"line {line}"


def states_of(work: Callable[[Path], None], base: Path) -> list[dict[str, str]]:
    """The states after each transaction of `work`."""
    directory = copied(base)
    states = []
    commit = Tables._commit

    def noted(tables: Tables) -> None:
        commit(tables)
        states.append({held.address: held.container_id for held in tables.all()})

    with mock.patch.object(Tables, "_commit", noted):
        work(directory)
    return states


def test_a_kill_while_the_store_is_made_leaves_one_that_works(memory_path: Path) -> None:
    directory = memory_path / "new"
    making = lines_of(partial(reserve, directory))
    quiet(directory).release(owner("victim").attachment)
    later = lines_of(partial(reserve, copied(directory)))
    for line, count in making.items():
        if line in later:
            continue
        shutil.rmtree(directory)
        kill_at(count, partial(reserve, directory))
        quiet(directory).reserve(owner("a"), SETS)
        assert held(directory)["10.0.0.1"] in ("victim", "a")
        assert repair.check(directory, fail), f"line {line}"


@pytest.mark.parametrize("damage", [b"\0" * 4096, b""])
def test_a_kill_while_the_store_is_built_again_leaves_one_that_works(
    memory_path: Path, damage: bytes
) -> None:
    base = memory_path / "base"
    for number in range(3):
        quiet(base).reserve(owner(f"c{number}"), SETS)
    expected = held(base)
    namespace = str(memory_path)
    living = (LivingAddress("10.0.0.9", "net1", namespace, memory_path.stat().st_ino),)
    facts = NodeFacts(BOOT, tuple(quiet(base).reservations()), living)
    (base / DATABASE).write_bytes(damage)
    only = sets_of(range_of("10.0.0.0/24", start="10.0.0.9", end="10.0.0.9"))

    def store(directory: Path) -> SqliteStore:
        files = StoreFiles(directory, report=silent, kept=False, facts=lambda: facts)
        return SqliteStore(files, BOOT)

    def use(directory: Path) -> None:
        store(directory).release(owner("nobody").attachment)

    for line, count in lines_of(partial(use, copied(base))).items():
        directory = copied(base)
        kill_at(count, partial(use, directory))
        for _ in range(2):  # the first one may have to wait for what pods were given before
            error = error_of(lambda: store(directory).reserve(owner("new"), only))  # noqa: B023
            assert error.code in (Code.TRY_AGAIN, Code.NO_FREE_ADDRESS), f"line {line}"
        assert error.code == Code.NO_FREE_ADDRESS
        assert held(directory) == expected, f"line {line}"
        assert repair.check(directory, fail), f"line {line}"


def silent(line: str) -> None:
    """Ignore the line."""
