"""CDI files of slots, for containers whose GPU is chosen when they start.

Allocate answers with the name of a CDI device, which stays the same while the container has its
slot. The file of the device is written at the container's start, before the runtime reads it. Each
slot has its own file, so no change touches the file of another container.

A reused slot has no file until its new holder starts. A runtime that reads too early finds no
device, and the kubelet tries again; it never finds the device of the previous holder.

Source: Container Device Interface, SPEC.md.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from base import files
from base.paths import Paths
from deviceplugin.allocate import cdi
from gpu.driver.driver_files import SharedFile
from host.device_nodes import DeviceNode

KIND = "podfabric.io/gpu"

_PREFIX = "podfabric-slot-"


def path(paths: Paths, slot: str) -> Path:
    """The CDI file of a slot."""
    return paths.cdi / f"{_PREFIX}{slot}.json"


def write(
    paths: Paths,
    slot: str,
    nodes: Sequence[DeviceNode],
    mounts: Sequence[SharedFile],
    variables: Mapping[str, str],
) -> None:
    """Write the file of a slot if it differs, atomically. Raises OSError."""
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
    cdi.put(path(paths, slot), KIND, [{"name": slot, "containerEdits": edits}])


def remove(paths: Paths, slot: str) -> None:
    """Remove the file of a slot if it exists. Raises OSError."""
    files.remove(path(paths, slot), durable=False)


def remove_others(paths: Paths, slots: Collection[str]) -> None:
    """Remove the files of all slots except these. Raises OSError."""
    for file in sorted(paths.cdi.glob(f"{_PREFIX}*.json")):
        if file.name.removeprefix(_PREFIX).removesuffix(".json") not in slots:
            files.remove(file, durable=False)
