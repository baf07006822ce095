"""What a container with parts of a GPU gets when it starts: its nodes, the driver, its limits.

Allocate answers with a CDI name, and the start writes what that is (`slot_files`). A group is named
after the container's slot, which is the first of its ids, and so is the CDI device.
"""

import errno
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc

from base.paths import Paths
from deviceplugin.kubelet.plugin_server import Rejected
from gpu.driver import gpu_device_files
from gpu.driver.driver_files import SharedFile
from gpu.limits.limits_file import GroupError, Limit
from gpu.pools import slot_files
from gpu.pools.limit_backend import ALONE, GpuParts
from host.device_nodes import DeviceNode
from host.errors import HostError
from host.selinux import READ, WRITE, ContainerLabels

_LONGEST = 200  # bytes of a group's name, which is part of the name of a file

INSIDE = "/run/podfabric/gpu"

# The nvidia runtime would give a container what its image asks for, which may be all GPUs.
VOID = {"NVIDIA_VISIBLE_DEVICES": "void"}


class Giver:
    """Makes what containers get, in the order in which a kill may interrupt it."""

    def __init__(self, paths: Paths, parts: GpuParts) -> None:
        self._paths = paths
        self._labels = ContainerLabels(paths.sys)
        self.parts = parts
        self.leaving = False  # there are to be no new containers

    def start(
        self, group: str, minor: int, limit: Limit, variables: Mapping[str, str] = {}
    ) -> None:
        """What a container has that starts: its limits, then its CDI device.

        Raises Rejected and OSError.
        """
        found, files = self._nodes(minor), self._limited(group, limit)
        slot_files.write(self._paths, group, found, files, {**VOID, **variables})

    def uuid(self, group: str) -> str:
        """The GPU of a container that has started; "" if it is not known."""
        try:
            return self.parts.groups.read(group).limit.uuid if self.parts.groups else ""
        except (GroupError, OSError):
            return ""

    def remove(self, group: str) -> None:
        """Remove what a container had that is gone. Raises OSError."""
        slot_files.remove(self._paths, group)
        if self.parts.groups is not None:
            try:
                self.parts.groups.remove(group)
            except GroupError as error:
                raise OSError(errno.EBUSY, str(error), group) from None

    def _nodes(self, minor: int) -> tuple[DeviceNode, ...]:
        try:
            return gpu_device_files.of_gpus(
                self._paths, [minor], gpu_device_files.TOOLS_AND_DISPLAY
            )
        except HostError as error:
            raise Rejected(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None

    def _limited(self, group: str, limit: Limit) -> list[SharedFile]:
        """Have a group with this limit; the files that its container sees.

        Raises Rejected and OSError.
        """
        groups = self.parts.groups
        if groups is None:
            raise Rejected(grpc.StatusCode.FAILED_PRECONDITION, ALONE)
        try:
            directory = groups.make(group, limit)
            files = [*_files_of(directory), *self.parts.files()]
        except (GroupError, HostError) as error:
            raise Rejected(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
        self._label(directory, files)
        return files

    def _label(self, directory: Path, files: Sequence[SharedFile]) -> None:
        """Let containers use what is podfabric's of these, where SELinux denies it else."""
        for host in {file.host for file in files}:
            path = Path(host)
            if path.parent == self._paths.shims or path == directory / "limits":
                self._labels.set(path, READ)
        # What is made in the directory `agent` later, a new socket, has the directory's label.
        for path in (directory / "region", directory / "agent", *(directory / "agent").iterdir()):
            self._labels.set(path, WRITE)


def group_of(resource: str, slot: str) -> str:
    """The group of the container whose slot of a resource that is: a name of a directory."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{resource}.{slot}")
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 9]}-{hashlib.sha256(f'{resource}.{slot}'.encode()).hexdigest()[:8]}"


def _files_of(directory: Path) -> tuple[SharedFile, ...]:
    return (
        SharedFile(str(directory / "limits"), f"{INSIDE}/limits"),
        SharedFile(str(directory / "region"), f"{INSIDE}/region", read_only=False),
        # The directory, since an agent that starts again makes a new socket.
        SharedFile(str(directory / "agent"), f"{INSIDE}/agent"),
    )
