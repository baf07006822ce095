"""The text of a scrape, made by prometheus_client from `agent.metrics`.

A pod in the host's network may read it, so it names no network and no range of a tenant. Only a
unix socket, which only root can open, shows each range.

A family that cannot be computed is left out and logged.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from agent.metrics import BUCKETS, Metrics, bounded
from base.scrape import Scrape
from cni.attachments.journal import Phase
from ipam.store import RangeUsage

if TYPE_CHECKING:
    from deviceplugin.kubelet.registration import PoolState

PHASES = frozenset((Phase.ADDING, Phase.ATTACHED, Phase.LEAVING, "damaged"))

_log = logging.getLogger(__name__)


class Exposition(Scrape):
    """The families of `metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics
        self._failures: dict[int, str] = {}
        self._version = installed_version()

    def collect(self) -> Iterator[Metric]:
        """All families; the registry calls this for each scrape."""
        metrics = self._metrics
        parts: Sequence[Callable[[], Sequence[Metric]]] = (
            lambda: _calls(metrics),
            lambda: _sweeps(metrics),
            lambda: _gauges(metrics),
            lambda: _addresses(tuple(metrics.usage()), by_range=metrics.by_range),
            lambda: [_attachments(metrics.attachments(), metrics.plugins)],
            lambda: [_devices(metrics.devices(), metrics.allocations())],
            lambda: [_mistakes(metrics.mistakes())],
            lambda: [_build(self._version)],
            *metrics.more,
        )
        for number, families in enumerate(parts):
            try:
                computed = families()
            except Exception as error:  # noqa: BLE001 - a failure must not cost the other families
                text = f"{type(error).__name__}: {error}"
                if self._failures.get(number) != text:  # not again for every scrape
                    _log.warning("metrics: a family is left out: %s", text)
                self._failures[number] = text
            else:
                self._failures.pop(number, None)
                yield from computed


def _calls(metrics: Metrics) -> Sequence[Metric]:
    requests = CounterMetricFamily(
        "podfabric_requests",
        "CNI calls that came to an end, by their error code (0 is success).",
        labels=("plugin", "verb", "code"),
    )
    seconds = HistogramMetricFamily(
        "podfabric_request_seconds",
        "From a call's begin in a worker to its answer.",
        labels=("plugin", "verb"),
    )
    refused = CounterMetricFamily(
        "podfabric_requests_refused", "CNI calls that were not begun.", labels=("reason",)
    )
    bounds = (*(str(bound) for bound in BUCKETS), "+Inf")
    with metrics.lock:
        for labels, count in sorted(metrics.requests.items()):
            requests.add_metric(labels, count)
        for names, (counts, total) in sorted(metrics.durations.items()):
            buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
            seconds.add_metric(names, buckets, total)
        for reason, count in sorted(metrics.refusals.items()):
            refused.add_metric((reason,), count)
    return requests, seconds, refused


def _sweeps(metrics: Metrics) -> Sequence[Metric]:
    return (
        CounterMetricFamily(
            "podfabric_sweep_removed", "What sweeps have removed.", metrics.sweep_removed
        ),
        CounterMetricFamily(
            "podfabric_sweep_errors", "What sweeps could not remove.", metrics.sweep_errors
        ),
        GaugeMetricFamily(
            "podfabric_sweep_last_timestamp_seconds",
            "When the last sweep ended, 0 before the first.",
            metrics.swept_at,
        ),
    )


def _gauges(metrics: Metrics) -> Sequence[Metric]:
    return [GaugeMetricFamily(name, text, value()) for name, text, value in metrics.gauges]


def _attachments(
    counts: Mapping[tuple[str, str], int], plugins: Collection[str]
) -> GaugeMetricFamily:
    tally: Counter[tuple[str, str]] = Counter()
    for (plugin, phase), count in counts.items():
        tally[bounded(plugin, plugins) if plugin else "unknown", bounded(phase, PHASES)] += count
    return _family(
        "podfabric_attachments",
        "Entries of the journal.",
        ("plugin", "phase"),
        sorted(tally.items()),
    )


def _addresses(ranges: Collection[RangeUsage], *, by_range: bool) -> Sequence[Metric]:
    families = [_totals(ranges), _ranges(ranges)]
    return [*families, _each(ranges)] if by_range else families


def _totals(ranges: Iterable[RangeUsage]) -> Metric:
    tally: Counter[tuple[str, str]] = Counter()
    for usage in ranges:
        family_name = "ipv6" if ":" in usage.range else "ipv4"
        tally[family_name, "used"] += usage.used
        tally[family_name, "free"] += usage.free
    return _family(
        "podfabric_ipam_addresses",
        "Addresses that ranges may hand out, of all ranges together.",
        ("family", "state"),
        sorted(tally.items()),
    )


def _ranges(ranges: Iterable[RangeUsage]) -> Metric:
    tally = dict.fromkeys(("open", "nearly_full", "full"), 0)
    for usage in ranges:
        tally[_fullness(usage)] += 1
    return _family(
        "podfabric_ipam_ranges",
        "Ranges by how full they are; a range is nearly full with a tenth of its addresses free.",
        ("state",),
        (((state,), count) for state, count in tally.items()),
    )


def _fullness(usage: RangeUsage) -> str:
    if usage.free == 0:
        return "full"
    return "nearly_full" if 10 * usage.free <= usage.used + usage.free else "open"


def _each(ranges: Iterable[RangeUsage]) -> Metric:
    tally: Counter[tuple[str, str, str]] = Counter()
    for usage in ranges:
        # Undecodable bytes of a configuration, as surrogates, would end the whole scrape.
        domain, range_ = (
            text.encode(errors="replace").decode() for text in (usage.domain, usage.range)
        )
        tally[domain, range_, "used"] += usage.used
        tally[domain, range_, "free"] += usage.free
    return _family(
        "podfabric_ipam_range_addresses",
        "Addresses that a range may hand out.",
        ("domain", "range", "state"),
        sorted(tally.items()),
    )


def _devices(pools: "Iterable[PoolState]", held: Mapping[str, int]) -> Metric:
    return _family(
        "podfabric_devices",
        "Device ids of a resource: healthy and unhealthy ones, those that containers hold, and "
        "whether the kubelet reads the list (registered is 1).",
        ("resource", "state"),
        (
            ((pool.resource, state), count)
            for pool in pools
            for state, count in (
                ("healthy", pool.healthy),
                ("unhealthy", pool.devices - pool.healthy),
                ("held", held.get(pool.resource, 0)),
                ("registered", int(pool.registered)),
            )
        ),
    )


def _mistakes(sections: Mapping[str, bool]) -> Metric:
    return _family(
        "podfabric_configuration_error",
        "1 where a mistake keeps a section of config.yaml from being used; the log has its text.",
        ("section",),
        (((section,), int(wrong)) for section, wrong in sections.items()),
    )


def _build(version_: str) -> Metric:
    return _family(
        "podfabric_build_info", "1, for the version that runs.", ("version",), [((version_,), 1)]
    )


def _family(
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], int]],
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for names, value in values:
        family.add_metric(names, value)
    return family


def installed_version() -> str:
    """The version of the installed podfabric; "unknown" where none is installed."""
    try:
        return version("podfabric")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
