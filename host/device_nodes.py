"""Looks up character devices of the host that containers get."""

import os
import stat
from pathlib import Path

import msgspec

from host.errors import HostError


class DeviceNode(msgspec.Struct, frozen=True, kw_only=True):
    """A character device that a container gets."""

    path: str  # in the container: "/dev/infiniband/uverbs0"
    host: str
    major: int
    minor: int


def look_up(host: Path, inside: str, missing: str, other: str) -> DeviceNode:
    """The node at a path of the host.

    Raises HostError, which says what to do if it is `missing`, or is something `other`.
    """
    try:
        status = host.stat()
    except OSError as error:
        raise HostError(f"{host}: {error.strerror}: {missing}") from None
    if not stat.S_ISCHR(status.st_mode):
        raise HostError(f"{host}: is not a character device: {other}")
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    return DeviceNode(path=inside, host=str(host), major=major, minor=minor)
