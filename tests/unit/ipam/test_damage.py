"""Files of a store lost, cut, zeroed, with bits flipped, or replaced by an older copy.

A process that hands out addresses sees what the node shows: the attachments' journal, and the
addresses of living network namespaces. The outcome is a CNIError or a right answer, and never an
address that a pod has. The store is built again without an operator.
"""

import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from cni.spec.errors import CNIError, Code
from ipam.store import repair, store_files
from ipam.store.database import DATABASE, WAL
from ipam.store.repair import LivingAddress, NodeFacts
from ipam.store.reservations import Reservation
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from tests.unit.ipam.calls import BOOT, NEXT_BOOT, error_of, owner, range_of, reservation, sets_of

pytestmark = pytest.mark.slow

SETS = sets_of(range_of("10.0.0.0/24"), range_of("fd00::/64"))
FLIPS = 120


class Node:
    """A node whose pods hold addresses; of every second one our plugins have a journal."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.namespaces = directory.parent / "netns"
        self.namespaces.mkdir(exist_ok=True)
        self.pods: dict[str, list[Reservation]] = {}
        self.more = NodeFacts()
        self.said: list[str] = []
        self.looks = 0
        self.kept: StoreFiles | None = None

    def files(self, *, kept: bool = False, facts: bool = True) -> StoreFiles:
        look = self.look if facts else None
        return StoreFiles(self.directory, kept=kept, facts=look, report=self.said.append)

    def store(self, **how: bool) -> SqliteStore:
        """As a process for one call opens it, or as the process that keeps it open."""
        return SqliteStore(self.kept or self.files(**how), BOOT)

    def add(self, name: str, store: SqliteStore) -> set[str]:
        """ADD of a pod, which lives from then on; its addresses."""
        grant = store.reserve(owner(name, pod=name), SETS)
        self.pods[name] = [each.reservation for each in grant.granted]
        (self.namespaces / name).touch()
        return {each.address for each in self.pods[name]}

    def delete(self, name: str, store: SqliteStore) -> None:
        store.release(owner(name).attachment)
        del self.pods[name]
        (self.namespaces / name).unlink()

    def addresses(self) -> set[str]:
        return {each.address for held in self.pods.values() for each in held}

    def look(self) -> NodeFacts:
        self.looks += 1
        living = [
            LivingAddress(
                each.address,
                "eth0",
                str(self.namespaces / name),
                (self.namespaces / name).stat().st_ino,
            )
            for name, held in self.pods.items()
            for each in held
        ]
        journal = [held for index, held in enumerate(self.pods.values()) if index % 2]
        return msgspec.structs.replace(
            self.more,
            boot=BOOT,
            journal=tuple(each for held in journal for each in held),
            living=tuple(living),
        )

    def require_never_twice(self, **how: bool) -> None:
        """Newcomers get errors or addresses of their own, and whoever goes is free again."""
        for number in range(3):
            taken = self.addresses()
            try:
                given = self.add(f"new{number}", self.store(**how))
            except CNIError as error:
                assert error.code in (Code.TRY_AGAIN, Code.IO_FAILURE), error.message
                assert "\n" not in error.message
                continue
            assert not given & taken, f"{given & taken} handed out twice"
        taken = self.addresses()
        assert not self.add("later", self.store(**how)) & taken
        assert repair.check(self.directory, print)
        held = [each.address for each in self.store().reservations()]
        assert len(set(held)) == len(held)
        for name in list(self.pods):
            self.delete(name, self.store(**how))
        self.add("last", self.store(**how))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with holes in it, whose process died with transactions in its WAL."""
    node = Node(tmp_path_factory.mktemp("sound") / "ipam")
    for number in range(40):
        node.add(f"c{number}", node.store())
    for number in range(0, 40, 3):
        node.delete(f"c{number}", node.store())
    child = os.fork()
    if child == 0:
        with node.files(kept=True).transaction() as tables:
            store = SqliteStore(node.files(kept=True), BOOT)
        for number in range(3):
            node.add(f"late{number}", store)
        os._exit(0 if tables else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (node.directory / WAL).stat().st_size > 0
    (node.directory / f"{DATABASE}-shm").unlink()
    return node.directory


@pytest.fixture
def node(sound: Path, memory_path: Path) -> Node:
    return copied(sound, memory_path)


def copied(sound: Path, root: Path) -> Node:
    """A copy of the sound node, all of whose pods live."""
    for name in ("damaged", "netns"):
        shutil.rmtree(root / name, ignore_errors=True)
    shutil.copytree(sound, root / "damaged")
    shutil.copytree(sound, root / "read", dirs_exist_ok=True)
    node = Node(root / "damaged")
    for held in SqliteStore(root / "read", BOOT).reservations():
        node.pods.setdefault(held.container_id, []).append(held)
        (node.namespaces / held.container_id).touch()
    shutil.rmtree(root / "read")
    return node


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_files, "SETTLE", 0.0)


@pytest.mark.parametrize("name", [DATABASE, WAL])
def test_cut_at_any_length(sound: Path, memory_path: Path, name: str) -> None:
    content = (sound / name).read_bytes()
    size = len(content)
    lengths = {0, 1, 16, 31, 32, 33, 99, 100, 511, 512, 4095, 4096, 4097, size - 1, size // 2}
    for length in sorted(lengths | {size * step // 40 for step in range(40)}):
        node = copied(sound, memory_path)
        (node.directory / name).write_bytes(content[:length])
        node.require_never_twice()


@pytest.mark.parametrize("name", [DATABASE, WAL])
def test_zeroed_whole_and_in_part(sound: Path, memory_path: Path, name: str) -> None:
    content = (sound / name).read_bytes()
    size = len(content)
    for first, last in [(0, size), *((at, min(at + 4096, size)) for at in range(0, size, 8192))]:
        node = copied(sound, memory_path)
        zeroed = content[:first] + bytes(last - first) + content[last:]
        (node.directory / name).write_bytes(zeroed)
        node.require_never_twice()


@pytest.mark.parametrize("name", [DATABASE, WAL])
def test_flipped_bits(sound: Path, memory_path: Path, name: str) -> None:
    chance = random.Random(f"podfabric {name}")
    for trial in range(FLIPS):
        node = copied(sound, memory_path)
        content = bytearray((node.directory / name).read_bytes())
        for _ in range(1 + trial % 4):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        (node.directory / name).write_bytes(content)
        try:
            node.require_never_twice()
        except CNIError as error:  # the flip is in the number of the version
            assert "is of another podfabric" in error.message


@pytest.mark.parametrize("names", [(DATABASE,), (WAL,), (DATABASE, WAL)])
def test_missing(node: Node, names: tuple[str, ...]) -> None:
    for name in names:
        (node.directory / name).unlink()
    node.require_never_twice()


def test_an_older_copy_beside_a_newer_wal_and_alone(node: Node) -> None:
    older = (node.directory / DATABASE).read_bytes()
    for number in range(3):  # each writes the WAL back
        node.add(f"more{number}", node.store())
    with closing(node.files(kept=True)) as kept:
        node.add("last", SqliteStore(kept, BOOT))
        wal = (node.directory / WAL).read_bytes()
    for beside in (wal, b""):
        (node.directory / DATABASE).write_bytes(older)
        (node.directory / WAL).write_bytes(beside)
        node.require_never_twice()


@pytest.mark.parametrize("kept", [False, True])
def test_without_a_look_at_the_node_a_damaged_store_is_an_error_and_stays_as_it_is(
    node: Node, kept: bool
) -> None:
    (node.directory / DATABASE).write_bytes(b"damaged")
    before = [(node.directory / name).read_bytes() for name in (DATABASE, WAL)]
    for use in (
        node.store(facts=False, kept=kept).reservations,
        lambda: node.store(facts=False, kept=kept).reserve(owner("new"), SETS),
    ):
        error = error_of(use)
        assert error.code == Code.STORE_DAMAGED
        assert "podfabric ipam fsck --rebuild" in error.message
        assert str(node.directory) in error.message
        assert "\n" not in error.message
    assert [(node.directory / name).read_bytes() for name in (DATABASE, WAL)] == before


def test_the_damaged_files_are_kept_aside_with_a_word(node: Node) -> None:
    (node.directory / DATABASE).write_bytes(b"damaged")
    wal = (node.directory / WAL).read_bytes()
    node.store().release(owner("c1").attachment)
    (aside,) = node.directory.glob(f"{DATABASE}.damaged-*Z")
    assert aside.read_bytes() == b"damaged"
    assert aside.with_name(f"{aside.name}-wal").read_bytes() == wal
    assert any(str(aside) in line for line in node.said)


def test_the_journal_is_worth_more_than_an_older_copy(node: Node) -> None:
    older = (node.directory / DATABASE).read_bytes(), (node.directory / WAL).read_bytes()
    node.delete("c1", node.store())
    node.more = NodeFacts()
    grant = node.store().reserve(owner("successor"), SETS[:1])
    successor = grant.granted[0].reservation
    (node.directory / DATABASE).write_bytes(older[0])
    (node.directory / WAL).write_bytes(older[1])
    facts = NodeFacts(BOOT, (successor,))
    files = StoreFiles(node.directory, kept=False, facts=lambda: facts)
    SqliteStore(files, BOOT).release(owner("nobody").attachment)
    holders = {each.address: each.container_id for each in node.store().reservations()}
    assert holders[successor.address] == "successor"


def test_what_an_earlier_boot_attached_takes_nothing_from_this_boot(node: Node) -> None:
    held = node.pods["c1"][0]
    former = msgspec.structs.replace(held, container_id="former", boot=NEXT_BOOT)
    facts = NodeFacts(BOOT, (former,))
    files = StoreFiles(node.directory, kept=False, facts=lambda: facts)
    SqliteStore(files, BOOT).release(owner("nobody").attachment)
    holders = {each.address: each.container_id for each in node.store().reservations()}
    assert holders[held.address] == "c1"


# --- addresses in use without a reservation ------------------------------------------------------


@pytest.fixture
def foreign(memory_path: Path) -> Iterator[tuple[SqliteStore, Path]]:
    """A kept store that was lost, beside a namespace in which another plugin set 10.0.0.1."""
    namespace = memory_path / "foreign"
    namespace.touch()

    def look() -> NodeFacts:
        found = [LivingAddress("10.0.0.1", "net1", str(namespace), namespace.stat().st_ino)]
        return NodeFacts(BOOT, living=tuple(found if namespace.stat().st_size == 0 else ()))

    with closing(StoreFiles(memory_path / "ipam", facts=look, report=print)) as kept:
        store = SqliteStore(kept, BOOT)
        store.reserve(owner("lost"), SETS)
        (memory_path / "ipam" / DATABASE).unlink()
        store.release(owner("lost").attachment)
        yield store, namespace


def test_it_is_handed_out_to_nobody_until_its_namespace_has_ended(
    foreign: tuple[SqliteStore, Path],
) -> None:
    store, namespace = foreign
    sets = sets_of(range_of("10.0.0.0/24"))
    assert store.reserve(owner("c1"), sets).granted[0].reservation.address == "10.0.0.2"
    only = sets_of(range_of("10.0.0.0/24", start="10.0.0.1", end="10.0.0.1"))
    assert error_of(lambda: store.reserve(owner("c2"), only)).code == Code.NO_FREE_ADDRESS
    assert store.exhausted(only)
    former = namespace.with_name("former")
    namespace.rename(former)
    namespace.write_text("of another pod, without the address")
    assert store.reserve(owner("c2"), only).granted[0].reservation.address == "10.0.0.1"


def test_its_pod_may_have_it_again_once_an_import_has_named_the_pod(
    foreign: tuple[SqliteStore, Path],
) -> None:
    store, _ = foreign
    store.load([reservation("10.0.0.1", "old", pod="p", namespace="ns", range="10.0.0.0/24")])
    grant = store.reserve(owner("new", pod="p"), sets_of(range_of("10.0.0.0/24")))
    assert grant.granted[0].reservation.address == "10.0.0.1"


# --- soon after a loss ---------------------------------------------------------------------------


def test_nothing_is_handed_out_until_what_pods_were_given_just_before_shows(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_files, "SETTLE", 3600.0)
    with closing(node.files(kept=True)) as kept:
        store = SqliteStore(kept, BOOT)
        grant = store.reserve(owner("attaching"), SETS)
        (node.directory / WAL).write_bytes(b"")
        error = error_of(lambda: store.reserve(owner("new"), SETS))
        assert error.code == Code.TRY_AGAIN
        assert "lost changes" in error.message
        node.delete("c1", store)
        monkeypatch.setattr(store_files, "SETTLE", 0.0)
        node.more = NodeFacts(begun=(time.time() - 60,))
        assert "that began before" in error_of(lambda: store.reserve(owner("new"), SETS)).message
        node.more = NodeFacts(unseen=("netns x: refused",), begun=(time.time() + 60,))
        assert "could not be read" in error_of(lambda: store.reserve(owner("new"), SETS)).message
        assert "netns x: refused" in node.said[-1]
        node.more = NodeFacts(begun=(time.time() + 60,))
        node.pods["attaching"] = [each.reservation for each in grant.granted]
        (node.namespaces / "attaching").touch()
        taken = node.addresses()
        assert not node.add("new", store) & taken
