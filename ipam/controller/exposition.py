"""Makes the text of the controller's metrics.

The text has the names of tenants' networks. So only a loopback address serves the text.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from base import scrape
from base.scrape import Source, counter, gauge
from ipam.controller.leader import ControllerProcess
from ipam.controller.rounds import Seen
from ipam.leases.objects import AddressPool
from kube.encoding import unreadable_family

CONDITIONS = ("Ready", "Exhausted", "Conflict")

_Count = Callable[[AddressPool], int]

_OF_POOLS: Sequence[tuple[str, str, _Count]] = (
    ("blocks", "Blocks that the pool has.", lambda pool: pool.status.blocks.total),
    ("blocks_leased", "Blocks that nodes lease.", lambda pool: pool.status.blocks.leased),
    (
        "blocks_quarantined",
        "Leased blocks of lost nodes. No other node can use them.",
        lambda pool: pool.status.blocks.quarantined,
    ),
    ("addresses", "Addresses that pods can get.", lambda pool: pool.status.addresses.capacity),
    ("addresses_used", "Addresses that pods have.", lambda pool: pool.status.addresses.used),
)


def exposition(process: ControllerProcess) -> Callable[[], bytes]:
    """A standby shows no pools, so that no pool counts twice."""
    registry = scrape.registry()
    registry.register(Source(partial(_families, process)))
    return partial(generate_latest, registry)


def _families(process: ControllerProcess) -> Iterator[Metric]:
    leads, counts = process.leadership.holds, process.counts
    yield GaugeMetricFamily(
        "podfabric_controller_leads", "1 if this process leads, 0 if it stands by.", int(leads)
    )
    yield CounterMetricFamily(
        "podfabric_controller_rounds", "Rounds that the controller completed.", process.rounds
    )
    yield counter(
        "podfabric_controller_reclaim_steps",
        "Blocks that the controller fenced or freed, and fences that the holder answered.",
        ("step",),
        {("fenced",): counts.fenced, ("freed",): counts.freed, ("answered",): counts.answered},
    )
    yield unreadable_family(process.unreadable())
    yield counter(
        "podfabric_controller_api_errors",
        "Requests to the API server that failed, by verb and kind of error.",
        ("verb", "error"),
        dict(process.errors),
    )
    if leads:
        yield from _of_blocks(process.seen)
        yield from _of_pools(process.seen.pools)
        if process.polled is not None:
            yield GaugeMetricFamily(
                "podfabric_controller_nodes_age_seconds",
                "Seconds since the last poll of the Nodes. The controller frees blocks of dead "
                "nodes only after a poll.",
                process.now() - process.polled.began,
            )


def _of_blocks(seen: Seen) -> Iterator[Metric]:
    for name, label, text, counts in (
        ("blocks", "state", "Blocks by their state.", seen.states),
        (
            "blocks_by_holder",
            "standing",
            "Blocks by the state of their node: well, silent, replaced, out_of_service, rebooted, "
            "gone.",
            seen.standings,
        ),
    ):
        samples = {(value,): count for value, count in counts.items()}
        yield gauge(f"podfabric_cluster_{name}", text, (label,), samples)
    for name, text, value in (
        (
            "contradictions",
            "Contradictions that podfabric ipam fsck --cluster reports.",
            seen.contradictions,
        ),
        ("nodes_over_limit", "Nodes with more blocks than their pool allows.", seen.over_limit),
        (
            "unusable_definitions",
            "Definitions and pools of other plugins that get no AddressPool.",
            seen.unusable,
        ),
    ):
        yield GaugeMetricFamily(f"podfabric_cluster_{name}", text, value)


def _of_pools(pools: Collection[AddressPool]) -> Iterator[Metric]:
    for name, text, count in _OF_POOLS:
        samples = {(pool.metadata.name,): count(pool) for pool in pools}
        yield gauge(f"podfabric_cluster_pool_{name}", text, ("pool",), samples)
    true = {
        (pool.metadata.name, each.type)
        for pool in pools
        for each in pool.status.conditions
        if each.status == "True"
    }
    yield gauge(
        "podfabric_cluster_pool_condition",
        "1 if the pool's condition is True, 0 if it is not.",
        ("pool", "type"),
        {
            (pool.metadata.name, type_): int((pool.metadata.name, type_) in true)
            for pool in pools
            for type_ in CONDITIONS
        },
    )
