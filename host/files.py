"""Writing files that must survive a kill or a power cut at any moment."""

import os
from pathlib import Path


def write_atomically(
    path: Path, content: bytes, mode: int = 0o600, *, durable: bool = True
) -> None:
    """Replace `path` by `content`: a reader sees the old file or the new one, never a part.

    It survives a kill. If it is `durable` it survives a power cut, too, from when this returns:
    the directory entry is on disk. Else the old file may be back, or none, and half the waiting
    for the disk is saved. The caller holds a lock that makes it the only writer of `path`: the
    temporary file's name is fixed, so that what a killed writer leaves is overwritten by the
    next one.
    """
    temporary = _temporary(path)
    try:
        descriptor = _created(temporary, mode)
        try:
            os.fchmod(descriptor, mode)
            write_at(descriptor, content, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)  # noqa: PTH105 - a Path's own costs more than the call
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def write_at(descriptor: int, content: bytes, offset: int) -> None:
    """Write all of `content`. Raises OSError, with a part of it written."""
    left = memoryview(content)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def remove(path: Path) -> None:
    """Remove `path`, and what a killed writer left of it, durably; nothing there is fine."""
    if not path.parent.exists():
        return
    _temporary(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    sync_directory(path.parent)


def _created(path: Path, mode: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, flags, mode)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
