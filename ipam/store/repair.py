"""Checks the store of a node, and builds a damaged store again.

A new store gets its reservations from the journal of attachments. If an interface has an address
that the journal lacks, no pod gets this address (`AddressesInUse`). Only the store's identity and
the lessee are read from the damaged file. If the lessee is readable, the blocks come back from the
API server (`leases.confirmation`). The damaged files are kept as `*.damaged-<time>`.
"""

import os
import sqlite3
import time
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from base.files import sync_directory
from cni.spec.errors import CNIError
from ipam.addresses import parse, parse_interface
from ipam.ranges import Range
from ipam.store.block_rows import Instance
from ipam.store.database import (
    BESIDE,
    DATABASE,
    UNREADABLE,
    WAL,
    StoreMeta,
    connect,
    create,
    has_content,
    remove,
)
from ipam.store.reservations import Reservation, unnamed
from ipam.store.snapshot import Noted, StoreLock, locked, snapshot
from ipam.store.tables import Tables

T = TypeVar("T")
Say = Callable[[str], None]


class LivingAddress(NamedTuple):
    """An interface's address in a network namespace. `namespace` is the path of the namespace file,
    which has `inode`."""

    address: str
    ifname: str
    namespace: str
    inode: int = 0

    @property
    def lasts(self) -> bool:
        try:
            return os.stat(self.namespace).st_ino == self.inode  # noqa: PTH116 - cheaper
        except OSError:
            return False


class NodeFacts(msgspec.Struct, frozen=True):
    """The addresses of this node's pods. `journal` has the addresses of attachments, `living` the
    addresses of interfaces. `begun` has the start times (since 1970) of ADDs that are not in the
    journal yet. `unseen` names the attachments whose interfaces could not be read."""

    boot: str = ""
    journal: tuple[Reservation, ...] = ()
    living: tuple[LivingAddress, ...] = ()
    begun: tuple[float, ...] = ()
    unseen: tuple[str, ...] = ()


FactsOf = Callable[[], NodeFacts]
"""Reads the facts of the node."""


class AddressesInUse:
    """Addresses that interfaces have but no attachment reserved. No pod gets them."""

    def __init__(self, found: Iterable[LivingAddress] = ()) -> None:
        every = sorted((parse(each.address), each) for each in found)
        self.addresses = [address for address, _ in every]
        self._found = [each for _, each in every]

    def within(self, range_: Range) -> Iterator[LivingAddress]:
        """The addresses that the range would hand out."""
        first = bisect_left(self.addresses, range_.first)
        last = bisect_right(self.addresses, range_.last)
        for address, each in zip(self.addresses[first:last], self._found[first:last], strict=True):
            if range_.allows(address):
                yield each


_NO_FACTS = NodeFacts()


def check(directory: Path, say: Say, facts: NodeFacts = _NO_FACTS) -> bool:
    """Whether the store is undamaged and has all addresses of the journal. Changes nothing, and
    delays no call. Passes each problem to `say`."""
    try:
        with snapshot(directory) as tables:
            if tables is not None:
                tables.verify()
            missing = facts.journal if tables is None else absent(tables, facts)
            free = [] if tables is None else _in_ranges(tables, unreserved(tables, facts))
    except CNIError as error:
        say(error.message)
        return False
    for entry in missing:
        say(f"{entry.address} of {entry.holder} is in the journal but not in the store")
    for living in free:
        say(
            f"{living.address} on {living.ifname} in {living.namespace} is in a range but not "
            "reserved: if the interface is on the same link, exclude the address, or run "
            "`podfabric ipam fsck --rebuild` to keep it from pods"
        )
    return not missing


def rebuild(directory: Path, say: Say) -> None:
    """Set the store's files aside. The next opening fills a new store. Raises CNIError 5 or 11."""
    with locked(directory) as lock:
        replace(directory, lock, say)


def replace(directory: Path, lock: StoreLock, say: Say) -> None:
    """Set the store's files aside, and make an empty database for the same lessee. The caller holds
    the lock, and has no file open. A kill leaves the old or the new files."""
    lock.note(lock.noted()._replace(lost=True))  # for the next process after a kill
    meta, lessee = None, None
    if has_content(directory / DATABASE) or has_content(directory / WAL):
        aside = _unused_aside(directory / DATABASE)
        for name, kept in ((DATABASE, aside), (WAL, aside.with_name(f"{aside.name}-wal"))):
            if (directory / name).exists():
                os.link(directory / name, kept)
                say(f"address store: kept {name} as {kept}")
        meta, lessee = _identity(aside)
    meta = StoreMeta(meta.store, meta.seq + 1) if meta else new_store()
    build(directory / DATABASE, meta, lessee)
    lock.note(Noted(meta.seq, lost=True))
    say("address store: built again")


def new_store() -> StoreMeta:
    return StoreMeta(uuid.uuid4().hex, 0)


def build(database: Path, meta: StoreMeta, lessee: Instance | None = None) -> None:
    """Replace the database by an empty database in one step."""
    temporary = database.with_name(f"{database.name}.new")
    remove(temporary)
    try:
        create(temporary, meta, lessee)
        temporary.chmod(0o600)
        # SQLite would apply them to the new database.
        for suffix in BESIDE:
            database.with_name(f"{database.name}{suffix}").unlink(missing_ok=True)
        temporary.replace(database)
    except BaseException:
        with suppress(OSError):  # it takes room on a full disk
            remove(temporary)
        raise
    sync_directory(database.parent)


def reconcile(tables: Tables, facts: NodeFacts, *, lost: bool = False) -> None:
    """Add the journal's reservations that the store lacks. After a loss, the API server must
    confirm all blocks again, because a lease may have ended."""
    missing = absent(tables, facts)
    if missing or lost:
        with tables.change():
            for reservation in missing:
                tables.put(reservation)
            for block in list(tables.blocks()):
                tables.put_block(msgspec.structs.replace(block, boot="", confirmed=0.0))


def absent(tables: Tables, facts: NodeFacts) -> list[Reservation]:
    """The journal's reservations that the store lacks. If an address has two reservations, only the
    one of this boot counts."""
    missing: dict[tuple[str, str], Reservation] = {}
    for entry in sorted(facts.journal, key=lambda entry: entry.boot == facts.boot):
        attachment = entry.attachment
        held = (*tables.of_attachment(attachment), *tables.of_attachment(unnamed(attachment)))
        other = tables.at(entry.domain, parse(entry.address))
        is_alive = other is not None and other.boot == facts.boot != entry.boot
        if entry.address not in {each.address for each in held} and not is_alive:
            missing[entry.domain, entry.address] = entry
    return list(missing.values())


def unreserved(tables: Tables, facts: NodeFacts) -> list[LivingAddress]:
    reserved = tables.addresses() if facts.living else set()
    return [each for each in facts.living if parse(each.address) not in reserved]


def _in_ranges(tables: Tables, living: Iterable[LivingAddress]) -> list[LivingAddress]:
    """The addresses that lie in a range with reservations."""
    ranges = [parse_interface(cidr)[1] for _, cidr in tables.ranges()]
    networks = [network for network in ranges if network.prefix < 128]
    return [each for each in living if any(parse(each.address) in network for network in networks)]


def _identity(path: Path) -> tuple[StoreMeta | None, Instance | None]:
    """The caller is the only user of the damaged database."""
    try:
        connection = connect(path)
    except UNREADABLE:
        return None, None
    try:
        meta = _row(connection, "SELECT store, seq FROM meta", StoreMeta)
        return meta, _row(connection, "SELECT instance, machine FROM lessee", Instance)
    finally:
        connection.interrupt()  # or the close would write the WAL back
        connection.close()


def _row(connection: sqlite3.Connection, statement: str, shape: type[T]) -> T | None:
    """Returns `None` if the row cannot be read."""
    try:
        return msgspec.convert(connection.execute(statement).fetchone(), shape)
    except (*UNREADABLE, msgspec.ValidationError):
        return None


def _unused_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    first = path.with_name(f"{path.name}.damaged-{stamp}")
    candidates = (first.with_name(f"{first.name}.{number}") for number in range(1, 1000))
    return next(each for each in (first, *candidates) if not each.exists())
