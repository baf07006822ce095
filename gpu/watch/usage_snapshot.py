"""What one look at all groups and GPUs found: for metrics, decisions, and compute shares."""

from collections.abc import Mapping

import msgspec

from gpu.limits.limits_file import GpuEntry
from gpu.limits.region import RegionUse
from gpu.limits.tenants import Tenant


class TenantSample(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant on its GPU. Bytes; what is not known now is None."""

    tenant: Tenant
    uuid: str  # of the GPU
    minor: int | None  # N of /dev/nvidiaN
    in_force: GpuEntry
    use: RegionUse | None  # None: the tenant has damaged its region
    processes: int  # registered ones that have not ended
    overhead_bytes: int  # contexts and modules, as far as they are measured
    device_bytes: int | None = None  # what the driver says that its processes use
    overuse_bytes: int | None = None  # above its limit and what is tolerated
    utilization: float | None = None  # of the GPU's time, 0 to 1


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that the driver told about."""

    uuid: str
    minor: int | None  # N of /dev/nvidiaN
    capacity_bytes: int  # what programs can use: without what the driver reserves
    unaccounted: Mapping[int, int]  # bytes by pid, of processes that hold no part of the GPU


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """The whole node."""

    at: float = 0.0  # time.monotonic()
    nvml_up: bool = False  # whether every GPU was told about
    problem: str = ""  # why NVML is not up
    tenants: tuple[TenantSample, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
