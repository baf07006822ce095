"""Watches the health of GPUs, and enforces the limits of containers that share GPUs.

Python loads the modules in `gpu` when the first pool of GPUs is configured.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from agent.observe.node_events import AgentEvents
from base import decoding
from base.paths import Paths
from base.problems import Problems

if TYPE_CHECKING:
    from deviceplugin.pools.pool_config import DevicePluginConfig
    from gpu.driver.gpu_inventory import LimitedGPU
    from gpu.gpu_pool import GpuLimitSettings
    from gpu.limit_service import GpuService
    from gpu.limits.tenants import Tenant
    from gpu.pools.limit_backend import GpuParts

_log = logging.getLogger(__name__)


class AgentGpuLimits:
    """Enforces the GPU limits of containers. The device plugin's `Service` calls the methods.

    `tenants` returns the containers that hold parts of GPUs. `limited` returns the GPUs that
    containers can share.
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
        self._limits = False  # whether the service keeps limits; otherwise it only checks health
        self._settings: GpuLimitSettings | None = None
        self._problems = Problems(_log)

    def parts(self, config: "DevicePluginConfig") -> "GpuParts":
        """The `GpuParts` of a configuration. The first call waits a few seconds for the driver."""
        from gpu.pools.limit_backend import GpuParts

        if self._service is None and not config.gpus:
            return GpuParts()
        if config.has_gpu_limits and not self._limits:
            self.close()  # a previous service only checks health
            self._service = self._made(config.gpu_limits)
            self._service.prepare()
            self._limits = True
        elif self._service is None:
            self._service = self._made(config.gpu_limits)
            self._service.watch_health()
        if not self._limits:
            return GpuParts(faults=self._service.faults)
        changed = config.gpu_limits != self._settings
        text = "the new settings apply when the agent starts again" if changed else None
        self._problems.tell("gpuLimits", text)
        return GpuParts(
            memory=self._service.memory,
            groups=self._service.groups,
            obstacle=self._service.shims.obstacle,
            files=self._service.shims.files,
            faults=self._service.faults,
        )

    def start(self) -> None:
        """Start enforcing limits. Call this after the device plugin has read its allocations."""
        if self._service is not None and self._limits:
            self._service.start()

    def close(self) -> None:
        """Stop. Containers keep their limits."""
        if self._service is not None:
            self._service.close()

    def families(self) -> Sequence[Metric]:
        return self._service.families() if self._service is not None and self._limits else ()

    def _made(self, settings: "GpuLimitSettings") -> "GpuService":
        from gpu.limit_service import GpuService

        decoding.build_decoders()  # of the modules imported above
        self._settings = settings
        return GpuService(
            self._paths,
            self._tenants,
            settings,
            self._events.of_gpu,
            limited=self._limited,
            sick=lambda uuid, fault: self._events.of_node("GpuUnhealthy", f"GPU {uuid}: {fault}"),
        )
