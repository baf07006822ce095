"""The stand-in for the API server behaves as the real one, and has the faults that tests want."""

import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from ipam.cluster.api import (
    AlreadyExists,
    Change,
    ClusterApi,
    Conflict,
    NetworkDefinition,
    NotFound,
    Refused,
    Unavailable,
)
from ipam.cluster.objects import AddressBlock, Meta
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.cluster.contract import ApiContract, block
from tests.waiting import join


@pytest.fixture
def fake() -> FakeApi:
    return FakeApi(clock=lambda: 1_800_000_000.0)


class TestContract(ApiContract):
    """The contract."""

    @pytest.fixture
    def api(self, fake: FakeApi) -> ClusterApi:
        return fake.client("node-a")

    @pytest.fixture
    def expired_version(self, fake: FakeApi) -> str:
        version = fake.look_at_all(AddressBlock).resource_version
        fake.expire_watches()
        return version


@pytest.mark.parametrize(
    ("fault", "error", "has_effect"),
    [
        (Fault.LOST_REQUEST, Unavailable, False),
        (Fault.LOST_ANSWER, Unavailable, True),
        (Fault.LATE, Unavailable, False),
        (Fault.CONFLICT, AlreadyExists, False),
        (Fault.REFUSED, Refused, False),
    ],
)
def test_a_fault_happens_before_or_after_the_effect(
    fake: FakeApi, fault: Fault, error: type[Exception], has_effect: bool
) -> None:
    asked: list[tuple[str, str, str]] = []

    def faults(*call: str) -> Fault | None:
        asked.append((call[0], call[1], call[2]))
        return fault

    new = block()
    with pytest.raises(error):
        fake.client("node-a", faults).create(new)
    assert asked == [("create", "AddressBlock", new.metadata.name)]
    assert bool(fake.look_at_all(AddressBlock).items) is has_effect
    fake.deliver()
    assert bool(fake.look_at_all(AddressBlock).items) is (has_effect or fault is Fault.LATE)


def test_a_late_request_that_cannot_have_its_effect_has_none(fake: FakeApi) -> None:
    stored = fake.put(block())
    late = fake.client("node-a", lambda *_: Fault.LATE)
    with pytest.raises(Unavailable):
        late.delete(stored)
    newer = fake.update(replace(stored, spec=replace(stored.spec, state="Draining")))
    fake.deliver()
    assert fake.look(AddressBlock, stored.metadata.name) == newer


def test_a_server_that_is_down_answers_nobody_but_the_test(fake: FakeApi) -> None:
    client = fake.client("node-a")
    stored = fake.put(block())
    fake.down = True
    for call in (client.nodes, fake.nodes, lambda: client.get(AddressBlock, "x")):
        with pytest.raises(Unavailable):
            call()
    client.report("Exhausted", "no address", {})
    assert not fake.events
    assert fake.look(AddressBlock, stored.metadata.name) == stored
    fake.down = False
    client.down = True
    with pytest.raises(Unavailable):
        client.nodes()
    assert not fake.nodes()
    assert client.calls["list", "Node"] == 2


def test_nodes_pods_definitions_and_events_are_what_the_test_says(fake: FakeApi) -> None:
    client = fake.client("node-a")
    with pytest.raises(NotFound):
        client.node("node-a")
    node = fake.add_node("node-a", boot_id="b")
    assert client.node("node-a") == node
    assert list(client.nodes()) == [node]
    assert not client.has_pods("node-a")
    fake.pods["node-a"] += 1
    assert client.has_pods("node-a")
    definition = NetworkDefinition(namespace="default", name="ib0", config="{}")
    fake.definitions.append(definition)
    assert list(client.network_definitions()) == [definition]
    client.report("Exhausted", "no address is free", {"kind": "Pod", "name": "trainer-0"})
    assert [(each.client, each.reason) for each in fake.events] == [("node-a", "Exhausted")]


def test_nobody_shares_what_a_client_read(fake: FakeApi) -> None:
    stored = fake.put(block())
    fake.look(AddressBlock, stored.metadata.name).metadata.labels["changed"] = "yes"
    assert fake.look(AddressBlock, stored.metadata.name) == stored


def test_a_watch_waits_lags_and_ends(fake: FakeApi) -> None:
    client = fake.client("node-a")
    fake.hold_watches()
    seen: list[Change[AddressBlock]] = []

    def watch(changes: Iterator[Change[AddressBlock]]) -> None:
        seen.extend(changes)

    thread = threading.Thread(target=watch, args=(client.watch(AddressBlock, "0"),))
    thread.start()
    stored = client.create(block())
    assert not seen
    fake.release_watches()
    fake.end_watches()
    join(thread)
    assert seen == [Change("ADDED", stored)]


def test_the_test_changes_what_it_wants(fake: FakeApi) -> None:
    first = fake.put(block())
    second = fake.put(replace(first, spec=replace(first.spec, nonce="n")))
    assert second.metadata.uid == first.metadata.uid
    with pytest.raises(Conflict):
        fake.delete(first)
    fake.remove(AddressBlock, first.metadata.name)
    assert not fake.look_at_all(AddressBlock).items
    third = fake.put(replace(second, metadata=Meta(name=second.metadata.name)))
    assert third.metadata.uid != first.metadata.uid
