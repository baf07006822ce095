"""The high-water mark: how far the store has come, in a small file beside the database.

SQLite takes a cut WAL for a shorter one and an older copy of the database for the database. So each
transaction is counted here, after SQLite has committed it and before the call answers. A database
that is behind its mark has lost changes that were answered. The mark holds no reservation.

The file has one line of fixed length, which is overwritten in place and is not synced. A mark that
is behind, damaged or gone costs only this check. After a reboot the last transactions may be
missing for a good reason, so `synced` counts instead of `seq`.
"""

import os
import zlib
from pathlib import Path
from typing import NamedTuple

from base.files import write_at

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LENGTH = 256  # bytes
_FORMAT = "podfabric-mark-1"


class Progress(NamedTuple):
    """`seq` and `held` are the database's, in the boot `boot` and the store `store`.

    `synced` is the `seq` that is known to be on disk, `saved` that of the backup copy.
    """

    boot: str
    store: str
    seq: int
    held: int
    synced: int = 0
    saved: int = 0


class Watermark:
    """The open file of a mark, made if it is missing. The caller holds the store's lock."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(self._descriptor, 0o600)
            self.mark = _decode(os.pread(self._descriptor, _LENGTH, 0))
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, mark: Progress) -> None:
        """Replace the mark. Raises OSError."""
        if mark != self.mark:
            write_at(self._descriptor, _encode(mark), 0)
            self.mark = mark

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read(path: Path) -> Progress | None:
    """The mark in a file, None if there is none that can be read."""
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        return None


def boot_id() -> str:
    """The kernel's name for this boot (proc(5)). Raises OSError."""
    return _BOOT_ID.read_text().strip()


def _encode(mark: Progress) -> bytes:
    content = " ".join((_FORMAT, *map(str, mark))).encode()
    return (b"%08x %b" % (zlib.crc32(content), content)).ljust(_LENGTH - 1) + b"\n"


def _decode(line: bytes) -> Progress | None:
    checksum, _, content = line.rstrip().partition(b" ")
    if checksum != b"%08x" % zlib.crc32(content):
        return None
    words = content.decode().split(" ")
    if len(words) != 1 + len(Progress._fields) or words[0] != _FORMAT:
        return None
    boot, store, *numbers = words[1:]
    return Progress(boot, store, *map(int, numbers))
