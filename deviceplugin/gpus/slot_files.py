"""CDI files of slots: what a container gets whose GPU is chosen when it starts.

Allocate answers with the name of a CDI device that stays the same for as long as the container has
its slot. The file that says what the device is comes at the start, before the runtime looks the
name up. Each slot has a file of its own, so no change touches the file of another container.

A slot that is given again has no file until its new holder starts. A runtime that looks too early
finds no device then, and the kubelet tries again: it never finds that of an earlier holder.

Source: Container Device Interface, SPEC.md.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from base import decoding, files
from base.paths import Paths
from gpu.driver_files import SharedFile
from gpu.nodes import GpuNode


class _SlotNode(msgspec.Struct):
    path: str = ""


class _SlotEdits(msgspec.Struct):
    deviceNodes: list[_SlotNode] = []


class _SlotDevice(msgspec.Struct):
    containerEdits: _SlotEdits


class _SlotFile(msgspec.Struct):
    devices: list[_SlotDevice] = []


KIND = "podfabric.io/gpu"
VERSION = "0.5.0"

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
    nodes: Sequence[GpuNode],
    mounts: Sequence[SharedFile],
    variables: Mapping[str, str],
) -> None:
    """Write the file of a slot if it differs. A reader sees the old or the new. Raises OSError."""
    edits: dict[str, Any] = {
        "deviceNodes": [
            {
                "path": node.path,
                "hostPath": node.host,
                "type": "c",
                "major": node.major,
                "minor": node.minor,
                "permissions": "rw",
            }
            for node in nodes
        ],
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
    document = {
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": [{"name": slot, "containerEdits": edits}],
    }
    content = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    file = path(paths, slot)
    if _content(file) == content:
        return
    if not file.parent.exists():
        file.parent.mkdir(parents=True)
        file.parent.chmod(0o755)  # others read it; our umask must not prevent that
    files.write_atomically(file, content, 0o644, durable=False)


def read(paths: Paths, slot: str) -> frozenset[int]:
    """N of each /dev/nvidiaN in the file of a slot: none if the file is missing or damaged."""
    try:
        file = decoding.decode(path(paths, slot).read_bytes(), _SlotFile)
    except (OSError, msgspec.MsgspecError):
        return frozenset()
    edits = [device.containerEdits for device in file.devices]
    nodes = (node.path.removeprefix("/dev/nvidia") for each in edits for node in each.deviceNodes)
    return frozenset(int(name) for name in nodes if name.isdecimal())


def remove(paths: Paths, slot: str) -> None:
    """Remove the file of a slot, if there is one. Raises OSError."""
    files.remove(path(paths, slot), durable=False)


def remove_others(paths: Paths, slots: Collection[str]) -> None:
    """Remove the files of all other slots than these. Raises OSError."""
    for file in _ours(paths):
        if file.name.removeprefix(_PREFIX).removesuffix(".json") not in slots:
            files.remove(file, durable=False)


def _ours(paths: Paths) -> Iterable[Path]:
    return sorted(paths.cdi.glob(f"{_PREFIX}*.json"))


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
