"""Files changed by another program while a process keeps them open: an operator's `cp` and `rm`.

Whoever had them open notices, and looks at the node before it hands out an address again. The files
that were put there are not written to.
"""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam import fsck, store_files
from ipam.database import DATABASE, WAL
from ipam.fsck import NodeFacts
from ipam.snapshot import LOCK
from ipam.sqlite_store import SqliteStore
from ipam.store import Reservation
from ipam.store_files import StoreFiles
from tests.unit.ipam.calls import BOOT, error_of, owner, range_of, sets_of

SETS = sets_of(range_of("10.0.0.0/24"), range_of("fd00::/64"))

Damage = Callable[[Path], object]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_files, "SETTLE", 0.0)


class Node:
    """A store that is kept open, with transactions in its WAL, and an older copy of its files."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "ipam"
        self.older = root / "older"
        plain = SqliteStore(self.directory, BOOT)
        for number in range(30):
            plain.reserve(owner(f"c{number}"), SETS)
        shutil.copytree(self.directory, self.older)
        self.held: set[Reservation] = set()
        self.looks = 0
        self.open()
        for number in range(30, 35):
            self.store.reserve(owner(f"c{number}"), SETS)
        self.store.release(owner("c3").attachment)
        self.held = set(self.store.reservations())
        assert (self.directory / WAL).stat().st_size > 0

    def open(self) -> None:
        self.kept = StoreFiles(self.directory, facts=self.look, report=lambda line: None)
        self.store = SqliteStore(self.kept, BOOT)

    def look(self) -> NodeFacts:
        """All that pods have is in the journal."""
        self.looks += 1
        return NodeFacts(BOOT, tuple(self.held))

    def require_never_twice(self) -> None:
        taken = {held.address for held in self.held}
        answers = 0
        for number in range(3):
            try:
                grant = self.store.reserve(owner(f"new{number}"), SETS)
            except CNIError as error:
                assert error.code == Code.TRY_AGAIN, error
                continue
            answers += 1
            given = {each.reservation.address for each in grant.granted}
            assert not given & taken
            taken |= given
            self.held |= {each.reservation for each in grant.granted}
        assert answers > 1
        assert self.held <= set(self.store.reservations())
        assert fsck.check(self.directory, print)


@pytest.fixture
def node(memory_path: Path) -> Iterator[Node]:
    node = Node(memory_path)
    with closing(node.kept):
        yield node


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
    store = SqliteStore(StoreFiles(killed, kept=kept), BOOT)
    assert error_of(lambda: store.reserve(owner("new"), SETS)).code == Code.STORE_DAMAGED
    assert [(killed / name).read_bytes() for name in (DATABASE, WAL)] == before


@pytest.mark.parametrize("how", [emptied, halved, zeroed, removed, replaced])
@pytest.mark.parametrize("name", [DATABASE, WAL])
def test_damage_is_noticed_and_built_again(node: Node, name: str, how: Damage) -> None:
    how(node.directory / name)
    node.require_never_twice()


@pytest.mark.parametrize("ending", ["close", "transaction"])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("checkpoints", [0, 2])
def test_an_older_copy_that_is_put_back_gets_what_it_lacks_and_is_not_written_to_before(
    node: Node, ending: str, in_place: bool, checkpoints: int
) -> None:
    for number in range(checkpoints):
        node.kept.close()
        node.open()
        grant = node.store.reserve(owner(f"more{number}"), SETS)
        node.held |= {each.reservation for each in grant.granted}
    if in_place:
        shutil.copyfile(node.older / DATABASE, node.directory / DATABASE)
    else:
        shutil.copyfile(node.older / DATABASE, node.directory / "new")
        (node.directory / "new").replace(node.directory / DATABASE)
    if ending == "close":
        node.kept.close()
        assert (node.directory / DATABASE).read_bytes() == (node.older / DATABASE).read_bytes()
        node.open()
    node.require_never_twice()


@pytest.mark.parametrize("also_the_directory", [False, True])
def test_when_all_files_are_removed_the_pods_keep_their_addresses(
    node: Node, also_the_directory: bool
) -> None:
    for path in node.directory.iterdir():
        path.unlink()
    if also_the_directory:
        node.directory.rmdir()
    node.require_never_twice()


def test_a_file_that_was_only_touched_changes_nothing_but_is_looked_at(node: Node) -> None:
    for name in (DATABASE, WAL, LOCK):
        (node.directory / name).touch()
        assert set(node.store.reservations()) == node.held
        node.store.release(owner("nobody").attachment)
    node.require_never_twice()


def test_another_process_of_ours_costs_no_look_at_the_node(node: Node) -> None:
    looks = node.looks
    SqliteStore(node.directory, BOOT).reserve(owner("other"), SETS)
    node.store.reserve(owner("mine"), SETS)
    assert node.looks == looks


def test_another_sqlite_program_may_read_and_what_it_changes_is_damage(node: Node) -> None:
    with closing(sqlite3.connect(node.directory / DATABASE)) as other:
        ((count,),) = other.execute("SELECT count(*) FROM reservation").fetchall()
        assert count == len(node.held)
        node.require_never_twice()
        other.execute("DELETE FROM reservation WHERE container_id = 'c1'")
        other.commit()
    assert not fsck.check(node.directory, print)
    requested = sets_of(range_of("10.0.0.0/24", start="10.0.0.2", end="10.0.0.2"))
    error = error_of(lambda: node.store.reserve(owner("new"), requested))
    assert error.code in (Code.STORE_DAMAGED, Code.NO_FREE_ADDRESS)


@pytest.mark.parametrize("name", [DATABASE, WAL])
def test_a_file_that_is_replaced_within_a_transaction_is_noticed(node: Node, name: str) -> None:
    with node.kept.transaction() as tables:
        assert len(list(tables.all())) == len(node.held)
        replaced(node.directory / name)
    node.require_never_twice()
