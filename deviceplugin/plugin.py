"""Offers the HCAs and GPUs of a node to the kubelet.

One thread watches the hardware. Another thread compares the ledger with the kubelet's records.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing

from base.loop import Loop
from base.paths import Paths
from base.problems import Problems
from deviceplugin.allocate import cdi, container_devices, memlock
from deviceplugin.availability import StartupGrace, changes, held_elsewhere, unavailable
from deviceplugin.health import Health
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.plugin_server import ServedPool
from deviceplugin.kubelet.pod_resources import PodResourcesClient
from deviceplugin.kubelet.registration import PluginServer, PoolState
from deviceplugin.ledger import Ledger
from deviceplugin.pool_service import PoolService
from deviceplugin.pools.pool import Pool
from deviceplugin.pools.pool_config import DevicePluginConfig
from deviceplugin.reconcile import PodsKnown, Reconciler
from gpu.driver.gpu_inventory import LimitedGPU
from gpu.limits.tenants import Tenant
from gpu.pools.limit_backend import GpuParts
from gpu.pools.plugin import GpuPools
from host.sysfs.discovery import HCA

LOOK_EVERY = 1.0  # seconds
LOOK_AGAIN = 0.25  # seconds, while a port's change is too recent to be reported
RATES_EVERY = 10.0  # seconds between checks of the rates of ports
RESCAN_EVERY = 60.0  # seconds between full looks, for changes that the checks miss
COMPARE_EVERY = 60.0  # seconds
COMPARE_SHARES = 10.0  # seconds while pools offer shares of GPUs

_log = logging.getLogger(__name__)


class DevicePlugin:
    """Serves the pools of `config` from `start` to `close`."""

    def __init__(
        self,
        paths: Paths,
        config: DevicePluginConfig,
        pods_known: PodsKnown = lambda names, uids: None,
        gpu_parts: GpuParts | None = None,
    ) -> None:
        self._paths = paths
        self._config = config
        self._lock = threading.Lock()
        self._inventory = Inventory(paths)
        self._health = Health()
        self._ledger = Ledger(paths, paths.boot_id(), _log.warning)
        self._grace = StartupGrace(self._ledger.keys(), time.monotonic())
        self._serving = False  # no pool is offered before `start` has adopted allocations
        self._overlap = False  # some HCA is in two pools
        self._allocated = False  # an Allocate came since the last `look`
        self.services: dict[str, PoolService] = {}  # the pools that are served now
        self._servers: dict[str, PluginServer] = {}
        self._problems = Problems(_log)
        self._stack = ExitStack()
        self._kubelet = self._stack.enter_context(closing(PodResourcesClient(paths)))
        parts = gpu_parts or GpuParts()
        self._gpus = GpuPools(paths, self._ledger, self._kubelet, parts, self._look_soon)
        self._reconciler = Reconciler(
            paths, self._ledger, self._kubelet, self._gpus.adopt, pods_known
        )
        self._looked = self._rates_read = time.monotonic()
        self._looks = Loop("devices", self._watch, join=10.0)
        self._comparisons = Loop("kubelet", self._follow_kubelet, join=10.0)

    def start(self) -> None:
        """Record the kubelet's allocations, then offer the pools. Raises OSError or HostError."""
        self.look()
        try:
            self._reconciler.adopt_written(self.services)
        except OSError as error:
            self._problems.tell("checkpoint", f"{self._paths.checkpoint}: {error.strerror}")
        self._grace = StartupGrace(self._ledger.keys(), time.monotonic())
        self._serving = True
        self.look(again=False)
        self._looks.start()
        self._comparisons.start()

    def close(self) -> None:
        """Withdraw every pool. Containers keep their devices."""
        self._looks.close()
        self._comparisons.close()
        with self._lock:
            self._withdraw(list(self._servers))
        self._stack.close()

    def reconfigure(self, config: DevicePluginConfig, gpu_parts: GpuParts | None = None) -> None:
        """Serve the pools of `config`. A pool that keeps its name stays registered."""
        with self._lock:
            self._gpus.use(gpu_parts or GpuParts())
            self._config = config
        self.look()

    def compare(self) -> None:
        """Compare the ledger with the kubelet's records now. Raises OSError."""
        if self._reconciler.reconcile(self.services, self._servers):
            self.look(again=False)
        self._ledger.settle()

    def states(self) -> list[PoolState]:
        return [server.state() for server in list(self._servers.values())]

    def tenants(self) -> Sequence[Tenant]:
        """The containers that hold parts of GPUs and have started."""
        return self._gpus.holders.listed()

    def limited_gpus(self) -> Sequence[LimitedGPU]:
        """The GPUs that pools offer in parts."""
        return self._gpus.limited

    def held(self) -> Mapping[str, int]:
        """The number of held device ids, by resource."""
        return Counter(allocation.resource for allocation in self._ledger.allocations())

    def _watch(self) -> float:
        now = time.monotonic()
        due = now - self._looked >= RESCAN_EVERY
        rates = now - self._rates_read >= RATES_EVERY
        self._rates_read = now if rates else self._rates_read
        if due or self._inventory.differs(rates=rates):
            self._looked = now
            self.look()
        elif self._health.pending or self._grace.pending or self._allocated or self._gpus.differs():
            self.look(again=False)
        return LOOK_AGAIN if self._health.pending else LOOK_EVERY

    def _on_allocate(self) -> None:
        """Update the other pools soon, because the kubelet may choose from them next."""
        if self._overlap:
            self._look_soon()

    def _look_soon(self) -> None:
        self._allocated = True
        self._looks.wake()

    def look(self, *, again: bool = True) -> None:
        """Update every pool. With `again`, read the hardware first."""
        with self._lock:
            present = self._inventory.look() if again else self._inventory.last()
            self._allocated = False  # before the ledger is read: an Allocate may follow
            current_pools = self._inventory.pools(self._config, self._ledger.allocations())
            offered = {hca.id for pool in current_pools for hca in pool.hcas}
            self._overlap = len(offered) < sum(len(pool.hcas) for pool in current_pools)
            self._health.observe(present, offered, time.monotonic())
            for pool in current_pools:
                if not pool.hcas:
                    why = "; ".join(f"{hca_id}: {why}" for hca_id, why in pool.left.items())
                    text = f"nothing is offered: {why or 'the node has no HCA'}"
                    self._problems.tell(pool.config.resource, text)
            self._offer(current_pools)
            self._describe(current_pools, present)

    def _offer(self, current_pools: Sequence[Pool]) -> None:
        ours = frozenset(pool.config.resource for pool in current_pools)
        of_gpus = {resource for config in self._config.gpus for resource in config.resources}
        self._withdraw([name for name in self._servers if name not in ours | of_gpus])
        try:
            self._ledger.serve(
                {pool.config.resource: [hca.id for hca in pool.hcas] for pool in current_pools}
            )
        except OSError as error:
            self._problems.tell("checkpoint", f"{self._paths.checkpoint}: {error.strerror}")
        with_rdma = [pool for pool in current_pools if pool.config.rdma and pool.hcas]
        fabric = with_rdma[0].config.resource if with_rdma else None
        for pool in current_pools:
            resource = pool.config.resource
            if pool.hcas:
                self._problems.tell(resource, pool.problem)
            service = self.services.get(resource)
            if service is None:
                service = self.services[resource] = PoolService(
                    resource,
                    self._paths,
                    self._ledger,
                    self._inventory,
                    self._kubelet,
                    self._on_allocate,
                    self._gpus.with_room,
                )
            changed = self._update(service, pool, ours, fabric=resource == fabric)
            if changed and resource in self._servers:
                self._servers[resource].changed()
        for resource in self._gpus.look(self._config).intersection(self._servers):
            self._servers[resource].changed()
        # Serve only now, because a service must be updated before its first call.
        serving: dict[str, ServedPool] = {
            **{resource: self.services[resource] for resource in sorted(ours)},
            **self._gpus.services,
        }
        if self._config.leaving:  # a restarted container needs PreStartContainer
            serving = {**self._gpus.shares}
        for resource, served in serving.items():
            if self._serving and resource not in self._servers:
                self._serve(resource, served)

    def _update(
        self, service: PoolService, pool: Pool, ours: frozenset[str], *, fabric: bool
    ) -> bool:
        resource = pool.config.resource
        held = self._ledger.held(resource)
        elsewhere = held_elsewhere(pool, self._ledger.allocations())
        now = unavailable(pool, self._health.reports(), held, elsewhere)
        for ids, why in changes(pool, service.unavailable, now):
            is_fault = why is not None and why not in elsewhere.values()
            level = logging.WARNING if is_fault else logging.INFO
            _log.log(level, "%s: %s: %s", resource, ids, why or "healthy")
        expected = self._grace.expected_at_start(pool, now, held, elsewhere, time.monotonic())
        return service.update(pool, now, ours, fabric_env=fabric, expected=expected)

    def _describe(self, current_pools: Sequence[Pool], present: Sequence[HCA]) -> None:
        """Update the CDI files, so that a restarted container gets the current nodes."""
        cdi_pools = [pool for pool in current_pools if pool.config.cdi]
        offering = [pool.config for pool in current_pools if pool.hcas and not self._config.leaving]
        problems = []
        hcas = {hca.id: hca for hca in present}
        try:
            cdi.remove_others(self._paths, [pool.config for pool in cdi_pools])
        except OSError as error:
            problems.append(str(error))
        for pool in cdi_pools:
            try:
                container_devices.describe(self._paths, pool, hcas)
            except cdi.Unwritten as error:  # continue with the files of the other pools
                problems.append(str(error))
        try:
            no_hook = memlock.describe(self._paths, offering)
            self._problems.tell("locked memory", no_hook and f"containers get no limit: {no_hook}")
        except cdi.Unwritten as error:
            problems.append(str(error))
        self._problems.tell("CDI", "; ".join(problems) or None)

    def _serve(self, resource: str, service: ServedPool) -> None:
        try:
            server = PluginServer(self._paths, service)
            server.start()
        except Exception as error:  # noqa: BLE001 - the other pools are still served
            self._problems.tell(
                resource, f"cannot serve the pool: {error} (tries again at the next change)"
            )
            return
        self._servers[resource] = server

    def _withdraw(self, resources: Iterable[str]) -> None:
        for resource in resources:
            self._servers.pop(resource).close()
            self.services.pop(resource, None)

    def _follow_kubelet(self) -> float:
        problem = None
        try:
            self.compare()
        except OSError as error:
            problem = f"{error.filename or self._paths.checkpoint}: {error.strerror}"
        self._problems.tell("comparison with the kubelet", problem)
        return COMPARE_SHARES if self._gpus.shares else COMPARE_EVERY
