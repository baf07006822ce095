"""The process: its loops, what it follows, what it says of itself. Real threads, and waits."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from ipam.controller import leader as process_module
from ipam.controller.exposition import exposition
from ipam.controller.leader import STUCK_AFTER, ControllerProcess
from ipam.controller.rounds import Rounds, Seen, World
from ipam.leases.objects import AddressBlock, AddressPool, AddressReservation
from kube import informer as mirror_module
from kube.informer import Mirror, same
from kube.leadership import Leadership
from kube.resources import NotFound, NotLeading
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.controller.cluster import Cluster
from tests.waiting import join, until


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pause is short."""
    for name, seconds in (("SETTLE", 0.05), ("ROUND_EVERY", 0.2)):
        monkeypatch.setattr(process_module, name, seconds)
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE", "POLL_EVERY"):
        monkeypatch.setattr(mirror_module, name, 0.2)


def _process(api: FakeApi, name: str) -> ControllerProcess:
    client = api.client(name)
    return ControllerProcess(client, Leadership(client.server, "podfabric", "controller", name))


@contextmanager
def _running(process: ControllerProcess) -> Iterator[ControllerProcess]:
    thread = threading.Thread(target=process.run)
    thread.start()
    try:
        yield process
    finally:
        process.stop()
        join(thread)


def _samples(process: ControllerProcess) -> dict[str, float]:
    """The metrics by name and labels."""
    text = exposition(process)().decode()
    return {
        ",".join([sample.name, *(f"{key}={value}" for key, value in sample.labels.items())]): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _is_ready(cluster: Cluster, name: str) -> bool:
    try:
        return cluster.condition("Ready", name) == ("True", "Decided")
    except (AssertionError, NotFound):
        return False


def test_rounds_go_on_after_an_outage() -> None:
    cluster = Cluster()
    process = _process(cluster.api, "only")
    with _running(process):
        until(lambda: process.rounds > 0)
        cluster.api.down = True
        until(lambda: process.errors["list", "Unavailable"] > 0)
        cluster.api.down = False
        cluster.pool("10.80.0.0/24", name="late")
        until(lambda: _is_ready(cluster, "late"))


def test_a_round_that_waited_long_for_the_server_does_not_delay_the_next() -> None:
    ticks = itertools.count(step=100)  # seconds pass, and no CPU time
    client = FakeApi().client("only")
    leadership = Leadership(client.server, "podfabric", "controller", "only")
    process = ControllerProcess(client, leadership, clock=lambda: float(next(ticks)))
    with _running(process):
        until(lambda: process.rounds > 2)


def test_a_loop_that_hangs_is_not_alive() -> None:
    now = 0.0
    client = FakeApi().client("only")
    process = ControllerProcess(
        client, Leadership(client.server, "podfabric", "controller", "only"), clock=lambda: now
    )
    assert process.alive()[0]
    now = STUCK_AFTER + 1
    assert process.alive() == (False, "stuck: election, rounds")


def test_a_process_whose_rounds_all_fail_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rounds: Rounds, world: World) -> Seen:
        raise RecursionError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(Rounds, "round", fail)
        with _running(_process(Cluster().api, "only")) as process:
            until(lambda: not process.alive()[0])
            assert process.errors["round", "Defect"] > 0
            assert process.alive()[1] == "failed 5 times or more in a row: rounds"
            patched.undo()
            until(lambda: process.alive() == (True, "alive"))


def test_a_round_of_many_slow_requests_is_alive_all_the_time() -> None:
    cluster = Cluster()
    for number in range(60):
        cluster.pool(f"10.{number}.0.0/24", name=f"pool-{number}")
    now = [0.0]
    said: list[str] = []

    def slow(verb: str, kind: str, name: str) -> None:
        if verb == "update_status":
            now[0] += 9.0
            said.append(process.alive()[1])

    client = cluster.api.client("only", slow)
    # The election has a clock of its own, so that the process leads through all of the round.
    leadership = Leadership(cluster.api, "podfabric", "controller", "only")
    process = ControllerProcess(client, leadership, clock=lambda: now[0])
    with _running(process):
        until(lambda: len(said) >= 60)
    assert not [text for text in said if "rounds" in text]
    assert STUCK_AFTER < 60 * 9.0


def test_a_list_of_nodes_that_takes_long_is_said_and_delays_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    listing = threading.Event()

    def slow(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("list", "Node") and cluster.client.calls["list", "Node"] > 1:
            now[0] += 120.0
            listing.wait(60.0)

    cluster = Cluster(slow)
    leadership = Leadership(cluster.api, "podfabric", "controller", "only")
    process = ControllerProcess(cluster.client, leadership, clock=lambda: now[0])
    with _running(process):
        until(lambda: cluster.client.calls["list", "Node"] > 1)
        cluster.pool("10.80.0.0/24", name="late")
        until(lambda: _is_ready(cluster, "late"))
        assert _samples(process)["podfabric_controller_nodes_age_seconds"] >= 120
        listing.set()
        until(lambda: "the API server took 120 s for a list of 0 nodes" in caplog.messages)


def test_without_the_leadership_nothing_is_written() -> None:
    cluster = Cluster()
    pool = cluster.pool()
    client = cluster.client
    client.may_write = lambda: False
    block = cluster.block("10.64.0.8", cluster.node("gpu-1"))
    for change in (
        lambda: client.update(pool),
        lambda: client.update_status(pool),
        lambda: client.delete(block),
        lambda: client.create(block),
    ):
        with pytest.raises(NotLeading):
            change()
    assert client.get(AddressPool, "pool") == pool
    assert client.errors == {}


def _names(mirror: Mirror[AddressBlock]) -> list[str]:
    return sorted(block.spec.range.partition("/")[0] for block in mirror.items() or ())


def test_a_mirror_shows_what_is_made_changed_and_deleted() -> None:
    cluster = Cluster()
    node = cluster.node("gpu-1")
    cluster.block("10.64.0.8", node)
    changes = threading.Semaphore(0)
    mirror = Mirror(cluster.client, AddressBlock, same, changes.release)
    until(lambda: mirror.items() is not None)
    assert _names(mirror) == ["10.64.0.8"]
    second = cluster.block("10.64.0.16", node)
    until(lambda: _names(mirror) == ["10.64.0.16", "10.64.0.8"])
    cluster.api.update(replace(second, spec=replace(second.spec, state="Draining")))
    until(lambda: {each.spec.state for each in mirror.items() or ()} == {"Active", "Draining"})
    cluster.api.end_watches()
    cluster.api.remove(AddressBlock, "default.10.64.0.8-29")
    until(lambda: _names(mirror) == ["10.64.0.16"])
    assert changes.acquire(timeout=0)
    mirror.close()


def test_a_mirror_lists_again_when_its_watch_has_expired() -> None:
    cluster = Cluster()
    node = cluster.node("gpu-1")
    cluster.block("10.64.0.8", node)
    mirror = Mirror(cluster.client, AddressBlock, same, lambda: None)
    until(lambda: _names(mirror) == ["10.64.0.8"])
    cluster.client.down = True
    cluster.api.remove(AddressBlock, "default.10.64.0.8-29")
    cluster.block("10.64.0.24", node)
    cluster.api.expire_watches()
    cluster.client.down = False
    until(lambda: _names(mirror) == ["10.64.0.24"])
    mirror.close()


def test_a_mirror_that_is_closed_begins_no_further_watch() -> None:
    api = FakeApi()
    client = api.client("only")
    others = set(threading.enumerate())
    mirror = Mirror(client, AddressReservation, same, lambda: None)
    (thread,) = set(threading.enumerate()) - others
    until(lambda: client.calls["watch", "AddressReservation"] == 1)
    mirror.close()
    api.end_watches()
    join(thread)
    assert client.calls["watch", "AddressReservation"] == 1


def test_a_mirror_of_nothing_is_empty_and_not_unknown() -> None:
    mirror = Mirror(FakeApi().client("only"), AddressReservation, same, lambda: None)
    until(lambda: mirror.items() == ())
    mirror.close()


def test_a_new_definition_is_seen_and_one_whose_kind_is_not_installed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirror_module, "KIND_EVERY", 0.1)
    installed = threading.Event()

    def missing(verb: str, kind: str, name: str) -> Fault | None:
        if kind == "NetworkAttachmentDefinition" and not installed.is_set():
            raise NotFound("the kind is not installed")
        return None

    cluster = Cluster()
    client = cluster.api.client("only", missing)
    leadership = Leadership(client.server, "podfabric", "controller", "only")
    with _running(ControllerProcess(client, leadership)) as process:
        until(lambda: process.rounds > 0)
        installed.set()
        cluster.define({"type": "whereabouts", "range": "10.70.0.0/24"}, "first")
        until(lambda: _is_ready(cluster, "10.70.0.0-24"))
        cluster.define({"type": "whereabouts", "range": "10.71.0.0/24"}, "second")
        until(lambda: _is_ready(cluster, "10.71.0.0-24"))
