"""One file of the store lost, cut, zeroed or with bits flipped.

Whatever happens then: a CNIError, or an answer that is right; never an address that someone
holds. After fsck everything that was held is held again, since the other file has it.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam import fsck
from ipam.recovery import DATABASE, LOG
from ipam.sqlite_store import SqliteStore
from ipam.store import Reservation
from ipam.store_files import PerCall
from tests.unit.ipam.calls import BOOT, owner, range_of, reservation, sets_of

WAL = f"{DATABASE}-wal"
SETS = sets_of(range_of("10.0.0.0/24"), range_of("fd00::/64"))
FLIPS = 120


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with holes in it, closed."""
    directory = tmp_path_factory.mktemp("sound") / "ipam"
    store = quiet(directory)
    for number in range(40):
        store.reserve(owner(f"c{number}", pod=f"p{number}"), SETS)
    for number in range(0, 40, 3):
        store.release(owner(f"c{number}").attachment)
    return directory


@pytest.fixture(scope="module")
def with_wal(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same store after a process died between its commit and its end."""
    directory = tmp_path_factory.mktemp("wal") / "ipam"
    shutil.copytree(sound, directory)
    child = os.fork()
    if child == 0:
        store = quiet(directory)
        with PerCall(directory).transaction() as (tables, log):
            for number in range(3):
                store._write(tables, log, [reservation(f"10.0.0.{200 + number}", "late")])
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (directory / WAL).stat().st_size > 0
    return directory


def quiet(directory: Path) -> SqliteStore:
    return SqliteStore(PerCall(directory, report=lambda text: None), BOOT)


def held_in(directory: Path) -> set[Reservation]:
    copy = directory.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    return set(quiet(copy).reservations())


def assert_never_twice(directory: Path, held: set[Reservation]) -> None:
    """Newcomers get errors or addresses of their own; fsck brings everything back."""
    taken = {one.address for one in held}
    given: set[str] = set()
    for number in range(3):
        try:
            grant = quiet(directory).reserve(owner(f"new{number}"), SETS)
        except CNIError as error:
            assert error.code in (Code.STORE_DAMAGED, Code.IO_FAILURE), error.message
            assert "\n" not in error.message
            break
        addresses = {one.reservation.address for one in grant.granted}
        assert not addresses & (taken | given), f"{addresses & (taken | given)} handed out twice"
        given |= addresses
    assert fsck.rebuild(directory, lambda line: None)
    assert fsck.check(directory, lambda line: None)
    after = quiet(directory).reservations()
    assert held <= set(after)
    assert given <= {one.address for one in after}
    assert len({one.address for one in after}) == len(after)


def damaged_copy(source: Path, target: Path, name: str, damage: Callable[[bytes], bytes]) -> Path:
    directory = target / "damaged"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(source, directory)
    path = directory / name
    path.write_bytes(damage(path.read_bytes()))
    return directory


def cut_to(length: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:length]


@pytest.mark.parametrize("name", [DATABASE, LOG])
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


@pytest.mark.parametrize("name", [DATABASE, LOG, WAL])
def test_zeroed_whole_and_in_part(with_wal: Path, memory_path: Path, name: str) -> None:
    held = held_in(with_wal)
    size = (with_wal / name).stat().st_size
    parts = [(0, size), *((at, min(at + 4096, size)) for at in range(0, size, 4096))]
    for first, last in parts:

        def zero(content: bytes, first: int = first, last: int = last) -> bytes:
            return content[:first] + bytes(last - first) + content[last:]

        assert_never_twice(damaged_copy(with_wal, memory_path, name, zero), held)


@pytest.mark.parametrize("name", [DATABASE, LOG, WAL])
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


@pytest.mark.parametrize("name", [DATABASE, LOG, WAL])
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


def test_a_log_that_is_behind_is_reported_and_written_anew(sound: Path, memory_path: Path) -> None:
    directory = damaged_copy(sound, memory_path, LOG, lambda content: content[: len(content) // 2])
    reports: list[str] = []
    SqliteStore(PerCall(directory, report=reports.append), BOOT).reserve(owner("new"), SETS)
    assert len(reports) == 1
    assert "the log was written anew" in reports[0]
    assert fsck.check(directory, reports.append)


def test_files_of_two_stores_are_not_mixed(sound: Path, memory_path: Path) -> None:
    quiet(memory_path / "other").reserve(owner("x"), SETS)
    directory = damaged_copy(sound, memory_path, DATABASE, lambda content: content)
    shutil.copy(memory_path / "other" / DATABASE, directory / DATABASE)
    with pytest.raises(CNIError, match="are of different stores"):
        quiet(directory).reserve(owner("new"), SETS)


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
