"""Reads facts about processes of the host in /proc, such as the container of a process.

Sources: cgroups(7) and proc(5). The kubelet (pkg/kubelet/cm/pod_container_manager_linux.go and
cgroup_manager_linux.go) names the cgroups of pods. Runtimes name the cgroups of containers.
"""

import os
import re
import select
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import msgspec

from base import files
from host import procfs

MOUNTED_REGION = "/run/podfabric/gpu/region"  # PF_REGION_PATH of shim/layout.h
_MOST_MOUNTINFO = 4 << 20  # bytes; a line has about 300, and a tenant may make 100,000 mounts

# "pod" and the UID, or a static pod's hash; systemd writes "_" for "-".
_UID = r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})"
_POD = re.compile(
    rf"(?:kubepods-(?:burstable-|besteffort-)?|kubelet-kubepods-[a-z-]*)?{_UID}(?:\.slice)?"
)
_CONTAINER = re.compile(r"(?:(?:cri-containerd|crio|docker)-)?([0-9a-f]{64})(?:\.scope)?")
# containerd with the cgroup driver cgroupfs, below a kubelet with the driver systemd
_BOTH = re.compile(rf"[a-z-]*{_UID}\.slice:(?:cri-containerd|crio|docker):([0-9a-f]{{64}})")
_FIRST = ("memory", "devices", "pids", "name=systemd", "")  # hierarchies; "": cgroup v2


class Container(msgspec.Struct, frozen=True):
    pod_uid: str  # with dashes; 32 digits for a static pod
    id: str  # 64 hexadecimal digits


class Mount(msgspec.Struct, frozen=True):
    """A place in a file system, as in mountinfo."""

    device: str  # "0:25"
    path: str  # from the file system's root


def container_of(pid: int) -> Container | None:
    """The container of a process; `None` if the process is in no pod or does not exist."""
    try:
        content = files.read(procfs.name(f"{pid}/cgroup"))
    except OSError:
        return None
    return container_in(os.fsdecode(content))


@lru_cache(maxsize=256)  # the text is the same for all processes of a container
def container_in(cgroups: str) -> Container | None:
    """The container that a text of /proc/PID/cgroup names, for cgroup v1, v2 or both."""
    paths: dict[str, str] = {}
    for line in procfs.lines(cgroups):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths |= dict.fromkeys(controllers.split(","), path)
    ordered = (paths.pop(name) for name in _FIRST if name in paths)
    for path in (*ordered, *paths.values()):
        container = _container(path)
        if container is not None:
            return container
    return None


def start_time(pid: int) -> int | None:
    """The start of a process in clock ticks since the boot; `None` if `pid` does not exist."""
    fields = _stat(pid)
    return int(fields[19]) if fields is not None else None


def parent_of(pid: int) -> int | None:
    """The parent's pid: 0 if the parent is not visible, `None` if process `pid` does not exist."""
    fields = _stat(pid)
    return int(fields[1]) if fields is not None else None


def pidfd_of(pid: int) -> int | None:
    """A pidfd of a process; `None` if the process has ended."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def has_ended(pidfd: int) -> bool:
    """Whether the process has ended. No other process gets the pid before the end."""
    return bool(ended((pidfd,)))


def ended(pidfds: Iterable[int]) -> set[int]:
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    return {pidfd for pidfd, _ in poll.poll(0)}


def sees_the_host() -> bool:
    """Whether this process is in the host's pid namespace, where the driver's pids are valid."""
    try:
        own, host = Path("/proc/self/ns/pid").stat(), procfs.path("1/ns/pid").stat()
    except OSError:  # unknown
        return True
    return (own.st_dev, own.st_ino) == (host.st_dev, host.st_ino)


def mounted_region(pid: int) -> Mount | None:
    """The region that a process has mounted; `None` if there is none, or mountinfo is too long."""
    try:
        with open(procfs.name(f"{pid}/mountinfo"), "rb") as file:  # noqa: PTH123
            content = file.read(_MOST_MOUNTINFO + 1)
    except OSError:
        return None
    if len(content) > _MOST_MOUNTINFO:
        return None
    for line in reversed(procfs.lines(os.fsdecode(content))):  # later mounts hide earlier ones
        if MOUNTED_REGION in line:
            _, _, device, path, point, *_ = line.split(" ", 5)
            if point == MOUNTED_REGION:
                return Mount(device, procfs.unescaped(path))
    return None


def place_of(path: Path) -> Mount:
    """The device of a path's file system, and the path from that file system's root.

    Raises OSError.
    """
    resolved = str(path.resolve(strict=True))
    best, inside = Mount("", "/"), "/"
    for line in procfs.lines(os.fsdecode(files.read("/proc/self/mountinfo"))):
        _, _, device, root, point, *_ = line.split(" ", 5)
        if "\\" in point:
            point = procfs.unescaped(point)
        below = resolved == point or resolved.startswith(f"{point.rstrip('/')}/")
        if below and len(point) >= len(inside):  # later mounts hide earlier ones
            best, inside = Mount(device, procfs.unescaped(root)), point
    return Mount(best.device, str(Path(best.path) / Path(resolved).relative_to(inside)))


def _container(path: str) -> Container | None:
    """The container below the outermost pod in a cgroup's path.

    Inner cgroups do not count, because a container can make cgroups of any name.
    """
    components = path.split("/")
    for component, below in zip(components, [*components[1:], ""], strict=True):
        if both := _BOTH.fullmatch(component):
            return Container(both[1].replace("_", "-"), both[2])
        if pod := _POD.fullmatch(component):
            inside = _CONTAINER.fullmatch(below)
            return Container(pod[1].replace("_", "-"), inside[1]) if inside else None
    return None


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat after the program's name. The name may contain any character."""
    try:
        return files.read(procfs.name(f"{pid}/stat")).rpartition(b")")[2].split()
    except OSError:
        return None
