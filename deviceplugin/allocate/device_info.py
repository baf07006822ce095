"""Writes device-information files, which Multus shows in the pod's network-status.

The specification has no verbs devices. So verbs devices are in our own key "podfabric". This key
also marks our files.

    {"type": "pci", "version": "1.1.0",
     "pci": {"pci-address": "0000:18:02.5", "rdma-device": "mlx5_3",
             "pf-pci-address": "0000:18:00.0"},
     "podfabric": {"uverbs": "uverbs3", "major": 231, "minor": 195}}

Source: Network Plumbing Working Group, Device Information Specification 1.1.0.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from base import decoding, files
from base.paths import Paths
from host.sysfs.discovery import HCA

VERSION = "1.1.0"
OURS = "podfabric"

_MODE = 0o444  # the mode that the specification's library uses


def path(paths: Paths, resource: str, device_id: str) -> Path:
    name = f"{resource}-{device_id}-device.json".replace("/", "-")
    return paths.devinfo / "dp" / name


def write(paths: Paths, resource: str, device_id: str, hcas: Collection[HCA]) -> bool:
    """Write the file of a device id that stands for these HCAs. Returns whether the id has a file.
    Raises OSError.

    An id of several HCAs, an SF or a software device gets no file: the specification has no type.
    """
    file = path(paths, resource, device_id)
    hca = next(iter(hcas)) if len(hcas) == 1 else None
    if hca is None or ":" not in hca.address:
        if _is_ours(file):
            files.remove(file)
        return False
    uverbs = next((rdma.uverbs for rdma in hca.rdma if rdma.uverbs is not None), None)
    pci = {
        "pci-address": hca.address,
        "rdma-device": ",".join(rdma.name for rdma in hca.rdma),
        "pf-pci-address": hca.pf,
    }
    ours: dict[str, str | int] = {}
    if uverbs is not None:
        ours = {"uverbs": uverbs.name, "major": uverbs.major, "minor": uverbs.minor}
    known = {key: value for key, value in pci.items() if value}
    _write(file, {"type": "pci", "version": VERSION, "pci": known, OURS: ours})
    return True


def remove_stale(paths: Paths, keys: Callable[[], Collection[tuple[str, str]]]) -> list[Path]:
    """Remove and return our files of every (resource, id) that is not in `keys`. Raises OSError.

    Lists the files before it calls `keys`, so that a new file stays.
    """
    listed = sorted((paths.devinfo / "dp").glob("*-device.json"))
    kept = {path(paths, resource, device_id) for resource, device_id in keys()}
    stale = [file for file in listed if file not in kept and _is_ours(file)]
    for file in stale:
        files.remove(file)
    return stale


def _is_ours(file: Path) -> bool:
    try:
        document = decoding.decode(file.read_bytes(), object)
    except (OSError, msgspec.MsgspecError):
        return False
    return isinstance(document, dict) and OURS in document


def _write(file: Path, document: dict[str, Any]) -> None:
    content = msgspec.json.encode(document)
    with suppress(OSError):
        if files.read(str(file)) == content:
            return
    for directory in (file.parent.parent, file.parent):
        try:
            usable = directory.stat().st_mode & 0o777
        except FileNotFoundError:
            directory.mkdir(parents=True, exist_ok=True)
            usable = 0
        if not usable:  # the mode that the specification's library uses
            directory.chmod(0o755)
    files.write_atomically(file, content, _MODE, durable=False)
