"""Queries for what domains hold on one link. They read as little of each row as a search needs."""

import sqlite3
from collections.abc import Iterator
from itertools import chain

from ipam.addresses import Interval
from ipam.others import HeldAddress
from ipam.schema import COLUMNS, address_of, key_of, reservation_of
from ipam.store import Reservation


class DomainQueries:
    """The part of `Tables` that `ipam.others` reads."""

    connection: sqlite3.Connection

    def is_only(self, domain: str) -> bool:
        """Whether no other domain holds an address."""
        ((others,),) = self.connection.execute(
            "SELECT EXISTS (SELECT 1 FROM run WHERE domain < ?1) "
            "OR EXISTS (SELECT 1 FROM run WHERE domain > ?1)",
            (domain,),
        ).fetchall()
        return not others

    def on_segment(self, segment: str, address: int) -> Iterator[HeldAddress]:
        """What any domain holds on a segment, "" for an unknown one, from `address` on."""
        for key, *rest in self.connection.execute(
            "SELECT address, domain, range, boot FROM reservation INDEXED BY by_segment "
            "WHERE segment = ? AND segment != '' AND address >= ? ORDER BY address",
            (segment, key_of(address)),
        ):
            yield HeldAddress(address_of(key), *rest)

    def in_domain(self, domain: str, address: int) -> Iterator[HeldAddress]:
        """What the domain holds from `address` on, lowest first."""
        for key, *rest in self.connection.execute(
            "SELECT address, domain, range, boot FROM reservation "
            "WHERE domain = ? AND address >= ? ORDER BY address",
            (domain, key_of(address)),
        ):
            yield HeldAddress(address_of(key), *rest)

    def of_others(
        self, domain: str, address: int, segment: str, beside: str
    ) -> Iterator[Reservation]:
        """Who holds `address` on `segment` in another domain, and in `beside`."""
        select = f"SELECT {COLUMNS} FROM reservation"
        on_segment = self.connection.execute(
            f"{select} INDEXED BY by_segment WHERE segment = ? AND segment != '' "
            "AND address = ? AND domain NOT IN (?, ?)",
            (segment, key_of(address), domain, beside),
        )
        of_beside = self.connection.execute(
            f"{select} WHERE domain = ? AND address = ?", (beside, key_of(address))
        )
        for row in chain(on_segment, of_beside):
            yield reservation_of(row)

    def is_used(self, domain: str, interval: Interval, segment: str, network: str) -> bool:
        """Whether another network and domain hold some of `interval` on `segment`."""
        ((used,),) = self.connection.execute(
            "SELECT EXISTS (SELECT 1 FROM reservation INDEXED BY by_segment WHERE segment = ? "
            "AND segment != '' AND address BETWEEN ? AND ? AND domain != ? AND network != ?)",
            (segment, key_of(interval.first), key_of(interval.last), domain, network),
        ).fetchall()
        return bool(used)
