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

from cni.spec.errors import Code
from ipam.store import repair, store_files
from ipam.store.database import DATABASE, WAL
from ipam.store.snapshot import LOCK
from ipam.store.sqlite_store import SqliteStore
from tests.unit.ipam.calls import BOOT, error_of, owner, range_of, sets_of
from tests.unit.ipam.test_damage import SETS, Node

Damage = Callable[[Path], object]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_files, "SETTLE", 0.0)


@pytest.fixture
def node(memory_path: Path) -> Iterator[Node]:
    """Its store is kept open, with transactions in its WAL. `older` is a copy of its files."""
    node = Node(memory_path / "ipam")
    for number in range(30):
        node.add(f"c{number}", node.store())
    shutil.copytree(node.directory, memory_path / "older")
    opened(node)
    for number in range(30, 35):
        node.add(f"c{number}", node.store())
    node.delete("c3", node.store())
    assert (node.directory / WAL).stat().st_size > 0
    yield node
    if node.kept is not None:
        node.kept.close()


def opened(node: Node) -> None:
    """The process ends, and the next one keeps the store open."""
    if node.kept is not None:
        node.kept.close()
    node.kept = node.files(kept=True)


def held(node: Node) -> set[str]:
    return {each.address for each in node.store().reservations()}


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
    older = node.directory.parent / "older" / DATABASE
    for number in range(checkpoints):
        opened(node)
        node.add(f"more{number}", node.store())
    if in_place:
        shutil.copyfile(older, node.directory / DATABASE)
    else:
        shutil.copyfile(older, node.directory / "new")
        (node.directory / "new").replace(node.directory / DATABASE)
    if ending == "close":
        opened(node)
        assert (node.directory / DATABASE).read_bytes() == older.read_bytes()
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
        assert held(node) == node.addresses()
        node.store().release(owner("nobody").attachment)
    node.require_never_twice()


def test_another_process_of_ours_costs_no_look_at_the_node(node: Node) -> None:
    looks = node.looks
    SqliteStore(node.directory, BOOT).reserve(owner("other"), SETS)
    node.add("mine", node.store())
    assert node.looks == looks


def test_another_sqlite_program_may_read_and_what_it_changes_is_damage(node: Node) -> None:
    with closing(sqlite3.connect(node.directory / DATABASE)) as other:
        ((count,),) = other.execute("SELECT count(*) FROM reservation").fetchall()
        assert count == len(node.addresses())
        node.require_never_twice()
        other.execute("DELETE FROM reservation WHERE container_id = 'last'")
        other.commit()
    assert not repair.check(node.directory, print)
    address = node.pods["last"][0].address
    requested = sets_of(range_of("10.0.0.0/24", start=address, end=address))
    error = error_of(lambda: node.store().reserve(owner("new"), requested))
    assert error.code in (Code.STORE_DAMAGED, Code.NO_FREE_ADDRESS)


@pytest.mark.parametrize("name", [DATABASE, WAL])
def test_a_file_that_is_replaced_within_a_transaction_is_noticed(node: Node, name: str) -> None:
    assert node.kept is not None
    with node.kept.transaction() as tables:
        assert len(list(tables.all())) == len(node.addresses())
        replaced(node.directory / name)
    node.require_never_twice()
