"""The text of a scrape of the controller, made by prometheus_client.

Pools are named, and with them networks of tenants: so it is served on a loopback address only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from base.scrape import Scrape
from ipam.cluster.controller.mirror import Polled
from ipam.cluster.controller.process import ControllerProcess
from ipam.cluster.controller.rounds import Seen
from ipam.cluster.object_reader import unreadable_family
from ipam.cluster.objects import AddressPool

CONDITIONS = ("Ready", "Exhausted", "Conflict")

_Count = Callable[[AddressPool], int]

_OF_POOLS: Sequence[tuple[str, str, _Count]] = (
    ("blocks", "Blocks that the pool has.", lambda pool: pool.status.blocks.total),
    ("blocks_leased", "Blocks that nodes lease.", lambda pool: pool.status.blocks.leased),
    (
        "blocks_quarantined",
        "Leased blocks that no node can use, since their node is lost.",
        lambda pool: pool.status.blocks.quarantined,
    ),
    ("addresses", "Addresses that pods can get.", lambda pool: pool.status.addresses.capacity),
    ("addresses_used", "Addresses that pods have.", lambda pool: pool.status.addresses.used),
)


class ControllerExposition(Scrape):
    """The families of `process`. One that stands by has no pools: Prometheus would add up what both
    say."""

    def __init__(self, process: ControllerProcess) -> None:
        super().__init__()
        self._process = process

    def collect(self) -> Iterator[Metric]:
        """All families; the registry calls this for each scrape."""
        yield from _of_process(self._process)
        if self._process.leadership.holds:
            seen = self._process.seen
            yield from _of_blocks(seen)
            yield from _of_pools(seen.pools)
            yield from _of_poll(self._process.polled, self._process.now())


def _of_process(process: ControllerProcess) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "podfabric_controller_leads",
        "1 if this process leads, 0 if it stands by.",
        value=int(process.leadership.holds),
    )
    yield CounterMetricFamily(
        "podfabric_controller_rounds", "Rounds that came to their end.", process.rounds
    )
    counts = process.counts
    steps = CounterMetricFamily(
        "podfabric_controller_reclaim_steps",
        "Blocks of dead nodes that were fenced and freed, and fences that a holder answered.",
        labels=("step",),
    )
    for step, count in (
        ("fenced", counts.fenced),
        ("freed", counts.freed),
        ("answered", counts.answered),
    ):
        steps.add_metric((step,), count)
    yield steps
    yield unreadable_family(process.unreadable())
    errors = CounterMetricFamily(
        "podfabric_controller_api_errors",
        "Requests to the API server that failed, by verb and kind of error.",
        labels=("verb", "error"),
    )
    for labels, count in sorted(process.errors.items()):
        errors.add_metric(labels, count)
    yield errors


def _of_poll(polled: Polled | None, now: float) -> Iterator[Metric]:
    if polled is None:
        return
    yield GaugeMetricFamily(
        "podfabric_controller_nodes_age_seconds",
        "How old what is known of the Nodes is: without it no block of a dead node is freed.",
        value=now - polled.began,
    )
    yield GaugeMetricFamily(
        "podfabric_controller_nodes_list_seconds",
        "How long the last list of all Nodes took.",
        value=polled.ended - polled.began,
    )


def _of_blocks(seen: Seen) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "podfabric_cluster_blocks", "Blocks by their state.", labels=("state",)
    )
    for state, count in sorted(seen.states.items()):
        states.add_metric((state,), count)
    yield states
    standings = GaugeMetricFamily(
        "podfabric_cluster_blocks_by_holder",
        "Blocks by how their nodes stand: well, silent, replaced, out_of_service, rebooted, gone.",
        labels=("standing",),
    )
    for standing, count in sorted(seen.standings.items()):
        standings.add_metric((standing,), count)
    yield standings
    for name, text, value in (
        ("contradictions", "What fsck --cluster would report.", seen.contradictions),
        ("nodes_over_limit", "Nodes with more blocks than their pool allows.", seen.over_limit),
        ("unusable_definitions", "Definitions that get no pool.", seen.unusable),
    ):
        yield GaugeMetricFamily(f"podfabric_cluster_{name}", text, value=value)


def _of_pools(pools: Iterable[AddressPool]) -> Iterator[Metric]:
    pools = tuple(pools)
    for name, text, count in _OF_POOLS:
        family = GaugeMetricFamily(f"podfabric_cluster_pool_{name}", text, labels=("pool",))
        for pool in pools:
            family.add_metric((pool.metadata.name,), count(pool))
        yield family
    conditions = GaugeMetricFamily(
        "podfabric_cluster_pool_condition",
        "1 if the pool's condition is True, 0 if it is not.",
        labels=("pool", "type"),
    )
    for pool in pools:
        true = {each.type for each in pool.status.conditions if each.status == "True"}
        for type_ in CONDITIONS:
            conditions.add_metric((pool.metadata.name, type_), int(type_ in true))
    yield conditions
