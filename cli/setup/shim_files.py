"""Installs the libraries of gpu/shim, which enforce the limits of GPUs.

Running containers have the files mounted. A new version replaces a file by a rename, so running
containers keep the old file. An unchanged file stays, so that all containers share its pages.
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
"""The directory of the image's files (deploy/Containerfile), or of the files from `make gpu`."""

_ELF = b"\x7fELF"


def read(source: Path) -> dict[str, bytes]:
    """The contents of the libraries by name. Raises InstallRefused, OSError."""
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
    """Write these files to a directory. Yields a line for each new file. Raises OSError."""
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
    """Remove the files. Running containers keep their mounted files. Raises OSError."""
    if directory.is_dir():
        with executables.locked(directory):
            for path in (directory / name for name in FILES):
                if path.exists():
                    path.unlink()
                    yield f"removed {path}"
            sync_directory(directory)
    for empty in (directory, directory.parent):
        with suppress(OSError):  # the directory has other files, or is gone
            empty.rmdir()


def _is(path: Path, content: bytes) -> bool:
    try:
        return not path.is_symlink() and path.read_bytes() == content
    except FileNotFoundError:
        return False
