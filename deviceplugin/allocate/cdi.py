"""Writes CDI specifications. The runtime looks up the device nodes of CDI names in these files.

Each pool has its own file and its own kind, such as "podfabric.io/rdma-hca". The runtime reads the
file at each start of a container, so the container gets the current nodes after a driver reload.

Source: Container Device Interface, SPEC.md, and the name rules of its pkg/parser.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from base import files
from base.paths import Paths
from deviceplugin.pools.pool_config import PoolConfig
from host.device_nodes import DeviceNode

VENDOR = "podfabric.io"
VERSION = "0.5.0"  # the first version with hostPath, and with names that begin with a digit

_PREFIX = f"{VENDOR}-"
_LONGEST = 63
_writing = Lock()  # two writers would use the same temporary file


class Unwritten(Exception):
    """A specification cannot be written. The text names the file and the remedy."""


def kind(resource: str) -> str:
    return f"{VENDOR}/{_slug(resource)}"


def qualified(resource: str, hca: str) -> str:
    """The CDI name of an HCA in an answer: "podfabric.io/rdma-hca=0000:3b:00.0"."""
    return f"{kind(resource)}={_name(hca)}"


def path(paths: Paths, resource: str) -> Path:
    return paths.cdi / f"{_PREFIX}{_slug(resource)}.json"


def write(paths: Paths, resource: str, devices: Mapping[str, Sequence[DeviceNode]]) -> None:
    """Write the pool's file if its content changes. `devices` has the device nodes by HCA id.

    Removes the file if no HCA has nodes: a specification must have a device. Raises Unwritten.
    """
    described = [
        {"name": _name(hca), "containerEdits": {"deviceNodes": node_edits(devices[hca])}}
        for hca in sorted(devices)
        if devices[hca]
    ]
    store(path(paths, resource), kind(resource), described)


def store(file: Path, of_kind: str, described: Sequence[Mapping[str, Any]]) -> None:
    """Write a file if its content changes. Without devices, remove the file. Raises Unwritten."""
    with _writing:
        try:
            if described:
                put(file, of_kind, described)
            else:
                files.remove(file)
        except OSError as error:
            raise Unwritten(
                f"cannot write the CDI specification {file}: {error.strerror}: give "
                f"the agent write access to {file.parent}"
            ) from None


def remove_others(paths: Paths, pools: Iterable[PoolConfig]) -> None:
    """Remove the CDI files of all pools except `pools`. Raises OSError."""
    kept = {path(paths, pool.resource) for pool in pools}
    with _writing:
        for file in sorted(paths.cdi.glob(f"{_PREFIX}*.json")):
            if file not in kept:
                files.remove(file)


def put(file: Path, of_kind: str, devices: Sequence[Mapping[str, Any]]) -> None:
    """Write a specification of these devices, unless the file has this content already.

    Raises OSError.
    """
    document = {"cdiVersion": VERSION, "kind": of_kind, "devices": devices}
    content = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    if file.exists() and file.read_bytes() == content:
        return
    if not file.parent.exists():
        file.parent.mkdir(parents=True)
        file.parent.chmod(0o755)  # despite the umask: every runtime must be able to read it
    files.write_atomically(file, content, 0o644, durable=False)


def node_edits(nodes: Sequence[DeviceNode]) -> list[dict[str, Any]]:
    """The CDI edits that give a container these nodes, each once."""
    once = {node.path: node for node in nodes}
    return [
        {
            "path": node.path,
            "hostPath": node.host,
            "type": "c",
            "major": node.major,
            "minor": node.minor,
            "permissions": "rw",
        }
        for node in (once[path] for path in sorted(once))
    ]


def _slug(resource: str) -> str:
    """A class name of CDI: a letter, then letters, digits and dashes, at most 63 in all."""
    slug = re.sub(r"[^A-Za-z0-9]", "-", resource).strip("-") or "pool"
    if not slug[0].isalpha():
        slug = f"r-{slug}"
    if len(slug) <= _LONGEST:
        return slug
    return f"{slug[: _LONGEST - 9]}-{hashlib.sha256(resource.encode()).hexdigest()[:8]}"


def _name(hca: str) -> str:
    """A device name of CDI. Addresses and names of RDMA devices stay unchanged."""
    name = re.sub(r"[^A-Za-z0-9_.:-]", "-", hca)
    return name if name[:1].isalnum() and name[-1:].isalnum() else f"d{name}0"
