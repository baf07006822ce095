"""Memory limits that the driver itself enforces, for the cgroup of a container: the tier `kernel`.

They hold for every library, since all device memory of the cgroup's processes counts. They are set
on the container's own cgroup after the runtime has made it and before its first process starts: a
limit on a parent holds, too, but programs would see the whole GPU.

Sources: nvml.h of R615 (nvmlDeviceSetMemoryLimits_v1), Documentation/admin-guide/cgroup-v2.rst
(dmem).
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from base import files
from gpu.group_limits import NO_LIMIT, Limit
from gpu.nvml import NOT_FOUND, NOT_SUPPORTED, UNLIMITED, Nvml, NvmlError
from host import procfs

FIRST_DRIVER = 615
Backend = Literal["dmem", "misc"]
"""What counts the memory: the kernel's controller dmem, or the driver, without nested cgroups."""

_MOST_LEVELS = 8  # of a container's cgroup below the root


class KernelTierError(Exception):
    """The driver enforces no limit there. The text says why and what to do."""


def unsupported(nvml: Nvml, uuid: str, cgroups: Path) -> str | None:
    """Why the driver cannot limit a GPU's memory for cgroups; None if it can, as far as it tells.

    Only setting a limit proves it, which `limit` does for each container. Raises NvmlError.
    """
    driver = nvml.driver_version()
    major = driver.partition(".")[0]
    if not major.isdecimal() or int(major) < FIRST_DRIVER:
        return f"driver {driver} has no memory limits of cgroups: R{FIRST_DRIVER} or later has them"
    if not (cgroups / "cgroup.controllers").exists():
        return f"{cgroups} is not of cgroups version 2"
    if nvml.in_mig_mode(uuid):
        return "the GPU is in MIG mode, whose devices have no memory limits of cgroups"
    return None


def limit(nvml: Nvml, cgroup: Path, limits: Sequence[Limit]) -> Backend:
    """Limit the memory of GPUs for a container's cgroup, and read that back.

    Raises KernelTierError; the container must not start then. Called again it does the same.
    """
    for each in limits:
        hard = UNLIMITED if each.memory_bytes == NO_LIMIT else each.memory_bytes
        try:
            nvml.set_cgroup_limit(each.uuid, cgroup, hard)
            found = nvml.cgroup_limit(each.uuid, cgroup)
        except NvmlError as error:
            raise KernelTierError(f"{cgroup}: {each.uuid}: {_explained(error, cgroup)}") from None
        if (found.soft, found.hard) != (0, hard):
            raise KernelTierError(
                f"{cgroup}: {each.uuid}: a limit of {hard} bytes was set, and the driver has "
                f"{found.hard} (soft {found.soft})"
            )
    return backend_of(cgroup)


def cgroup_of(pid: int, cgroups: Path) -> Path:
    """The directory of a process' cgroup, of version 2, below `cgroups`. Raises KernelTierError.

    An agent in a cgroup namespace of its own sees paths relative to its own cgroup, "/../../a/b".
    The rest of such a path is looked for then: a container's name is unique.
    """
    try:
        text = os.fsdecode(files.read(procfs.name(f"{pid}/cgroup")))
    except OSError as error:
        raise KernelTierError(f"process {pid}: {error.strerror}") from None
    path = next((line[3:] for line in procfs.lines(text) if line.startswith("0::")), "/")
    names = [name for name in path.split("/") if name]
    rest = [name for name in names if name != ".."]
    if not rest:
        raise KernelTierError(f"process {pid} is in no cgroup of version 2 of its own")
    if len(rest) == len(names):
        directory = cgroups.joinpath(*rest)
        if directory.is_dir():
            return directory
    else:
        for parent, below, _ in os.walk(cgroups):
            if rest[0] in below and (found := Path(parent).joinpath(*rest)).is_dir():
                return found
            if len(Path(parent).relative_to(cgroups).parts) >= _MOST_LEVELS:
                below.clear()
    raise KernelTierError(f"{cgroups}: has no cgroup {path} of process {pid}")


def backend_of(cgroup: Path) -> Backend:
    """What counts the memory of a cgroup's processes."""
    return "dmem" if (cgroup / "dmem.max").exists() else "misc"


def node_backend(cgroups: Path) -> Backend:
    """What counts memory on this node: the driver registers its GPUs where it uses dmem."""
    with suppress(OSError):
        lines = (cgroups / "dmem.capacity").read_text().splitlines()
        if any(line.startswith("nvidia/") for line in lines):
            return "dmem"
    return "misc"


def above_pods_without_dmem(cgroups: Path) -> Path | None:
    """The uppermost cgroup above pods that does not enable dmem, where the driver uses that.

    None if all do. The levels below the kubelet's own are made with each pod, and not looked at.
    """
    if node_backend(cgroups) == "dmem":
        for name in ("kubepods", "kubepods.slice"):
            pods = cgroups / name
            if pods.is_dir() and (lacking := without_dmem(pods / "pod", cgroups)) is not None:
                return lacking
    return None


def dmem_obstacle(cgroups: Path) -> str | None:
    """Why limits of pods' containers would fail where the kernel counts; None if not so."""
    lacking = above_pods_without_dmem(cgroups)
    if lacking is None:
        return None
    return (
        f"{lacking}/cgroup.subtree_control lacks dmem: `echo +dmem > "
        f"{lacking}/cgroup.subtree_control`, or load the driver with RmMemacctMode=1"
    )


def without_dmem(cgroup: Path, cgroups: Path) -> Path | None:
    """The uppermost cgroup that does not enable dmem for its children, on the way to `cgroup`.

    None if all do. For a kernel that has the controller.
    """
    above = [cgroups, *(cgroups / part for part in reversed(_parents(cgroup, cgroups)))]
    for directory in above:
        enabled = ""
        with suppress(OSError):
            enabled = (directory / "cgroup.subtree_control").read_text()
        if "dmem" not in enabled.split():
            return directory
    return None


def _parents(cgroup: Path, cgroups: Path) -> list[Path]:
    """The cgroups between the root and this one, the lowest first, relative to the root."""
    return [path for path in cgroup.relative_to(cgroups).parents if path != Path()]


def _explained(error: NvmlError, cgroup: Path) -> str:
    if error.code == NOT_SUPPORTED:
        return f"{error}: this driver has no memory limits of cgroups (R{FIRST_DRIVER} has)"
    if error.code == NOT_FOUND:
        return (
            f"{error}: write +dmem into cgroup.subtree_control of every cgroup above it (podfabric "
            "doctor names the first that lacks it), or load the driver with RmMemacctMode=1"
        )
    return str(error)
