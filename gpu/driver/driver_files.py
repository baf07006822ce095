"""Finds the files that bring NVIDIA's driver and our shims into a container.

A shim has the file names of the driver's library that the shim replaces. In a container, the
driver's own library is outside of the loader's directories. The shim is linked with this library by
path (docs/developers/gpu-library.md). In a container, each library is in Debian's directory and in
Red Hat's.

Sources: ld.so(8); nvc_info.c of libnvidia-container for the names of libraries.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from host.errors import HostError

CUDA, NVML = "libcuda.so", "libnvidia-ml.so"
CUDA_SHIM, NVML_SHIM = "libpfcuda.so", "libpfnvml.so"
TRIPLET = f"{os.uname().machine}-linux-gnu"
# Where drivers install libraries: Debian, RPM distributions, Google's COS, NixOS.
DIRECTORIES = (
    *(f"usr/lib/{TRIPLET}", "usr/lib64", f"usr/lib/{TRIPLET}/nvidia/current"),
    *(f"lib/{TRIPLET}", "lib64", "usr/lib", "lib"),
)
# Libraries that libcuda or cuda-gdb loads. Libraries for graphics, video and OpenCL are left out.
OTHERS = (
    *("libcudadebugger.so", "libnvidia-gpucomp.so", "libnvidia-nvvm.so", "libnvidia-nvvm70.so"),
    *("libnvidia-pkcs11.so", "libnvidia-pkcs11-openssl3.so", "libnvidia-ptxjitcompiler.so"),
)
TOOL = "usr/bin/nvidia-smi"
INSIDE = (f"/usr/lib/{TRIPLET}", "/usr/lib64")
"""The directories that the loader searches in images of Debian's and of Red Hat's family."""

REAL = {
    CUDA: "/usr/lib/podfabric/libpfcuda-real.so.1",
    NVML: "/usr/lib/podfabric/libpfnvidia-ml-real.so.1",
}
"""The driver's own libraries, with which the shims are linked (tools/build_shim.py)."""

_SHIMS = {CUDA: CUDA_SHIM, NVML: NVML_SHIM}
_MOST_LINKS = 40  # as in the kernel's path lookup


class SharedFile(msgspec.Struct, frozen=True):
    """A file or directory of the host that a container sees."""

    host: str
    container: str
    read_only: bool = True


class DriverLibrary(msgspec.Struct, frozen=True):
    """A library of the driver. Paths are relative to the driver's root."""

    name: str  # "libcuda.so"
    file: str  # "usr/lib64/libcuda.so.580.65.06"
    names: tuple[str, ...]  # the file and links to it: "libcuda.so", "libcuda.so.1", ...


class InstalledDriver(msgspec.Struct, frozen=True):
    libraries: tuple[DriverLibrary, ...]
    tool: str  # nvidia-smi; "" if there is none


def resolved(root: Path, path: str) -> str | None:
    """The path below `root`, resolved as after chroot(2); `None` if nothing is there."""
    done: list[str] = []
    pending = path.split("/")[::-1]
    links = 0
    while pending:
        name = pending.pop()
        if name in ("", "."):
            continue
        if name == "..":
            del done[-1:]
            continue
        try:
            target = str(root.joinpath(*done, name).readlink())
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: it exists and is not a link
                return None
            done.append(name)
            continue
        links += 1
        if links > _MOST_LINKS:
            return None
        if target.startswith("/"):
            done.clear()
        pending += target.split("/")[::-1]
    return "/".join(done)


def library(root: Path, soname: str) -> Path | None:
    """The file of a library such as "libnvidia-ml.so.1"; `None` if the driver has no such file."""
    found = _first(root, soname)
    return root / found[1] if found is not None else None


def installed(root: Path) -> InstalledDriver:
    """The driver installed below `root`. Raises HostError if it is missing or incomplete."""
    found = _first(root, f"{CUDA}.1")
    if found is None:
        raise HostError(
            f"no {CUDA}.1 below {root}: install NVIDIA's driver, or set gpuLimits.driverRoot to "
            "the driver's directory"
        )
    linked, file = found
    version = PurePosixPath(file).name.removeprefix(f"{CUDA}.")
    directories = dict.fromkeys((linked, str(PurePosixPath(file).parent)))
    libraries = tuple(_libraries(root, directories, version))
    for name in (CUDA, NVML):
        if not any(library.name == name for library in libraries):
            raise HostError(
                f"{root} has the driver's {file} but no {name}.{version}: install the whole driver"
            )
    return InstalledDriver(libraries, resolved(root, TOOL) or "")


def shared(driver: InstalledDriver, root: Path, shims: Path) -> tuple[SharedFile, ...]:
    """The files of the driver and the shims that a container gets. Raises HostError."""
    for name in (CUDA_SHIM, NVML_SHIM):
        if not (shims / name).is_file():
            raise HostError(f"{shims} has no {name}: run `podfabric install --gpu` on this node")
    files = [SharedFile(str(root / driver.tool), f"/{TOOL}")] if driver.tool else []
    for library in driver.libraries:
        source = str(root / library.file)
        if library.name in _SHIMS:
            files.append(SharedFile(source, REAL[library.name]))
            source = str(shims / _SHIMS[library.name])
        files += [
            SharedFile(source, f"{directory}/{name}")
            for directory in INSIDE
            for name in library.names
        ]
    return tuple(files)


def _first(root: Path, soname: str) -> tuple[str, str] | None:
    """The first directory that has the name `soname`, and the file that the name leads to."""
    for directory in DIRECTORIES:
        file = resolved(root, f"{directory}/{soname}")
        if file is not None:
            return directory, file
    return None


def _libraries(root: Path, directories: Iterable[str], version: str) -> Iterator[DriverLibrary]:
    """The driver's libraries of `version` in `directories`, each with all of its names."""
    entries = [(directory, name) for directory in directories for name in _entries(root, directory)]
    for library_name in (CUDA, NVML, *OTHERS):
        pattern = re.compile(rf"{re.escape(library_name)}(\..+)?")
        targets: dict[str, list[str]] = {}
        for directory, name in entries:
            if pattern.fullmatch(name):
                file = resolved(root, f"{directory}/{name}")
                if file is not None and PurePosixPath(file).name == f"{library_name}.{version}":
                    targets.setdefault(file, []).append(name)
        for file, names in sorted(targets.items())[:1]:
            yield DriverLibrary(library_name, file, tuple(sorted(set(names))))


def _entries(root: Path, directory: str) -> Sequence[str]:
    try:
        return os.listdir(root / directory)  # noqa: PTH208 - thousands of entries, few of interest
    except OSError:
        return ()
