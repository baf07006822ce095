"""Looks up the host's character devices for containers."""

import os
import stat
from pathlib import Path

import msgspec

from base.paths import Paths
from host.errors import HostError
from host.sysfs.discovery import CharacterDevice


class DeviceNode(msgspec.Struct, frozen=True, kw_only=True):
    """A character device that a container gets."""

    path: str  # in the container: "/dev/infiniband/uverbs0"
    host: str
    major: int
    minor: int


def look_up(host: Path, inside: str, missing: str, other: str) -> DeviceNode:
    """The device node at `host`. Raises HostError; the remedy is `missing` (no file) or `other`."""
    try:
        status = host.stat()
    except OSError as error:
        raise HostError(f"{host}: {error.strerror}: {missing}") from None
    if not stat.S_ISCHR(status.st_mode):
        raise HostError(f"{host}: is not a character device: {other}")
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    return DeviceNode(path=inside, host=str(host), major=major, minor=minor)


def verify(paths: Paths, device: CharacterDevice) -> DeviceNode:
    """The device node of an RDMA device. Raises HostError if sysfs has other numbers."""
    host, numbers = paths.dev / "infiniband" / device.name, f"{device.major}:{device.minor}"
    in_sysfs = f"sysfs has {numbers}"
    missing = f"{in_sysfs}: is udev running, and is this the host's /dev?"
    other = f"{in_sysfs}: remove the file and run `udevadm trigger`"
    node = look_up(host, f"/dev/infiniband/{device.name}", missing, other)
    if (node.major, node.minor) != (device.major, device.minor):
        raise HostError(
            f"{host}: has device number {node.major}:{node.minor}, but {in_sysfs}, because the "
            "file is older than the loaded driver: is udev running?"
        )
    return node
