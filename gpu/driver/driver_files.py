"""The files of NVIDIA's driver on a node, and where a container has them and the shims.

A shim lies over the driver's file, under each of its names, so that every program that finds the
driver finds the shim. The driver's own file has another name, in a directory that the loader does
not look into: the shim names it (docs/gpu-limits.md).

The image may be of any distribution, so the libraries are in the directories of both families,
Debian's and Red Hat's. No hook needs to make links or the loader's cache then.

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
# Where a driver's libraries are below its root: Debian, RPM distributions, Google's COS, NixOS.
DIRECTORIES = (
    *(f"usr/lib/{TRIPLET}", "usr/lib64", f"usr/lib/{TRIPLET}/nvidia/current"),
    *(f"lib/{TRIPLET}", "lib64", "usr/lib", "lib"),
)
# What libcuda itself loads, and cuda-gdb. Not there: what draws, encodes, or is of OpenCL.
OTHERS = (
    *("libcudadebugger.so", "libnvidia-gpucomp.so", "libnvidia-nvvm.so", "libnvidia-nvvm70.so"),
    *("libnvidia-pkcs11.so", "libnvidia-pkcs11-openssl3.so", "libnvidia-ptxjitcompiler.so"),
)
TOOL = "usr/bin/nvidia-smi"
INSIDE = (f"/usr/lib/{TRIPLET}", "/usr/lib64")
"""Where the loader of an image looks, of Debian's family and of Red Hat's."""

REAL = {
    CUDA: "/usr/lib/podfabric/libpfcuda-real.so.1",
    NVML: "/usr/lib/podfabric/libpfnvidia-ml-real.so.1",
}
"""Where a shim looks for the library that it stands in for (tools/build_shim.py)."""

_SHIMS = {CUDA: CUDA_SHIM, NVML: NVML_SHIM}
_MOST_LINKS = 40  # as the kernel follows in a path


class SharedFile(msgspec.Struct, frozen=True):
    """A file or directory of the host that a container sees."""

    host: str
    container: str
    read_only: bool = True


class DriverLibrary(msgspec.Struct, frozen=True):
    """A library of the driver. Paths are below the driver's root, without "/" in front."""

    name: str  # "libcuda.so"
    file: str  # "usr/lib64/libcuda.so.580.65.06"
    names: tuple[str, ...]  # of the file and of links to it: "libcuda.so", "libcuda.so.1", ...


class InstalledDriver(msgspec.Struct, frozen=True):
    """The driver below a root."""

    cuda: DriverLibrary
    nvml: DriverLibrary
    others: tuple[DriverLibrary, ...]
    tool: str  # nvidia-smi; "" if it is not there

    @property
    def libraries(self) -> tuple[DriverLibrary, ...]:
        """All of them."""
        return (self.cuda, self.nvml, *self.others)


def resolved(root: Path, path: str) -> str | None:
    """Where a path below `root` leads, as if that were "/"; below it. None if nothing is there."""
    done: list[str] = []
    left = path.split("/")[::-1]
    links = 0
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        if name == "..":
            del done[-1:]
            continue
        try:
            target = str(root.joinpath(*done, name).readlink())
        except OSError as error:
            if error.errno != errno.EINVAL:  # it exists, and is not a link
                return None
            done.append(name)
            continue
        links += 1
        if links > _MOST_LINKS:
            return None
        if target.startswith("/"):
            done.clear()
        left += target.split("/")[::-1]
    return "/".join(done)


def library(root: Path, soname: str) -> Path | None:
    """The file behind a library's name, such as "libnvidia-ml.so.1"; None if there is none."""
    found = _first(root, soname)
    return root / found[1] if found is not None else None


def installed(root: Path) -> InstalledDriver:
    """The driver that is installed below `root`. Raises HostError if there is none."""
    found = _first(root, f"{CUDA}.1")
    if found is None:
        raise HostError(
            f"no {CUDA}.1 below {root}: install NVIDIA's driver, or set gpuLimits.driverRoot"
        )
    linked, file = found
    version = PurePosixPath(file).name.removeprefix(f"{CUDA}.")
    directories = dict.fromkeys((linked, str(PurePosixPath(file).parent)))
    libraries = {each.name: each for each in _libraries(root, directories, version)}
    for name in (CUDA, NVML):
        if name not in libraries:
            raise HostError(
                f"{root}/{file} is there without {name}.{version}: install the whole driver"
            )
    return InstalledDriver(
        cuda=libraries.pop(CUDA),
        nvml=libraries.pop(NVML),
        others=tuple(libraries.values()),
        tool=resolved(root, TOOL) or "",
    )


def shared(driver: InstalledDriver, root: Path, shims: Path) -> tuple[SharedFile, ...]:
    """What a container with limits sees of the driver and the shims.

    Args:
        driver: the driver.
        root: its root on the host.
        shims: the directory of the shims on the host.

    Raises HostError without the shims.
    """
    for name in (CUDA_SHIM, NVML_SHIM):
        if not (shims / name).is_file():
            raise HostError(f"{shims} has no {name}: run `podfabric install --gpu` on this node")
    laid = (
        SharedFile(_behind(each, root, shims), f"{directory}/{name}")
        for directory in INSIDE
        for each in driver.libraries
        for name in each.names
    )
    real = (
        SharedFile(str(root / each.file), REAL[each.name]) for each in (driver.cuda, driver.nvml)
    )
    tool = [SharedFile(str(root / driver.tool), f"/{TOOL}")] if driver.tool else []
    return (*laid, *real, *tool)


def _behind(each: DriverLibrary, root: Path, shims: Path) -> str:
    shim = _SHIMS.get(each.name)
    return str(shims / shim) if shim is not None else str(root / each.file)


def _first(root: Path, soname: str) -> tuple[str, str] | None:
    """The directory with a library's name, and the file behind the name."""
    for directory in DIRECTORIES:
        file = resolved(root, f"{directory}/{soname}")
        if file is not None:
            return directory, file
    return None


def _libraries(root: Path, directories: Iterable[str], version: str) -> Iterator[DriverLibrary]:
    """The libraries of that version, with every name that leads to each."""
    entries = [(directory, name) for directory in directories for name in _entries(root, directory)]
    for library_name in (CUDA, NVML, *OTHERS):
        pattern = re.compile(rf"{re.escape(library_name)}(\..+)?")
        behind: dict[str, list[str]] = {}
        for directory, name in entries:
            if pattern.fullmatch(name):
                file = resolved(root, f"{directory}/{name}")
                if file is not None and PurePosixPath(file).name == f"{library_name}.{version}":
                    behind.setdefault(file, []).append(name)
        for file, names in sorted(behind.items())[:1]:
            yield DriverLibrary(library_name, file, tuple(sorted(set(names))))


def _entries(root: Path, directory: str) -> Sequence[str]:
    try:
        return os.listdir(root / directory)  # noqa: PTH208 - thousands, of which few matter
    except OSError:
        return ()
