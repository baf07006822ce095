"""The text of a scrape, made by prometheus_client: its families are computed for each scrape."""

from collections.abc import Iterable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric


class Scrape:
    """A registry of this process' own metrics and the families of `collect`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self._registry)
        prometheus_client.PlatformCollector(registry=self._registry)
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format 0.0.4."""
        return prometheus_client.generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: otherwise the registry computes all families to learn their names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families; the registry calls this for each scrape."""
        raise NotImplementedError
