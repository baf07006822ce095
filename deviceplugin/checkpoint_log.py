"""The checkpoint's log: what was granted since the checkpoint was last written whole.

A whole checkpoint is a new file, its name and their fsyncs; a line of the log is one write to room
that is there already, which a kill of the writer does not undo. The disk has it when `sync`
returns. A line is an allocation as the checkpoint has it; zeros follow the last one. Every whole
checkpoint names a new, empty log.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from base.files import write_at

ROOM = 256 * 1024  # bytes: some 500 allocations of an HCA with one port

_NAMES = "checkpoint.*.log"


class Log:
    """A log to be written to, by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = 0

    @classmethod
    def create(cls, directory: Path) -> "Log":
        """An empty one, named by no checkpoint yet. It is on disk but for its name. OSError."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"checkpoint.{os.urandom(4).hex()}.log"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Written, not only set apart: to write where nothing was ever written costs more.
            write_at(descriptor, bytes(ROOM), 0)
            os.fsync(descriptor)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        return cls(path)

    @property
    def used(self) -> bool:
        """Whether it has a line."""
        return self._end > 0

    def append(self, allocations: Iterable[bytes]) -> bool:
        """Add encoded allocations, for any reader from now on. False if there is no room for them.

        Raises OSError: then its end is not known, and nothing more may be added.
        """
        lines = b"".join(one + b"\n" for one in allocations)
        if self._end + len(lines) > ROOM:
            return False
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_at(descriptor, lines, self._end)
        except OSError:
            with suppress(OSError):
                write_at(descriptor, bytes(len(lines)), self._end)
            raise
        finally:
            os.close(descriptor)
        self._end += len(lines)
        return True

    def sync(self) -> None:
        """What was added before is on disk when this returns. Any thread may call it. OSError."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def lines(path: Path) -> bytes:
    """Its whole lines. One that was not written to its end was never answered. Raises OSError."""
    written, _, _ = path.read_bytes().partition(b"\0")
    return written[: written.rfind(b"\n") + 1]


def remove_others(directory: Path, kept: Path) -> None:
    """Remove every log but that. Raises OSError."""
    for path in directory.glob(_NAMES):
        if path != kept:
            path.unlink(missing_ok=True)
