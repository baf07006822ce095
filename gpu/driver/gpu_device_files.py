"""Looks up and checks the device nodes of NVIDIA's driver.

Each GPU has its own /dev/nvidiaN. All GPUs share /dev/nvidiactl and /dev/nvidia-uvm.

Sources: the driver's README, chapter "Known issues"; nvidia-modprobe(1).
"""

from collections.abc import Iterable

from base.paths import Paths
from host.device_nodes import DeviceNode, look_up
from host.errors import HostError

NEEDED = ("nvidiactl", "nvidia-uvm")
TOOLS = ("nvidia-uvm-tools",)
TOOLS_AND_DISPLAY = ("nvidia-uvm-tools", "nvidia-modeset")

_REMEDIES = {
    "nvidiactl": "is NVIDIA's driver loaded?",
    "nvidia-uvm": "run `nvidia-modprobe -u -c 0`",
}


def of_gpus(
    paths: Paths, minors: Iterable[int], optional: Iterable[str] = TOOLS
) -> tuple[DeviceNode, ...]:
    """The device nodes of these GPUs, with the nodes of `optional` that exist. Raises HostError."""
    names = [f"nvidia{minor}" for minor in sorted(set(minors))]
    present = [name for name in optional if (paths.dev / name).exists()]
    return tuple(_node(paths, name) for name in (*names, *NEEDED, *present))


def fault(paths: Paths, minor: int) -> str | None:
    """The problem with the GPU's device nodes; `None` if there is none."""
    try:
        of_gpus(paths, [minor], ())
    except HostError as error:
        return str(error)
    return None


def _node(paths: Paths, name: str) -> DeviceNode:
    missing = _REMEDIES.get(name, "is this the host's /dev?")
    again = "remove the file and run `nvidia-modprobe -c 0 -u`"
    return look_up(paths.dev / name, f"/dev/{name}", missing, again)
