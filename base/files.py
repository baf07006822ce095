"""Writes files that must survive a kill or a power cut at any moment."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_PART = 64 << 10  # bytes
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_AT_FDCWD = -100  # <fcntl.h>
_RENAME_EXCHANGE = 2  # <linux/fs.h>


def write_atomically(
    path: Path | str, content: bytes, mode: int = 0o600, *, durable: bool = True
) -> None:
    """Replace the file at `path` by `content`. Raises OSError, which names the file.

    A reader sees the old file or the new one, never a part. If `durable`, the new file survives a
    power cut. Otherwise a power cut may restore the old file or leave no file. After such a power
    cut the temporary file has the new content (see `recover`).

    The caller must be the only writer of `path`. The next writer overwrites the temporary file of a
    killed writer.
    """
    temporary = _temporary(path)
    descriptor = directory = -1
    try:
        descriptor = create(temporary, _NEW, mode)
        # Opened before the rename: if no descriptor is left, the old file stays.
        directory = os.open(os.path.dirname(path) or ".", _DIRECTORY) if durable else -1  # noqa: PTH120
        os.fchmod(descriptor, mode)
        write_at(descriptor, content, 0)
        os.fsync(descriptor)
        os.replace(temporary, path)  # noqa: PTH105 - Path.replace costs more than the call
        if durable:
            os.fsync(directory)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        if isinstance(error, OSError) and error.filename is None:  # of a descriptor
            error.filename = str(path)
        raise
    finally:
        for opened in (descriptor, directory):
            if opened >= 0:
                os.close(opened)


def recover(path: Path | str, is_whole: Callable[[bytes], bool]) -> None:
    """Finish an interrupted `write_atomically`, before the next writer begins. Raises OSError.

    The temporary file replaces the file if `is_whole` accepts its content. Otherwise the temporary
    file is removed. The file system must keep the order of creations and renames. An fsync of a new
    file must also save the file's name. ext4, XFS and btrfs do both.
    """
    temporary = _temporary(path)
    try:
        content = read(temporary)
    except FileNotFoundError:
        return
    if not is_whole(content):
        os.unlink(temporary)  # noqa: PTH108
        return
    descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)  # the writer may have been killed before its fsync
    finally:
        os.close(descriptor)
    os.replace(temporary, path)  # noqa: PTH105
    sync_directory(Path(path).parent)


def exchange(one: Path, other: Path) -> None:
    """Exchange the names of two files of one file system, in one step. Raises OSError.

    The caller must call `sync_directory` for the directories.
    """
    import ctypes  # few processes need it

    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))


def write_at(descriptor: int, content: bytes, offset: int) -> None:
    """Write all of `content` at `offset`. After an OSError, a part of it may be written."""
    left = memoryview(content)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def append(path: str, content: bytes) -> bool:
    """Append `content` to a file. Returns False if the file does not exist.

    A kill after the return loses nothing. An earlier kill or a power cut may leave a part of
    `content` or zeros at the end of the file. Raises OSError, which names the file. After an
    OSError the file has its old size.
    """
    try:
        descriptor = os.open(path, _APPENDING)
    except FileNotFoundError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(descriptor, left) :]
        except BaseException as error:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            if isinstance(error, OSError):
                error.filename = path
            raise
    finally:
        os.close(descriptor)
    return True


def read(path: str) -> bytes:
    """Read a file, at half the cost of Path.read_bytes. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, _PART):  # in /proc, a short read is not the end
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def version(file: Path | str | int) -> tuple[int, ...]:
    """Numbers that change when the file changes. Returns only the errno if stat(2) fails."""
    try:
        status = os.stat(file)  # noqa: PTH116 - of a descriptor, too
    except OSError as error:
        return (error.errno or 0,)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def remove(path: Path | str, *, durable: bool = True) -> None:
    """Remove the file at `path`, and the temporary file of a killed writer, if they exist.

    If not `durable`, a power cut may undo the removal.
    """
    try:
        directory = os.open(os.path.dirname(path), _DIRECTORY) if durable else -1  # noqa: PTH120
    except FileNotFoundError:
        return
    try:
        for name in (_temporary(path), path):
            with suppress(FileNotFoundError):
                os.unlink(name)  # noqa: PTH108 - a Path's own costs more than the call
        if durable:
            os.fsync(directory)
    finally:
        if durable:
            os.close(directory)


def create(path: str, flags: int, mode: int) -> int:
    """Open the file. Creates missing directories above it (0700)."""
    try:
        return os.open(path, flags, mode)
    except FileNotFoundError:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, flags, mode)


def _temporary(path: Path | str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.tmp")  # noqa: PTH118 - a Path costs more


def sync_directory(path: Path) -> None:
    """Write the directory's list of names to disk (fsync)."""
    descriptor = os.open(path, _DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
