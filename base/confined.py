"""Reads files that a tenant names, below directories that the administrator allows.

Each component of the path is opened relative to the previous one, never through a symbolic link
(openat(2), O_NOFOLLOW). So a tenant gains nothing by replacing a directory with a link. An O_PATH
descriptor shows the type of the file before the file is opened. Opening a pipe can block for ever,
and opening a device can start the device.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_OPENED = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class UnsafeFile(Exception):
    """A file that must not be read. The text has only the reason, without the file's name."""


def is_below(directories: Iterable[str], path: str) -> bool:
    """Whether the text `path` is below one of the directories. Does not look at the file system."""
    return _split(directories, path) is not None


def read(directories: Iterable[str], path: str, most: int) -> bytes:
    """Read a regular file of at most `most` bytes. Raises UnsafeFile, OSError."""
    with _parent(directories, path) as (parent, name):
        descriptor = _open(parent, name)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UnsafeFile(f"has more than {most} bytes")
    return content


def _split(directories: Iterable[str], path: str) -> tuple[str, list[str]] | None:
    names = _names(path)
    if names is None:
        return None
    for directory in directories:
        base = _names(directory)
        if base is not None and len(names) > len(base) and names[: len(base)] == base:
            return directory, names[len(base) :]
    return None


def _names(path: str) -> list[str] | None:
    """The components of an absolute path, or `None` if the path is invalid or has ".."."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return None
    names = [name for name in path.split("/") if name not in ("", ".")]
    return None if path[:1] != "/" or ".." in names or b"\0" in encoded else names


@contextmanager
def _parent(directories: Iterable[str], path: str) -> Iterator[tuple[int, str]]:
    split = _split(directories, path)
    if split is None:
        raise UnsafeFile("is not below an allowed directory")
    directory, names = split
    with ExitStack() as opened:
        # The administrator's directory may have links in its path.
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        for name in names[:-1]:
            descriptor = os.open(name, _STEP, dir_fd=descriptor)
            opened.callback(os.close, descriptor)
            _require(descriptor, stat.S_ISDIR, f'is below "{name}", which is not a directory')
        yield descriptor, names[-1]


def _open(parent: int, name: str) -> int:
    handle = os.open(name, _STEP, dir_fd=parent)
    try:
        _require(handle, stat.S_ISREG, "is not a regular file")
        # Opened through the handle, because the name may belong to another file by now.
        return os.open(f"/proc/self/fd/{handle}", _OPENED)
    finally:
        os.close(handle)


def _require(descriptor: int, kind: Callable[[int], bool], otherwise: str) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISLNK(mode):
        raise UnsafeFile("is a symbolic link, or below one")
    if not kind(mode):
        raise UnsafeFile(otherwise)
