"""Makes a tmpfs(5) for each region, of exactly the region's size.

A tenant that enlarges its region gets ENOSPC. On a shared tmpfs, the region would take memory from
the host and from other groups.

The region is bind-mounted at its path, and then the tmpfs is unmounted. Bind mounts of the region
keep the tmpfs alive. All mounts are made in the host's mount namespace, where the container runtime
sees the mounts. An agent in a container needs HostToContainer propagation.
"""

import errno
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from base import files
from host import mounts

_NAME = "region"
_BESIDE = ".room"


class RegionTmpfs:
    """One thread at a time may use it. `put` and `remove` also remove a killed agent's mounts."""

    def __init__(self) -> None:
        self._possible = False

    def put(self, path: Path, content: bytes) -> None:
        """Make or replace the region at `path`. Raises OSError."""
        mounts.in_host(partial(_put, path, content))

    def remove(self, path: Path) -> None:
        """Remove the region at `path` if it exists. Raises OSError."""
        if path.parent.exists():  # unmounting would need a capability
            mounts.in_host(partial(_remove, path))

    def obstacle(self, root: Path) -> str | None:
        """The reason why no region can be made below `root`; `None` if there is none."""
        if self._possible:
            return None
        tried = root / ".tried"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                device = mounts.in_host(partial(_put, tried, b" "))
                if tried.stat().st_dev != device:
                    return (
                        f"the agent does not see the host's mounts below {root}: mount "
                        f"{root.parent} into its container with mountPropagation HostToContainer"
                    )
            finally:
                self.remove(tried)
        except OSError as error:
            return f"cannot mount file systems below {root}: {_explained(error)}"
        self._possible = True
        return None


def _put(path: Path, content: bytes) -> int:
    """Returns the device number of the region's file system."""
    _remove(path)
    path.touch(0o600)
    beside = path.parent / _BESIDE
    beside.mkdir(mode=0o700)
    try:
        flags = mounts.NOSUID | mounts.NODEV | mounts.NOEXEC
        options = f"size={len(content)},nr_inodes=2,mode=0700"
        mounts.mount("podfabric", beside, "tmpfs", flags, options)
        _write(beside / _NAME, content)
        mounts.mount(str(beside / _NAME), path, "", mounts.BIND)
        return path.stat().st_dev
    finally:
        mounts.unmount(beside)  # the mount of the file at `path` stays
        beside.rmdir()


def _remove(path: Path) -> None:
    mounts.unmount(path.parent / _BESIDE)
    with suppress(FileNotFoundError):
        (path.parent / _BESIDE).rmdir()
    mounts.unmount(path)
    files.remove(path, durable=False)


def _write(path: Path, content: bytes) -> None:
    """Write the file in place, because the file system has no space for a second file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o666)
        files.write_at(descriptor, content, 0)
    finally:
        os.close(descriptor)


def _explained(error: OSError) -> str:
    if error.errno not in (errno.EPERM, errno.EACCES):
        return f"{error.filename}: {error.strerror}"
    return (
        f"{error.filename}: {error.strerror}: give the agent the capabilities SYS_ADMIN, "
        "SYS_CHROOT and SYS_PTRACE, and no security profile that denies mounts"
    )
