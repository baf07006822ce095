"""The agent's part of GPUs: their health, and limits for pools whose containers have parts of them.

It is made when the first pool of GPUs is configured. Until then its modules are not loaded.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from agent.observe.node_events import AgentEvents
from base import decoding
from base.paths import Paths

if TYPE_CHECKING:
    from deviceplugin.pools.pool_config import DevicePluginConfig
    from gpu.driver.gpu_inventory import LimitedGPU
    from gpu.gpu_pool import GpuLimitSettings
    from gpu.limit_service import GpuService
    from gpu.limits.tenants import Tenant
    from gpu.pools.limit_backend import GpuParts

_log = logging.getLogger(__name__)


class AgentGpuLimits:
    """Keeps the limits of containers, for the device plugin's `Service`, which calls it.

    `tenants` answers which containers hold parts of GPUs, `limited` which GPUs are given in parts.
    """

    def __init__(
        self,
        paths: Paths,
        tenants: "Callable[[], Sequence[Tenant]]",
        limited: "Callable[[], Sequence[LimitedGPU]]",
        events: AgentEvents,
    ) -> None:
        self._paths = paths
        self._tenants = tenants
        self._limited = limited
        self._events = events
        self._service: GpuService | None = None
        self._limits = False  # whether it keeps limits, and not only looks for errors
        self._settings: GpuLimitSettings | None = None
        self._told: GpuLimitSettings | None = None

    def parts(self, config: "DevicePluginConfig") -> "GpuParts":
        """The parts for that configuration. Waits a few seconds for the driver, the first time."""
        from gpu.pools.limit_backend import GpuParts

        if not self._limits and not config.has_gpu_limits:
            if self._service is None and config.gpus:
                self._service = self._made(config.gpu_limits)
                self._service.watch_health()
            return GpuParts() if self._service is None else GpuParts(faults=self._service.faults)
        if self._service is None or not self._limits:
            if self._service is not None:
                self._service.close()
            self._service = self._made(config.gpu_limits)
            self._service.prepare()
            self._limits = True
        if config.gpu_limits not in (self._settings, self._told):
            _log.warning("gpuLimits: other settings count when the agent starts again")
        self._told = config.gpu_limits
        return GpuParts(
            memory=self._service.memory,
            groups=self._service.groups,
            obstacle=self._service.shims.obstacle,
            files=self._service.shims.files,
            faults=self._service.faults,
        )

    def start(self) -> None:
        """The device plugin knows now who holds what. Called again it does nothing."""
        if self._service is not None and self._limits:
            self._service.start()

    def close(self) -> None:
        """Stop. What containers have stays."""
        if self._service is not None:
            self._service.close()

    def families(self) -> Sequence[Metric]:
        """What a scrape shows."""
        return self._service.families() if self._service is not None and self._limits else ()

    def _made(self, settings: "GpuLimitSettings") -> "GpuService":
        from gpu.limit_service import GpuService

        decoding.build_decoders()  # of the modules that were imported just now
        self._settings = self._told = settings
        return GpuService(
            self._paths,
            self._tenants,
            settings,
            self._events.of_gpu,
            limited=self._limited,
            sick=lambda uuid, fault: self._events.of_node("GpuUnhealthy", f"GPU {uuid}: {fault}"),
        )
