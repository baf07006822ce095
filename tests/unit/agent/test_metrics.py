"""The metrics: every family, with labels from known sets only."""

import logging
import time
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.observe import metrics as agent_metrics
from agent.observe.metrics import Lasting, Metrics
from agent.serve.workers import Workers
from cni.spec.errors import Code
from deviceplugin.kubelet.registration import PoolState
from ipam.store.reservations import RangeUsage
from tests.waiting import PATIENCE


def made(
    usage: Iterable[RangeUsage] = (),
    attachments: Mapping[tuple[str, str], int] | None = None,
    devices: Iterable[PoolState] = (),
    *,
    by_range: bool = False,
) -> Metrics:
    metrics = Metrics(
        ("ipoib", "podfabric-ipam"),
        lambda: usage,
        lambda: attachments or {},
        by_range=by_range,
    )
    metrics.add(lambda: [agent_metrics.devices(devices, {"rdma/hca": 2})])
    return metrics


POOL = PoolState(
    resource="rdma/hca",
    socket="/s",
    registered=True,
    streams=1,
    devices=8,
    healthy=7,
    problem="",
)


def test_devices_are_counted_by_resource_and_state() -> None:
    found = read(made(devices=[POOL]))
    counts = {"healthy": 7, "unhealthy": 1, "held": 2, "registered": 1}
    for state, count in counts.items():
        assert found[f"podfabric_devices{{resource=rdma/hca,state={state}}}"] == count


def read(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and labels, as Prometheus understands it."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found, "Prometheus refuses a scrape with a sample that is there twice"
            found[key] = sample.value
    return found


def test_calls_are_counted_and_timed() -> None:
    metrics = made()
    metrics.observe("ipoib", "ADD", 0, 0.003)
    metrics.observe("ipoib", "ADD", 0, 0.0004)
    metrics.observe("ipoib", "ADD", Code.NO_FREE_ADDRESS, 130.0)
    found = read(metrics)
    assert found["podfabric_requests_total{code=0,plugin=ipoib,verb=ADD}"] == 2
    assert found["podfabric_requests_total{code=110,plugin=ipoib,verb=ADD}"] == 1
    bucket = "podfabric_request_seconds_bucket{{le={},plugin=ipoib,verb=ADD}}"
    assert found[bucket.format("0.0005")] == 1
    assert found[bucket.format("0.005")] == 2
    assert found[bucket.format("120.0")] == 2
    assert found[bucket.format("+Inf")] == 3
    assert found["podfabric_request_seconds_sum{plugin=ipoib,verb=ADD}"] == pytest.approx(130.0034)


def test_no_client_makes_series_without_end() -> None:
    metrics = made()
    for number in range(50):
        metrics.observe(f"plugin{number}\n", f"VERB{number}", 100_000 + number, 0.1)
    found = read(metrics)
    assert found["podfabric_requests_total{code=other,plugin=other,verb=other}"] == 50
    assert len(found) < 60


def test_how_busy_the_agent_is_is_asked_at_each_scrape() -> None:
    metrics = made()
    assert "podfabric_connections" not in read(metrics)
    workers = SimpleNamespace(running=2, waiting=5, stuck=3)
    metrics.watch(cast(Workers, workers), lambda: 9)
    assert read(metrics)["podfabric_requests_running"] == 2
    workers.running = 1
    found = read(metrics)
    assert found["podfabric_requests_running"] == 1
    assert (found["podfabric_requests_waiting"], found["podfabric_connections"]) == (5, 9)
    assert found["podfabric_workers_stuck"] == 3


def test_a_sweep_is_counted() -> None:
    metrics = made()
    assert read(metrics)["podfabric_sweep_last_timestamp_seconds"] == 0
    metrics.swept(removed=3, errors=0)
    metrics.swept(removed=1, errors=2)
    found = read(metrics)
    assert found["podfabric_sweep_removed_total"] == 4
    assert found["podfabric_sweep_errors_total"] == 2
    assert abs(found["podfabric_sweep_last_timestamp_seconds"] - time.time()) < 60


def test_addresses_are_counted_by_range_however_many() -> None:
    metrics = made(
        [
            RangeUsage("", "10.0.0.0/24", 3, 251),
            RangeUsage("fabric", "fd00::/64", 1, 2**64 - 2),
            RangeUsage("fabric", "fd00::/64", 1, 0),  # the same labels
            RangeUsage("\udc80", "x", 1, 1),
        ],
        by_range=True,
    )
    found = read(metrics)
    assert found["podfabric_ipam_range_addresses{domain=,range=10.0.0.0/24,state=used}"] == 3
    assert found["podfabric_ipam_range_addresses{domain=,range=10.0.0.0/24,state=free}"] == 251
    assert found["podfabric_ipam_range_addresses{domain=fabric,range=fd00::/64,state=used}"] == 2
    assert (
        found["podfabric_ipam_range_addresses{domain=fabric,range=fd00::/64,state=free}"] == 2.0**64
    )
    assert found["podfabric_ipam_range_addresses{domain=?,range=x,state=used}"] == 1


def test_a_reader_who_may_be_a_pod_learns_totals_and_no_name_or_range() -> None:
    metrics = made(
        [
            RangeUsage("tenant-blue", "10.1.0.0/24", 3, 251),
            RangeUsage("tenant-blue", "10.2.0.0/24", 250, 4),
            RangeUsage("tenant-red", "10.3.0.0/30", 1, 0),
            RangeUsage("tenant-red", "fd00::/64", 1, 2**64 - 2),
        ]
    )
    found = {key: n for key, n in read(metrics).items() if key.startswith("podfabric_ipam")}
    assert found == {
        "podfabric_ipam_addresses{family=ipv4,state=used}": 254,
        "podfabric_ipam_addresses{family=ipv4,state=free}": 255,
        "podfabric_ipam_addresses{family=ipv6,state=used}": 1,
        "podfabric_ipam_addresses{family=ipv6,state=free}": 2.0**64,
        "podfabric_ipam_ranges{state=open}": 2,
        "podfabric_ipam_ranges{state=nearly_full}": 1,
        "podfabric_ipam_ranges{state=full}": 1,
    }


def test_attachments_are_counted_by_plugin_and_phase() -> None:
    counts = {
        ("ipoib", "attached"): 3,
        ("", "damaged"): 1,
        ("alien", "odd"): 1,
        ("strange", "odd"): 1,
    }
    found = read(made(attachments=counts))
    attachments = {key: n for key, n in found.items() if key.startswith("podfabric_attach")}
    assert attachments == {
        "podfabric_attachments{phase=attached,plugin=ipoib}": 3,
        "podfabric_attachments{phase=damaged,plugin=unknown}": 1,
        "podfabric_attachments{phase=other,plugin=other}": 2,
    }


def test_what_fails_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[Exception] = [OSError("b"), ValueError("a"), ValueError("a")]

    def usage() -> list[RangeUsage]:
        if failures:
            raise failures.pop()
        return [RangeUsage("", "10.0.0.0/24", 3, 251)]

    caplog.set_level(logging.WARNING)
    metrics = Metrics(("ipoib",), usage, lambda: {("ipoib", "attached"): 1})
    for _ in range(3):
        found = read(metrics)
        assert not any(key.startswith("podfabric_ipam") for key in found)
        assert found["podfabric_attachments{phase=attached,plugin=ipoib}"] == 1
    assert caplog.messages == [
        "metrics: a family is left out: ValueError: a",
        "metrics: a family is left out: OSError: b",
    ]
    assert any(key.startswith("podfabric_ipam") for key in read(metrics))


def test_the_process_and_its_version_are_there() -> None:
    found = read(made())
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert any(key.startswith("podfabric_build_info{version=") for key in found)
    assert not any("_created" in key for key in found)


def test_two_agents_of_one_process_count_apart() -> None:
    first, second = made(), made()
    first.swept(removed=1, errors=0)
    assert read(second)["podfabric_sweep_removed_total"] == 0


def test_scrapes_within_a_second_share_one_exposition() -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return b"%d" % len(made)

    lasting = Lasting(make, seconds=PATIENCE)
    assert [lasting(), lasting()] == [b"1", b"1"]
    brief = Lasting(make, seconds=0.01)
    assert brief() == b"2"
    time.sleep(0.02)
    assert brief() == b"3"
