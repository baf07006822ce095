"""Metrics for Prometheus: metrics of the process, and families that each scrape computes."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from base.problems import Problems

Labels = TypeVar("Labels", bound=tuple[str, ...])

_LEFT_OUT = "metrics: a family is left out"
_log = logging.getLogger(__name__)

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    prometheus_client.ProcessCollector(registry=made)
    prometheus_client.PlatformCollector(registry=made)
    return made


class Source(Collector):
    """Families of metrics that each scrape computes, and leaves out after an error."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families
        self._problems = Problems(_log)

    def collect(self) -> Iterable[Metric]:
        try:
            families = tuple(self._families())
        except Exception as error:  # noqa: BLE001 - a failure must not cost the other families
            self._problems.tell(_LEFT_OUT, f"{type(error).__name__}: {error}")
            return ()
        self._problems.tell(_LEFT_OUT, None)
        return families


def gauge(name: str, text: str, labels: Sequence[str], samples: Mapping[Labels, float]) -> Metric:
    """A gauge, with one value for each combination of label values."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def counter(name: str, text: str, labels: Sequence[str], samples: Mapping[Labels, float]) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, samples: Mapping[Labels, float]
) -> Metric:
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family
