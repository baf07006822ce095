"""CDI files of slots: what a container gets whose GPU is chosen when it starts.

Allocate answers with the name of a CDI device that stays the same for as long as the container has
its slot. The file that says what the device is comes at the start, before the runtime looks the
name up. Each slot has a file of its own, so no change touches the file of another container.

A slot that is given again has no file until its new holder starts. A runtime that looks too early
finds no device then, and the kubelet tries again: it never finds that of an earlier holder.

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


def qualified(slot: str) -> str:
    """The CDI name of a slot in an answer."""
    return f"{KIND}={slot}"


def path(paths: Paths, slot: str) -> Path:
    """The file of a slot."""
    return paths.cdi / f"{_PREFIX}{slot}.json"


def write(
    paths: Paths,
    slot: str,
    nodes: Sequence[DeviceNode],
    mounts: Sequence[SharedFile],
    variables: Mapping[str, str],
) -> None:
    """Write the file of a slot if it differs. A reader sees the old or the new. Raises OSError."""
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
    """Remove the file of a slot, if there is one. Raises OSError."""
    files.remove(path(paths, slot), durable=False)


def remove_others(paths: Paths, slots: Collection[str]) -> None:
    """Remove the files of all other slots than these. Raises OSError."""
    for file in sorted(paths.cdi.glob(f"{_PREFIX}*.json")):
        if file.name.removeprefix(_PREFIX).removesuffix(".json") not in slots:
            files.remove(file, durable=False)
