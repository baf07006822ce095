"""The metrics of GPU limits. Unknown values are left out.

No label has a pid, because pids would add many series.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpu.driver.gpu_inventory import LimitedGPU
from gpu.limits.region import RegionUse
from gpu.watch.usage_watch import NodeSample, TenantSample

OLD = 10.0  # seconds; older values of the driver are left out, because the driver hangs
_ON_GPU = ("namespace", "pod", "container", "gpu_uuid", "gpu")
_GPU = ("gpu_uuid", "gpu")

Rows = Sequence[tuple[str, str, Callable[[TenantSample], float | None]]]
"""Name, text, and a function that returns a tenant's value, or `None` if unknown."""


def _use(value: Callable[[RegionUse], float]) -> Callable[[TenantSample], float | None]:
    """A function that returns a value of a tenant's region, or `None` if the region is damaged."""
    return lambda of: None if of.use is None else value(of.use)


_GAUGES: Rows = [
    ("memory_limit_bytes", "Memory that the container may use.", lambda of: of.limit.memory_bytes),
    ("memory_overhead_bytes", "Memory of contexts and modules.", lambda of: of.overhead_bytes),
    ("memory_device_bytes", "Memory in use, as the driver reports it.", lambda of: of.device_bytes),
    ("memory_overuse_bytes", "Memory above limit plus tolerance.", lambda of: of.overuse_bytes),
    ("compute_share_ratio", "Share of the GPU's time.", lambda of: of.limit.compute_share),
    ("compute_utilization_ratio", "Part of the GPU's time in use.", lambda of: of.utilization),
    ("processes", "Processes that use CUDA.", lambda of: of.processes),
    ("memory_used_bytes", "Memory counted as used.", _use(lambda use: use.used_bytes)),
    ("memory_peak_bytes", "Highest value of used memory.", _use(lambda use: use.peak_bytes)),
]
_COUNTERS: Rows = [
    ("memory_denied", "Allocations of memory that were refused.", _use(lambda use: use.denied)),
    ("launches", "Launches of kernels and graphs.", _use(lambda use: use.launches)),
    ("throttled_launches", "Launches that had to wait.", _use(lambda use: use.throttled)),
    ("launch_wait_seconds", "Time that launches waited.", _use(lambda use: use.wait_ns / 1e9)),
    ("process_slots_stale", "Freed slots of dead processes.", _use(lambda use: use.stale_slots)),
    ("process_slots_refused", "Processes that got no slot.", _use(lambda use: use.refused_slots)),
    ("lock_recoveries", "Deaths of the lock's holder.", _use(lambda use: use.lock_recoveries)),
]


def families(
    sample: NodeSample,
    kills: Mapping[str, int],
    now: float,
    wall: float,
    limited: Sequence[LimitedGPU] = (),
) -> Sequence[Metric]:
    """All metrics. `now` is time.monotonic(), and `wall` is time.time() at the same moment."""
    if now - sample.at > OLD:
        tenants = tuple(
            replace(tenant, device_bytes=None, overuse_bytes=None, utilization=None)
            for tenant in sample.tenants
        )
        sample = NodeSample(at=sample.at, problem=sample.problem, tenants=tenants)

    launched = (
        "last_launch_timestamp_seconds",
        "Unix time of the last launch of a kernel or graph.",
        lambda of: wall - now + of.use.last_launch / 1e9 if of.use and of.use.last_launch else None,
    )
    killed = (
        "memory_overuse_kills",
        "Processes that were killed because their container used too much memory.",
        lambda of: kills.get(of.tenant.group, 0),
    )
    text = "1 if the driver reports every GPU, else 0."
    up = GaugeMetricFamily("podfabric_gpu_nvml_up", text, value=int(sample.nvml_up))
    withheld = _of_gpu(
        "withheld", "1 if the node withholds the GPU because it cannot enforce limits, else 0."
    )
    for limit in limited:
        withheld.add_metric((limit.uuid, str(limit.minor)), int(limit.obstacle is not None))
    gauges = _of_tenants(GaugeMetricFamily, [*_GAUGES, launched], sample.tenants)
    counters = _of_tenants(CounterMetricFamily, [*_COUNTERS, killed], sample.tenants)
    return (up, *gauges, *counters, *_of_gpus(sample), withheld)


def _of_tenants(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    rows: Rows,
    tenants: Sequence[TenantSample],
) -> Iterator[Metric]:
    for name, text, value in rows:
        family = kind(f"podfabric_gpu_{name}", text, labels=_ON_GPU)
        for tenant in tenants:
            pod, number = tenant.tenant.pod, value(tenant)
            if number is not None:
                container, gpu = tenant.tenant.container, (tenant.uuid, str(tenant.minor))
                labels = pod.namespace, pod.name, container, *gpu
                family.add_metric(labels, number)
        yield family


def _of_gpus(sample: NodeSample) -> Sequence[Metric]:
    capacity = _of_gpu("capacity_bytes", "Memory of the GPU that programs can use.")
    allocated = _of_gpu("allocated_bytes", "Memory that containers may use together.")
    share = _of_gpu("allocated_share_ratio", "The sum of the containers' shares of the GPU's time.")
    tenants = _of_gpu("tenants", "Containers that hold a share of the GPU.")
    unaccounted = _of_gpu("unaccounted_bytes", "Memory that processes without a share use.")
    for gpu in sample.gpus:
        labels = gpu.uuid, str(gpu.minor)
        own = [tenant.limit for tenant in sample.tenants if tenant.uuid == gpu.uuid]
        capacity.add_metric(labels, gpu.capacity_bytes)
        memory = sum(min(limit.memory_bytes, gpu.capacity_bytes) for limit in own)
        allocated.add_metric(labels, memory)
        share.add_metric(labels, sum(limit.compute_share for limit in own))
        tenants.add_metric(labels, len(own))
        unaccounted.add_metric(labels, sum(gpu.unaccounted.values()))
    return capacity, allocated, share, tenants, unaccounted


def _of_gpu(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"podfabric_gpu_{name}", text, labels=_GPU)
