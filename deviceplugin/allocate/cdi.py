"""CDI specifications: where a pool is to answer with names, and the runtime looks up the nodes.

A pool has a kind of its own, "podfabric.io/rdma-hca", in a file of its own, and one CDI device per
HCA; so an HCA may be in two pools. A name that a container was given once means the nodes
that the file has when the container starts: after a driver was loaded anew, those of now.

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
from deviceplugin.allocate.nodes import DeviceNode
from deviceplugin.pools.config import PoolConfig

VENDOR = "podfabric.io"
VERSION = "0.5.0"  # the first with hostPath, and names that begin with a digit

_PREFIX = f"{VENDOR}-"
_LONGEST = 63
_BEGINNING = f'{{\n  "cdiVersion": "{VERSION}",\n  "kind": "{VENDOR}/'.encode()
_writing = Lock()  # the temporary file's name is fixed


class Unwritten(Exception):
    """A specification cannot be written. The text names the file and says what to do."""


def kind(resource: str) -> str:
    """The pool's kind. It differs between resources whose variables differ (environment.py)."""
    return f"{VENDOR}/{_slug(resource)}"


def qualified(resource: str, hca: str) -> str:
    """What the kubelet's answer names an HCA: "podfabric.io/rdma-hca=0000:3b:00.0"."""
    return f"{kind(resource)}={_name(hca)}"


def path(paths: Paths, resource: str) -> Path:
    """The pool's file."""
    return paths.cdi / f"{_PREFIX}{_slug(resource)}.json"


def write(paths: Paths, resource: str, devices: Mapping[str, Sequence[DeviceNode]]) -> None:
    """Make the pool's file say this, by HCA id. It is touched only where it says otherwise.

    Without a device that has nodes there is none: one without devices is not valid. A reader sees
    the old file or the new one. Raises Unwritten; somebody else's file is left as it is.
    """
    file = path(paths, resource)
    content = _specification(resource, devices)
    with _writing:
        try:
            old = _content(file)
            if old is not None and not _is_ours(old):
                raise Unwritten(
                    f"{file}: is not podfabric's, by the kind it has: move it away, or take `cdi` "
                    f"off the pool {resource}"
                )
            if content is None:
                files.remove(file)
            elif old != content:
                _make_directory(file.parent)
                files.write_atomically(file, content, 0o644, durable=False)
        except OSError as error:
            raise Unwritten(
                f"cannot write the CDI specification {file}: {error.strerror}: the agent needs "
                f"{file.parent} to write to"
            ) from None


def remove_others(paths: Paths, pools: Iterable[PoolConfig]) -> list[Path]:
    """Remove our files of other pools than these; what was removed. Raises OSError."""
    kept = {path(paths, pool.resource) for pool in pools}
    ours = sorted(paths.cdi.glob(f"{_PREFIX}*.json"))
    return [file for file in ours if file not in kept and _remove(file)]


def _specification(resource: str, devices: Mapping[str, Sequence[DeviceNode]]) -> bytes | None:
    described = [
        {"name": _name(hca), "containerEdits": {"deviceNodes": _edits(devices[hca])}}
        for hca in sorted(devices)
        if devices[hca]
    ]
    if not described:
        return None
    specification = {"cdiVersion": VERSION, "kind": kind(resource), "devices": described}
    return msgspec.json.format(msgspec.json.encode(specification), indent=2) + b"\n"


def _edits(nodes: Sequence[DeviceNode]) -> list[dict[str, Any]]:
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
    """A class name of CDI: a letter first, then letters, digits and dashes, 63 at most."""
    slug = re.sub(r"[^A-Za-z0-9]", "-", resource).strip("-") or "pool"
    if not slug[0].isalpha():
        slug = f"r-{slug}"
    if len(slug) <= _LONGEST:
        return slug
    return f"{slug[: _LONGEST - 9]}-{hashlib.sha256(resource.encode()).hexdigest()[:8]}"


def _name(hca: str) -> str:
    """A device name of CDI. Addresses and RDMA devices' names are such as they are."""
    name = re.sub(r"[^A-Za-z0-9_.:-]", "-", hca)
    return name if name[:1].isalnum() and name[-1:].isalnum() else f"d{name}0"


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


def _is_ours(content: bytes) -> bool:
    """Whether a file of our name is ours by its kind, as far as a power cut has left it.

    Of nothing, or zeros, there is nothing to lose. What cannot be read is ours if it begins as
    ours do, up to the kind or to where it was cut off; else it is somebody's, in YAML perhaps.
    """
    try:
        found = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        left = content.rstrip(b"\0")
        return _BEGINNING.startswith(left) or left.startswith(_BEGINNING)
    of_kind = found.get("kind") if isinstance(found, dict) else None
    return isinstance(of_kind, str) and of_kind.startswith(f"{VENDOR}/")


def _remove(file: Path) -> bool:
    with _writing:
        content = _content(file)
        if content is None or not _is_ours(content):
            return False
        files.remove(file)
        return True


def _make_directory(directory: Path) -> None:
    if not directory.exists():
        directory.mkdir(parents=True)
        directory.chmod(0o755)  # others read it, whatever our umask
