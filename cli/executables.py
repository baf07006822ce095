"""The CNI executables: their names, how to recognize ours, and how to install them.

A directory has the launcher under each plugin's name, which hands the call to the agent. Its
subdirectory FALLBACK has scripts that run the plugins by this interpreter, without an agent.
"""

import fcntl
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from base.files import sync_directory
from cni import installation

PLUGINS = {
    "ib-sriov": "cni.sriov",  # the name in definitions for InfiniBand
    "ipoib": "cni.ipoib",
    "podfabric-ipam": "ipam",
    "rdma": "cni.rdma",
    "sriov": "cni.sriov",
}
"""The module of each plugin, by the name its executable has."""

EVERY = {**PLUGINS, "nv-ipam": "ipam"}
"""Also those that are installed only if they are named: most nodes have no nv-ipam, or NVIDIA's."""

FALLBACK = ".podfabric"
"""The directory of the scripts, beside the launchers; cni/launcher/launcher.c has the name too."""

CODE = Path(__file__).resolve().parent.parent
_OF_IMAGE = Path(sys.prefix) / f"lib/podfabric/launcher-{os.uname().machine}"
LAUNCHER = _OF_IMAGE if _OF_IMAGE.exists() else CODE / "build/cni/launcher"
"""The image's launcher for this machine (deploy/Containerfile), or what `make cni` built."""

_LAUNCHER_MARK = b"podfabric launcher 1"  # cni/launcher/launcher.c
_SCRIPT_MARK = b"# podfabric: the CNI executable"
_INSTALLATION_MARK = f'"{installation.MARK}"'.encode()
_MAX_SIZE = 8 << 20  # no launcher is larger, so another plugin's 100 MB are not read
_TEMPORARY = ".podfabric-new"

# Isolated from the caller's PYTHON* variables and working directory (-I), without the site
# machinery (-S): a runtime passes its whole environment on, and start-up is paid on every call.
_SCRIPT = """\
#!{python} -IS
{mark} "{name}"
{about}
import sys
sys.path[1:1] = {path!r}
from {module} import main
main({argument})
"""
_INSTALLED = f"# {installation.NAME} beside it says where the node's files are, and no PODFABRIC_*."
_DEVELOPMENT = (
    "# For development and tests: PODFABRIC_* of the caller say where the node's files are."
)


def script(name: str, *, development: bool = False) -> bytes:
    """The script that runs a plugin with this interpreter."""
    return _SCRIPT.format(
        about=_DEVELOPMENT if development else _INSTALLED,
        argument=repr(installation.DEVELOPMENT) if development else "__file__",
        python=Path(sys.prefix) / "bin" / "python3",
        mark=_SCRIPT_MARK.decode(),
        name=name,
        path=[str(CODE), sysconfig.get_paths()["purelib"]],
        module=EVERY[name],
    ).encode()


def is_launcher(content: bytes) -> bool:
    """Whether it is the content of a launcher."""
    return content.startswith(b"\x7fELF") and _LAUNCHER_MARK in content


def is_ours(path: Path) -> bool:
    """Whether a file, or a link's target, is an executable or installation file of podfabric."""
    if not path.is_file() or path.stat().st_size > _MAX_SIZE:
        return False
    content = path.read_bytes()
    if path.name == installation.NAME:
        return _INSTALLATION_MARK in content
    return is_launcher(content) or (content.startswith(b"#!") and _SCRIPT_MARK in content)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the directory for changes, and remove temporary files that a killed process left."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for parent in (directory, directory / FALLBACK):
            for temporary in parent.glob(f".*{_TEMPORARY}"):
                temporary.unlink()
        yield
    finally:
        os.close(descriptor)


def install(contents: Mapping[Path, bytes]) -> None:
    """Write executables to these paths, in this order; the caller holds `locked`.

    Existing files are replaced. A runtime that starts an executable meanwhile gets the old or the
    new file. All contents are on disk before the first rename, so only a rename can fail halfway.
    """
    temporaries = {path: path.with_name(f".{path.name}{_TEMPORARY}") for path in contents}
    try:
        for path, content in contents.items():
            with temporaries[path].open("xb") as file:
                os.fchmod(file.fileno(), 0o644 if path.name == installation.NAME else 0o755)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in temporaries.items():
            temporary.replace(path)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
    for directory in {path.parent for path in contents}:
        sync_directory(directory)
