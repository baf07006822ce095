"""The GPUs of this node, and their faults.

A GPU is listed once its device nodes exist. The GPU stays listed while the driver shows it or a
container holds it. Otherwise the kubelet would remove a device that a container has.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

import msgspec

from base.paths import Paths
from base.problems import Problems
from gpu.driver import gpu_device_files
from host.errors import HostError
from host.sysfs.gpus import GPU, GPUs

_log = logging.getLogger(__name__)


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a GPU, in bytes."""

    total: int
    reserved: int = 0  # for the driver and its firmware; no program can allocate these bytes

    @property
    def usable(self) -> int:
        return max(self.total - self.reserved, 0)


MemorySource = Callable[[], Mapping[str, GpuMemory]]
"""Returns the memory of each GPU by UUID, as NVML reports it. Raises HostError if NVML fails."""


class NodeGPU(msgspec.Struct, frozen=True, kw_only=True):
    gpu: GPU
    minor: int  # N in /dev/nvidiaN
    fault: str | None = None  # why no container can get the GPU now
    memory: GpuMemory | None = None  # `None`: unknown

    @property
    def name(self) -> str:
        return f"nvidia{self.minor}"


_MEMORY = "the memory of the GPUs is not known"
NOT_KEPT = "the node cannot enforce its limits: "


class LimitedGPU(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that a pool offers as shares with limits."""

    uuid: str
    minor: int  # N in /dev/nvidiaN
    obstacle: str | None = None  # why the node cannot enforce limits on it


class GpuInventory:
    """The GPUs of this node. Any thread may use it."""

    def __init__(
        self,
        paths: Paths,
        memory: MemorySource = dict,
        sick: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._sick = sick  # returns faults by UUID
        self._paths = paths
        self._gpus = GPUs(paths)
        self._source = memory
        self._memory: dict[str, GpuMemory] = {}  # by UUID
        self._problems = Problems(_log)
        self._lock = threading.Lock()
        self._ready: set[str] = set()  # addresses of GPUs that had all their device nodes once

    def look(self, held: Iterable[GPU] = ()) -> list[NodeGPU]:
        """List the GPUs, sorted by minor number. `held` has the GPUs that containers hold."""
        with self._lock:
            present = {gpu.address: gpu for gpu in self._gpus.read()}
            self._learn()
            sick = self._sick()
            listed: dict[str, NodeGPU] = {}
            for address, gpu in present.items():
                if gpu.minor is None:
                    continue
                fault = gpu_device_files.fault(self._paths, gpu.minor)
                if fault is None:
                    self._ready.add(address)
                fault = fault or sick.get(gpu.uuid)
                listed[address] = NodeGPU(
                    gpu=gpu, minor=gpu.minor, fault=fault, memory=self._memory.get(gpu.uuid)
                )
            of_holders = {gpu.address: gpu for gpu in held}
            self._ready &= {*present, *of_holders}
            kept = [
                node for address, node in listed.items() if address in self._ready | {*of_holders}
            ]
            kept += [
                NodeGPU(
                    gpu=gpu,
                    minor=gpu.minor,
                    fault=f"{address} is not on this node now",
                    memory=self._memory.get(gpu.uuid),
                )
                for address, gpu in of_holders.items()
                if address not in listed and gpu.minor is not None
            ]
            return sorted(kept, key=lambda node: node.minor)

    def was_ready(self, gpu: GPU) -> bool:
        """Whether an earlier `look` found all device nodes of the GPU."""
        return gpu.address in self._ready

    def _learn(self) -> None:
        """Read the memory sizes. Known sizes stay while the driver is reloaded."""
        try:
            self._memory |= self._source()
            self._problems.tell(_MEMORY, None)
        except HostError as error:
            self._problems.tell(_MEMORY, str(error))
