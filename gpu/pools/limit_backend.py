"""The agent's contribution to pools of GPUs: NVML and the groups that enforce limits.

A device plugin that runs alone has neither, so it offers no shares of GPUs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from deviceplugin.pools.pool_config import DevicePluginConfig
from gpu.driver.driver_files import SharedFile
from gpu.driver.gpu_inventory import MemorySource

if TYPE_CHECKING:
    from gpu.limits.groups import Groups  # imports more modules than a node without GPUs needs

ALONE = "the device plugin runs alone: run `podfabric agent`, which enforces limits"


@dataclass(frozen=True)
class GpuParts:
    """The agent's functions for pools of GPUs. The defaults allow no shares of GPUs.

    `obstacle` returns the reason why the node cannot enforce limits. `files` raises HostError.
    """

    memory: MemorySource = dict
    groups: "Groups | None" = None
    obstacle: Callable[[], str | None] = lambda: ALONE
    files: Callable[[], Sequence[SharedFile]] = tuple
    faults: Callable[[], Mapping[str, str]] = dict  # of unhealthy GPUs, by UUID


class GpuLimits(Protocol):
    """Enforces limits for a `Service`. One thread at a time may use it."""

    def parts(self, config: DevicePluginConfig) -> GpuParts:
        """The functions for a configuration. Call this before the pools are served."""

    def start(self) -> None:
        """Start to enforce limits. The ledger must be complete. A second call does nothing."""

    def close(self) -> None:
        """Stop. The files of containers stay."""
