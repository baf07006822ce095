"""The log that earlier versions kept beside the database: how far it goes, for the upgrade.

Those versions wrote a change to `reservations.log` first and committed it then, so a log that is
ahead of the database has reservations that the database lacks. A line is `<crc32> <JSON>`; the
first names the store.
"""

import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from base import decoding
from ipam.database import StoreMeta

NAME = "reservations.log"


class _LogLine(msgspec.Struct):
    """The first line has `store` and `base`, every other one `seq`."""

    store: str = ""
    base: int = 0
    seq: int = -1


class Reach(NamedTuple):
    """How far a log goes."""

    store: str
    seq: int  # of its last change


def reach_of(path: Path) -> Reach | None:
    """How far the log at `path` goes; None if it cannot be read, or without a log. OSError."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    first = _decoded(lines[0]) if lines else None
    if first is None:
        return None
    # The last line may be torn: such a transaction was not answered.
    decoded = (_decoded(line) for line in reversed(lines[1:]))
    last = next((line.seq for line in decoded if line is not None), -1)
    return Reach(first.store, max(first.base, last))


def missing_from(meta: StoreMeta | None, path: Path) -> str | None:
    """Which changes of the log at `path` a database lacks; None if it has all, or without a log.

    `meta` is None for a missing database. Raises OSError.
    """
    log = reach_of(path)
    if log is None:
        is_there = path.exists() and path.stat().st_size > 0
        return f"{path.name} of an earlier version cannot be read" if is_there else None
    store, reached = log
    if meta is None:
        return f"{path.name} of an earlier version has {reached} changes" if reached > 0 else None
    if meta.store != store:
        return f"{path.name} of an earlier version is of another store"
    if meta.seq < reached:
        return f"{path.name} of an earlier version has {reached} changes, the database {meta.seq}"
    return None


def _decoded(line: bytes) -> _LogLine | None:
    checksum, _, document = line.partition(b" ")
    if checksum != f"{zlib.crc32(document):08x}".encode():
        return None
    try:
        return decoding.decode(document, _LogLine)
    except msgspec.MsgspecError:
        return None
