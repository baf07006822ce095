"""Files that someone less trusted names, below directories that the administrator allows.

The path is followed by hand: each component is opened below the one before it, never through a
symbolic link (openat(2), O_NOFOLLOW). So a directory that becomes a link meanwhile leads nowhere
else. What stands at the end is looked at before it is opened (O_PATH): only to open a pipe can
wait for ever, and only to open a device can set it to work.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_OPENED = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class UnsafeFile(Exception):
    """The file is not one to be opened. The text says why, in words that follow its name."""


def is_below(directories: Iterable[str], path: str) -> bool:
    """Whether the text of `path` leads below one of them. Nothing on disk is looked at."""
    return _placed(directories, path) is not None


def read(directories: Iterable[str], path: str, most: int) -> bytes:
    """A regular file of at most `most` bytes. Raises Unfit, OSError."""
    with _parent(directories, path) as (parent, name):
        descriptor = _reopened(parent, name, os.O_RDONLY)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UnsafeFile(f"has more than {most} bytes")
    return content


def append(directories: Iterable[str], path: str, content: bytes, most: int) -> None:
    """Add to a regular file with one name, which is made (0600) if there is none.

    Raises Unfit, also where the file would have more than `most` bytes, and OSError.
    """
    with _parent(directories, path) as (parent, name):
        descriptor = _made(parent, name)
        if descriptor is None:
            descriptor = _reopened(parent, name, os.O_WRONLY | os.O_APPEND)
    with os.fdopen(descriptor, "ab", buffering=0) as file:
        status = os.fstat(descriptor)
        if status.st_nlink > 1:  # the other name may be a file that others trust
            raise UnsafeFile("has a second name (a hard link)")
        if status.st_size + len(content) > most:
            raise UnsafeFile(f"has reached {most} bytes: nothing is added until it is moved away")
        file.write(content)


def _placed(directories: Iterable[str], path: str) -> tuple[str, list[str]] | None:
    """The allowed directory that `path` is below, and the names from there on."""
    names = _names(path)
    if names is None:
        return None
    for directory in directories:
        base = _names(directory)
        if base is not None and len(names) > len(base) and names[: len(base)] == base:
            return directory, names[len(base) :]
    return None


def _names(path: str) -> list[str] | None:
    """The components of an absolute path; None for a text with "..", or one that is not a path."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return None
    names = [name for name in path.split("/") if name not in ("", ".")]
    return None if path[:1] != "/" or ".." in names or b"\0" in encoded else names


@contextmanager
def _parent(directories: Iterable[str], path: str) -> Iterator[tuple[int, str]]:
    """A descriptor of the directory that holds the file, and the file's name in it."""
    placed = _placed(directories, path)
    if placed is None:
        raise UnsafeFile("is not below an allowed directory")
    directory, names = placed
    with ExitStack() as opened:
        # The administrator's own path may lead through links.
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        for name in names[:-1]:
            descriptor = os.open(name, _STEP, dir_fd=descriptor)
            opened.callback(os.close, descriptor)
            _require(descriptor, stat.S_ISDIR, f'is below "{name}", which is no directory')
        yield descriptor, names[-1]


def _made(parent: int, name: str) -> int | None:
    """A new file, None if there is something of that name."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | _OPENED
    try:
        return os.open(name, flags, 0o600, dir_fd=parent)
    except FileExistsError:
        return None


def _reopened(parent: int, name: str, flags: int) -> int:
    """The regular file of that name, opened for good."""
    found = os.open(name, _STEP, dir_fd=parent)
    try:
        _require(found, stat.S_ISREG, "is no regular file")
        # The very file that was looked at, whatever bears its name by now.
        return os.open(f"/proc/self/fd/{found}", flags | _OPENED)
    finally:
        os.close(found)


def _require(descriptor: int, kind: Callable[[int], bool], otherwise: str) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISLNK(mode):
        raise UnsafeFile("is a symbolic link, or below one")
    if not kind(mode):
        raise UnsafeFile(otherwise)
