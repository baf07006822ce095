"""The files and device nodes that a container with a share of a GPU gets when it starts.

A group has the limits of one container. The first of the container's ids is its slot. The group's
name contains the slot. Allocate answers with a CDI device of the same name. The CDI file is written
when the container starts, before the runtime reads the file.

A reused slot has no file until its new container starts. A runtime that reads too early finds no
device, and never the device of an earlier container. The kubelet then tries again.

Source: Container Device Interface, SPEC.md.
"""

import errno
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from base import files
from base.paths import Paths
from deviceplugin.allocate import cdi
from deviceplugin.kubelet.plugin_server import Rejected
from gpu.driver import gpu_device_files
from gpu.driver.driver_files import SharedFile
from gpu.limits.limits_file import GroupError, Limit
from gpu.pools.limit_backend import ALONE, GpuParts
from host.device_nodes import DeviceNode
from host.errors import HostError
from host.selinux import READ, WRITE, ContainerLabels

KIND = "podfabric.io/gpu"
_PREFIX = "podfabric-slot-"
_LONGEST = 200  # bytes of a group's name, because a file's name contains it

INSIDE = "/run/podfabric/gpu"

# Without this variable, NVIDIA's runtime adds the GPUs that the image requests, often all GPUs.
VOID = {"NVIDIA_VISIBLE_DEVICES": "void"}


class ContainerFiles:
    """Makes and removes the files of containers. A kill at any point does no harm."""

    def __init__(self, paths: Paths, parts: GpuParts) -> None:
        self._paths = paths
        self._labels = ContainerLabels(paths.sys)
        self.parts = parts
        self.leaving = False  # the node accepts no new containers

    def start(
        self, group: str, minor: int, limit: Limit, variables: Mapping[str, str] = {}
    ) -> None:
        """Make the group of a container, then its CDI device. Raises Rejected or OSError."""
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
            # Mount the directory, because a restarted agent makes a new socket in it.
            SharedFile(str(directory / "agent"), f"{INSIDE}/agent"),
            *shared,
        )
        write_device(self._paths, group, nodes, mounts, {**VOID, **variables})

    def uuid(self, group: str) -> str:
        """The UUID of a group's GPU; "" if unknown, as before the container's start."""
        try:
            return self.parts.groups.read(group).limit.uuid if self.parts.groups else ""
        except (GroupError, OSError):
            return ""

    def remove(self, group: str) -> None:
        files.remove(self._paths.cdi / f"{_PREFIX}{group}.json", durable=False)
        if self.parts.groups is not None:
            try:
                self.parts.groups.remove(group)
            except GroupError as error:
                raise OSError(errno.EBUSY, str(error), group) from None

    def remove_others(self, groups: Collection[str]) -> None:
        """Remove the CDI files of all groups except these. Raises OSError."""
        for file in sorted(self._paths.cdi.glob(f"{_PREFIX}*.json")):
            if file.name.removeprefix(_PREFIX).removesuffix(".json") not in groups:
                files.remove(file, durable=False)

    def _label(self, directory: Path) -> None:
        """Set SELinux labels that let containers use podfabric's own files."""
        for path in (*self._paths.shims.glob("*.so"), directory / "limits"):
            self._labels.set(path, READ)
        # A new socket in `agent` inherits the directory's label.
        for path in (directory / "region", directory / "agent", *(directory / "agent").iterdir()):
            self._labels.set(path, WRITE)


def write_device(
    paths: Paths,
    group: str,
    nodes: Sequence[DeviceNode],
    mounts: Sequence[SharedFile],
    variables: Mapping[str, str],
) -> None:
    """Write the CDI file of a group atomically if its content changes. Raises OSError."""
    edits: dict[str, Any] = {
        "deviceNodes": cdi.node_edits(nodes),
        "mounts": [
            {
                "hostPath": mount.host,
                "containerPath": mount.container,
                "options": [
                    "ro" if mount.read_only else "rw",
                    *("nosuid", "nodev", "rbind", "rprivate"),
                ],
            }
            for mount in mounts
        ],
        "env": [f"{name}={value}" for name, value in sorted(variables.items())],
    }
    device = {"name": group, "containerEdits": edits}
    cdi.put(paths.cdi / f"{_PREFIX}{group}.json", KIND, [device])


def group_of(resource: str, slot: str) -> str:
    """The name of the group for a container with this slot of the resource."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{resource}.{slot}")
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 9]}-{hashlib.sha256(f'{resource}.{slot}'.encode()).hexdigest()[:8]}"
