"""Checks the store of a node in full, and builds it again from everything that can be read.

In this order, and the first that names an owner for an address counts:

1. the rows of a database that has all changes which the mark counts;
2. the attachments' journals: what is attached now is worth more than an older copy;
3. the rows of an older or partly readable database, and of the backup copy;
4. addresses that the database marks as taken without a readable row, and addresses that the node's
   living network namespaces have: they are held for an unknown owner.

An address that is held for nothing costs less than one that two pods have. The files that were
there are kept as `*.damaged-<time>`.
"""

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from ipam import salvage, watermark
from ipam.addresses import Network, parse, parse_interface
from ipam.blocks import NO_LEASES, Leases
from ipam.recovery import (
    BACKUP,
    DATABASE,
    MARK,
    WAL,
    build,
    has_content,
    missing_changes,
    unused_aside,
)
from ipam.salvage import Contents, Key
from ipam.store import Reservation
from ipam.store_files import locked
from ipam.watermark import Progress

UNKNOWN = "unknown"
"""Network and container of a reservation whose owner is not known."""

_FILES = (DATABASE, WAL, BACKUP)

Say = Callable[[str], None]


class LivingAddress(NamedTuple):
    """An address that an interface in a living network namespace has."""

    address: str
    ifname: str
    namespace: str


class NodeFacts(msgspec.Struct, frozen=True):
    """What the node knows of addresses outside the store: attachments' journals and the kernel."""

    journal: tuple[Reservation, ...] = ()
    living: tuple[LivingAddress, ...] = ()


class _Files(NamedTuple):
    database: Contents
    backup: Contents
    mark: Progress | None

    @property
    def is_current(self) -> bool:
        """Whether the database has all changes which the mark counts."""
        meta = self.database.meta
        return meta is not None and missing_changes(meta, self.mark) is None

    @property
    def is_sound(self) -> bool:
        return self.database.problem is None and self.is_current

    @property
    def is_saved(self) -> bool:
        """Whether the backup copy is sound and has all changes."""
        meta, newest = self.backup.meta, self.database.meta
        return (
            self.backup.problem is None
            and meta is not None
            and (self.mark is not None or newest is not None)
            and missing_changes(meta, self.mark) is None
            and (newest is None or newest.store != meta.store or meta.seq >= newest.seq)
        )


def check(directory: Path, say: Say) -> bool:
    """Whether the store is sound. Changes nothing; `say` gets what is wrong."""
    with locked(directory):
        files = _read(directory)
        is_new = files.mark is None or files.mark.seq == 0
        if is_new and not any(has_content(directory / name) for name in _FILES):
            return True
    problem = _problem(files)
    if problem is not None:
        say(problem)
    return problem is None


def rebuild(
    directory: Path,
    say: Say,
    *,
    accept_loss: bool = False,
    facts: NodeFacts | None = None,
    boot: str = "",
) -> bool:
    """Build the store again. `boot` is that of reservations whose owner is unknown.

    Answers whether that was possible without loss, or with a loss that the caller accepts;
    otherwise nothing was changed.
    """
    facts = facts or NodeFacts()
    with locked(directory):
        files = _read(directory)
        merged = _Merged(say, boot or watermark.boot_id())
        merged.add_all(files, facts)
        lost = _lost(files, facts, merged.kept_living)
        if lost != 0 and not accept_loss:
            say(
                f"{'An unknown number' if lost is None else lost} of the reservations cannot be "
                "read anywhere: their addresses would be given out again. Nothing was changed. "
                "Drain the node, or compare with its pods, and run `podfabric ipam fsck "
                "--rebuild --accept-loss`"
            )
            return False
        _replace(directory, files, merged.reservations.values(), say)
    return True


def unreserved(
    living: Iterable[LivingAddress], held: Collection[Reservation]
) -> Iterator[tuple[LivingAddress, str, Network]]:
    """Living addresses without a reservation, with each domain and range that they lie in.

    Only ranges that a reservation is from are known.
    """
    ranges: set[tuple[str, Network]] = set()
    for domain, cidr in {(reservation.domain, reservation.range) for reservation in held}:
        network = parse_interface(cidr)[1]
        if network.prefix < 128:
            ranges.add((domain, network))
    keys = {(reservation.domain, reservation.address) for reservation in held}
    for living_address in living:
        address = parse(living_address.address)
        around = [(domain, network) for domain, network in sorted(ranges) if address in network]
        if not any((domain, living_address.address) in keys for domain, _ in around):
            for domain, network in around:
                yield living_address, domain, network


def _problem(files: _Files) -> str | None:
    if files.database.problem is not None or files.database.meta is None:
        return f"{DATABASE}: {files.database.problem}"
    return missing_changes(files.database.meta, files.mark)


class _Merged:
    """Collects reservations: the first for an address counts."""

    def __init__(self, say: Say, boot: str) -> None:
        self.reservations: dict[Key, Reservation] = {}
        self.kept_living: set[Key] = set()
        self._say = say
        self._boot = boot

    def add_all(self, files: _Files, facts: NodeFacts) -> None:
        """Add everything that is known, in the order of trust."""
        if files.is_current:
            self._add(DATABASE, files.database.rows.values())
        self._add("the attachments' journal", facts.journal)
        if not files.is_sound:
            self._add_copies(files)
        for domain, address in sorted(files.database.taken):
            if (domain, address) not in self.reservations:
                self._hold(domain, address, UNKNOWN, UNKNOWN, self._range_of(domain, address))
        for living, domain, network in list(unreserved(facts.living, self.reservations.values())):
            self._hold(domain, living.address, living.namespace, living.ifname, network)
            self.kept_living.add((domain, living.address))

    def _add_copies(self, files: _Files) -> None:
        """The database and the backup copy, the newer one first."""
        copies = [(DATABASE, files.database), (BACKUP, files.backup)]
        seqs = [-1 if copy.meta is None else copy.meta.seq for _, copy in copies]
        if files.database.meta is not None and seqs[1] > seqs[0]:
            copies.reverse()
        for name, copy in copies:
            if copy.problem is not None:
                self._say(f"{name}: {copy.problem}: {len(copy.rows)} reservations can be read")
            self._add(name, copy.rows.values())

    def _add(self, source: str, reservations: Iterable[Reservation]) -> None:
        added = 0
        for reservation in reservations:
            key = (reservation.domain, reservation.address)
            holder = self.reservations.setdefault(key, reservation)
            added += holder is reservation
            if holder.attachment != reservation.attachment:
                self._say(
                    f"{reservation.address}: held by {holder.holder}; {source} also has "
                    f"{reservation.holder}, which is left out"
                )
        if added:
            self._say(f"{source} gives {added} reservations")

    def _hold(self, domain: str, address: str, holder: str, ifname: str, network: Network) -> None:
        """Hold an address for an unknown owner, until the next boot or an operator's release."""
        self.reservations[(domain, address)] = Reservation(
            domain=domain,
            address=address,
            range=str(network),
            network=UNKNOWN,
            container_id=holder,
            ifname=ifname,
            boot=self._boot,
            since=int(time.time()),
            segment="",
        )
        where = "" if holder == UNKNOWN else f" on {ifname} in {holder}"
        self._say(
            f"{address} is in use{where}, and its owner is unknown: it is held until the node "
            f"starts again, or until `podfabric ipam release {address} --force`"
        )

    def _range_of(self, domain: str, address: str) -> Network:
        number = parse(address)
        for reservation in self.reservations.values():
            network = parse_interface(reservation.range)[1]
            if reservation.domain == domain and number in network:
                return network
        return Network(number, 128)


def _lost(files: _Files, facts: NodeFacts, living: Collection[Key]) -> int | None:
    """How many reservations of the store no source shows; None if that is not known.

    The backup copy does not count unless it has all changes: it may have addresses released since.
    """
    if files.is_sound or files.is_saved:
        return 0
    database = files.database
    keys = {(reservation.domain, reservation.address) for reservation in facts.journal}
    keys |= set(living)
    if database.meta is None or files.is_current:
        keys |= database.rows.keys() | database.taken
    if files.is_current and database.meta is not None:
        held = database.meta.held
    elif files.mark is not None:
        held = files.mark.held
    else:
        return None
    return max(0, held - len(keys))


def _replace(directory: Path, files: _Files, reservations: Iterable[Reservation], say: Say) -> None:
    """Write the store again. After a kill, the next call works or says to run fsck again.

    The backup copy comes first: without its WAL the former database may be older than the mark.
    """
    every = sorted(reservations, key=lambda held: (held.domain, parse(held.address)))
    metas = [contents.meta for contents in (files.database, files.backup) if contents.meta]
    stores = [] if files.mark is None else [files.mark.store]
    stores += [meta.store for meta in metas]
    seqs = [0 if files.mark is None else files.mark.seq, *(meta.seq for meta in metas)]
    store = stores[0] if stores else uuid.uuid4().hex
    for name in _FILES:
        file = directory / name
        if file.exists():
            aside = unused_aside(file)
            os.link(file, aside)
            say(f"kept {name} as {aside}")
    for name in (BACKUP, DATABASE):
        build(directory / name, store, max(seqs) + 1, every, _leases(files))
    say(f"wrote {len(every)} reservations to a new {DATABASE}")


def _leases(files: _Files) -> Leases:
    """The blocks of the database, or if it knows no instance, of the backup copy."""
    leases = (contents.leases.to_be_confirmed for contents in (files.database, files.backup))
    return next((known for known in leases if known.instance is not None), NO_LEASES)


def _read(directory: Path) -> _Files:
    """Read copies: SQLite writes to what it opens, and a check must not change the files."""
    with _copied(directory) as copy:
        return _Files(
            salvage.read(copy / DATABASE),
            salvage.read(copy / BACKUP),
            watermark.read(directory / MARK),
        )


@contextmanager
def _copied(directory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".fsck-", dir=directory) as name:
        copy = Path(name)
        for file in (DATABASE, WAL, BACKUP):
            if (directory / file).exists():
                shutil.copyfile(directory / file, copy / file)
        yield copy
