"""The lessee's access to this node's store. Each method is one transaction.

The caller must have no transaction open. No method calls the API server.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from cni.spec.errors import CNIError, Code
from ipam.addresses import parse
from ipam.store.block_rows import Instance, LeasedBlock
from ipam.store.reservations import Reservation
from ipam.store.store_files import StoreFiles
from ipam.store.tables import Tables

Revision = Callable[[LeasedBlock], LeasedBlock]
"""Returns the changed row."""


class Surveyed(NamedTuple):
    block: LeasedBlock
    used: int


class Survey(NamedTuple):
    """The blocks of the store at one moment. `seq` is the number of the last transaction."""

    seq: int
    blocks: tuple[Surveyed, ...]


class BlockStore:
    """The rows of leased blocks. Every method may raise CNIError."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self._is_closed = False

    def close(self) -> None:
        """Refuse changes with CNIError 11, because another process leases for this node."""
        self._is_closed = True

    def seq(self) -> int:
        with self._files.transaction() as tables:
            return tables.meta.seq

    def blocks(self) -> dict[str, LeasedBlock]:
        with self._files.transaction() as tables:
            return {block.name: block for block in tables.blocks()}

    def survey(self) -> Survey:
        with self._files.transaction() as tables:
            blocks = tuple(Surveyed(block, _used(tables, block)) for block in tables.blocks())
            return Survey(tables.meta.seq, blocks)

    def holders(self, name: str) -> Mapping[int, Reservation]:
        with self._files.transaction() as tables:
            block = tables.block(name)
            return {} if block is None else _held(tables, block)

    def instance(self) -> Instance | None:
        """Returns `None` before the first lease."""
        with self._files.transaction() as tables:
            return tables.instance()

    def identify(self, machine: str) -> Instance:
        """The store's identity. A store copied from another machine gets a new identity, because
        the other machine holds the blocks. If the identity is new, rows with reservations become
        `lost`, and other rows are deleted."""
        with self._files.transaction() as tables:
            known = tables.instance()
            if known is not None and known.machine == machine:
                return known
            new = Instance(str(uuid.uuid4()), machine)
            with self._changing(tables):
                tables.put_instance(new)
                for block in list(tables.blocks()):
                    _lose(tables, block)
            return new

    def put(self, block: LeasedBlock) -> None:
        with self._files.transaction() as tables, self._changing(tables):
            tables.put_block(block)

    def revise(self, revisions: Mapping[tuple[str, str], Revision]) -> None:
        """Change the rows with these names and uids. Skips rows that are gone or `returning`."""
        with self._files.transaction() as tables:
            changed = []
            for (name, uid), revision in revisions.items():
                block = tables.block(name)
                if block is not None and block.uid == uid and block.state != "returning":
                    revised = revision(block)
                    if revised != block:
                        changed.append(revised)
            if changed:
                with self._changing(tables):
                    for block in changed:
                        tables.put_block(block)

    def serve(self, space: str, domain: str) -> dict[str, LeasedBlock] | None:
        """Add `domain` to the domains of all blocks in a space. Returns all rows, or `None` if a
        row was changed."""
        with self._files.transaction() as tables:
            blocks = {block.name: block for block in tables.blocks()}
            others = [
                block
                for block in blocks.values()
                if block.space == space and domain not in block.domains
            ]
            if others:
                with self._changing(tables):
                    for block in others:
                        domains = (*block.domains, domain)
                        tables.put_block(msgspec.structs.replace(block, domains=domains))
            return None if others else blocks

    def begin_return(self, name: str, uid: str) -> bool:
        """Mark a row as `returning`, so that no pod gets an address of the block. Returns False if
        a pod has an address."""
        with self._files.transaction() as tables:
            block = tables.block(name)
            if block is None or block.uid != uid or block.state == "lost":
                return False
            if _used(tables, block):
                return False
            with self._changing(tables):
                for stale in _held(tables, block).values() if block.sticky else ():
                    tables.drop(stale.domain, parse(stale.address))
                tables.put_block(msgspec.structs.replace(block, state="returning"))
            return True

    def forget(self, name: str, uid: str) -> None:
        """Delete the row of an ended lease, unless a pod holds an address of the block."""
        with self._gone(name, uid) as (tables, block):
            if block is not None and not _used(tables, block):
                with self._changing(tables):
                    tables.drop_block(name)

    def lose(self, name: str, uid: str) -> Mapping[int, Reservation]:
        """Delete an unused row, but mark a used row as `lost`. Returns the block's reservations."""
        with self._gone(name, uid) as (tables, block):
            if block is None:
                return {}
            with self._changing(tables):
                return _lose(tables, block)

    @contextmanager
    def _changing(self, tables: Tables) -> Iterator[None]:
        """Raises CNIError 11 after `close`."""
        if self._is_closed:
            raise CNIError(
                Code.TRY_AGAIN, "another agent leases blocks for this node: nothing was changed"
            )
        with tables.change():
            yield

    @contextmanager
    def _gone(self, name: str, uid: str) -> Iterator[tuple[Tables, LeasedBlock | None]]:
        with self._files.transaction() as tables:
            block = tables.block(name)
            yield tables, block if block is not None and block.uid == uid else None


def _lose(tables: Tables, block: LeasedBlock) -> Mapping[int, Reservation]:
    held = _held(tables, block)
    if held:
        tables.put_block(msgspec.structs.replace(block, state="lost"))
    else:
        tables.drop_block(block.name)
    return held


def _held(tables: Tables, block: LeasedBlock) -> Mapping[int, Reservation]:
    return {
        parse(reservation.address): reservation
        for domain in block.domains
        for reservation in tables.within(domain, block.interval)
    }


def _used(tables: Tables, block: LeasedBlock) -> int:
    """In a sticky block, only this boot's reservations count. The pod may be elsewhere now."""
    if block.sticky:
        return sum(held.boot == block.boot for held in _held(tables, block).values())
    return sum(
        min(run.last, block.last) - max(run.first, block.first) + 1
        for domain in block.domains
        for run in tables.runs_in(domain, block.interval)
    )
