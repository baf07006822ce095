"""Recognizes and installs podfabric's CNI executables.

The runtime's directory has a copy of the launcher under each plugin's name, and under the name of
the hook for locked memory. Another project's executable with such a name moves to REPLACED until
podfabric is uninstalled.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from base import files
from base.files import sync_directory
from base.locks import directory_locked
from base.watching import WatchedFile
from cni.spec.config import SERVED
from deviceplugin.allocate.memlock import HOOK

PLUGINS = (
    "ib-sriov",  # the name of `sriov` in definitions for InfiniBand
    "ipoib",
    "podfabric-ipam",
    "podfabric-ipvlan",
    "podfabric-macvlan",
    "rdma",
    "sriov",
)

EVERY = (
    *PLUGINS,
    "ipvlan",
    "macvlan",
    *sorted(SERVED[1:]),
)  # also the names that only `--plugins` installs

INSTALLED = (*EVERY, HOOK)

OWN = ".podfabric"  # podfabric's directory next to the launchers
REPLACED = f"{OWN}/replaced"  # for executables that launchers have replaced

CODE = Path(__file__).resolve().parents[2]
_OF_IMAGE = Path(sys.prefix) / f"lib/podfabric/launcher-{os.uname().machine}"
LAUNCHER = _OF_IMAGE if _OF_IMAGE.exists() else CODE / "build/cni/launcher"
"""The image's launcher for this machine (deploy/Containerfile), or the one from `make cni`."""

_LAUNCHER_MARK = b"podfabric launcher "  # in cni/launcher/launcher.c, in any version
_MAX_SIZE = 8 << 20  # no launcher is larger, so a larger file is not read
_TEMPORARY = ".podfabric-new"

RETURNED = "another project's file took the place of podfabric's, and the runtime runs that file"
TAKE_AGAIN = (
    "remove what installs it (the project's DaemonSet), then restart podfabric's pod of this node; "
    "without Kubernetes: `podfabric install`"
)

_NONE: Mapping[Path, Path] = MappingProxyType({})
_log = logging.getLogger(__name__)


class InstallRefused(Exception):
    """`install` or `uninstall` failed. The text names the file and the remedy."""


def is_launcher(content: bytes) -> bool:
    return content.startswith(b"\x7fELF") and _LAUNCHER_MARK in content


def is_ours(path: Path) -> bool:
    """Whether a file, or a link's target, is a launcher."""
    if not path.is_file() or path.stat().st_size > _MAX_SIZE:
        return False
    return is_launcher(path.read_bytes())


def exists(path: Path) -> bool:
    """Whether the path exists. A broken link counts as existing."""
    return path.is_symlink() or path.exists()


def is_foreign(path: Path) -> bool:
    """Whether another project's file is at the path."""
    return exists(path) and not is_ours(path)


def place_kept(path: Path) -> Path:
    """The path to which `install` moves another project's executable that was at `path`."""
    return path.parent / REPLACED / path.name


def has_returned(path: Path) -> bool:
    """Whether another project's file is at `path` again, after `install` has moved one aside."""
    return is_foreign(path) and is_foreign(place_kept(path))


def watch(directory: Path) -> WatchedFile:
    """Log when another project's file replaces a launcher, until `close`."""
    ours: set[str] = set()
    logged: set[str] = set()

    def look() -> None:
        for name in INSTALLED:
            path = directory / name
            if is_ours(path):
                ours.add(name)
                logged.discard(name)
            elif name not in logged and (has_returned(path) or (name in ours and exists(path))):
                logged.add(name)
                _log.warning("%s: %s: %s", path, RETURNED, TAKE_AGAIN)

    look()
    return WatchedFile(directory / OWN, look, name="executables")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the directory for changes, and remove temporary files of a killed process."""
    with directory_locked(directory):
        for temporary in directory.glob(f".*{_TEMPORARY}"):
            temporary.unlink()
        yield


def install(contents: Mapping[Path, bytes], kept: Mapping[Path, Path] = _NONE) -> None:
    """Write executables in the order of `contents`. The caller holds `locked`.

    `kept` maps the path of an existing file to the file's new path. A runtime always finds the old
    or the new file. All contents are on disk before the first rename, so a full disk changes no
    executable.
    """
    temporaries = {path: path.with_name(f".{path.name}{_TEMPORARY}") for path in contents}
    try:
        for path, content in contents.items():
            with temporaries[path].open("xb") as file:
                os.fchmod(file.fileno(), 0o755)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in temporaries.items():
            place = kept.get(path, path)
            temporary.replace(place)
            if place != path:
                files.exchange(place, path)  # a kill before this line leaves a launcher at `place`
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
    for directory in {path.parent for path in (*contents, *kept.values())}:
        sync_directory(directory)
