"""A process killed while it keeps a store open: whoever comes next finds all that was answered."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from ipam import database, fsck, store_files
from ipam.database import WAL
from ipam.sqlite_store import SqliteStore
from ipam.store_files import StoreFiles
from ipam.tables import Tables
from tests.unit.ipam.calls import BOOT, owner, range_of, sets_of
from tests.unit.ipam.kills import copied, fail, held, kill_at, lines_of, quiet
from tests.waiting import PATIENCE

SETS = sets_of(range_of("10.0.0.0/24"), range_of("fd00::/64"))
ROUNDS = 40


@contextmanager
def keeping(directory: Path) -> Iterator[SqliteStore]:
    kept = StoreFiles(directory, report=lambda text: None)
    try:
        yield SqliteStore(kept, BOOT)
    finally:
        kept.close()


def reserve(directory: Path) -> None:
    with keeping(directory) as store:
        store.reserve(owner("victim1", pod="p"), SETS)
        store.reserve(owner("victim2"), SETS)


def both(directory: Path) -> None:
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


@pytest.mark.parametrize("work", [reserve, both, compact])
def test_a_kill_at_any_line_leaves_a_state_between_two_transactions(
    memory_path: Path, work: Callable[[Path], None]
) -> None:
    base = memory_path / "base"
    for number in range(3):
        quiet(base).reserve(owner(f"c{number}", pod=f"p{number}"), SETS)
    states = [held(base), *states_of(work, base)]
    opening = lines_of(partial(held, copied(base)))
    for line, count in lines_of(partial(work, copied(base))).items():
        if line in opening and line[0] != store_files.__file__:
            continue
        directory = copied(base)
        kill_at(count, partial(work, directory))
        now = held(directory)
        assert now in states, f"line {line}"
        newcomer = quiet(directory).reserve(owner("newcomer"), SETS)
        addresses = {granted.reservation.address for granted in newcomer.granted}
        assert not addresses & set(now), f"line {line}"
        assert fsck.check(directory, fail), f"line {line}"


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


def test_a_kill_at_any_moment_loses_and_doubles_nothing(memory_path: Path) -> None:
    """A child says on a pipe what it is about to do, and that it is done."""
    random_ = random.Random("podfabric")
    with_wal, longest = 0, 0.05
    for number in range(ROUNDS):
        directory = memory_path / f"store{number}"
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            endless(directory, writing)
        os.close(writing)
        with os.fdopen(reading) as lines:
            lines.readline()
            time.sleep(random_.uniform(0, longest))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            told = lines.read().split("\n")[:-1]
        if (directory / WAL).exists():
            with_wal += 1
        else:  # a child on a busy machine needs longer for its first transaction
            longest = min(1.5 * longest, PATIENCE)
        doing, done = parsed(told)
        now = set(held(directory).values())
        assert now in (done, done | doing, done - doing), told[-3:]
        after = quiet(directory).reservations()
        assert (
            len({(container.domain, container.address) for container in after})
            == len(after)
            == len(now) * 2
        )
        assert fsck.check(directory, fail)
    assert with_wal > ROUNDS / 2


def endless(directory: Path, writing: int) -> None:
    """Reserve and release until the process is killed."""
    random_ = random.Random(directory.name)
    alive: list[str] = []
    try:
        with keeping(directory) as store:
            store.reservations()  # makes the store, which takes long on a busy machine
            os.write(writing, b"\n")
            for number in range(1_000_000):
                if alive and random_.random() < 0.4:
                    container = alive.pop(random_.randrange(len(alive)))
                    os.write(writing, f"- {container}\n".encode())
                    store.release(owner(container).attachment)
                else:
                    container = f"c{number}"
                    alive.append(container)
                    os.write(writing, f"+ {container}\n".encode())
                    store.reserve(owner(container), SETS)
                os.write(writing, b"done\n")
    finally:
        os._exit(1)


def parsed(told: list[str]) -> tuple[set[str], set[str]]:
    """Containers in doubt, and those that hold addresses by an answer."""
    done: set[str] = set()
    doing = ("", "")
    for line in told:
        if line == "done":
            sign, container = doing
            done = done | {container} if sign == "+" else done - {container}
            doing = ("", "")
        else:
            sign, container = line.split()
            doing = (sign, container)
    return {doing[1]} - {""}, done
