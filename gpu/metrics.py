"""The metrics of GPU limits, from the last look. None has a pid, so that series do not pile up.

What is not known is left out: 0 would be a claim.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpu.group_limits import NO_LIMIT
from gpu.inventory import LimitedGPU
from gpu.region import RegionCounts, RegionUse
from gpu.samples import NodeSample, TenantSample

OLD = 10.0  # seconds; a look that is older says nothing: the driver hangs
_HOLDER = ("namespace", "pod", "container")
_ON_GPU = (*_HOLDER, "gpu_uuid", "gpu")
_GPU = ("gpu_uuid", "gpu")

Value = float | None
Labels = tuple[str, ...]
T = TypeVar("T")

_GAUGES: Sequence[tuple[str, str, Callable[[TenantSample], Value]]] = (
    (
        "memory_limit_bytes",
        "Memory of the GPU that the container may use.",
        lambda of: None if of.in_force.memory_bytes == NO_LIMIT else of.in_force.memory_bytes,
    ),
    (
        "memory_overhead_bytes",
        "Memory for contexts and modules of the container, as far as measured.",
        lambda of: of.overhead_bytes,
    ),
    (
        "memory_device_bytes",
        "Memory that the container uses, as the driver says.",
        lambda of: of.device_bytes,
    ),
    (
        "memory_overuse_bytes",
        "Memory above the limit and what is tolerated, as the driver says.",
        lambda of: of.overuse_bytes,
    ),
    ("compute_share_ratio", "Part of the GPU's time that it was given.", lambda of: of.share),
    (
        "compute_utilization_ratio",
        "Part of the time that it used the GPU, as the driver says.",
        lambda of: of.utilization,
    ),
    ("processes", "Processes that use CUDA.", lambda of: of.processes),
)
_SAID_GAUGES: Sequence[tuple[str, str, Callable[[RegionUse], Value]]] = (
    ("memory_used_bytes", "Memory that counts as used.", lambda use: use.used_bytes),
    ("memory_peak_bytes", "The most that counted as used.", lambda use: use.peak_bytes),
)
_SAID_COUNTERS: Sequence[tuple[str, str, Callable[[RegionUse], float]]] = (
    ("memory_denied", "Allocations that were refused.", lambda use: use.denied),
    ("launches", "Kernels and graphs that were launched.", lambda use: use.launches),
    ("throttled_launches", "Launches that had to wait.", lambda use: use.throttled),
    (
        "launch_wait_seconds",
        "How long all launches together had to wait.",
        lambda use: use.wait_ns / 1e9,
    ),
    (
        "external_imports",
        "Memory of other processes that was opened, which counts there.",
        lambda use: use.external_imports,
    ),
)
_GROUP_COUNTERS: Sequence[tuple[str, str, Callable[[RegionCounts], float]]] = (
    (
        "process_slots_stale",
        "Slots of dead processes that were freed.",
        lambda counts: counts.stale_slots,
    ),
    (
        "lock_recoveries",
        "How often a process died while it counted.",
        lambda counts: counts.lock_recoveries,
    ),
    (
        "process_slots_refused",
        "How often a process found no free slot.",
        lambda counts: counts.refused_slots,
    ),
)


def families(
    sample: NodeSample,
    kills: Mapping[str, int],
    now: float,
    wall: float,
    limited: Sequence[LimitedGPU] = (),
) -> Sequence[Metric]:
    """All families.

    Args:
        kills: how many processes were killed, by group.
        now: time.monotonic(): what the driver said long ago is left out.
        wall: time.time(), of the same moment.
        limited: the GPUs that are given in parts.
    """
    if now - sample.at > OLD:
        sample = NodeSample(at=sample.at, problem=sample.problem, tenants=_forgotten(sample))
    on_gpu = [(_on_gpu(of), of) for of in sample.tenants]
    said = [(labels, of.use) for labels, of in on_gpu if of.use is not None]
    up = GaugeMetricFamily(
        "podfabric_gpu_nvml_up",
        "Whether the driver tells about every GPU.",
        value=int(sample.nvml_up),
    )
    return (
        up,
        *(_gauge(name, text, _ON_GPU, _values(on_gpu, of)) for name, text, of in _GAUGES),
        *(_gauge(name, text, _ON_GPU, _values(said, of)) for name, text, of in _SAID_GAUGES),
        *(_counter(name, text, _ON_GPU, _values(said, of)) for name, text, of in _SAID_COUNTERS),
        _gauge(
            "last_launch_timestamp_seconds",
            "When a kernel or graph was launched last.",
            _ON_GPU,
            (
                (labels, wall - now + use.last_launch / 1e9)
                for labels, use in said
                if use.last_launch
            ),
        ),
        _counter(
            "memory_overuse_kills",
            "Processes that were killed because the container used more than it may.",
            _ON_GPU,
            ((labels, kills.get(of.tenant.group, 0)) for labels, of in on_gpu),
        ),
        *_of_groups(sample),
        *_of_gpus(sample),
        _gauge(
            "withheld",
            "Whether the GPU is not given, since its limits cannot be kept.",
            _GPU,
            (((of.uuid, str(of.minor)), int(of.obstacle is not None)) for of in limited),
        ),
    )


def _of_groups(sample: NodeSample) -> Iterable[Metric]:
    """What is counted of a group's processes."""
    counts = [(_holder(of), of.counts) for of in sample.tenants if of.counts is not None]
    for name, text, value in _GROUP_COUNTERS:
        yield _counter(name, text, _HOLDER, _values(counts, value))


def _of_gpus(sample: NodeSample) -> Iterable[Metric]:
    def of(uuid: str) -> list[TenantSample]:
        return [each for each in sample.tenants if each.uuid == uuid]

    labelled = [((gpu.uuid, str(gpu.minor)), gpu) for gpu in sample.gpus]
    yield _gauge(
        "capacity_bytes",
        "Memory of the GPU that programs can use.",
        _GPU,
        ((labels, gpu.capacity_bytes) for labels, gpu in labelled),
    )
    yield _gauge(
        "allocated_bytes",
        "Memory that containers may use together.",
        _GPU,
        (
            (
                labels,
                sum(min(each.in_force.memory_bytes, gpu.capacity_bytes) for each in of(gpu.uuid)),
            )
            for labels, gpu in labelled
        ),
    )
    yield _gauge(
        "allocated_share_ratio",
        "Parts of the GPU's time that containers were given, together.",
        _GPU,
        ((labels, sum(each.share for each in of(gpu.uuid))) for labels, gpu in labelled),
    )
    yield _gauge(
        "tenants",
        "Containers that hold a part of the GPU.",
        _GPU,
        ((labels, len(of(gpu.uuid))) for labels, gpu in labelled),
    )
    yield _gauge(
        "unaccounted_bytes",
        "Memory that processes use which hold no part of the GPU.",
        _GPU,
        ((labels, gpu.unaccounted_bytes) for labels, gpu in labelled),
    )


def _forgotten(sample: NodeSample) -> tuple[TenantSample, ...]:
    """The tenants without what the driver said."""
    return tuple(
        replace(of, device_bytes=None, overuse_bytes=None, utilization=None)
        for of in sample.tenants
    )


def _holder(of: TenantSample) -> tuple[str, str, str]:
    return of.tenant.pod.namespace, of.tenant.pod.name, of.tenant.container


def _on_gpu(of: TenantSample) -> tuple[str, ...]:
    return (*_holder(of), of.uuid, str(of.minor))


def _values(
    labelled: Iterable[tuple[Labels, T]], value: Callable[[T], Value]
) -> Iterable[tuple[Labels, float]]:
    """What is known of each."""
    found = ((labels, value(of)) for labels, of in labelled)
    return ((labels, number) for labels, number in found if number is not None)


def _gauge(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]
) -> Metric:
    family = GaugeMetricFamily(f"podfabric_gpu_{name}", text, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def _counter(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]
) -> Metric:
    family = CounterMetricFamily(f"podfabric_gpu_{name}", text, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family
