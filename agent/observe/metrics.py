"""Counts calls, refusals and sweeps for Prometheus, and collects the metrics of other sources.

A label's value is from a known set or "other", so that no client can create endless series. A pod
in the host's network may read the metrics. So the metrics contain no network or range of a tenant,
except on a unix socket, which only root can open.
"""

import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.metrics_core import Metric

from base import scrape
from base.scrape import Source, gauge
from cni.attachments.journal import Phase
from cni.spec.errors import Code
from ipam.store.reservations import RangeUsage

if TYPE_CHECKING:
    from agent.serve.workers import Workers
    from deviceplugin.kubelet.registration import PoolState

VERBS = frozenset(("ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"))
PHASES = frozenset((Phase.ADDING, Phase.ATTACHED, Phase.LEAVING, "damaged"))
BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0),
)

_CODES = frozenset((0, *Code))
_OTHER = "other"


class Metrics:
    """The agent's counters, and the sources that each scrape reads.

    Args:
        plugins: the names that a label may have.
        usage: returns the number of used and free addresses of each range.
        attachments: returns the number of entries by plugin ("" if damaged) and phase.
        by_range: add the metrics of each range, for readers who may see the tenants' networks.
    """

    def __init__(
        self,
        plugins: Collection[str],
        usage: Callable[[], Iterable[RangeUsage]],
        attachments: Callable[[], Mapping[tuple[str, str], int]],
        *,
        by_range: bool = False,
    ) -> None:
        self._plugins = frozenset(plugins)
        self._registry = scrape.registry()
        counter = partial(Counter, registry=self._registry)
        self._requests = counter(
            "podfabric_requests",
            "Finished CNI calls, by error code (0 for success).",
            ("plugin", "verb", "code"),
        )
        self._seconds = Histogram(
            "podfabric_request_seconds",
            "Time from the start of a call in a worker to its answer.",
            ("plugin", "verb"),
            registry=self._registry,
            buckets=BUCKETS,
        )
        self._refused = counter(
            "podfabric_requests_refused", "CNI calls that the agent refused to start.", ("reason",)
        )
        self._removed = counter(
            "podfabric_sweep_removed", "Attachments and addresses that sweeps removed."
        )
        self._errors = counter(
            "podfabric_sweep_errors", "Attachments and addresses that sweeps failed to remove."
        )
        self._swept_at = Gauge(
            "podfabric_sweep_last_timestamp_seconds",
            "Unix time of the end of the last sweep, 0 before the first sweep.",
            registry=self._registry,
        )
        build = Info(
            "podfabric_build",
            "Always 1. The label has the version that runs.",
            registry=self._registry,
        )
        build.info({"version": installed_version()})
        self.add(
            lambda: _addresses(tuple(usage()), by_range=by_range),
            lambda: [_attachments(attachments(), self._plugins)],
        )

    def add(self, *sources: Callable[[], Iterable[Metric]]) -> None:
        """Collect the families of these sources at each scrape."""
        for source in sources:
            self._registry.register(Source(source))

    def watch(self, workers: "Workers", connections: Callable[[], int]) -> None:
        for name, text, value in (
            ("requests_running", "CNI calls that run in workers.", lambda: workers.running),
            ("requests_waiting", "CNI calls that wait for a worker.", lambda: workers.waiting),
            (
                "workers_stuck",
                "Workers whose call has run past its deadline.",
                lambda: workers.stuck,
            ),
            ("connections", "Connected launchers.", connections),
        ):
            Gauge(f"podfabric_{name}", text, registry=self._registry).set_function(value)

    def observe(self, plugin: str, verb: str, code: int, seconds: float) -> None:
        """Count a call that ended with this CNI error code (0 for success)."""
        plugin, verb = _bounded(plugin, self._plugins), _bounded(verb, VERBS)
        label = str(int(code)) if code in _CODES else _OTHER
        self._requests.labels(plugin, verb, label).inc()
        self._seconds.labels(plugin, verb).observe(seconds)

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def swept(self, removed: int, errors: int) -> None:
        self._removed.inc(removed)
        self._errors.inc(errors)
        self._swept_at.set_to_current_time()

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)


class Lasting:
    """Calls `make` at most once in `seconds`. Other calls return the last result."""

    def __init__(self, make: Callable[[], bytes], seconds: float = 1.0) -> None:
        self._make = make
        self._seconds = seconds
        self._lock = threading.Lock()
        self._made = b""
        self._until = 0.0

    def __call__(self) -> bytes:
        with self._lock:
            if time.monotonic() >= self._until:
                self._made = self._make()
                self._until = time.monotonic() + self._seconds
            return self._made


def _bounded(value: str, allowed: Collection[str]) -> str:
    return value if value in allowed else _OTHER


def _attachments(counts: Mapping[tuple[str, str], int], plugins: Collection[str]) -> Metric:
    tally: Tally[tuple[str, str]] = Tally()
    for (plugin, phase), count in counts.items():
        tally[_bounded(plugin, plugins) if plugin else "unknown", _bounded(phase, PHASES)] += count
    return gauge("podfabric_attachments", "Attachments in the journal.", ("plugin", "phase"), tally)


def _addresses(ranges: Collection[RangeUsage], *, by_range: bool) -> Sequence[Metric]:
    totals: Tally[tuple[str, str]] = Tally()
    fullness: Tally[tuple[str]] = Tally({("open",): 0, ("nearly_full",): 0, ("full",): 0})
    by_state: Tally[tuple[str, str, str]] = Tally()
    for usage in ranges:
        family = "ipv6" if ":" in usage.range else "ipv4"
        # A surrogate from undecodable bytes of a configuration would end the whole scrape.
        domain, range_ = (
            text.encode(errors="replace").decode() for text in (usage.domain, usage.range)
        )
        for state, count in (("used", usage.used), ("free", usage.free)):
            totals[family, state] += count
            by_state[domain, range_, state] += count
        fullness[_fullness(usage),] += 1
    families = [
        gauge(
            "podfabric_ipam_addresses",
            "Used and free addresses of all ranges together.",
            ("family", "state"),
            totals,
        ),
        gauge(
            "podfabric_ipam_ranges",
            "Ranges that are open, nearly full (at most a tenth of the addresses is free) or full.",
            ("state",),
            fullness,
        ),
    ]
    if by_range:
        text, labels = "Used and free addresses of a range.", ("domain", "range", "state")
        families.append(gauge("podfabric_ipam_range_addresses", text, labels, by_state))
    return families


def _fullness(usage: RangeUsage) -> str:
    if usage.free == 0:
        return "full"
    return "nearly_full" if 10 * usage.free <= usage.used + usage.free else "open"


def devices(pools: "Iterable[PoolState]", held: Mapping[str, int]) -> Metric:
    return gauge(
        "podfabric_devices",
        "Device ids that are healthy, unhealthy or held. The state registered is 1 if the kubelet "
        "reads the list of ids.",
        ("resource", "state"),
        {
            (pool.resource, state): count
            for pool in pools
            for state, count in (
                ("healthy", pool.healthy),
                ("unhealthy", pool.devices - pool.healthy),
                ("held", held.get(pool.resource, 0)),
                ("registered", int(pool.registered)),
            )
        },
    )


def mistakes(sections: Mapping[str, bool]) -> Metric:
    return gauge(
        "podfabric_configuration_error",
        "1 if the agent cannot use a section of config.yaml because of a mistake, else 0. The log "
        "names the mistake.",
        ("section",),
        {(section,): int(wrong) for section, wrong in sections.items()},
    )


def installed_version() -> str:
    """The version of the installed podfabric, or "unknown" in a checkout."""
    try:
        return version("podfabric")
    except PackageNotFoundError:
        return "unknown"
