"""Looks up and checks the device nodes of NVIDIA's driver.

Source: the driver's README, chapter "Known issues" and nvidia-modprobe(1): /dev/nvidiaN for each
GPU, /dev/nvidiactl and /dev/nvidia-uvm for all of them. nvidia-uvm is made by the first program
that uses CUDA, or by nvidia-modprobe.
"""

import os
import stat
from collections.abc import Iterable

import msgspec

from base.paths import Paths
from host.errors import HostError

NEEDED = ("nvidiactl", "nvidia-uvm")
TOOLS = ("nvidia-uvm-tools",)
TOOLS_AND_DISPLAY = ("nvidia-uvm-tools", "nvidia-modeset")

_REMEDIES = {
    "nvidiactl": "is NVIDIA's driver loaded?",
    "nvidia-uvm": "run `nvidia-modprobe -u -c 0`",
}


class GpuNode(msgspec.Struct, frozen=True, kw_only=True):
    """A character device that a container gets with its GPUs."""

    path: str  # in the container: "/dev/nvidia0"
    host: str
    major: int
    minor: int


def of_gpus(
    paths: Paths, minors: Iterable[int], optional: Iterable[str] = TOOLS
) -> tuple[GpuNode, ...]:
    """The nodes that a container with these GPUs needs: each once, those of the GPUs first.

    A node of `optional` that the host lacks is left out. Raises HostError if another one is
    missing, or is not a character device.
    """
    names = [f"nvidia{minor}" for minor in sorted(set(minors))]
    present = [name for name in optional if (paths.dev / name).exists()]
    return tuple(_node(paths, name) for name in (*names, *NEEDED, *present))


def fault(paths: Paths, minor: int) -> str | None:
    """Why no container can be given that GPU; None if its nodes are there."""
    try:
        of_gpus(paths, [minor], ())
    except HostError as error:
        return str(error)
    return None


def _node(paths: Paths, name: str) -> GpuNode:
    path = paths.dev / name
    try:
        status = path.stat()
    except OSError as error:
        remedy = _REMEDIES.get(name, "is this the host's /dev?")
        raise HostError(f"{path}: {error.strerror}: {remedy}") from None
    if not stat.S_ISCHR(status.st_mode):
        raise HostError(
            f"{path}: is not a character device: remove it and run `nvidia-modprobe -c 0 -u`"
        )
    return GpuNode(
        path=f"/dev/{name}",
        host=str(path),
        major=os.major(status.st_rdev),
        minor=os.minor(status.st_rdev),
    )
