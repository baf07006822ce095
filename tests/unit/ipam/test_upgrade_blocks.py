"""A store of version 3 or 4, whose table of blocks had fewer columns, by the build that made it."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest

from cni.spec.errors import Code
from ipam import fsck, upgrade
from ipam.blocks import Instance, LeasedBlock
from ipam.recovery import BACKUP, DATABASE, MARK, WAL
from ipam.resident import Resident
from ipam.schema import VERSION, block_row, crc_of
from ipam.sqlite_store import SqliteStore
from ipam.store_files import PerCall
from tests.unit.ipam.calls import BOOT, error_of, owner
from tests.unit.ipam.kills import MODULES, fail, kill_at, lines_of
from tests.unit.ipam.test_blocks import INSTANCE, SETS, block, changed, leases

# As the builds of version 3 wrote them, the first one first.
BEFORE_KEPT_OUT = """CREATE TABLE block (name TEXT PRIMARY KEY, uid TEXT, space TEXT, pool TEXT, domains TEXT,
    first BLOB, last BLOB, state TEXT, max_offline REAL, boot TEXT, confirmed REAL, crc INTEGER)
    WITHOUT ROWID"""  # noqa: E501 - verbatim
BEFORE_RAILS = """CREATE TABLE block (name TEXT PRIMARY KEY, uid TEXT, space TEXT, pool TEXT, domains TEXT,
    first BLOB, last BLOB, kept_out TEXT, state TEXT, max_offline REAL, boot TEXT, confirmed REAL,
    crc INTEGER)
    WITHOUT ROWID"""  # noqa: E501
BEFORE_CEDING = """CREATE TABLE block (name TEXT PRIMARY KEY, uid TEXT, space TEXT, pool TEXT, domains TEXT,
    first BLOB, last BLOB, kept_out TEXT, state TEXT, max_offline REAL, boot TEXT, confirmed REAL,
    rails TEXT, sticky TEXT, crc INTEGER)
    WITHOUT ROWID"""  # noqa: E501
LAST = """CREATE TABLE block (name TEXT PRIMARY KEY, uid TEXT, space TEXT, pool TEXT, domains TEXT,
    first BLOB, last BLOB, kept_out TEXT, state TEXT, max_offline REAL, boot TEXT, confirmed REAL,
    rails TEXT, sticky TEXT, cover TEXT, ceded TEXT, crc INTEGER)
    WITHOUT ROWID"""
COLUMNS = (
    *("name", "uid", "space", "pool", "domains", "first", "last", "kept_out", "state"),
    *("max_offline", "boot", "confirmed", "rails", "sticky", "cover", "ceded"),
)


def rows_in(statement: str) -> list[LeasedBlock]:
    """Two blocks with what such a table can say of them."""
    rows = [msgspec.structs.replace(block(index), max_offline=1800.0) for index in (0, 3)]
    if statement == BEFORE_KEPT_OUT:
        return [msgspec.structs.replace(row, kept_out=()) for row in rows]
    if statement == LAST:
        rows[1] = msgspec.structs.replace(rows[1], ceded=(rows[1].kept_out[1],))
    return rows


def earlier_row(row: LeasedBlock, statement: str) -> tuple[object, ...]:
    """The row as such a build writes it."""
    written = tuple(
        value
        for name, value in zip(COLUMNS, block_row(row), strict=False)
        if f"{name} " in statement
    )
    return (*written, crc_of(written))


@pytest.fixture(
    params=[(BEFORE_KEPT_OUT, 3), (BEFORE_RAILS, 3), (BEFORE_CEDING, 3), (LAST, 3), (LAST, 4)]
)
def former(request: pytest.FixtureRequest) -> tuple[str, int]:
    made: tuple[str, int] = request.param
    return made


@pytest.fixture
def statement(former: tuple[str, int]) -> str:
    return former[0]


@pytest.fixture
def version(former: tuple[str, int]) -> int:
    return former[1]


@pytest.fixture
def directory(statement: str, version: int, memory_path: Path) -> Path:
    """A store of such a build, closed."""
    directory = memory_path / "ipam"
    SqliteStore(directory, BOOT).reserve(owner("c1"), SETS)
    with changed(directory) as tables:
        tables.put_instance(INSTANCE)
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        database.execute("DROP TABLE block")
        database.execute(statement)
        for row in rows_in(statement):
            written = earlier_row(row, statement)
            marks = ", ".join("?" * len(written))
            database.execute(f"INSERT INTO block VALUES ({marks})", written)
        write_version(database, version)
    return directory


def write_version(database: sqlite3.Connection, version: int) -> None:
    ((_, *rest),) = database.execute("SELECT version, store, seq, count FROM meta").fetchall()
    content = (version, *rest)
    database.execute("UPDATE meta SET version = ?, crc = ?", (version, crc_of(content)))
    database.commit()


def version_of(directory: Path) -> int:
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        ((version,),) = database.execute("SELECT version FROM meta").fetchall()
    assert isinstance(version, int)
    return version


def held(directory: Path) -> list[str]:
    return [each.address for each in SqliteStore(directory, BOOT).reservations()]


def is_upgraded(directory: Path, statement: str) -> bool:
    assert leases(directory) == (INSTANCE, rows_in(statement))
    assert held(directory) == ["10.0.0.1"]
    return version_of(directory) == VERSION and fsck.check(directory, fail)


def test_the_next_call_upgrades_it(directory: Path, statement: str, version: int) -> None:
    assert version_of(directory) == version
    SqliteStore(directory, BOOT).reserve(owner("c2"), SETS)
    assert SqliteStore(directory, BOOT).release(owner("c2").attachment)
    assert is_upgraded(directory, statement)


def test_an_agent_upgrades_it(directory: Path, statement: str) -> None:
    with closing(Resident(directory)) as kept, kept.transaction() as tables:
        assert list(tables.blocks()) == rows_in(statement)
    assert is_upgraded(directory, statement)


def test_a_replaced_agent_of_the_former_version_may_end_a_call_in_it(
    directory: Path, statement: str, version: int
) -> None:
    assert is_upgraded(directory, statement)
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        write_version(database, version)
    assert is_upgraded(directory, statement)


def test_fsck_finds_it_sound_and_rebuilds_it_with_its_blocks(
    directory: Path, statement: str, version: int
) -> None:
    assert fsck.check(directory, fail)
    assert version_of(directory) == version
    assert fsck.rebuild(directory, lambda line: None)
    instance, rows = leases(directory)
    assert (instance, rows) == (INSTANCE, unconfirmed(rows_in(statement)))
    assert version_of(directory) == VERSION


def unconfirmed(rows: list[LeasedBlock]) -> list[LeasedBlock]:
    return [msgspec.structs.replace(row, boot="", confirmed=0.0) for row in rows]


def test_fsck_salvages_the_blocks_of_a_damaged_one(directory: Path, statement: str) -> None:
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        database.execute("UPDATE block SET uid = 'other' WHERE name = ?", (block(0).name,))
        database.execute("UPDATE run SET crc = 0")
        database.commit()
    assert error_of(partial(leases, directory)).code == Code.STORE_DAMAGED
    assert fsck.rebuild(directory, lambda line: None)
    assert leases(directory) == (INSTANCE, unconfirmed(rows_in(statement)[1:]))
    assert held(directory) == ["10.0.0.1"]


def test_its_backup_copy_gives_the_blocks_back(directory: Path, statement: str) -> None:
    database = sqlite3.connect(directory / DATABASE)
    with closing(database), closing(sqlite3.connect(directory / BACKUP)) as copy:
        database.backup(copy)
    for name in (DATABASE, WAL, MARK):
        (directory / name).unlink(missing_ok=True)
    assert fsck.rebuild(directory, lambda line: None, accept_loss=True)
    assert leases(directory) == (INSTANCE, unconfirmed(rows_in(statement)))


def more_columns(database: sqlite3.Connection) -> None:
    database.execute("ALTER TABLE block ADD COLUMN colour TEXT")


def fewer_columns(database: sqlite3.Connection) -> None:
    database.execute("ALTER TABLE block DROP COLUMN space")


def no_table(database: sqlite3.Connection) -> None:
    database.execute("DROP TABLE block")


@pytest.mark.parametrize("damage", [more_columns, fewer_columns, no_table])
def test_other_columns_are_damage_and_stay(
    directory: Path, version: int, damage: Callable[[sqlite3.Connection], None]
) -> None:
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        damage(database)
        database.commit()
    error = error_of(partial(held, directory))
    assert (error.code, f"version {version}" in error.message) == (Code.STORE_DAMAGED, True)
    assert version_of(directory) == version
    assert fsck.rebuild(directory, lambda line: None)
    assert held(directory) == ["10.0.0.1"]
    assert leases(directory)[0] == Instance(*INSTANCE)


def test_a_kill_at_any_line_leaves_the_former_version_or_this_one(
    directory: Path, statement: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.ipam.kills.MODULES", MODULES | {upgrade.__file__})
    base = directory.with_name("base")
    shutil.copytree(directory, base)

    def fresh() -> Path:
        shutil.rmtree(directory)
        shutil.copytree(base, directory)
        return directory

    def opened(path: Path) -> None:
        with PerCall(path, report=lambda text: None).transaction():
            pass

    seen = set()
    lines = lines_of(partial(opened, fresh()))
    assert any(name == upgrade.__file__ for name, _ in lines)
    for line, count in lines.items():
        kill_at(count, partial(opened, fresh()))
        seen.add(version_of(directory))
        assert is_upgraded(directory, statement), f"line {line}"
    assert seen == {version, VERSION}
