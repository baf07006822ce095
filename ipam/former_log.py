"""The log that earlier versions kept beside the database: how far it goes, for the upgrade.

Those versions wrote a change to `reservations.log` first and committed it then, so a log that is
ahead of the database has reservations that the database lacks. A line is `<crc32> <JSON>`; the
first names the store.
"""

import zlib
from pathlib import Path

import msgspec

from ipam.database import Meta

NAME = "reservations.log"


class _LogLine(msgspec.Struct):
    """The first line has `store` and `base`, every other one `seq`."""

    store: str = ""
    base: int = 0
    seq: int = -1


def missing_from(meta: Meta | None, path: Path) -> str | None:
    """Which changes of the log at `path` a database lacks; None if it has all, or without a log.

    `meta` is None for a missing database. Raises OSError.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    if not lines:
        return None
    first = _decoded(lines[0])
    if first is None:
        return f"{path.name} of an earlier version cannot be read"
    # The last line may be torn: such a transaction was not answered.
    decoded = (_decoded(line) for line in reversed(lines[1:]))
    reached = max(first.base, next((line.seq for line in decoded if line is not None), -1))
    if meta is None:
        return f"{path.name} of an earlier version has {reached} changes" if reached > 0 else None
    if meta.store != first.store:
        return f"{path.name} of an earlier version is of another store"
    if meta.seq < reached:
        return f"{path.name} of an earlier version has {reached} changes, the database {meta.seq}"
    return None


def _decoded(line: bytes) -> _LogLine | None:
    checksum, _, document = line.partition(b" ")
    if checksum != f"{zlib.crc32(document):08x}".encode():
        return None
    try:
        return msgspec.json.decode(document, type=_LogLine)
    except msgspec.MsgspecError:
        return None
