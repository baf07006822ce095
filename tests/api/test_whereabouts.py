"""Moving over from whereabouts on a real API server, with the rights of the agents.

    PODFABRIC_TAKEOVER=2000x50 .venv/bin/python -m pytest tests/api/test_whereabouts.py -k takeover

has 2,000 entries of whereabouts, and 50 pods of each of four nodes that restart: some minutes.
`python -m bench.leases a4` has row A4 with 512 DELs at once on 16 nodes.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.cluster.kubernetes_api import KubernetesApi
from ipam.cluster.lessee import FOREIGN_EVERY
from ipam.cluster.objects import AddressBlock, Meta
from ipam.cluster.whereabouts.objects import (
    IPAllocation,
    IPPool,
    IPPoolSpec,
    OverlappingRangeIPReservation,
    OverlappingReservationSpec,
    entries,
)
from tests.api.conftest import NODE_A
from tests.api.server import ApiServer, name
from tests.api.whereabouts import NAMESPACE, MovingNode, install_kinds, ready_pool

RANGE = "10.88.0.0/20"
IPAM = {"range": RANGE}
POOL = "10.88.0.0-20"
ENTRIES, PODS = map(int, os.environ.get("PODFABRIC_TAKEOVER", "300x10").split("x"))
"""Of whereabouts, and its pods that restart on each node. Each entry costs the server 2 ms in each
patch: it works out whose fields they are."""
NODES = 4


def pod_of(number: int) -> str:
    return f"old{number}"


def allocation(number: int) -> IPAllocation:
    """As the versions 0.6, 0.7 and 0.9 wrote them."""
    ifname = "eth0" if number % 3 == 2 else ""
    return IPAllocation(
        id=f"{number:064x}", podref=f"ns/{pod_of(number)}" if number % 3 else "", ifname=ifname
    )


def address(number: int) -> str:
    return f"10.88.{number // 256}.{number % 256}"


@pytest.fixture
def nodes(
    server: ApiServer, node_a: KubernetesApi, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[list[MovingNode]]:
    """Nodes beside ENTRIES of whereabouts, or another number that a test is parametrized with."""
    number_of_entries: int = getattr(request, "param", ENTRIES)
    install_kinds(server)
    with ready_pool(server, RANGE, 32, "Read"), ExitStack() as stack:
        held = {str(number): allocation(number) for number in range(1, number_of_entries + 1)}
        pool = IPPool(
            metadata=Meta(name=POOL, namespace=NAMESPACE),
            spec=IPPoolSpec(range=RANGE, allocations=held),
        )
        server.admin.create(pool)
        for number in range(1, number_of_entries + 1, 10):
            server.admin.create(
                OverlappingRangeIPReservation(
                    metadata=Meta(name=address(number), namespace=NAMESPACE),
                    spec=OverlappingReservationSpec(podref=f"ns/{pod_of(number)}"),
                )
            )
        names = [name("moving") for _ in range(NODES)]
        yield [
            stack.enter_context(closing(MovingNode(server.node(each), tmp_path / each, each)))
            for each in names
        ]


def held(server: ApiServer) -> dict[int, str]:
    pool = server.admin.get(IPPool, POOL, NAMESPACE)
    return {int(each.offset): each.allocation.id for each in entries(pool)}


def reserved(server: ApiServer) -> set[str]:
    found = server.admin.list(OverlappingRangeIPReservation).items
    return {each.metadata.name for each in found}


def in_turns(nodes: list[MovingNode], work: Callable[[int, MovingNode], None]) -> None:
    """The work on each node. An IPPool of this size takes the server some seconds for each patch,
    and others that come meanwhile as often again."""
    for number, node in enumerate(nodes):
        work(number, node)


def persistently(node: MovingNode, pod: str, container: str) -> str:
    """The address that an ADD gives in the end: as a runtime, it tries again after a code 11."""
    for _ in range(20):
        try:
            return node.add(pod, dict(IPAM), container=container)[0]
        except CNIError as error:
            if error.code != Code.TRY_AGAIN:
                raise
    raise AssertionError(f"{pod}: error 11, 20 times")


def own(number: int) -> range:
    """The pods of whereabouts on a node that have a podref: two of three entries."""
    return range(1 + number * 3 * PODS, 1 + (number + 1) * 3 * PODS)


def test_a_takeover_changes_nothing_but_by_dels(server: ApiServer, nodes: list[MovingNode]) -> None:
    """Row A14: entries of three versions of whereabouts, and pods that restart."""
    before = held(server)
    assert len(before) == ENTRIES
    given: list[str] = []

    def restart(number: int, node: MovingNode) -> None:
        for each in [each for each in own(number) if each % 3][:PODS]:
            assert persistently(node, pod_of(each), f"new{each}") == address(each)
        names = (f"new-pod{number}-{each}" for each in range(40))
        given.extend(persistently(node, each, f"{each}-1") for each in names)

    in_turns(nodes, restart)
    theirs = {address(number) for number in before}
    assert len(set(given)) == 40 * NODES
    assert not theirs & set(given)
    after = held(server)
    taken_over = {key for key in before if before[key] != after[key]}
    assert after.keys() == before.keys()
    assert len(taken_over) == PODS * NODES
    assert {after[key] for key in taken_over} == {f"new{key}" for key in taken_over}
    assert len(reserved(server)) == ENTRIES / 10

    # The pods end. One of whereabouts that never restarted ends too.
    def end(number: int, node: MovingNode) -> None:
        for each in [each for each in own(number) if each % 3][:PODS]:
            node.delete(pod_of(each), f"new{each}", IPAM)
        last = own(number)[-1]
        node.delete(pod_of(last), before[last], IPAM)
        node.steps(6)

    in_turns(nodes, end)
    ended = taken_over | {own(number)[-1] for number in range(NODES)}
    assert held(server) == {key: before[key] for key in before.keys() - ended}
    assert reserved(server) == {address(key) for key in range(1, ENTRIES + 1, 10)} - {
        address(key) for key in ended
    }
    blocks = server.admin.list(AddressBlock, {"spec.pool": POOL}).items
    assert not any(block.spec.foreign for block in blocks if _is_above(block))
    for node in nodes:
        node.steps(2, FOREIGN_EVERY)


def _is_above(block: AddressBlock) -> bool:
    """Whether the block is above all that whereabouts holds."""
    third, fourth = map(int, block.spec.first.split(".")[2:])
    return third * 256 + fourth > ENTRIES


@pytest.mark.parametrize("nodes", [600], indirect=True)
def test_dels_of_whereabouts_sandboxes_are_answered_while_the_server_is_away(
    server: ApiServer, node_a: KubernetesApi, nodes: list[MovingNode]
) -> None:
    """Row A4, with 300 DELs on 4 nodes."""
    before = held(server)
    gone = [each for each in before if each % 3][:300]
    patient = [node.client for node in nodes]
    for node in nodes:
        node.client = server.impatient(node.name)
        node.restart()
    server.plane.stop_api_server()
    try:

        def end(number: int, node: MovingNode) -> None:
            for each in gone[number::NODES]:
                node.delete(pod_of(each), before[each], IPAM)

        in_turns(nodes, end)
        for node in nodes:
            node.steps(1)
    finally:
        server.plane.start_api_server()
        server.await_policy(node_a, NODE_A)
    for node, client in zip(nodes, patient, strict=True):
        node.client = client
        node.restart()

    def settle(number: int, node: MovingNode) -> None:
        directory = node.directory / "whereabouts"
        for _ in range(200):
            node.steps(1)
            if not list(directory.iterdir()):
                return
        raise AssertionError(f"{directory} is not empty")

    in_turns(nodes, settle)
    assert held(server).keys() == before.keys() - set(gone)
    assert not reserved(server) & {address(each) for each in gone}
