"""A store that the program before `segment` wrote.

version1/ has its database as SQLite's shell dumps it, and the log that it kept beside it.
"""

import json
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from cni.policy.rules import Policy
from cni.spec.config import NetworkConfig
from cni.spec.errors import CNIError, Code
from ipam import fsck, recovery, upgrade
from ipam.recovery import DATABASE
from ipam.resident import Resident
from ipam.schema import VERSION, crc_of
from ipam.segments import BEFORE, of_config
from ipam.sqlite_store import SqliteStore
from ipam.store_files import PerCall
from tests.unit.ipam.calls import (
    BOOT,
    Calls,
    error_of,
    owner,
    range_of,
    sets_of,
)
from tests.unit.ipam.kills import MODULES, fail, kill_at, lines_of

WRITTEN = Path(__file__).parent / "version1"
LOG = "reservations.log"
SETS = sets_of(range_of("10.0.0.0/24"), range_of("fd00::/64"))
HELD = {
    ("", "10.0.0.1", "c0"), ("", "10.0.0.2", "d0"), ("", "10.0.0.3", "c2"),
    ("", "10.0.0.4", "c3"), ("", "fd00::1", "c0"), ("", "fd00::2", "d0"),
    ("", "fd00::3", "c2"), ("", "fd00::4", "c3"), ("blue", "10.0.0.1", "c9"),
}  # fmt: skip


@pytest.fixture
def directory(memory_path: Path) -> Path:
    """A store of version 1, closed."""
    directory = memory_path / "ipam"
    directory.mkdir()
    with closing(sqlite3.connect(directory / DATABASE, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript((WRITTEN / "reservations.sql").read_text())
    shutil.copyfile(WRITTEN / LOG, directory / LOG)
    return directory


def store_in(directory: Path) -> SqliteStore:
    return SqliteStore(PerCall(directory, report=lambda text: None), BOOT)


def held(directory: Path) -> set[tuple[str, str, str]]:
    every = store_in(directory).reservations()
    return {
        (reservation.domain, reservation.address, reservation.container_id) for reservation in every
    }


def version_of(directory: Path) -> int:
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        ((version,),) = database.execute("SELECT version FROM meta").fetchall()
    assert isinstance(version, int)
    return version


def test_the_next_call_upgrades_the_store_in_its_place(directory: Path) -> None:
    store = store_in(directory)
    grant = store.reserve(owner("new"), SETS, segment="ib0 0x8001")
    assert [granted.reservation.address for granted in grant.granted] == ["10.0.0.5", "fd00::5"]
    assert held(directory) == HELD | {("", "10.0.0.5", "new"), ("", "fd00::5", "new")}
    segments = {
        reservation.container_id: reservation.segment for reservation in store.reservations()
    }
    assert segments == {**dict.fromkeys(segments, BEFORE), "new": "ib0 0x8001"}
    assert version_of(directory) == VERSION
    assert fsck.check(directory, fail)
    assert store.release(owner("c0").attachment) != []


def test_an_agent_upgrades_it_when_it_opens_it(directory: Path) -> None:
    with closing(Resident(directory)) as kept:
        store = SqliteStore(kept, BOOT)
        store.reserve(owner("new"), SETS)
        assert len(store.reservations()) == len(HELD) + 2
    assert version_of(directory) == VERSION
    assert fsck.check(directory, fail)


def test_fsck_of_it_finds_it_sound_and_changes_nothing(directory: Path) -> None:
    assert fsck.check(directory, fail)
    assert version_of(directory) == 1
    assert fsck.rebuild(directory, lambda line: None)
    assert held(directory) == HELD
    assert version_of(directory) == VERSION


def test_the_log_of_an_earlier_version_is_removed(directory: Path) -> None:
    reports: list[str] = []
    store = SqliteStore(PerCall(directory, report=reports.append), BOOT)
    store.reservations()
    assert not (directory / LOG).exists()
    assert len(reports) == 1
    store.reservations()
    assert len(reports) == 1


def test_a_row_that_was_damaged_before_is_damaged_still(directory: Path) -> None:
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        database.execute("UPDATE reservation SET uid = 'x' WHERE container_id = 'c2'")
        database.commit()
    assert error_of(lambda: store_in(directory).reservations()).code == Code.STORE_DAMAGED
    assert store_in(directory).held_by(owner("c0").attachment) != []
    assert fsck.rebuild(directory, lambda line: None)
    assert held(directory) == {
        (domain, address, fsck.UNKNOWN if holder == "c2" else holder)
        for domain, address, holder in HELD
    }


LINKS = pytest.mark.parametrize("link", [{"master": "eth0"}, {}])
POOL = {"range": "10.0.0.0/24"}
MINE = {**POOL, "network_name": "mine"}


@LINKS
def test_a_private_range_over_addresses_of_before_is_refused_on_every_link(
    directory: Path, link: dict[str, object]
) -> None:
    node = Calls(directory)
    first = {**MINE, "range_start": "10.0.0.1", "range_end": "10.0.0.1"}
    for ipam in (MINE, first, {**MINE, "addresses": [{"address": "10.0.0.1/24"}]}):
        error = error_of(partial(node.add, ipam, "evil", network="mine", config=link))
        assert error.code == Code.NOT_ALLOWED
        assert "unknown link" in error.message
    assert held(directory) == HELD


@LINKS
def test_an_address_of_before_is_passed_over_where_private_ranges_are_allowed(
    directory: Path, link: dict[str, object]
) -> None:
    node = Calls(directory)
    node.policy = Policy(private_ranges=True)
    asked = partial(node.add, MINE, "evil", network="mine", config=link)
    assert error_of(partial(asked, args="IP=10.0.0.1")).code == Code.ADDRESS_TAKEN
    # 10.0.0.2 is of another boot than this one: its pod is gone.
    assert [ip.address for ip in asked().ips] == ["10.0.0.2/24"]
    again = node.addresses(MINE, "evil2", network="mine", config=link)
    assert again == ["10.0.0.5/24"]


def test_an_address_of_before_counts_no_more_when_its_pod_came_again(directory: Path) -> None:
    node = Calls(directory)
    node.delete(None, "c9", network="n2")
    for pod in ("p0", "p2", "p3"):
        assert node.add(POOL, f"{pod}-again", pod=pod, config={"master": "eth0"})
    assert node.addresses(MINE, "t", network="mine", config={"master": "eth1"}) == ["10.0.0.1/24"]
    on_link = partial(node.add, MINE, "t2", network="third", config={"master": "eth0"})
    assert error_of(on_link).code == Code.NOT_ALLOWED


def test_an_address_of_before_and_of_an_earlier_boot_refuses_no_range(directory: Path) -> None:
    node = Calls(directory, boot="33333333-3333-3333-3333-333333333333")
    assert node.addresses(MINE, "t", network="mine", config={"master": "eth0"}) == ["10.0.0.1/24"]


def test_a_network_of_before_is_not_refused_for_its_own_addresses(directory: Path) -> None:
    node = Calls(directory)
    node.delete(None, "c9", network="n2")
    assert node.addresses(MINE, "t", network="n1", config={"master": "eth0"}) == ["10.0.0.2/24"]


def test_a_new_reservation_on_an_unknown_link_is_not_one_of_before(memory_path: Path) -> None:
    node = Calls(memory_path / "new")
    node.add(POOL, "c1", network="theirs", config={"type": "other"})
    assert [reservation.segment for reservation in node.store.reservations()] == [""]
    assert node.addresses(MINE, "t", network="mine", config={"type": "other"}) == ["10.0.0.1/24"]


@pytest.mark.parametrize("key", ["bridge", "master"])
def test_no_configuration_names_the_link_of_before(key: str) -> None:
    assert of_config(NetworkConfig(keys={"type": "other", key: BEFORE})) == ""
    assert of_config(NetworkConfig(keys={"type": "other", key: BEFORE.strip()})) != BEFORE


def test_rows_are_salvaged_although_an_index_is_damaged(directory: Path) -> None:
    damage_index(directory, "by_boot")
    assert error_of(lambda: store_in(directory).reservations()).code == Code.STORE_DAMAGED
    assert fsck.rebuild(directory, lambda line: None)
    assert held(directory) == HELD
    assert {reservation.segment for reservation in store_in(directory).reservations()} == {BEFORE}
    assert fsck.check(directory, fail)


def damage_index(directory: Path, name: str) -> None:
    """Overwrite 64 bytes of the page that the index begins with."""
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        ((size,),) = database.execute("PRAGMA page_size").fetchall()
        ((page,),) = database.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = ?", (name,)
        ).fetchall()
    with (directory / DATABASE).open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * 64)


def test_other_tables_than_version_1_had_are_damage(directory: Path) -> None:
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        database.execute("DROP INDEX by_uid")
    error = error_of(lambda: store_in(directory).reservations())
    assert (error.code, "version 1" in error.message) == (Code.STORE_DAMAGED, True)
    assert version_of(directory) == 1


@pytest.mark.parametrize("act", [store_in, partial(fsck.check, say=print)])
def test_a_store_of_a_newer_program_is_refused_by_name_and_not_rebuilt(
    directory: Path, act: Callable[[Path], object]
) -> None:
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        ((_, *rest),) = database.execute("SELECT version, store, seq, count FROM meta").fetchall()
        content = (VERSION + 1, *rest)
        database.execute("UPDATE meta SET version = ?, crc = ?", (VERSION + 1, crc_of(content)))
        database.commit()

    def used() -> object:
        made = act(directory)
        return made.reservations() if isinstance(made, SqliteStore) else made

    error = error_of(used)
    assert error.code == Code.STORE_DAMAGED
    assert "newer podfabric" in error.message
    assert "fsck" not in error.message
    rebuilding = error_of(lambda: fsck.rebuild(directory, print, accept_loss=True))
    assert "newer podfabric" in rebuilding.message


def test_a_kill_at_any_line_leaves_version_1_or_this_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.ipam.kills.MODULES", MODULES | {upgrade.__file__})
    base = directory.with_name("base")
    shutil.copytree(directory, base)

    def fresh() -> Path:
        shutil.rmtree(directory)
        shutil.copytree(base, directory)
        return directory

    seen = set()
    lines = lines_of(partial(held, fresh()))
    assert any(name == upgrade.__file__ for name, _ in lines)
    for line, count in lines.items():
        kill_at(count, partial(held, fresh()))
        seen.add(version_of(directory))
        assert held(directory) == HELD, f"line {line}"
        assert version_of(directory) == VERSION
        assert fsck.check(directory, fail), f"line {line}"
    assert seen == {1, VERSION}


# --- the log of an earlier version -----------------------------------------------------------


def lose_last_change(directory: Path) -> None:
    """As if an older copy of the database had been put back: the log has one change more."""
    with (directory / LOG).open("r+b") as log:
        last = log.read().splitlines()[-1].partition(b" ")[2]
        seq = json.loads(last)["seq"] + 1
        change = b'{"seq":%d,"drop":[["","10.0.0.4"]]}' % seq
        log.write(b"%08x %b\n" % (zlib.crc32(change), change))


def lose_database(directory: Path) -> None:
    for file in directory.glob(f"{DATABASE}*"):
        file.unlink()


def spoil_log(directory: Path) -> None:
    (directory / LOG).write_text("not a log\n")


@pytest.mark.parametrize("damage", [lose_last_change, lose_database, spoil_log])
def test_changes_that_only_the_log_has_are_damage_and_the_log_stays(
    directory: Path, damage: Callable[[Path], None]
) -> None:
    damage(directory)
    log = (directory / LOG).read_bytes()
    error = error_of(lambda: store_in(directory).reserve(owner("c7"), SETS))
    assert error.code == Code.STORE_DAMAGED
    assert LOG in error.message
    assert (directory / LOG).read_bytes() == log
    said: list[str] = []
    assert not fsck.check(directory, said.append)
    assert said
    assert not fsck.rebuild(directory, said.append)
    assert (directory / LOG).read_bytes() == log


def test_fsck_keeps_the_log_aside_where_its_loss_is_accepted(directory: Path) -> None:
    lose_database(directory)
    assert fsck.rebuild(directory, print, accept_loss=True)
    (aside,) = directory.glob(f"{LOG}.damaged-*")
    assert aside.read_bytes() == (WRITTEN / LOG).read_bytes()
    assert fsck.check(directory, print)
    store_in(directory).reserve(owner("c7"), SETS)


@pytest.mark.parametrize("damage", [lose_last_change, lose_database, spoil_log])
def test_a_kill_while_fsck_rebuilds_beside_a_log_ends_well(
    directory: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the new database and the removal of the log, which is ahead of the old one."""
    steps = {module.__file__ for module in (fsck, recovery)}
    monkeypatch.setattr("tests.unit.ipam.kills.MODULES", steps)
    for _ in range(3):
        damage(directory)
    base = directory.with_name("base")
    shutil.copytree(directory, base)
    rebuild = partial(fsck.rebuild, directory, lambda line: None, accept_loss=True)

    def fresh() -> Path:
        shutil.rmtree(directory)
        shutil.copytree(base, directory)
        return directory

    reading = lines_of(partial(fsck.check, fresh(), lambda line: None))  # which changes nothing
    lines = {line: count for line, count in lines_of(rebuild).items() if line not in reading}
    expected = held(directory)
    after_the_database = 0
    for line, count in lines.items():
        fresh()
        kill_at(count, rebuild)
        is_new = (directory / DATABASE).exists() and version_of(directory) == VERSION
        if is_new and (directory / LOG).exists() and damage is not spoil_log:
            after_the_database += 1
            assert held(directory) == expected, f"line {line}"
        try:
            assert held(directory) == expected, f"line {line}"
        except CNIError as error:
            assert error.code == Code.STORE_DAMAGED, f"line {line}: {error}"
            assert rebuild(), f"line {line}"
            assert held(directory) == expected, f"line {line}"
        assert not (directory / LOG).exists(), f"line {line}"
        assert fsck.check(directory, fail), f"line {line}"
        assert store_in(directory).reserve(owner("newcomer"), SETS).granted
    assert after_the_database or damage is spoil_log


def test_torn_last_line_of_the_log_is_no_change(directory: Path) -> None:
    with (directory / LOG).open("ab") as log:
        log.write(b'0000 {"seq": 99')
    assert held(directory) == HELD
    assert not (directory / LOG).exists()
