"""What the agent adds to pools of GPUs: NVML, and the groups whose limits are kept.

A device plugin that runs alone has neither, and gives no parts of GPUs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from deviceplugin.pools.pool_config import DevicePluginConfig
from gpu.driver.driver_files import SharedFile
from gpu.driver.gpu_inventory import MemorySource

if TYPE_CHECKING:
    from gpu.limits.groups import Groups  # more modules than a node without GPUs loads

ALONE = "the device plugin runs alone: run `podfabric agent`, which keeps limits"


@dataclass(frozen=True)
class GpuParts:
    """The parts of an agent. Without them no part of a GPU is given.

    `obstacle` answers why limits cannot be kept, and `files` what a container with limits sees
    beside the files of its group; it raises HostError.
    """

    memory: MemorySource = dict
    groups: "Groups | None" = None
    obstacle: Callable[[], str | None] = lambda: ALONE
    files: Callable[[], Sequence[SharedFile]] = tuple
    faults: Callable[[], Mapping[str, str]] = dict  # of sick GPUs, by UUID


class GpuLimits(Protocol):
    """Keeps the limits of containers on this node, for a `Service`, from one thread at a time."""

    def parts(self, config: DevicePluginConfig) -> GpuParts:
        """The parts for that configuration, before its pools are served."""

    def start(self) -> None:
        """The device plugin knows now who holds what. Called again it does nothing."""

    def close(self) -> None:
        """Stop. What containers have stays."""
