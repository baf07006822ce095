"""Mode "replicas": each GPU is K ids of one resource, and each id gives the whole GPU.

Containers on one GPU share its memory and time without limits. Ids and answers are those of
Deepomatic's shared-gpu: "nvidia0-_-1" to "nvidia0-_-K".

Source: Deepomatic/container-engine-accelerators, pkg/gpu/nvidia/manager.go and beta_plugin.go.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from base.paths import Paths
from base.types import DeviceId
from deviceplugin.api import v1beta1_pb2
from deviceplugin.checkpoint import AllocatedGPU
from deviceplugin.kubelet.extended_resources import MOST_IDS
from deviceplugin.kubelet.plugin_server import ServedPool
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.ledger import Ledger
from gpu.driver import gpu_device_files
from gpu.driver.gpu_inventory import NodeGPU
from gpu.gpu_pool import GpuPoolConfig
from gpu.pools import ids as gpu_ids
from gpu.pools.ids import adopted, numa
from host.errors import HostError

_log = logging.getLogger(__name__)


class ReplicaService(ServedPool):
    """The resource of a pool of mode "replicas". Several threads may call it."""

    def __init__(
        self,
        resource: str,
        paths: Paths,
        ledger: Ledger,
        allocated: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(resource)
        self._paths = paths
        self._ledger = ledger
        self._allocated = allocated
        self._config = GpuPoolConfig(mode="replicas")
        self._gpus: dict[str, NodeGPU] = {}  # by device id; replaced, never changed
        self.problem: str | None = None  # why there are fewer ids than configured

    def update(
        self, config: GpuPoolConfig, gpus: Sequence[NodeGPU], expected: Collection[str] = ()
    ) -> bool:
        """Replace the pool and its GPUs. Returns True if the kubelet must get a new list.

        A held id stays healthy despite a fault if `expected` has the address of its GPU.
        """
        count = min(config.replicas, MOST_IDS // max(len(gpus), 1))
        self.problem = None
        if count != config.replicas:
            self.problem = (
                f"{config.resource}: {config.replicas} replicas of {len(gpus)} GPUs are more ids "
                f"than the kubelet accepts ({MOST_IDS}): offers {count} of each GPU: set replicas "
                f"to {count} or less"
            )
        by_id = {f"{gpu.name}-_-{k}": gpu for gpu in gpus for k in range(1, count + 1)}
        held = self._ledger.held(config.resource)
        waiting = {name for name in by_id if name in held and by_id[name].gpu.address in expected}
        self._config, self._gpus = config, by_id
        return self.relist(
            [
                (device_id, gpu.fault is None or device_id in waiting, numa(gpu))
                for device_id, gpu in by_id.items()
            ]
        )

    def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """Ids of one GPU if it has enough free ids, else ids of few GPUs."""
        gpus = self._gpus
        gpu_of = {device_id: gpus[device_id].name for device_id in available if device_id in gpus}
        free = {(self.name, device_id) for device_id in available}
        held = Counter(
            f"nvidia{allocation.gpu.minor}"
            for allocation in self._ledger.allocations()
            if allocation.gpu is not None and allocation.key not in free
        )
        spread = self._config.placement == "spread"
        return gpu_ids.preferred(gpu_of, available, must_include, size, held, spread=spread)

    def allocate(self, ids: list[str]) -> v1beta1_pb2.ContainerAllocateResponse:
        """The device nodes of the ids' GPUs. Writes the allocation to disk first."""
        gpu_ids.check(self.name, ids, self._gpus)
        gpus = {DeviceId(device_id): self._gpus[device_id] for device_id in sorted(ids)}
        try:
            nodes = gpu_device_files.of_gpus(self._paths, {gpu.minor for gpu in gpus.values()})
        except HostError as error:
            raise gpu_ids.refusal(self.name, ids[0], str(error)) from None
        try:
            self._ledger.record(
                self.name, {device_id: _recorded(gpu) for device_id, gpu in gpus.items()}
            )
        except OSError as error:
            raise gpu_ids.unwritten(error) from None
        self._allocated()
        _log.info("%s: %s allocated", self.name, ", ".join(sorted(ids)))
        return v1beta1_pb2.ContainerAllocateResponse(
            devices=[
                v1beta1_pb2.DeviceSpec(
                    container_path=node.path, host_path=node.host, permissions="rw"
                )
                for node in nodes
            ],
            mounts=[
                v1beta1_pb2.Mount(
                    container_path=mount.container, host_path=mount.host, read_only=True
                )
                for mount in filter(None, [self._config.driver_mount])
            ],
        )

    def adopt(self, rows: Sequence[PodDevices]) -> None:
        """Record containers that the kubelet has and the ledger lacks. Raises OSError."""
        gpus = self._gpus
        missing = [name for name in adopted(self._ledger, self.name, rows) if name in gpus]
        if missing:
            self._ledger.adopt(self.name, {name: _recorded(gpus[name]) for name in missing})


def _recorded(gpu: NodeGPU) -> AllocatedGPU:
    return AllocatedGPU(uuid=gpu.gpu.uuid, bdf=gpu.gpu.address, minor=gpu.minor)
