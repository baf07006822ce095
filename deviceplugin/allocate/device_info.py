"""Device-information files, which Multus passes on for a pod's device id.

The device plugin writes `dp/<resource>-<id>-device.json` at Allocate. Multus copies it for each
attachment and tells the CNI plugin the path; the plugin may complete the copy. The specification
has PCI devices but no verbs devices. These are in our own key "podfabric", which other readers
ignore, and by which we recognize our files.

    {"type": "pci", "version": "1.1.0",
     "pci": {"pci-address": "0000:18:02.5", "rdma-device": "mlx5_3",
             "pf-pci-address": "0000:18:00.0"},
     "podfabric": {"uverbs": "uverbs3", "major": 231, "minor": 195}}

Source: Network Plumbing Working Group, Device Information Specification 1.1.0.
"""

import os
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from base import decoding, files
from base.paths import Paths
from host.discovery import HCA, CharacterDevice

VERSION = "1.1.0"
OURS = "podfabric"

_MOST_BYTES = 64 << 10  # longer files are cut and cannot be decoded then
_MODE = 0o444  # as the specification's library uses


def path(paths: Paths, resource: str, device_id: str) -> Path:
    """The file of a device id. A "/" in either part of its name becomes "-"."""
    name = f"{resource}-{device_id}-device.json".replace("/", "-")
    return paths.devinfo / "dp" / name


def write(paths: Paths, resource: str, device_id: str, hcas: Collection[HCA]) -> bool:
    """Write the file of an id that stands for these HCAs; whether it has one.

    Several HCAs (mode "all"), SFs and software devices have no file, since the specification has
    no type for them: an old file is removed. Raises OSError.
    """
    file = path(paths, resource, device_id)
    hca = next(iter(hcas)) if len(hcas) == 1 else None
    if hca is None or not _is_pci(hca.address):
        if _is_ours(file):
            files.remove(file)
        return False
    verbs = next((rdma.uverbs for rdma in hca.rdma if rdma.uverbs is not None), None)
    names = ",".join(rdma.name for rdma in hca.rdma)
    _write(file, _completed({}, hca.address, names, hca.pf, verbs))
    return True


def remove_stale(paths: Paths, keys: Callable[[], Collection[tuple[str, str]]]) -> list[Path]:
    """Remove our files of all other (resource, id) than `keys`; return them. Raises OSError.

    `keys` is called after the files were listed, so that a file written meanwhile stays. The files
    of other plugins stay.
    """
    listed = sorted((paths.devinfo / "dp").glob("*-device.json"))
    kept = {path(paths, resource, device_id) for resource, device_id in keys()}
    stale = [file for file in listed if file not in kept and _is_ours(file)]
    for file in stale:
        files.remove(file)
    return stale


def update_cni(
    paths: Paths,
    file: str,
    address: str,
    rdma: str,
    uverbs: CharacterDevice | None = None,
    *,
    pf: str = "",
) -> None:
    """Complete an attachment's copy (`runtimeConfig.CNIDeviceInfoFile`), or make it.

    Other keys stay as they are, and all keys of a device that is not a PCI device (vDPA). No file
    is made for an interface whose device has no PCI address. Raises OSError, and ValueError if the
    path is not that of such a copy: the author of a network definition chooses the path.
    """
    copy = _copy(paths, file)
    document = _content(copy)
    if document or _is_pci(address):
        _write(copy, _completed(document, address, rdma, pf, uverbs))


def _copy(paths: Paths, file: str) -> Path:
    """The file with that path, directly below Multus' directory. Raises OSError, ValueError.

    Only the text of the path is compared. Following it could block forever, on a file system that
    a tenant made hang.
    """
    ours = paths.devinfo / "cni"
    directory, wanted = ours.resolve(), Path(file)
    usual = Paths().devinfo / "cni"  # Multus' spelling, which may differ from our setting
    spellings = {ours, directory} | ({usual} if usual.resolve() == directory else set())
    if wanted.name in ("", "..") or wanted.parent not in spellings:
        raise ValueError(f"it is not directly below {directory}, so it is left alone")
    return directory / wanted.name


def _content(copy: Path) -> dict[str, Any]:
    """A copy's content, {} if there is no file. Raises OSError, ValueError for other files."""
    try:
        # Do not follow a link, and do not wait for a pipe.
        descriptor = os.open(copy, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file, so it is left alone")
        try:
            document = decoding.decode(opened.read(_MOST_BYTES), object)
        except msgspec.MsgspecError:
            document = None
    if not isinstance(document, dict) or not isinstance(document.get("type"), str):
        raise ValueError("it is not device information, so it is left alone")
    return document


def _completed(
    old_document: dict[str, Any],
    address: str,
    rdma: str,
    pf: str,
    uverbs: CharacterDevice | None,
) -> dict[str, Any]:
    document: dict[str, Any] = dict(old_document) or {"type": "pci", "version": VERSION}
    if document.get("type") == "pci" and _is_pci(address):
        old = document.get("pci")
        pci = {"pci-address": address, **(old if isinstance(old, dict) else {})}
        if rdma:
            pci["rdma-device"] = rdma
        if pf:
            pci.setdefault("pf-pci-address", pf)
        document["pci"] = pci
    old = document.get(OURS)
    ours = dict(old) if isinstance(old, dict) else {}
    if uverbs is not None:
        ours |= {"uverbs": uverbs.name, "major": uverbs.major, "minor": uverbs.minor}
    document[OURS] = ours
    return document


def _is_pci(address: str) -> bool:
    return ":" in address


def _is_ours(file: Path) -> bool:
    return OURS in _document(file)


def _document(file: Path) -> dict[str, Any]:
    """The file's content, {} if it does not exist or cannot be decoded."""
    try:
        document = decoding.decode(file.read_bytes(), object)
    except (OSError, msgspec.MsgspecError):
        return {}
    return document if isinstance(document, dict) else {}


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
