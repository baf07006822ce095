"""Files changed by another program while a process keeps them open: an operator's `cp` and `rm`.

The outcome is that of a closed store: the same errors, or right answers. The files that were put
there are not written to.
"""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam import fsck
from ipam.fsck import NodeFacts
from ipam.recovery import DATABASE, LOCK, MARK, WAL, back_up
from ipam.sqlite_store import SqliteStore
from ipam.store import Reservation
from ipam.store_files import StoreFiles
from tests.unit.ipam.calls import BOOT, error_of, owner, range_of, sets_of

SETS = sets_of(range_of("10.0.0.0/24"), range_of("fd00::/64"))
BACKUP = "backup"

Damage = Callable[[Path], object]


class Node:
    """A store that is kept open, with transactions in its WAL, and a backup from before those."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "ipam"
        self.backup = root / BACKUP
        self.reports: list[str] = []
        plain = SqliteStore(self.directory, BOOT)
        for number in range(30):
            plain.reserve(owner(f"c{number}"), SETS)
        with StoreFiles(self.directory, kept=False).transaction() as tables:
            back_up(self.directory, tables)
        shutil.copytree(self.directory, self.backup)
        self.kept = StoreFiles(self.directory, report=self.reports.append)
        self.store = SqliteStore(self.kept, BOOT)
        for number in range(30, 35):
            self.store.reserve(owner(f"c{number}"), SETS)
        self.store.release(owner("c3").attachment)
        self.held = set(self.store.reservations())
        self.facts = NodeFacts(journal=tuple(self.held))
        assert (self.directory / WAL).stat().st_size > 0


@pytest.fixture
def node(memory_path: Path) -> Iterator[Node]:
    node = Node(memory_path)
    with closing(node.kept):
        yield node


def outcome(store: SqliteStore, held: set[Reservation]) -> int:
    """The code of the error for three newcomers, 0 if they get addresses: never one of `held`."""
    taken = {reservation.address for reservation in held}
    for number in range(3):
        try:
            grant = store.reserve(owner(f"new{number}"), SETS)
        except CNIError as error:
            assert "\n" not in error.message
            return error.code
        given = {granted.reservation.address for granted in grant.granted}
        assert not given & taken
        taken |= given
    return 0


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def removed(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    new = path.with_name("elsewhere")
    new.write_bytes(b"something else")
    new.replace(path)


@pytest.mark.parametrize("kept", [False, True])
def test_the_wal_of_a_damaged_database_is_not_written_back(
    node: Node, memory_path: Path, kept: bool
) -> None:
    """The error says that nothing was changed."""
    killed = memory_path / "killed"
    shutil.copytree(node.directory, killed, ignore=shutil.ignore_patterns("*-shm"))
    halved(killed / DATABASE)
    before = [(killed / name).read_bytes() for name in (DATABASE, WAL)]
    assert (
        outcome(SqliteStore(StoreFiles(killed, kept=kept), BOOT), node.held) == Code.STORE_DAMAGED
    )
    assert [(killed / name).read_bytes() for name in (DATABASE, WAL)] == before


@pytest.mark.parametrize("how", [emptied, halved, zeroed, removed, replaced])
@pytest.mark.parametrize("name", [DATABASE, WAL, MARK])
def test_damage_is_noticed_as_by_a_store_that_is_closed(
    node: Node, memory_path: Path, name: str, how: Damage
) -> None:
    closed = memory_path / "closed"
    # As a kill would leave it.
    shutil.copytree(node.directory, closed, ignore=shutil.ignore_patterns("*-shm"))
    if name == DATABASE:
        # A closed store has no WAL, which may hold all pages that a test's small store has.
        SqliteStore(closed, BOOT).reservations()
    how(closed / name)
    expected = outcome(SqliteStore(StoreFiles(closed, report=print, kept=False), BOOT), node.held)
    how(node.directory / name)
    content = (node.directory / DATABASE).exists() and (node.directory / DATABASE).read_bytes()
    code = outcome(node.store, node.held)
    # What is left of a database may do, if its WAL has the other pages: `outcome` has looked.
    assert code == expected or (name, code) == (DATABASE, 0)
    if code:
        assert code == Code.STORE_DAMAGED
        assert content == (
            (node.directory / DATABASE).exists() and (node.directory / DATABASE).read_bytes()
        )
    assert fsck.rebuild(node.directory, print, facts=node.facts)
    assert fsck.check(node.directory, print)
    assert node.held <= set(node.store.reservations())
    assert outcome(node.store, node.held) in (0, Code.ALREADY_ATTACHED)


@pytest.mark.parametrize("ending", ["close", "transaction", "handover"])
@pytest.mark.parametrize("names", [(DATABASE,), (DATABASE, MARK)])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_backup_that_is_put_back_is_not_written_to_by_who_had_the_files_open(
    node: Node, ending: str, names: tuple[str, ...], in_place: bool
) -> None:
    for name in names:
        if in_place:
            shutil.copyfile(node.backup / name, node.directory / name)
        else:
            shutil.copyfile(node.backup / name, node.directory / "new")
            (node.directory / "new").replace(node.directory / name)
    if ending == "close":
        node.kept.close()
        assert (node.directory / DATABASE).read_bytes() == (node.backup / DATABASE).read_bytes()
        node.store = SqliteStore(node.directory, BOOT)
    elif ending == "handover":
        fsck.check(node.directory, print)
    # The file is the one that the WAL was begun on, so nothing is lost.
    assert set(node.store.reservations()) == node.held
    assert outcome(node.store, node.held) == 0
    assert fsck.check(node.directory, print)


@pytest.mark.parametrize("ending", ["close", "transaction"])
@pytest.mark.parametrize("in_place", [True, False])
def test_an_older_copy_that_is_put_back_is_damage(node: Node, ending: str, in_place: bool) -> None:
    for number in range(2):  # the copy is two checkpoints behind
        node.kept.close()
        node.kept = StoreFiles(node.directory)
        node.store = SqliteStore(node.kept, BOOT)
        node.store.reserve(owner(f"more{number}"), SETS)
    held = set(node.store.reservations())
    new = node.directory / "new"
    shutil.copyfile(node.backup / DATABASE, new)
    if in_place:
        shutil.copyfile(new, node.directory / DATABASE)
        new.unlink()
    else:
        new.replace(node.directory / DATABASE)
    if ending == "close":
        node.kept.close()
        node.store = SqliteStore(node.directory, BOOT)
    assert outcome(node.store, held) == Code.STORE_DAMAGED
    assert (node.directory / DATABASE).read_bytes() == (node.backup / DATABASE).read_bytes()
    assert fsck.rebuild(node.directory, print, facts=NodeFacts(journal=tuple(held)))
    assert held <= set(node.store.reservations())
    assert outcome(node.store, held) == 0


def test_everything_removed_is_a_new_store(node: Node) -> None:
    for path in node.directory.iterdir():
        path.unlink()
    assert node.store.reservations() == []
    assert outcome(node.store, set()) == 0
    assert fsck.check(node.directory, print)


def test_a_directory_that_is_removed_is_made_again(node: Node) -> None:
    shutil.rmtree(node.directory)
    assert outcome(node.store, set()) == 0
    assert fsck.check(node.directory, print)


def test_a_database_removed_with_its_mark_is_damage_while_the_wal_exists(node: Node) -> None:
    (node.directory / DATABASE).unlink()
    (node.directory / MARK).unlink()
    assert outcome(node.store, node.held) == Code.STORE_DAMAGED
    assert (node.directory / WAL).stat().st_size > 0


def test_a_file_that_was_only_touched_changes_nothing_but_is_looked_at(node: Node) -> None:
    for name in (DATABASE, WAL, MARK, LOCK):
        (node.directory / name).touch()
        assert set(node.store.reservations()) == node.held
    assert outcome(node.store, node.held) == 0
    assert fsck.check(node.directory, print)


def test_another_sqlite_program_may_read_and_what_it_changes_is_damage(node: Node) -> None:
    with closing(sqlite3.connect(node.directory / DATABASE)) as other:
        ((count,),) = other.execute("SELECT count(*) FROM reservation").fetchall()
        assert count == len(node.held)
        assert outcome(node.store, node.held) == 0
        other.execute("DELETE FROM reservation WHERE container_id = 'c1'")
        other.commit()
    assert not fsck.check(node.directory, print)
    requested = sets_of(range_of("10.0.0.0/24", start="10.0.0.2", end="10.0.0.2"))
    error = error_of(lambda: node.store.reserve(owner("new"), requested))
    assert error.code in (Code.STORE_DAMAGED, Code.NO_FREE_ADDRESS)


@pytest.mark.parametrize("name", [DATABASE, WAL, MARK])
def test_a_file_that_is_replaced_within_a_transaction_is_noticed(node: Node, name: str) -> None:
    with node.kept.transaction() as tables:
        assert len(list(tables.all())) == len(node.held)
        replaced(node.directory / name)
    code = outcome(node.store, node.held)
    assert code == (0 if name == MARK else Code.STORE_DAMAGED)
    assert fsck.rebuild(node.directory, print, facts=node.facts)
    assert node.held <= set(node.store.reservations())
