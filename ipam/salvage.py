"""What can be read of a database: everything if it is sound, else every row that is readable."""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from ipam.addresses import parse, text
from ipam.blocks import NO_LEASES, Leases
from ipam.database import StoreMeta, connect
from ipam.recovery import has_content, verify
from ipam.schema import (
    BLOCK_COLUMNS,
    COLUMNS,
    UNREADABLE,
    Damage,
    ForeignWal,
    OtherVersion,
    address_of,
    block_of,
    key_of,
    lessee_of,
    meta_of,
    reservation_of,
    run_of,
)
from ipam.store import Reservation
from ipam.tables import Tables

Key = tuple[str, str]
"""Domain and address."""

_MOST_ADDRESSES = 1_000_000  # of a run, which are looked up one by one
_ORDERS = ("ASC", "DESC")


class Contents(msgspec.Struct):
    """What a database holds.

    `problem` is None if all of it is sound, and `meta` if it cannot be read. `taken` has the
    addresses that are taken by a run and have no readable row.
    """

    problem: str | None = None
    meta: StoreMeta | None = None
    rows: dict[Key, Reservation] = msgspec.field(default_factory=dict)
    taken: set[Key] = msgspec.field(default_factory=set)
    leases: Leases = NO_LEASES


def read(path: Path) -> Contents:
    """Read a database that no other process uses. SQLite may write to it. Raises OtherVersion."""
    if not has_content(path):
        return Contents("is empty" if path.exists() else "is missing")
    try:
        with closing(Tables(path)) as tables:
            verify(tables)
            leases = Leases(tables.instance(), tuple(tables.blocks()))
            return Contents(meta=tables.meta, rows=_by_key(tables.all()), leases=leases)
    except OtherVersion:
        raise  # a rebuilt store would lack what only that program knows
    except ForeignWal as error:
        # Together the two are a mixture of old and new rows. The file alone is an older copy.
        path.with_name(f"{path.name}-wal").unlink()
        return msgspec.structs.replace(read(path), problem=str(error))
    except UNREADABLE as error:
        return _salvaged(path, str(error))


def _salvaged(path: Path, problem: str) -> Contents:
    contents = Contents(problem)
    try:
        connection = connect(path)
    except UNREADABLE:
        return contents
    with closing(connection):
        with suppress(*UNREADABLE):
            contents.meta = StoreMeta(*meta_of(connection)[1:])
        salvage = _Salvage(connection)
        contents.rows = _by_key(salvage.rows())
        keys = salvage.taken()
        for key in (keys | salvage.indexed()) - contents.rows.keys():
            contents.rows.update(_by_key(salvage.row(*key)))
        contents.taken = keys - contents.rows.keys()
        contents.leases = salvage.leases()
    return contents


class _Salvage:
    """Reads a damaged database. A page that cannot be read ends a walk, so each has two ends."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self) -> Iterator[Reservation]:
        """The reservations that the table's own tree leads to."""
        for order in _ORDERS:
            yield from self._decoded(
                f"SELECT {COLUMNS}, crc FROM reservation ORDER BY domain {order}, address {order}"
            )

    def row(self, domain: str, address: str) -> Iterator[Reservation]:
        """The reservation of an address, if it can be read."""
        key = key_of(parse(address))
        yield from self._decoded(
            f"SELECT {COLUMNS}, crc FROM reservation WHERE domain = ? AND address = ?",
            domain,
            key,
        )

    def indexed(self) -> set[Key]:
        """The keys in those indexes that have all rows. They carry no checksum."""
        keys = set()
        for index, column in (("by_attachment", "network"), ("by_boot", "boot")):
            for order in _ORDERS:
                for domain, address in self._walked(
                    f"SELECT domain, address FROM reservation INDEXED BY {index} "
                    f"ORDER BY {column} {order}"
                ):
                    with suppress(Damage):
                        keys.add((str(domain), text(address_of(address))))
        return keys

    def taken(self) -> set[Key]:
        """The addresses of all runs that can be read."""
        keys = set()
        for order in _ORDERS:
            for row in self._walked(
                f"SELECT domain, first, last, crc FROM run ORDER BY domain {order}, first {order}"
            ):
                with suppress(Damage):
                    run = run_of(row)
                    last = min(run.last, run.first + _MOST_ADDRESSES)
                    keys |= {(row[0], text(address)) for address in range(run.first, last + 1)}
        return keys

    def leases(self) -> Leases:
        """The blocks that can be read. The API server knows of the others."""
        instances, blocks = [], {}
        for row in self._walked("SELECT instance, machine, crc FROM lessee"):
            with suppress(Damage):
                instances.append(lessee_of(row))
        for order in _ORDERS:
            for row in self._walked(
                f"SELECT {BLOCK_COLUMNS}, crc FROM block ORDER BY name {order}"
            ):
                with suppress(Damage):
                    block = block_of(row)
                    blocks[block.name] = block
        return Leases(instances[0] if instances else None, tuple(blocks.values()))

    def _decoded(self, statement: str, *values: object) -> Iterator[Reservation]:
        for row in self._walked(statement, *values):
            with suppress(Damage):
                yield reservation_of(row)

    def _walked(self, statement: str, *values: object) -> Iterator[tuple[Any, ...]]:
        with suppress(*UNREADABLE):
            yield from self._connection.execute(statement, values)


def _by_key(reservations: Iterable[Reservation]) -> dict[Key, Reservation]:
    return {(reservation.domain, reservation.address): reservation for reservation in reservations}
