"""The log of the store: every change, one line each, written before SQLite commits it.

SQLite has no checksums and loses its last commits with its WAL. The log tells both, and the
store can be rebuilt from it. A line is `<crc32, 8 hex digits> <JSON>`. The first line names
the store and the sequence number `base` that the log begins with; behind it come records: first
those of `base` itself, everything that was reserved then, after that one or more for each
transaction, numbered without gaps. `more` says that the transaction goes on in the next line.
"""

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from base.files import replacing
from ipam.store import Reservation

VERSION = 1
_BLOCK = 4096
_CHANGES_PER_LINE = 500

T = TypeVar("T", "Header", "Record")

Key = tuple[str, str]
"""Domain and address."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. `store` is the identity that the database carries too."""

    format: str = "podfabric address log"
    version: int = VERSION
    store: str
    base: int


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one transaction, or a part of it, reserved and released."""

    seq: int
    more: bool = False
    put: tuple[Reservation, ...] = ()
    drop: tuple[Key, ...] = ()


class Tail(NamedTuple):
    """The end of the log as seen from the database's sequence number.

    `last` is the last sequence number that can be read (-1: none), `records` those behind the
    database, oldest first, `end` where the readable part ends, `torn` whether more follows that
    was never completed, `problem` what cannot be read ("" if nothing), `unread_end` whether
    that is at the very end.
    """

    last: int
    records: tuple[Record, ...]
    end: int
    torn: bool
    problem: str
    unread_end: bool


class Log:
    """An open log. The caller holds the store's lock."""

    def __init__(self, path: Path) -> None:
        """Open an existing log; FileNotFoundError if there is none."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self.header = self._read_header()

    def close(self) -> None:
        """Give the file back."""
        os.close(self._descriptor)

    def reopen(self) -> None:
        """Go on with the file that has taken this one's place."""
        new = Log(self.path)
        os.close(self._descriptor)
        self._descriptor, self.header = new._descriptor, new.header

    def fileno(self) -> int:
        """The file's descriptor, for stat(2)."""
        return self._descriptor

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._descriptor).st_size

    def is_unused(self) -> bool:
        """Whether nothing was ever recorded: a header, or less than one record behind it."""
        if self.size == 0:
            return True
        if self.header is None or self.header.base != 0:
            return False
        tail = self.tail(0)
        return tail.last == 0 and not tail.problem

    def append(self, records: Sequence[Record]) -> None:
        """Write the records of one transaction. Raises OSError, with a part of them written."""
        content = memoryview(b"".join(_line(record) for record in records))
        while content:
            content = content[os.write(self._descriptor, content) :]

    def truncate(self, size: int) -> None:
        """Forget what is behind `size`."""
        os.ftruncate(self._descriptor, size)

    def tail(self, since: int) -> Tail:
        """What the log holds behind sequence number `since`, read from its end."""
        lines = self._lines_backwards()
        end, remainder = next(lines)
        torn, problem, unread_end = remainder != b"", "", False
        last, records = -1, list[Record]()
        for offset, line in lines:
            if offset == 0:
                last = last if last >= 0 or self.header is None else self.header.base
                break
            record = _decode(line, Record)
            if record is None:
                problem = problem or f"the line at byte {offset} of {self.path} cannot be read"
                unread_end = unread_end or last < 0
                continue
            if last < 0 and record.more:
                end, torn = offset, True
                continue
            last = max(last, record.seq)
            if record.seq <= since:
                break
            records.append(record)
        records.reverse()
        problem = problem or self._gap(since, records)
        if self.header is None:
            problem = problem or f"the first line of {self.path} cannot be read"
        return Tail(last, tuple(records), end, torn, problem, unread_end)

    def _gap(self, since: int, records: Sequence[Record]) -> str:
        if [one.seq for one in records] == [since + 1 + index for index in range(len(records))]:
            return ""
        return f"{self.path} has no record {since + 1}, it begins with {records[0].seq}"

    def _read_header(self) -> Header | None:
        line, newline, _ = os.pread(self._descriptor, _BLOCK, 0).partition(b"\n")
        return _decode(line, Header) if newline else None

    def _lines_backwards(self) -> Iterator[tuple[int, bytes]]:
        """(offset, line) from the end. The first is what follows the last newline."""
        start, rest, block = self.size, b"", _BLOCK
        while start > 0:
            step = min(block, start)
            start -= step
            block *= 2
            content = os.pread(self._descriptor, step, start) + rest
            rest, *lines = content.split(b"\n")
            offset = start + len(content)
            for line in reversed(lines):
                offset -= len(line)
                yield offset, line
                offset -= 1
        yield 0, rest


def records_of(seq: int, put: Sequence[Reservation] = (), drop: Sequence[Key] = ()) -> list[Record]:
    """One transaction as the records that follow sequence number `seq`."""
    step = _CHANGES_PER_LINE
    parts: list[tuple[Sequence[Reservation], Sequence[Key]]] = [
        *((put[index : index + step], ()) for index in range(0, len(put), step)),
        *(((), drop[index : index + step]) for index in range(0, len(drop), step)),
    ]
    if len(put) + len(drop) <= step:
        parts = [(put, drop)]
    return [
        Record(
            seq=seq + 1 + index,
            more=index < len(parts) - 1,
            put=tuple(part_put),
            drop=tuple(part_drop),
        )
        for index, (part_put, part_drop) in enumerate(parts)
    ]


def write_new(path: Path, header: Header, reservations: Iterable[Reservation]) -> None:
    """Replace the log by one that begins with these reservations, durably and in one step."""
    with replacing(path) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(_line(header))
        chunk: list[Reservation] = []
        for reservation in reservations:
            chunk.append(reservation)
            if len(chunk) == _CHANGES_PER_LINE:
                file.write(_line(Record(seq=header.base, put=tuple(chunk))))
                chunk.clear()
        if chunk:
            file.write(_line(Record(seq=header.base, put=tuple(chunk))))


def read_all(path: Path) -> Iterator[Header | Record | None]:
    """Every line from the beginning, the header first; None is one that cannot be read.

    A last line without an end was never written in full and is left out, as is all of a file
    that has no line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if line.endswith(b"\n"):
                content = line[:-1]
                yield _decode(content, Record) if number else _decode(content, Header)


def _line(one: Header | Record) -> bytes:
    content = msgspec.json.encode(one)
    return b"%08x %b\n" % (zlib.crc32(content), content)


def _decode(line: bytes, shape: type[T]) -> T | None:
    crc, _, content = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(content):
        return None
    try:
        return msgspec.json.decode(content, type=shape)
    except msgspec.MsgspecError:
        return None
