"""Counts calls, refusals and sweeps for an operator's Prometheus, and has the other sources.

`agent.exposition` makes the text of a scrape from them. It loads prometheus_client, which costs as
much of an agent's start as all of our plugins, so an agent that is never scraped does without.

A label's value is one of a known set or "other", so that no client can create series without end.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from cni.spec.errors import Code
from ipam.store import RangeUsage

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from agent.exposition import Exposition
    from deviceplugin.kubelet.registration import PoolState

VERBS = frozenset(("ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"))
MAX_REASONS = 8  # of refusals; they are texts of our own
BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0),
)

_CODES = frozenset((0, *Code))
_OTHER = "other"


class Metrics:
    """The agent's counters, and the sources that a scrape asks.

    Args:
        plugins: the names that may be a label.
        usage: answers how many addresses of each range are used and free.
        attachments: answers how many journal entries there are by plugin and phase; the plugin
            of a damaged entry is "".
        devices: answers the state of each pool of the device plugin.
        allocations: answers how many device ids containers hold, by resource.
        by_range: tell the addresses of each range, to a reader who may know the tenants'
            networks and ranges.
    """

    def __init__(
        self,
        plugins: Collection[str],
        usage: Callable[[], Iterable[RangeUsage]],
        attachments: Callable[[], Mapping[tuple[str, str], int]],
        devices: "Callable[[], Iterable[PoolState]]" = tuple,
        allocations: Callable[[], Mapping[str, int]] = dict,
        *,
        by_range: bool = False,
    ) -> None:
        self.plugins = frozenset(plugins)
        self.usage = usage
        self.attachments = attachments
        self.devices = devices
        self.allocations = allocations
        self.by_range = by_range
        self.mistakes: Callable[[], Mapping[str, bool]] = dict  # by section of config.yaml
        self.more: list[Callable[[], Sequence[Metric]]] = []
        self.gauges: list[tuple[str, str, Callable[[], int]]] = []  # name, text, value
        # Counters, and what protects them.
        self.lock = threading.Lock()
        self.requests: Counter[tuple[str, str, str]] = Counter()  # by plugin, verb and CNI code
        # Of each plugin and verb: calls by bound of BUCKETS (the last one: above all), and seconds.
        self.durations: dict[tuple[str, str], tuple[list[int], float]] = {}
        self.refusals: Counter[str] = Counter()  # by reason
        self.sweep_removed = 0
        self.sweep_errors = 0
        self.swept_at = 0.0  # the time of day, 0 before the first sweep

    def observe(self, plugin: str, verb: str, code: int, seconds: float) -> None:
        """Count a call that ended with this CNI error code, 0 for success."""
        plugin, verb = bounded(plugin, self.plugins), bounded(verb, VERBS)
        label = str(int(code)) if code in _CODES else _OTHER
        with self.lock:
            self.requests[plugin, verb, label] += 1
            counts, total = self.durations.get((plugin, verb), ([0] * (len(BUCKETS) + 1), 0.0))
            counts[bisect_left(BUCKETS, seconds)] += 1
            self.durations[plugin, verb] = counts, total + seconds

    def refused(self, reason: str) -> None:
        """Count a call that was not begun."""
        with self.lock:
            if reason not in self.refusals and len(self.refusals) >= MAX_REASONS:
                reason = _OTHER
            self.refusals[reason] += 1

    def swept(self, removed: int, errors: int) -> None:
        """Count what a sweep removed and could not remove."""
        with self.lock:
            self.sweep_removed += removed
            self.sweep_errors += errors
            self.swept_at = time.time()

    def watch(
        self,
        running: Callable[[], int],
        waiting: Callable[[], int],
        stuck: Callable[[], int],
        connections: Callable[[], int],
    ) -> None:
        """Where a scrape finds how busy the agent is."""
        self.gauges += [
            ("podfabric_requests_running", "CNI calls that workers are at.", running),
            ("podfabric_requests_waiting", "CNI calls that no worker has begun.", waiting),
            ("podfabric_workers_stuck", "Workers whose call does not end.", stuck),
            ("podfabric_connections", "Launchers that are connected.", connections),
        ]

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format 0.0.4."""
        return self._exposition.text()

    @cached_property
    def _exposition(self) -> "Exposition":
        from agent.exposition import Exposition

        return Exposition(self)


class Lasting:
    """Makes an exposition at most once in `seconds`, however often it is asked for."""

    def __init__(self, make: Callable[[], bytes], seconds: float = 1.0) -> None:
        self._make = make
        self._seconds = seconds
        self._lock = threading.Lock()
        self._made = b""
        self._until = 0.0

    def __call__(self) -> bytes:
        """The last exposition, or a new one if that is too old."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._made = self._make()
                self._until = time.monotonic() + self._seconds
            return self._made


def bounded(value: str, allowed: Collection[str]) -> str:
    """The value if it may be a label's value, else "other"."""
    return value if value in allowed else _OTHER
