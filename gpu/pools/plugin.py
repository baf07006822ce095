"""The pools of GPUs of a node, which `DevicePlugin` serves."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from base.paths import Paths
from base.problems import Problems
from deviceplugin.availability import GRACE
from deviceplugin.kubelet.pod_resources import PodResourcesClient
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.ledger import Ledger
from deviceplugin.pools.pool_config import DevicePluginConfig
from gpu.driver.gpu_inventory import NOT_KEPT, GpuInventory, LimitedGPU, NodeGPU
from gpu.gpu_pool import GpuPoolConfig
from gpu.pools.container_files import ContainerFiles, group_of
from gpu.pools.holders import Holders
from gpu.pools.limit_backend import GpuParts
from gpu.pools.pre_start import Starter
from gpu.pools.replicas import ReplicaService
from gpu.pools.share_pool import SharePool, by_pool, kinds
from gpu.pools.shares import ShareService
from host.sysfs.gpus import GPU

_log = logging.getLogger(__name__)

NOTHING = "nothing is offered, because no GPU has its device nodes: load NVIDIA's driver"

GpuService = ReplicaService | ShareService


class GpuPools:
    """The pools of GPUs of a node. One thread at a time may call `look` and `adopt`."""

    def __init__(
        self,
        paths: Paths,
        ledger: Ledger,
        kubelet: PodResourcesClient,
        parts: GpuParts,
        allocated: Callable[[], object],
    ) -> None:
        self._paths = paths
        self._ledger = ledger
        self._allocated = allocated
        self._configs: Sequence[GpuPoolConfig] = ()
        self._inventory = GpuInventory(
            paths, lambda: self._files.parts.memory(), lambda: self._files.parts.faults()
        )
        self._files = ContainerFiles(paths, parts)
        self.holders = Holders(paths, ledger)
        self._starter = Starter(paths, ledger, kubelet, self._files, self.holders)
        self._limited: Mapping[str, LimitedGPU] = {}  # by address
        self._gpus: list[NodeGPU] = []
        self._faults: dict[str, str | None] = {}  # that were logged, by address
        self._expected: frozenset[str] = frozenset()
        self._began = time.monotonic()
        self._problems = Problems(_log)
        self._replicas: dict[str, ReplicaService] = {}  # by resource
        self._pools: dict[tuple[str, ...], SharePool] = {}  # by their resources
        self.shares: dict[str, ShareService] = {}  # by resource
        self._groups = self._live_groups()
        self._adopted = False  # if not, the ledger may lack running containers
        self._recorded: frozenset[str] = frozenset()  # groups in the kubelet's records

    @property
    def services(self) -> Mapping[str, GpuService]:
        """All services, by resource."""
        return {**self._replicas, **self.shares}

    @property
    def limited(self) -> Sequence[LimitedGPU]:
        return tuple(self._limited.values())

    def use(self, parts: GpuParts) -> None:
        self._files.parts = parts

    def differs(self) -> bool:
        """Whether the GPUs, their device nodes or obstacles have changed since the last `look`."""
        if not self._configs:
            return False
        gpus = self._inventory.look(self._held())
        return (
            gpus != self._gpus
            or self._expected_of(gpus) != self._expected
            or self._limited_of(gpus) != self._limited
        )

    def look(self, config: DevicePluginConfig) -> set[str]:
        configs = config.gpus
        self._files.leaving = config.leaving
        if configs != self._configs:
            self._configure(configs)
        if self._adopted:
            self._remove_gone()
        if not configs:
            return set()
        gpus = self._inventory.look(self._held())
        self._gpus, self._expected = gpus, self._expected_of(gpus)
        self._limited = self._limited_of(gpus)
        gpus = [self._withheld(gpu) for gpu in gpus]
        self._log_changes(gpus)
        changed: set[str] = set()
        for pool, mine in by_pool(self._configs, gpus):
            changed |= self._update(pool, mine)
        return changed

    def adopt(self, rows: Sequence[PodDevices]) -> None:
        """Record containers that the kubelet has and the ledger lacks. Raises OSError."""
        for service in self.services.values():
            service.adopt(rows)
        self.holders.learn(rows)
        self._recorded = frozenset(
            group_of(row.resource, min(row.ids))
            for row in rows
            if row.ids and row.resource in self.shares
        )
        groups = self._files.parts.groups
        if not self._adopted and groups is not None:
            self._groups |= set(groups.names())  # a killed agent may have left groups
        self._adopted = True

    def with_room(self) -> list[str]:
        """The addresses of GPUs with room for a container that has its HCAs but no GPU yet."""
        return sorted({address for pool in self._pools.values() for address in pool.with_room()})

    def _limited_of(self, gpus: Sequence[NodeGPU]) -> dict[str, LimitedGPU]:
        """The GPUs that pools offer as shares, by address."""
        obstacle = self._files.parts.obstacle
        return {
            gpu.gpu.address: LimitedGPU(uuid=gpu.gpu.uuid, minor=gpu.minor, obstacle=obstacle())
            for config, mine in by_pool(self._configs, gpus)
            for gpu in (mine if config.mode != "replicas" else ())
        }

    def _withheld(self, gpu: NodeGPU) -> NodeGPU:
        """The GPU, with a fault if the node cannot enforce its limits."""
        limited = self._limited.get(gpu.gpu.address)
        if gpu.fault is not None or limited is None or limited.obstacle is None:
            return gpu
        return replace(gpu, fault=NOT_KEPT + limited.obstacle)

    def _configure(self, configs: Sequence[GpuPoolConfig]) -> None:
        """Make a service for each resource. Keep the services of unchanged resources."""
        self._configs = configs
        replicas = {config.resource for config in configs if config.mode == "replicas"}
        self._replicas = {
            resource: self._replicas.get(resource)
            or ReplicaService(resource, self._paths, self._ledger, self._allocated)
            for resource in sorted(replicas)
        }
        shared = [config for config in configs if config.mode != "replicas"]
        self._pools = {
            config.resources: self._pools.get(config.resources) or SharePool(self._ledger)
            for config in shared
        }
        before, self.shares = self.shares, {}
        for config in shared:
            pool = self._pools[config.resources]
            for kind in kinds(config):
                old = before.get(kind.resource)
                if old is None or old.kind != kind or old.pool is not pool:
                    old = ShareService(pool, kind, self._files, self._starter, self._allocated)
                self.shares[kind.resource] = old

    def _update(self, config: GpuPoolConfig, gpus: Sequence[NodeGPU]) -> set[str]:
        """Update the pool. Returns the resources that have new lists."""
        if config.mode == "replicas":
            service = self._replicas[config.resource]
            changed = {config.resource} if service.update(config, gpus, self._expected) else set()
            problem = service.problem
        else:
            pool = self._pools[config.resources]
            pool.update(config, gpus)
            problem = pool.problem
            changed = {
                name for name in config.resources if self.shares[name].update(self._expected)
            }
        self._problems.tell(", ".join(config.resources), problem if gpus else NOTHING)
        return changed

    def _expected_of(self, gpus: Sequence[NodeGPU]) -> frozenset[str]:
        """The addresses of GPUs that may become ready soon after the start (see `StartupGrace`)."""
        if time.monotonic() >= self._began + GRACE:
            return frozenset()
        withheld = (address for address, of in self._limited_of(gpus).items() if of.obstacle)
        never = (gpu.gpu.address for gpu in gpus if not self._inventory.was_ready(gpu.gpu))
        return frozenset((*never, *withheld))

    def _held(self) -> list[GPU]:
        given = (allocation.gpu for allocation in self._ledger.allocations())
        return [
            GPU(uuid=gpu.uuid, address=gpu.bdf, minor=gpu.minor, numa=None)
            for gpu in given
            if gpu is not None and gpu.bdf
        ]

    def _live_groups(self) -> frozenset[str]:
        """The groups of all containers with a GPU, started or not."""
        given = [(entry.resource, entry.gpu) for entry in self._ledger.allocations() if entry.gpu]
        named = ((gpu.group, group_of(resource, gpu.slot)) for resource, gpu in given if gpu.slot)
        return frozenset(filter(None, chain.from_iterable(named)))

    def _remove_gone(self) -> None:
        """Remove the groups and CDI files of containers that have ended."""
        with self._ledger.allocating:  # an Allocate may reuse the slot
            # A container whose GPU is missing cannot be adopted, but may still run.
            live = self._live_groups() | self._recorded
            try:
                self._files.remove_others(live)
            except OSError as error:
                _log.warning("%s: cannot be removed: %s", error.filename, error.strerror)
            gone, self._groups = self._groups - live, live
            for group in sorted(gone):
                try:
                    self._files.remove(group)
                except OSError as error:
                    self._groups |= {group}  # the next `look` tries again
                    _log.warning("%s: cannot be removed: %s", group, error)

    def _log_changes(self, gpus: Sequence[NodeGPU]) -> None:
        before, self._faults = self._faults, {gpu.gpu.address: gpu.fault for gpu in gpus}
        for gpu in gpus:
            if before.get(gpu.gpu.address, "") != gpu.fault:
                level = logging.INFO if gpu.fault is None else logging.WARNING
                _log.log(level, "%s (%s): %s", gpu.name, gpu.gpu.address, gpu.fault or "healthy")
