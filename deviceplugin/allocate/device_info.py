"""Device-information files: what Multus passes on of a device id that a pod has.

`dp/<resource>-<id>-device.json` is the device plugin's, written at Allocate; Multus copies it for
each attachment and tells the CNI plugin where, which may complete the copy. The specification
knows PCI devices and no verbs devices: those stand in a part "podfabric" of our own, by which we
know our files, too, and which its readers skip.

    {"type": "pci", "version": "1.1.0",
     "pci": {"pci-address": "0000:18:02.5", "rdma-device": "mlx5_3",
             "pf-pci-address": "0000:18:00.0"},
     "podfabric": {"uverbs": "uverbs3", "major": 231, "minor": 195}}

Source: Network Plumbing Working Group, Device Information Specification 1.1.0.
"""

import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from base import files
from base.paths import Paths
from host.discovery import HCA, CharacterDevice

VERSION = "1.1.0"
OURS = "podfabric"

_MOST_BYTES = 64 << 10  # what is longer is none, and is cut to what cannot be read
_MODE = 0o444  # as the specification's library writes them


def path(paths: Paths, resource: str, device_id: str) -> Path:
    """The file of a device id: "/" is "-" in both parts of its name."""
    name = f"{resource}-{device_id}-device.json".replace("/", "-")
    return paths.devinfo / "dp" / name


def write(paths: Paths, resource: str, device_id: str, hcas: Collection[HCA]) -> bool:
    """Say which HCA the id is now, in place of what the file said; whether there is a file.

    There is none for several HCAs (mode "all"), nor for an SF or a software device: the
    specification has no type for these. An old one is removed then. Raises OSError.
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
    """Remove our files but those of these (resource, id); what was removed. Raises OSError.

    `keys` is asked once the files are listed: one that is written meanwhile stays. Without keys
    that is all of them. Other plugins' files stay.
    """
    found = sorted((paths.devinfo / "dp").glob("*-device.json"))
    kept = {path(paths, resource, device_id) for resource, device_id in keys()}
    stale = [file for file in found if file not in kept and _is_ours(file)]
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

    What it says already of other things stays; of a device that is none of PCI's (vDPA), all of
    it. For an interface whose device has no PCI address nothing is made. Raises OSError, and
    ValueError for what is no such copy: whoever writes a network's definition chooses the path.
    """
    copy = _copy(paths, file)
    found = _content(copy)
    if found or _is_pci(address):
        _write(copy, _completed(found, address, rdma, pf, uverbs))


def _copy(paths: Paths, file: str) -> Path:
    """The file with that path, directly below Multus' directory. Raises OSError, ValueError.

    Only the text of the path is compared: to look where it leads could wait for a file system
    that its owner has hung.
    """
    ours = paths.devinfo / "cni"
    directory, given = ours.resolve(), Path(file)
    usual = Paths().devinfo / "cni"  # as Multus writes it, whatever spelling is set for us
    spellings = {ours, directory} | ({usual} if usual.resolve() == directory else set())
    if given.name in ("", "..") or given.parent not in spellings:
        raise ValueError(f"it is not directly below {directory}, so it is left alone")
    return directory / given.name


def _content(copy: Path) -> dict[str, Any]:
    """What a copy says, {} if there is none. Raises OSError, ValueError for anything else."""
    try:
        # A link is followed by nobody, and a pipe waited for by nobody.
        descriptor = os.open(copy, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file, so it is left alone")
        try:
            found = msgspec.json.decode(opened.read(_MOST_BYTES))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            found = None
    if not isinstance(found, dict) or not isinstance(found.get("type"), str):
        raise ValueError("it is no device information, so it is left alone")
    return found


def _completed(
    found: dict[str, Any], address: str, rdma: str, pf: str, uverbs: CharacterDevice | None
) -> dict[str, Any]:
    document: dict[str, Any] = dict(found) if found else {"type": "pci", "version": VERSION}
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
    """What the file says, {} if there is none or it cannot be understood."""
    try:
        found = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: Path, document: dict[str, Any]) -> None:
    for directory in (file.parent.parent, file.parent):
        try:
            usable = directory.stat().st_mode & 0o777
        except FileNotFoundError:
            directory.mkdir(parents=True, exist_ok=True)
            usable = 0
        if not usable:  # as the specification's library makes them
            directory.chmod(0o755)
    files.write_atomically(file, msgspec.json.encode(document), _MODE, durable=False)
