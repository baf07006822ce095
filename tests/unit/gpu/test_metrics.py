"""Metrics from made-up samples: what is not known is left out, and nothing has a pid."""

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from base.pod import Pod
from gpu.driver.gpu_inventory import LimitedGPU
from gpu.limits.limits_file import Limit
from gpu.limits.region import RegionUse
from gpu.limits.tenants import Tenant
from gpu.watch import gpu_metrics
from gpu.watch.usage_watch import GpuSample, NodeSample, TenantSample
from tests.unit.gpu.made import GIB, A, B

USE = RegionUse(
    used_bytes=3 * GIB,
    peak_bytes=4 * GIB,
    denied=5,
    tat=0,
    backlogged_at=0,
    longest_ns=0,
    longest_at=0,
    launches=700,
    throttled=8,
    wait_ns=1_500_000_000,
    last_launch=90_000_000_000,
    launched_ns=0,
    finished_ns=0,
    paid_ns=0,
    lock_recoveries=1,
    stale_slots=2,
    refused_slots=3,
    paid_finished_ns=0,
)


def tenant(uuid: str = A, minor: int = 0, **more: object) -> TenantSample:
    values: dict[str, object] = {
        "tenant": Tenant(group="g", pod=Pod("ns", "pod", "uid"), container="main"),
        "uuid": uuid,
        "minor": minor,
        "limit": Limit("", 4 * GIB, 0.5),
        "use": USE,
        "processes": 2,
        "overhead_bytes": 10,
        "device_bytes": 2 * GIB,
        "overuse_bytes": 0,
        "utilization": 0.125,
    }
    return TenantSample(**(values | more))  # type: ignore[arg-type]


def node(*tenants: TenantSample) -> NodeSample:
    gpus = (GpuSample(uuid=A, minor=0, capacity_bytes=8 * GIB, unaccounted={7: 11}),)
    return NodeSample(at=100.0, nvml_up=True, tenants=tenants, gpus=gpus)


def shown(families: Iterable[Metric]) -> dict[str, float | list[float]]:
    """The values by name; those with several series as a list."""
    found: dict[str, list[float]] = {}
    for family in families:
        for sample in family.samples:
            assert "pid" not in sample.labels
            found.setdefault(sample.name.removeprefix("podfabric_gpu_"), []).append(sample.value)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def at(now: float, sample: NodeSample) -> dict[str, float | list[float]]:
    return shown(gpu_metrics.families(sample, {"g": 12}, now, wall=1000.0))


def test_every_metric_of_a_tenant_and_a_gpu_has_its_unit() -> None:
    assert at(101.0, node(tenant())) == {
        "nvml_up": 1,
        "memory_limit_bytes": 4 * GIB,
        "memory_used_bytes": 3 * GIB,
        "memory_peak_bytes": 4 * GIB,
        "memory_overhead_bytes": 10,
        "memory_device_bytes": 2 * GIB,
        "memory_overuse_bytes": 0,
        "memory_overuse_kills_total": 12,
        "memory_denied_total": 5,
        "compute_share_ratio": 0.5,
        "compute_utilization_ratio": 0.125,
        "launches_total": 700,
        "throttled_launches_total": 8,
        "launch_wait_seconds_total": 1.5,
        "last_launch_timestamp_seconds": 989.0,
        "processes": 2,
        "process_slots_stale_total": 2,
        "process_slots_refused_total": 3,
        "lock_recoveries_total": 1,
        "capacity_bytes": 8 * GIB,
        "allocated_bytes": 4 * GIB,
        "allocated_share_ratio": 0.5,
        "tenants": 1,
        "unaccounted_bytes": 11,
    }


def labels(families: Iterable[Metric]) -> dict[str, set[str]]:
    """The names of the labels of each family, which are the same in all of its series."""
    found = {}
    for family in families:
        (found[family.name.removeprefix("podfabric_gpu_")],) = {
            frozenset(sample.labels) for sample in family.samples
        }
    return {name: set(of) for name, of in found.items()}


def test_series_have_the_labels_that_the_documentation_says_and_no_others() -> None:
    """Above all no pid, with which series would pile up."""
    limited = [LimitedGPU(uuid=A, minor=0)]
    sample = node(tenant(), tenant(B, 1))
    holder, gpu = {"namespace", "pod", "container"}, {"gpu_uuid", "gpu"}
    on_gpu = {"limit", "used", "peak", "overhead", "device", "overuse"}
    names = {f"memory_{name}_bytes" for name in on_gpu}
    names |= {"memory_denied", "memory_overuse_kills", "processes"}
    names |= {"compute_share_ratio", "compute_utilization_ratio", "launches"}
    names |= {"launch_wait_seconds", "throttled_launches", "last_launch_timestamp_seconds"}
    names |= {"process_slots_stale", "process_slots_refused", "lock_recoveries"}
    of_gpu = {"capacity_bytes", "allocated_bytes", "allocated_share_ratio", "tenants"}
    assert labels(gpu_metrics.families(sample, {}, 101.0, 1000.0, limited)) == {
        "nvml_up": set(),
        **dict.fromkeys(names, holder | gpu),
        **dict.fromkeys(of_gpu | {"unaccounted_bytes", "withheld"}, gpu),
    }


def test_what_is_not_known_is_left_out() -> None:
    found = at(
        101.0,
        node(
            tenant(
                use=None,
                device_bytes=None,
                overuse_bytes=None,
                utilization=None,
            )
        ),
    )
    assert {name for name in found if name.startswith(("memory", "compute"))} == {
        "memory_limit_bytes",
        "memory_overhead_bytes",
        "memory_overuse_kills_total",
        "compute_share_ratio",
    }


def test_what_the_driver_said_is_left_out_once_it_is_old() -> None:
    found = at(100.0 + gpu_metrics.OLD + 1, node(tenant()))
    assert found["nvml_up"] == 0
    assert not {"memory_device_bytes", "compute_utilization_ratio", "capacity_bytes"} & found.keys()
    assert found["memory_used_bytes"] == 3 * GIB
