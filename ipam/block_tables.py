"""Queries for leased blocks, and the changes to their rows."""

import sqlite3
from collections.abc import Iterator
from functools import lru_cache

from ipam.addresses import Interval
from ipam.blocks import Instance, LeasedBlock
from ipam.schema import (
    BLOCK_COLUMNS,
    BLOCK_MARKS,
    block_of,
    block_row,
    key_of,
)


class BlockTables:
    """The part of `Tables` that `ipam.cluster` uses."""

    connection: sqlite3.Connection

    def blocks(self) -> Iterator[LeasedBlock]:
        """Every block, by name."""
        for row in self.connection.execute(f"SELECT {BLOCK_COLUMNS} FROM block ORDER BY name"):
            yield _seen(row)

    def blocks_in(self, domain: str, interval: Interval) -> list[LeasedBlock]:
        """The blocks that give out addresses of the interval in the domain, lowest first."""
        rows = self.connection.execute(
            f"SELECT {BLOCK_COLUMNS} FROM block WHERE first <= ? AND last >= ? ORDER BY first",
            (key_of(interval.last), key_of(interval.first)),
        )
        return [block for block in map(_seen, rows) if domain in block.domains]

    def block(self, name: str) -> LeasedBlock | None:
        """The block of that name."""
        row = self.connection.execute(
            f"SELECT {BLOCK_COLUMNS} FROM block WHERE name = ?", (name,)
        ).fetchone()
        return None if row is None else _seen(row)

    def unprobed(self) -> list[LeasedBlock]:
        """The blocks of which addresses are to be probed before their first use."""
        rows = self.connection.execute(
            f"SELECT {BLOCK_COLUMNS} FROM block WHERE unprobed != '[]' ORDER BY name"
        )
        return list(map(_seen, rows))

    def put_block(self, block: LeasedBlock) -> None:
        """Record a block, or what changed of it."""
        self.connection.execute(f"REPLACE INTO block VALUES ({BLOCK_MARKS})", block_row(block))

    def drop_block(self, name: str) -> None:
        """Forget a block."""
        self.connection.execute("DELETE FROM block WHERE name = ?", (name,))

    def instance(self) -> Instance | None:
        """Who leases the blocks; None before the first lease."""
        row = self.connection.execute("SELECT instance, machine FROM lessee").fetchone()
        return None if row is None else Instance(*row)

    def put_instance(self, instance: Instance) -> None:
        """Lease under this identity from here on."""
        self.connection.execute("REPLACE INTO lessee VALUES (1, ?, ?)", instance)


# Who holds the store's lock does not work a row out again.
_seen = lru_cache(1024)(block_of)
