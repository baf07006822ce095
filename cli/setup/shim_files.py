"""Puts the libraries of gpu/shim on a node. These libraries enforce the limits of GPUs.

A running container has the libraries mounted, file by file. So no file is written in place: a new
version is a new file that is renamed over the old name. Running containers keep the old file. An
unchanged file stays, so that its pages are in memory once for all containers.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from base.files import sync_directory
from cli.setup import executables
from cli.setup.executables import CODE, InstallRefused
from gpu.driver.driver_files import CUDA_SHIM, NVML_SHIM

FILES = (CUDA_SHIM, NVML_SHIM)

_OF_IMAGE = Path(sys.prefix) / f"lib/podfabric/gpu-{os.uname().machine}"
BUILT = _OF_IMAGE if _OF_IMAGE.exists() else CODE / "build/gpu/shim"
"""The image's files for this machine (deploy/Containerfile), or what `make gpu` built."""

_ELF = b"\x7fELF"


def read(source: Path) -> dict[str, bytes]:
    """The files in a directory, by their names. Raises InstallRefused and OSError."""
    contents = {}
    for name in FILES:
        path = source / name
        if not path.is_file():
            raise InstallRefused(f"{path}: this file does not exist: run `make gpu`")
        contents[name] = path.read_bytes()
        if not contents[name].startswith(_ELF):
            raise InstallRefused(f"{path}: is not an ELF file: remove {source} and run `make gpu`")
    return contents


def install(contents: dict[str, bytes], directory: Path) -> Iterator[str]:
    """Write these files to a directory; yields a line for each new one. Raises OSError."""
    for parent in (directory.parent.parent, directory.parent, directory):
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with executables.locked(directory):
        other = {
            directory / name: content
            for name, content in contents.items()
            if not _is(directory / name, content)
        }
        executables.install(other)
    yield from (f"installed {path}" for path in other)


def uninstall(directory: Path) -> Iterator[str]:
    """Remove the files; running containers keep theirs. Raises OSError."""
    if directory.is_dir():
        with executables.locked(directory):
            for path in (directory / name for name in FILES):
                if path.exists():
                    path.unlink()
                    yield f"removed {path}"
            sync_directory(directory)
    for empty in (directory, directory.parent):
        with suppress(OSError):  # it has something else, or is gone
            empty.rmdir()


def _is(path: Path, content: bytes) -> bool:
    try:
        return not path.is_symlink() and path.read_bytes() == content
    except FileNotFoundError:
        return False
