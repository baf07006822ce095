"""Alnair's metrics of pods, for dashboards that were made for it (`compat.metrics: [alnair]`).

They are gauges, as Alnair's are, summed over the processes of a pod: a series per process would end
with it. Alnair's gauge of tokens has no equal here.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from gpu.samples import NodeSample

_CONTAINER = ("pod_name", "namespace")
_ON_GPU = ("gpu_uuid", "gpu_idx", "pod_name")


def families(sample: NodeSample) -> Sequence[Metric]:
    """All families."""
    launches: dict[tuple[str, ...], float] = defaultdict(float)
    used: dict[tuple[str, ...], float] = defaultdict(float)
    utilization: dict[tuple[str, ...], float] = defaultdict(float)
    memory: dict[tuple[str, ...], float] = defaultdict(float)
    capacities = {gpu.uuid: gpu.capacity_bytes for gpu in sample.gpus}
    for of in sample.tenants:
        pod = of.tenant.pod
        if of.use is not None:
            launches[pod.name, pod.namespace] += of.use.launches
            used[pod.name, pod.namespace] += of.use.used_bytes
        on_gpu = of.uuid, str(of.minor), pod.name
        if of.utilization is not None:
            utilization[on_gpu] += 100 * of.utilization
        if of.device_bytes is not None and capacities.get(of.uuid):
            memory[on_gpu] += 100 * of.device_bytes / capacities[of.uuid]
    return (
        _gauge(
            "cuda_launch_kernel_cnt",
            "Kernels and graphs that were launched.",
            _CONTAINER,
            launches,
        ),
        _gauge("cuda_mem_used", "Bytes of GPU memory that count as used.", _CONTAINER, used),
        _gauge("gpu_util", "Percent of the time that the GPU was used.", _ON_GPU, utilization),
        _gauge("gpu_mem_util", "Percent of the GPU's memory that is used.", _ON_GPU, memory),
    )


def _gauge(
    name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]
) -> Metric:
    family = GaugeMetricFamily(f"alnair_{name}", text, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family
