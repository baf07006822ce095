"""What an operator's Prometheus reads: calls, connections, the sweep, addresses, attachments.

A pod in the host's network may read it, too, so it names no network and no range of a tenant.
Only a unix socket, which is for root, tells of each range.

A label's value is one of a known set or "other", so that no client can make series without end.
What is computed for a scrape and fails is left out of it, and logged.
"""

import functools
import logging
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from cni.attachments.journal import Phase
from cni.spec.errors import Code
from ipam.store import RangeUsage

if TYPE_CHECKING:
    from deviceplugin.kubelet.server import PoolState

VERBS = frozenset(("ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"))
PHASES = frozenset((Phase.ADDING, Phase.ATTACHED, Phase.LEAVING, "damaged"))
MAX_REASONS = 8  # of refusals; they are texts of our own
BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0),
)

_CODES = frozenset((0, *Code))
_OTHER = "other"

_log = logging.getLogger(__name__)


class Metrics:
    """`plugins` are the names that may be a label; `usage` and `attachments` are asked by a scrape.

    `devices` answers how each pool of the device plugin stands, `allocations` how many ids
    containers hold by resource.
    `by_range` is for a reader who may know the tenants' networks and ranges.
    `attachments` answers how many there are by plugin and phase; the plugin of a damaged one,
    which nobody can tell, is "".
    """

    def __init__(
        self,
        plugins: Collection[str],
        usage: Callable[[], Iterable[RangeUsage]],
        attachments: Callable[[], Mapping[tuple[str, str], int]],
        devices: Callable[[], "Iterable[PoolState]"] = tuple,
        allocations: Callable[[], Mapping[str, int]] = dict,
        *,
        by_range: bool = False,
    ) -> None:
        self._plugins = frozenset(plugins)
        self._reasons: set[str] = set()
        self._computed = _Computed()
        # When a series began is noise here, and twice the lines.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._make_counters(self._registry)
        prometheus_client.ProcessCollector(registry=self._registry)
        prometheus_client.PlatformCollector(registry=self._registry)
        self._computed.add(lambda: _addresses(tuple(usage()), by_range=by_range))
        self._computed.add(lambda: [self._attachments(attachments())])
        self._computed.add(lambda: [_devices(devices(), allocations())])
        self._computed.add(_build)
        self._registry.register(self._computed)

    def _make_counters(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "podfabric_requests",
            "CNI calls that came to an end, by their error code (0 is success).",
            ("plugin", "verb", "code"),
            registry=registry,
        )
        self._seconds = Histogram(
            "podfabric_request_seconds",
            "From a call's begin in a worker to its answer.",
            ("plugin", "verb"),
            buckets=BUCKETS,
            registry=registry,
        )
        self._refused = Counter(
            "podfabric_requests_refused",
            "CNI calls that were not begun.",
            ("reason",),
            registry=registry,
        )
        self._sweep_removed = Counter(
            "podfabric_sweep_removed", "What sweeps have removed.", registry=registry
        )
        self._sweep_errors = Counter(
            "podfabric_sweep_errors", "What sweeps could not remove.", registry=registry
        )
        self._sweep_time = Gauge(
            "podfabric_sweep_last_timestamp_seconds",
            "When the last sweep ended, 0 before the first.",
            registry=registry,
        )

    def observe(self, plugin: str, verb: str, code: int, seconds: float) -> None:
        """A call came to its end with that CNI error code, 0 for success."""
        plugin, verb = _bounded(plugin, self._plugins), _bounded(verb, VERBS)
        self._requests.labels(plugin, verb, str(int(code)) if code in _CODES else _OTHER).inc()
        self._seconds.labels(plugin, verb).observe(seconds)

    def refused(self, reason: str) -> None:
        """A call was not begun."""
        if len(self._reasons) < MAX_REASONS:
            self._reasons.add(reason)
        self._refused.labels(_bounded(reason, self._reasons)).inc()

    def swept(self, removed: int, errors: int) -> None:
        """A sweep came to its end."""
        self._sweep_removed.inc(removed)
        self._sweep_errors.inc(errors)
        self._sweep_time.set_to_current_time()

    def watch(
        self,
        running: Callable[[], int],
        waiting: Callable[[], int],
        stuck: Callable[[], int],
        connections: Callable[[], int],
    ) -> None:
        """Where a scrape finds how busy the agent is."""
        for name, text, count in (
            ("podfabric_requests_running", "CNI calls that workers are at.", running),
            ("podfabric_requests_waiting", "CNI calls that no worker has begun.", waiting),
            ("podfabric_workers_stuck", "Workers whose call does not end.", stuck),
            ("podfabric_connections", "Launchers that are connected.", connections),
        ):
            self._computed.add(_gauge(name, text, count))

    def exposition(self) -> bytes:
        """All of it, in Prometheus' text format 0.0.4."""
        return prometheus_client.generate_latest(self._registry)

    def _attachments(self, counts: Mapping[tuple[str, str], int]) -> Metric:
        tally: Tally[tuple[str, str]] = Tally()
        for (plugin, phase), count in counts.items():
            plugin = _bounded(plugin, self._plugins) if plugin else "unknown"
            tally[plugin, _bounded(phase, PHASES)] += count
        family = GaugeMetricFamily(
            "podfabric_attachments", "Entries of the journal.", labels=("plugin", "phase")
        )
        for labels, count in sorted(tally.items()):
            family.add_metric(labels, count)
        return family


class Lasting:
    """An exposition that is made at most once a second, whoever asks how often."""

    def __init__(self, make: Callable[[], bytes], seconds: float = 1.0) -> None:
        self._make = make
        self._seconds = seconds
        self._lock = threading.Lock()
        self._made = b""
        self._until = 0.0

    def __call__(self) -> bytes:
        """The last one, or a new one if that is too old."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._made = self._make()
                self._until = time.monotonic() + self._seconds
            return self._made


class _Computed:
    """Families that are made anew for each scrape."""

    def __init__(self) -> None:
        self._families: list[Callable[[], Sequence[Metric]]] = []
        self._failures: dict[int, str] = {}

    def add(self, families: Callable[[], Sequence[Metric]]) -> None:
        """Some more, from the next scrape on."""
        self._families.append(families)

    def describe(self) -> Iterable[Metric]:
        """Nothing, or the registry would compute them all to learn their names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """What Prometheus' registry calls."""
        for number, families in enumerate(list(self._families)):
            try:
                made = families()
            except Exception as error:  # noqa: BLE001 - one family must not cost the others
                text = f"{type(error).__name__}: {error}"
                if self._failures.get(number) != text:  # not again for every scrape
                    _log.warning("metrics: a family is left out: %s", text)
                self._failures[number] = text
            else:
                self._failures.pop(number, None)
                yield from made


def _gauge(name: str, text: str, count: Callable[[], int]) -> Callable[[], Sequence[Metric]]:
    return lambda: [GaugeMetricFamily(name, text, value=count())]


def _addresses(ranges: Collection[RangeUsage], *, by_range: bool) -> Sequence[Metric]:
    families = [_totals(ranges), _ranges(ranges)]
    return [*families, _each(ranges)] if by_range else families


def _totals(ranges: Iterable[RangeUsage]) -> Metric:
    tally: Tally[tuple[str, str]] = Tally()
    for one in ranges:
        family_name = "ipv6" if ":" in one.range else "ipv4"
        tally[family_name, "used"] += one.used
        tally[family_name, "free"] += one.free
    family = GaugeMetricFamily(
        "podfabric_ipam_addresses",
        "Addresses that ranges may hand out, of all ranges together.",
        labels=("family", "state"),
    )
    for labels, count in sorted(tally.items()):
        family.add_metric(labels, count)
    return family


def _ranges(ranges: Iterable[RangeUsage]) -> Metric:
    tally = dict.fromkeys(("open", "nearly_full", "full"), 0)
    for one in ranges:
        tally[_fullness(one)] += 1
    family = GaugeMetricFamily(
        "podfabric_ipam_ranges",
        "Ranges by how full they are; a range is nearly full with a tenth of its addresses free.",
        labels=("state",),
    )
    for state, count in tally.items():
        family.add_metric((state,), count)
    return family


def _fullness(one: RangeUsage) -> str:
    if one.free == 0:
        return "full"
    return "nearly_full" if 10 * one.free <= one.used + one.free else "open"


def _each(ranges: Iterable[RangeUsage]) -> Metric:
    tally: Tally[tuple[str, str, str]] = Tally()
    for one in ranges:
        # Undecodable bytes of a configuration, as surrogates, would end the whole scrape.
        domain, range_ = (
            text.encode(errors="replace").decode() for text in (one.domain, one.range)
        )
        tally[domain, range_, "used"] += one.used
        tally[domain, range_, "free"] += one.free
    family = GaugeMetricFamily(
        "podfabric_ipam_range_addresses",
        "Addresses that a range may hand out.",
        labels=("domain", "range", "state"),
    )
    for labels, count in sorted(tally.items()):
        family.add_metric(labels, count)
    return family


def _devices(pools: "Iterable[PoolState]", held: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(
        "podfabric_devices",
        "Device ids of a resource: healthy and unhealthy ones, those that containers hold, and "
        "whether the kubelet reads the list (registered is 1).",
        labels=("resource", "state"),
    )
    for pool in pools:
        counts = {
            "healthy": pool.healthy,
            "unhealthy": pool.devices - pool.healthy,
            "held": held.get(pool.resource, 0),
            "registered": int(pool.registered),
        }
        for state, count in counts.items():
            family.add_metric((pool.resource, state), count)
    return family


def _build() -> Sequence[Metric]:
    family = GaugeMetricFamily(
        "podfabric_build_info", "1, for the version that runs.", labels=("version",)
    )
    family.add_metric((_version(),), 1)
    return [family]


@functools.cache
def _version() -> str:
    # Its megabyte is for agents that somebody scrapes.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("podfabric")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


def _bounded(value: str, known: Collection[str]) -> str:
    return value if value in known else _OTHER
