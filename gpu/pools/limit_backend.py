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

ALONE = "the device plugin runs alone: run `podfabric agent`, which keeps limits"


@dataclass(frozen=True)
class GpuParts:
    """The functions of an agent. Without them no share of a GPU is allocated.

    `obstacle` returns the reason why the node cannot enforce limits. `files` returns the files of
    the driver and the shims for containers with limits; it raises HostError.
    """

    memory: MemorySource = dict
    groups: "Groups | None" = None
    obstacle: Callable[[], str | None] = lambda: ALONE
    files: Callable[[], Sequence[SharedFile]] = tuple
    faults: Callable[[], Mapping[str, str]] = dict  # of unhealthy GPUs, by UUID


class GpuLimits(Protocol):
    """Enforces limits for a `Service`. One thread at a time may use it."""

    def parts(self, config: DevicePluginConfig) -> GpuParts:
        """The functions for that configuration, before its pools are served."""

    def start(self) -> None:
        """Start: the ledger is complete. A second call does nothing."""

    def close(self) -> None:
        """Stop. The files of containers stay."""
