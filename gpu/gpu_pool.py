"""The settings of GPU pools and GPU limits. `gpu_pool_keys` reads the settings."""

from pathlib import Path
from typing import Literal

import msgspec

from gpu.driver.driver_files import SharedFile
from host.sysfs.gpus import GPU

GpuMode = Literal["replicas", "slices", "units"]
Placement = Literal["spread", "pack"]

Action = Literal["report", "kill"]  # for a group that uses more memory than its limit

CONTEXT_RESERVE = 400 << 20  # bytes charged for a CUDA context until it is measured
RESERVE = 256 << 20  # bytes of each GPU that no container gets


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    resource: str  # "podfabric.io/gpu-10g-25"
    memory: int  # bytes
    compute: int  # percent of the GPU's time, from 1 to 100


class GpuPoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of GPUs. A GPU belongs to the first pool that selects it."""

    mode: GpuMode = "slices"
    resource: str = ""  # mode "replicas"
    replicas: int = 1  # mode "replicas": ids per GPU
    shapes: tuple[Shape, ...] = ()  # mode "slices"
    memory_resource: str = "alnair/vgpu-memory"  # mode "units"
    compute_resource: str = "alnair/vgpu-compute"  # mode "units": an id is 1 % of time
    unit: int = 1 << 30  # mode "units": bytes per id of `memory_resource`
    devices: tuple[str, ...] = ()  # addresses and UUIDs; () selects every GPU
    placement: Placement = "pack"
    reserve: int = RESERVE
    memory: int = 0  # bytes of each GPU; 0: the size that NVML reports
    driver_mount: SharedFile | None = None  # mode "replicas": the driver's directory

    @property
    def resources(self) -> tuple[str, ...]:
        if self.mode == "replicas":
            return (self.resource,)
        if self.mode == "slices":
            return tuple(shape.resource for shape in self.shapes)
        return (self.memory_resource, self.compute_resource)

    def selects(self, gpu: GPU) -> bool:
        return not self.devices or gpu.address in self.devices or gpu.uuid in self.devices


class GpuLimitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part `gpuLimits` of config.yaml (docs/use/gpus.md)."""

    driver_root: Path = Path("/")  # the host's directory where NVIDIA's driver is installed
    on_overuse: Action = "report"
