"""The files and device nodes that a container with a share of a GPU gets when it starts.

Allocate answers with the name of a CDI device; `ContainerFiles.start` writes the device
(`slot_files`). The CDI device and the group have the name of the container's slot, its first id.
"""

import errno
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import grpc

from base.paths import Paths
from deviceplugin.kubelet.plugin_server import Rejected
from gpu.driver import gpu_device_files
from gpu.driver.driver_files import SharedFile
from gpu.limits.limits_file import GroupError, Limit
from gpu.pools import slot_files
from gpu.pools.limit_backend import ALONE, GpuParts
from host.errors import HostError
from host.selinux import READ, WRITE, ContainerLabels

_LONGEST = 200  # bytes of a group's name, which is part of a file's name

INSIDE = "/run/podfabric/gpu"

# Without it, NVIDIA's runtime adds the GPUs that the image asks for, often all of them.
VOID = {"NVIDIA_VISIBLE_DEVICES": "void"}


class ContainerFiles:
    """Makes and removes the files of containers, in an order that survives a kill."""

    def __init__(self, paths: Paths, parts: GpuParts) -> None:
        self._paths = paths
        self._labels = ContainerLabels(paths.sys)
        self.parts = parts
        self.leaving = False  # the node accepts no new containers

    def start(
        self, group: str, minor: int, limit: Limit, variables: Mapping[str, str] = {}
    ) -> None:
        """Make the group of a starting container, then its CDI device.

        Raises Rejected and OSError.
        """
        groups = self.parts.groups
        if groups is None:
            raise Rejected(grpc.StatusCode.FAILED_PRECONDITION, ALONE)
        try:
            nodes = gpu_device_files.of_gpus(
                self._paths, [minor], gpu_device_files.TOOLS_AND_DISPLAY
            )
            directory = groups.make(group, limit)
            shared = self.parts.files()
        except (GroupError, HostError) as error:
            raise Rejected(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
        self._label(directory)
        mounts = (
            SharedFile(str(directory / "limits"), f"{INSIDE}/limits"),
            SharedFile(str(directory / "region"), f"{INSIDE}/region", read_only=False),
            # The directory: an agent that starts again makes a new socket in it.
            SharedFile(str(directory / "agent"), f"{INSIDE}/agent"),
            *shared,
        )
        slot_files.write(self._paths, group, nodes, mounts, {**VOID, **variables})

    def uuid(self, group: str) -> str:
        """The GPU of a container that has started; "" if it is unknown."""
        try:
            return self.parts.groups.read(group).limit.uuid if self.parts.groups else ""
        except (GroupError, OSError):
            return ""

    def remove(self, group: str) -> None:
        """Remove the files of a container that has ended. Raises OSError."""
        slot_files.remove(self._paths, group)
        if self.parts.groups is not None:
            try:
                self.parts.groups.remove(group)
            except GroupError as error:
                raise OSError(errno.EBUSY, str(error), group) from None

    def _label(self, directory: Path) -> None:
        """Set SELinux labels that let containers use podfabric's own files."""
        for path in (*self._paths.shims.glob("*.so"), directory / "limits"):
            self._labels.set(path, READ)
        # A new socket in `agent` inherits the directory's label.
        for path in (directory / "region", directory / "agent", *(directory / "agent").iterdir()):
            self._labels.set(path, WRITE)


def group_of(resource: str, slot: str) -> str:
    """The name of the group of the container that has this slot of the resource."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{resource}.{slot}")
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 9]}-{hashlib.sha256(f'{resource}.{slot}'.encode()).hexdigest()[:8]}"
