"""The GPUs of a node and the resources that its pools of GPUs offer.

`DevicePlugin` calls this beside its pools of HCAs, and serves each resource to the kubelet.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from base.paths import Paths
from deviceplugin.gpus.replicas import ReplicaService
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.ledger import Ledger
from deviceplugin.pools.gpu_pool import GpuPoolConfig
from deviceplugin.startup_grace import GRACE
from gpu.inventory import GpuInventory, NodeGPU
from host.gpus import GPU

_log = logging.getLogger(__name__)


class GpuPools:
    """The pools of GPUs of a node. `look` and `adopt` are called by one thread at a time."""

    def __init__(self, paths: Paths, ledger: Ledger, allocated: Callable[[], object]) -> None:
        self._paths = paths
        self._ledger = ledger
        self._allocated = allocated
        self._configs: Sequence[GpuPoolConfig] = ()
        self._inventory = GpuInventory(paths)
        self._gpus: list[NodeGPU] = []
        self._expected: frozenset[str] = frozenset()
        self._began = time.monotonic()
        self._problems: dict[str, str] = {}
        self._services: dict[str, ReplicaService] = {}

    @property
    def services(self) -> Mapping[str, ReplicaService]:
        """The resources that are offered now."""
        return self._services

    def differs(self) -> bool:
        """Whether the GPUs or their nodes are others than at the last `look`."""
        if not self._configs:
            return False
        gpus = self._inventory.look(self._held())
        return gpus != self._gpus or self._expected_of(gpus) != self._expected

    def look(self, configs: Sequence[GpuPoolConfig]) -> set[str]:
        """Update every resource; those whose lists have changed."""
        self._configs = configs
        ours = {resource for config in configs for resource in config.resources}
        for resource in [name for name in self._services if name not in ours]:
            del self._services[resource]
        if not configs:
            return set()
        gpus = self._inventory.look(self._held())
        self._tell_changes(gpus)
        self._gpus, self._expected = gpus, self._expected_of(gpus)
        changed: set[str] = set()
        left = list(gpus)
        for config in configs:
            mine = [gpu for gpu in left if config.selects(gpu.gpu)]
            left = [gpu for gpu in left if gpu not in mine]
            changed |= self._update(config, mine)
        return changed

    def adopt(self, rows: Sequence[PodDevices]) -> None:
        """Record what only the kubelet knows. Raises OSError."""
        for service in list(self._services.values()):
            service.adopt(rows)

    def _update(self, config: GpuPoolConfig, gpus: Sequence[NodeGPU]) -> set[str]:
        service = self._services.get(config.resource)
        if service is None:
            service = ReplicaService(self._paths, self._ledger, self._allocated)
            self._services[config.resource] = service
        changed = service.update(config, gpus, self._expected)
        why = service.problem
        if not gpus:
            why = "nothing is offered: no GPU has its device nodes: is NVIDIA's driver loaded?"
        self._tell(config.resource, why)
        return {config.resource} if changed else set()

    def _expected_of(self, gpus: Iterable[NodeGPU]) -> frozenset[str]:
        """The GPUs that have not been ready since the plugin started, a short while ago.

        A node that boots starts its pods again before the driver is loaded, and the kubelet rejects
        for good a pod with an unhealthy id (see `startup_grace`).
        """
        if time.monotonic() >= self._began + GRACE:
            return frozenset()
        never = (gpu.gpu.address for gpu in gpus if not self._inventory.was_ready(gpu.gpu))
        return frozenset(never)

    def _held(self) -> list[GPU]:
        given = (allocation.gpu for allocation in self._ledger.allocations())
        return [
            GPU(uuid=gpu.uuid, address=gpu.bdf, minor=gpu.minor, numa=None)
            for gpu in given
            if gpu is not None and gpu.bdf
        ]

    def _tell_changes(self, gpus: Sequence[NodeGPU]) -> None:
        before = {gpu.gpu.address: gpu.fault for gpu in self._gpus}
        for gpu in gpus:
            if gpu.gpu.address not in before or before[gpu.gpu.address] != gpu.fault:
                level = logging.INFO if gpu.fault is None else logging.WARNING
                _log.log(level, "%s (%s): %s", gpu.name, gpu.gpu.address, gpu.fault or "healthy")

    def _tell(self, resource: str, problem: str | None) -> None:
        """Log a problem, once while it stays the same."""
        if problem is not None and self._problems.get(resource) != problem:
            _log.warning("%s: %s", resource, problem)
        if problem is None:
            self._problems.pop(resource, None)
        else:
            self._problems[resource] = problem
