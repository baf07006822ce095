"""A file system of its own for each region, of exactly the region's size.

The tenant can write to its region, so it can make the file larger. On a tmpfs for all it would
take the room of the others, and of the host, until somebody cuts the file. On its own it gets
ENOSPC. A mount of the file over its place among the group's files is all that is left to see; the
file system ends with the last mount of it, which is the container's.

The runtime must see the mounts, too: an agent in a container needs its directory mounted with
Bidirectional propagation.

Sources: mount(2), umount2(2), tmpfs(5).
"""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from base import files
from gpu import processes
from host import procfs

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND = 2, 4, 8, 4096  # linux/mount.h
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_NAME = "region"
_BESIDE = ".room"

_libc = ctypes.CDLL(None, use_errno=True)


class RegionRooms(Protocol):
    """Makes regions. Methods raise OSError."""

    def put(self, path: Path, content: bytes) -> None:
        """Make the region at `path`, in place of a former one."""

    def remove(self, path: Path) -> None:
        """Remove the region at `path`, if there is one."""

    def obstacle(self, root: Path) -> str | None:
        """Why no region can be made below `root`; None if one can."""


class TmpfsRooms:
    """Regions on file systems of their own. One thread at a time may use it.

    A kill leaves mounts at `path` or beside it, which the next `put` or `remove` takes away.
    """

    def __init__(self) -> None:
        self._possible = False

    def put(self, path: Path, content: bytes) -> None:
        """Make the region at `path`, in place of a former one. Raises OSError."""
        self.remove(path)
        path.touch(0o600)
        with _own_tmpfs(path.parent / _BESIDE, len(content)) as beside:
            made = beside / _NAME
            _write(made, content)
            _mount(str(made), path, "", _MS_BIND)

    def remove(self, path: Path) -> None:
        """Remove the region at `path`, if there is one. Raises OSError."""
        _unmount(path.parent / _BESIDE)
        with suppress(FileNotFoundError):
            (path.parent / _BESIDE).rmdir()
        _unmount(path)
        files.remove(path, durable=False)

    def obstacle(self, root: Path) -> str | None:
        """Why no region can be made below `root`; None if one can, which stays so."""
        if self._possible:
            return None
        tried = root / ".tried"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self.put(tried, b" ")
                place = processes.place_of(tried)
                if not _seen_by_the_host(place.device):
                    return (
                        f"the host does not see what the agent mounts below {root}: mount "
                        f"{root.parent} into the agent's container with mountPropagation "
                        "Bidirectional"
                    )
            finally:
                self.remove(tried)
        except OSError as error:
            needs = "the agent needs the capability SYS_ADMIN, and no profile that denies mounts"
            remedy = f": {needs}" if error.errno in (errno.EPERM, errno.EACCES) else ""
            return f"cannot mount file systems below {root}: {error.strerror}{remedy}"
        self._possible = True
        return None


@contextmanager
def _own_tmpfs(directory: Path, size: int) -> Iterator[Path]:
    """A new tmpfs with room for one file of that size; what is mounted of it elsewhere stays."""
    directory.mkdir(mode=0o700)
    try:
        flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        _mount("podfabric", directory, "tmpfs", flags, f"size={size},nr_inodes=2,mode=0700")
        try:
            yield directory
        finally:
            _unmount(directory)
    finally:
        directory.rmdir()


def _write(path: Path, content: bytes) -> None:
    """Make the file, with each of its pages. There is room for no second one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o666)
        files.write_at(descriptor, content, 0)
    finally:
        os.close(descriptor)


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    encoded = os.fsencode(target)
    if _libc.mount(os.fsencode(source), encoded, kind.encode(), flags, options.encode()) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def _unmount(target: Path) -> None:
    """Take away all that is mounted there, at once; who uses it keeps it."""
    while _libc.umount2(os.fsencode(target), _MNT_DETACH | _UMOUNT_NOFOLLOW) == 0:
        pass
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOENT):  # not a mount, or not there
        raise OSError(code, os.strerror(code), str(target))


def _seen_by_the_host(device: str) -> bool:
    """Whether the host's mounts have that file system. True if they cannot be read."""
    try:
        lines = procfs.path("1/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return True
    return any(line.split(" ", 3)[2] == device for line in lines)
