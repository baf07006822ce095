"""One file of the store lost, cut, zeroed, with bits flipped, or replaced by an older copy.

The outcome is a CNIError or a right answer, and never an address that someone holds. After fsck
everything that was held is held again: from what can be read, the backup copy, and the journal.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam import fsck, recovery
from ipam.fsck import LivingAddress, NodeFacts
from ipam.recovery import BACKUP, DATABASE, MARK, WAL, back_up
from ipam.sqlite_store import SqliteStore
from ipam.store import Reservation
from ipam.store_files import StoreFiles
from tests.unit.ipam.calls import BOOT, error_of, owner, range_of, sets_of

SETS = sets_of(range_of("10.0.0.0/24"), range_of("fd00::/64"))
FLIPS = 120
LATE = [owner(f"late{number}") for number in range(3)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with holes in it and a backup copy, closed."""
    directory = tmp_path_factory.mktemp("sound") / "ipam"
    store = quiet(directory)
    for number in range(40):
        store.reserve(owner(f"c{number}", pod=f"p{number}"), SETS)
    for number in range(0, 40, 3):
        store.release(owner(f"c{number}").attachment)
    with StoreFiles(directory, kept=False).transaction() as tables:
        back_up(directory, tables)
    return directory


@pytest.fixture(scope="module")
def with_wal(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same store after a process died between its commit and its end."""
    directory = tmp_path_factory.mktemp("wal") / "ipam"
    shutil.copytree(sound, directory)
    die_after(directory, lambda store: [store.reserve(owner_, SETS) for owner_ in LATE])
    return directory


def die_after(directory: Path, work: Callable[[SqliteStore], object]) -> None:
    """Do `work` in a process that ends without closing the store."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work(SqliteStore(StoreFiles(directory), BOOT))
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert (directory / WAL).stat().st_size > 0


def quiet(directory: Path) -> SqliteStore:
    return SqliteStore(StoreFiles(directory, report=lambda text: None, kept=False), BOOT)


def held_in(directory: Path) -> set[Reservation]:
    copy = directory.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    return set(quiet(copy).reservations())


def assert_never_twice(directory: Path, held: set[Reservation]) -> None:
    """Newcomers get errors or addresses of their own; fsck brings everything back."""
    taken = {reservation.address for reservation in held}
    given: set[Reservation] = set()
    for number in range(3):
        try:
            grant = quiet(directory).reserve(owner(f"new{number}"), SETS)
        except CNIError as error:
            assert error.code in (Code.STORE_DAMAGED, Code.IO_FAILURE), error.message
            assert "\n" not in error.message
            break
        reservations = {granted.reservation for granted in grant.granted}
        addresses = {reservation.address for reservation in reservations}
        assert not addresses & taken, f"{addresses & taken} handed out twice"
        taken |= addresses
        given |= reservations
    # The journal has the attachments since the backup copy was made.
    late = {reservation for reservation in held if reservation.container_id.startswith("late")}
    facts = NodeFacts(journal=tuple(late | given))
    assert fsck.rebuild(directory, silent, facts=facts, accept_loss=True)
    assert fsck.check(directory, print)
    after = quiet(directory).reservations()
    assert held | given <= set(after)
    assert len({reservation.address for reservation in after}) == len(after)


def silent(line: str) -> None:
    """Ignore what fsck says."""


def damaged_copy(source: Path, target: Path, name: str, damage: Callable[[bytes], bytes]) -> Path:
    directory = target / "damaged"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(source, directory)
    path = directory / name
    path.write_bytes(damage(path.read_bytes()))
    return directory


def cut_to(length: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:length]


@pytest.mark.parametrize("name", [DATABASE, MARK, BACKUP])
def test_cut_at_any_length(sound: Path, memory_path: Path, name: str) -> None:
    held = held_in(sound)
    size = (sound / name).stat().st_size
    lengths = {0, 1, 16, 99, 100, 511, 512, 4095, 4096, 4097, size - 1, size - 2, size // 2}
    lengths |= {size * step // 40 for step in range(40)}
    for length in sorted(lengths):
        directory = damaged_copy(sound, memory_path, name, cut_to(length))
        assert_never_twice(directory, held)


def test_a_wal_cut_at_any_length(with_wal: Path, memory_path: Path) -> None:
    held = held_in(with_wal)
    size = (with_wal / WAL).stat().st_size
    for length in [*range(0, size, size // 40), size - 1, 31, 32, 33]:
        directory = damaged_copy(with_wal, memory_path, WAL, cut_to(length))
        assert_never_twice(directory, held)


@pytest.mark.parametrize("name", [DATABASE, MARK, BACKUP, WAL])
def test_zeroed_whole_and_in_part(with_wal: Path, memory_path: Path, name: str) -> None:
    held = held_in(with_wal)
    size = (with_wal / name).stat().st_size
    parts = [(0, size), *((at, min(at + 4096, size)) for at in range(0, size, 4096))]
    for first, last in parts:

        def zero(content: bytes, first: int = first, last: int = last) -> bytes:
            return content[:first] + bytes(last - first) + content[last:]

        assert_never_twice(damaged_copy(with_wal, memory_path, name, zero), held)


@pytest.mark.parametrize("name", [DATABASE, MARK, BACKUP, WAL])
def test_flipped_bits(with_wal: Path, memory_path: Path, name: str) -> None:
    held = held_in(with_wal)
    random_ = random.Random(f"podfabric {name}")
    for trial in range(FLIPS):

        def flip(content: bytes, trial: int = trial) -> bytes:
            changed = bytearray(content)
            for _ in range(1 + trial % 4):
                changed[random_.randrange(len(changed))] ^= 1 << random_.randrange(8)
            return bytes(changed)

        assert_never_twice(damaged_copy(with_wal, memory_path, name, flip), held)


@pytest.mark.parametrize("name", [DATABASE, MARK, BACKUP, WAL])
def test_missing(with_wal: Path, memory_path: Path, name: str) -> None:
    held = held_in(with_wal)
    directory = damaged_copy(with_wal, memory_path, name, lambda content: content)
    (directory / name).unlink()
    assert_never_twice(directory, held)


def test_a_lost_database_is_an_error_that_names_fsck_and_keeps_the_files(
    sound: Path, memory_path: Path
) -> None:
    directory = damaged_copy(sound, memory_path, DATABASE, lambda content: b"")
    with pytest.raises(CNIError) as caught:
        quiet(directory).reserve(owner("new"), SETS)
    assert caught.value.code == Code.STORE_DAMAGED
    assert "podfabric ipam fsck" in caught.value.message
    assert str(directory) in caught.value.message
    assert (directory / DATABASE).read_bytes() == b""


def test_files_of_two_stores_are_not_mixed(sound: Path, memory_path: Path) -> None:
    quiet(memory_path / "other").reserve(owner("x"), SETS)
    directory = damaged_copy(sound, memory_path, DATABASE, lambda content: content)
    shutil.copy(memory_path / "other" / DATABASE, directory / DATABASE)
    with pytest.raises(CNIError, match="are of different stores"):
        quiet(directory).reserve(owner("new"), SETS)


def test_lost_wal_is_an_error_in_this_boot_and_none_after_a_power_loss(
    with_wal: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = held_in(with_wal)
    directory = damaged_copy(with_wal, memory_path, WAL, lambda content: b"")
    error = error_of(lambda: quiet(directory).reserve(owner("new"), SETS))
    assert error.code == Code.STORE_DAMAGED
    assert "its WAL was lost" in error.message
    monkeypatch.setattr(recovery, "boot_id", lambda: "next boot")
    # Every sandbox of the boot before is gone, and what it held late with it.
    names = {reservation.container_id for reservation in quiet(directory).reservations()}
    assert names == {reservation.container_id for reservation in held} - {"late0", "late1", "late2"}


def test_older_copy_of_the_database_is_an_error_after_a_reboot_too(
    sound: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = damaged_copy(sound, memory_path, DATABASE, lambda content: content)
    monkeypatch.setattr(recovery, "_CHANGES_WORTH_A_CHECKPOINT", 1)
    monkeypatch.setattr(recovery, "_LOOK_AT_WAL", 1)
    quiet(directory).reserve(owner("new"), SETS)
    shutil.copy(sound / DATABASE, directory / DATABASE)
    monkeypatch.setattr(recovery, "boot_id", lambda: "next boot")
    error = error_of(lambda: quiet(directory).reservations())
    assert error.code == Code.STORE_DAMAGED
    assert "older copy" in error.message


def test_older_copy_of_the_database_is_not_mixed_with_the_wal(
    sound: Path, with_wal: Path, memory_path: Path
) -> None:
    directory = memory_path / "ipam"
    shutil.copytree(sound, directory)
    for number in range(3):
        quiet(directory).reserve(owner(f"more{number}"), SETS)
    die_after(directory, lambda store: store.reserve(owner("last"), SETS))
    shutil.copy(sound / DATABASE, directory / DATABASE)
    error = error_of(lambda: quiet(directory).reservations())
    assert error.code == Code.STORE_DAMAGED
    assert "another copy was put in its place" in error.message


def test_everything_removed_is_a_new_store(sound: Path, memory_path: Path) -> None:
    directory = damaged_copy(sound, memory_path, DATABASE, lambda content: content)
    for path in directory.iterdir():
        path.unlink()
    assert quiet(directory).reservations() == []
    assert fsck.check(directory, print)


@pytest.mark.parametrize("left", [MARK, BACKUP])
def test_database_removed_with_all_but_one_file_is_an_error(
    sound: Path, memory_path: Path, left: str
) -> None:
    directory = damaged_copy(sound, memory_path, DATABASE, lambda content: content)
    for path in directory.iterdir():
        if path.name != left:
            path.unlink()
    assert error_of(lambda: quiet(directory).reservations()).code == Code.STORE_DAMAGED


# --- what fsck builds from -----------------------------------------------------------------------


def without_backup(sound: Path, target: Path, damage: Callable[[bytes], bytes]) -> Path:
    directory = damaged_copy(sound, target, DATABASE, damage)
    (directory / BACKUP).unlink()
    return directory


def test_rebuild_refuses_to_lose_reservations_and_counts_them(
    sound: Path, memory_path: Path
) -> None:
    held = held_in(sound)
    directory = without_backup(sound, memory_path, lambda content: bytes(len(content)))
    lines: list[str] = []
    assert not fsck.rebuild(directory, lines.append)
    assert any(line.startswith(f"{len(held)} of the reservations") for line in lines)
    facts = NodeFacts(journal=tuple(sorted(held, key=lambda reservation: reservation.address)[1:]))
    assert not fsck.rebuild(directory, lines.append, facts=facts)
    assert any(line.startswith("1 of the reservations") for line in lines)
    assert fsck.rebuild(directory, silent, facts=NodeFacts(journal=tuple(held)))
    assert set(quiet(directory).reservations()) == held


def test_journal_is_worth_more_than_an_older_backup(sound: Path, memory_path: Path) -> None:
    directory = damaged_copy(sound, memory_path, DATABASE, lambda content: content)
    quiet(directory).release(owner("c1").attachment)
    grant = quiet(directory).reserve(owner("successor"), sets_of(range_of("10.0.0.0/24")))
    successor = grant.granted[0].reservation
    (directory / DATABASE).write_bytes(bytes(5000))
    facts = NodeFacts(journal=(successor,))
    assert fsck.rebuild(directory, silent, facts=facts, accept_loss=True)
    holders = {
        reservation.address: reservation.container_id
        for reservation in quiet(directory).reservations()
    }
    assert holders[successor.address] == "successor"


def test_living_address_in_a_known_range_is_held_and_reported(
    sound: Path, memory_path: Path
) -> None:
    held = held_in(sound)
    directory = without_backup(sound, memory_path, lambda content: bytes(len(content)))
    journal = tuple(reservation for reservation in held if reservation.container_id == "c1")
    living = [
        LivingAddress("10.0.0.77", "net1", "/run/netns/foreign"),
        LivingAddress("192.0.2.1", "eth0", "/run/netns/foreign"),
        *(
            LivingAddress(reservation.address, reservation.ifname, "/run/netns/c1")
            for reservation in journal
        ),
    ]
    lines: list[str] = []
    facts = NodeFacts(journal, tuple(living))
    assert fsck.rebuild(directory, lines.append, facts=facts, accept_loss=True, boot=BOOT)
    after = {reservation.address: reservation for reservation in quiet(directory).reservations()}
    assert after.keys() == {"10.0.0.77", *(reservation.address for reservation in journal)}
    assert after["10.0.0.77"].container_id == "/run/netns/foreign"
    assert [line for line in lines if "10.0.0.77 is in use on net1 in /run/netns/foreign" in line]
    requested = sets_of(range_of("10.0.0.0/24", start="10.0.0.77", end="10.0.0.78"))
    grant = quiet(directory).reserve(owner("new"), requested)
    assert grant.granted[0].reservation.address == "10.0.0.78"


def test_address_whose_row_is_damaged_stays_taken(sound: Path, memory_path: Path) -> None:
    held = held_in(sound)
    directory = without_backup(
        sound, memory_path, lambda content: content.replace(b"n1c10eth0", b"n1c10xth0")
    )
    lost = {reservation.address for reservation in held if reservation.container_id == "c10"}
    assert lost
    error = error_of(lambda: quiet(directory).reservations())
    assert error.code == Code.STORE_DAMAGED
    assert fsck.rebuild(directory, silent, boot=BOOT), "every address is accounted for"
    after = {
        reservation.address: reservation.container_id
        for reservation in quiet(directory).reservations()
    }
    assert {address for address, holder in after.items() if holder == fsck.UNKNOWN} == lost
    assert after.keys() == {reservation.address for reservation in held}


@pytest.mark.parametrize("byte", [b"\xcf", b"\n", b"x"])
def test_a_damaged_table_definition_is_one_line_that_names_fsck(
    sound: Path, memory_path: Path, byte: bytes
) -> None:
    text = b"PRIMARY KEY (domain, address)"
    directory = damaged_copy(
        sound, memory_path, DATABASE, lambda content: content.replace(text, byte + text[1:])
    )
    with pytest.raises(CNIError) as caught:
        quiet(directory).reserve(owner("new"), SETS)
    assert caught.value.code == Code.STORE_DAMAGED
    assert "\n" not in caught.value.message
