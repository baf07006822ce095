"""Rows of leased blocks in the store: kept, checked, and gone once it is built again."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse
from ipam.store import repair
from ipam.store.block_rows import Instance, LeasedBlock
from ipam.store.database import DATABASE, VERSION
from ipam.store.repair import NodeFacts
from ipam.store.sqlite_store import SqliteStore
from ipam.store.store_files import StoreFiles
from ipam.store.tables import Tables
from tests.unit.ipam.calls import BOOT, NEXT_BOOT, error_of, owner, range_of, sets_of
from tests.unit.ipam.kills import fail

SETS = sets_of(range_of("10.0.0.0/24", domain="blue"))
INSTANCE = Instance("11111111-aaaa", "machine/uuid/node-a")


def block(index: int = 0) -> LeasedBlock:
    first = parse("10.0.0.0") + 16 * index
    return LeasedBlock(
        name=f"blue.10.0.0.{16 * index}-28",
        uid=f"uid-{index}",
        space="blue",
        pool="blue-10.0.0.0-24",
        domains=("blue", "blue 10.0.0.0/24"),
        first=first,
        last=first + 15,
        kept_out=(Interval(first, first), Interval(first + 5, first + 9)),
        max_offline=1800.0,
        boot=BOOT,
        confirmed=12.5,
    )


@contextmanager
def changed(directory: Path) -> Iterator[Tables]:
    files = StoreFiles(directory, report=lambda text: None, kept=False)
    with files.transaction() as tables, tables.change():
        yield tables


@pytest.fixture
def directory(memory_path: Path) -> Path:
    directory = memory_path / "ipam"
    SqliteStore(directory, BOOT).reserve(owner("c1"), SETS)
    with changed(directory) as tables:
        tables.put_instance(INSTANCE)
        for index in (0, 3):
            tables.put_block(block(index))
    return directory


def leases(directory: Path) -> tuple[Instance | None, list[LeasedBlock]]:
    with StoreFiles(directory, report=lambda text: None, kept=False).transaction() as tables:
        return tables.instance(), list(tables.blocks())


def test_what_is_written_is_read_again_by_name_domain_and_addresses(directory: Path) -> None:
    assert leases(directory) == (INSTANCE, [block(0), block(3)])
    with changed(directory) as tables:
        assert tables.block(block(3).name) == block(3)
        assert tables.block("blue.10.0.0.16-28") is None
        behind = Interval(block(3).last, block(3).last + 100)
        assert tables.blocks_in("blue", behind) == [block(3)]
        assert tables.blocks_in("green", block(3).interval) == []
        tables.drop_block(block(0).name)
    assert leases(directory) == (INSTANCE, [block(3)])


@pytest.mark.parametrize(
    ("confirmed", "boot", "state", "now", "expected"),
    [
        (100.0, BOOT, "usable", 100.0, True),
        (100.0, BOOT, "usable", 1899.9, True),
        (100.0, BOOT, "usable", 1900.0, False),
        (100.0, BOOT, "usable", 99.0, False),  # a clock that went back is of another boot
        (100.0, NEXT_BOOT, "usable", 100.0, False),
        (100.0, BOOT, "returning", 100.0, False),
        (100.0, BOOT, "lost", 100.0, False),
        (100.0, BOOT, "draining", 100.0, False),
        (100.0, BOOT, "unconfirmed", 100.0, False),
    ],
)
def test_a_block_is_confirmed_for_max_offline_of_its_boot(
    confirmed: float, boot: str, state: str, now: float, expected: bool
) -> None:
    row = msgspec.structs.replace(block(), confirmed=confirmed, boot=boot, state=state)
    assert row.is_confirmed(BOOT, now) is expected


@pytest.mark.parametrize(
    "damage",
    ["UPDATE block SET content = 'x'", "UPDATE block SET first = 'x'", "DROP TABLE block"],
)
def test_a_row_that_cannot_be_read_is_damage_to_fsck(directory: Path, damage: str) -> None:
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        database.execute(damage)
        database.commit()
    assert error_of(lambda: leases(directory)).code == Code.STORE_DAMAGED
    said: list[str] = []
    assert not repair.check(directory, said.append)
    assert said


def test_a_store_built_again_has_its_identity_and_no_block(directory: Path) -> None:
    """The API server knows the blocks; what a damaged row says of one counts for nothing."""
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        database.execute("UPDATE block SET content = 'x' WHERE name = ?", (block(0).name,))
        database.commit()
    repair.rebuild(directory, lambda line: None)
    assert leases(directory) == (INSTANCE, [])
    assert repair.check(directory, fail)


def test_a_store_of_another_version_stays_as_it_is(directory: Path) -> None:
    with closing(sqlite3.connect(directory / DATABASE)) as database:
        database.execute(f"PRAGMA user_version = {VERSION + 1}")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    for facts in (None, NodeFacts):
        store = SqliteStore(StoreFiles(directory, kept=False, facts=facts, report=fail), BOOT)
        with pytest.raises(CNIError, match="is of another podfabric") as caught:
            store.release(owner("c1").attachment)
        assert caught.value.code == Code.STORE_DAMAGED
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
