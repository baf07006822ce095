"""Sticky addresses: a pod that its set's reservation names has its address on every node."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.controller.reclaim import give_to_others
from ipam.leases.objects import (
    AddressBlock,
    AddressPool,
    AddressReservation,
    BlockSpec,
    Holder,
    OwnerReference,
    ReservationSpec,
    StickySpec,
)
from ipam.store.reservations import AddressInUse, Grant
from kube.resources import Meta
from tests.fake_api import FakeApi, Fault, changed_node
from tests.unit.ipam.calls import error_of, request
from tests.unit.ipam.leases.audit import audit, audit_settled
from tests.unit.ipam.leases.boundaries import Kill, Killed, armed, disarmed
from tests.unit.ipam.leases.nodes import RANGE, ClusterNode, blocks_of, put_pool

POOL = "10.0.0.0-24"
IPAM = {"range": RANGE, "sticky": True}
PODS = [f"web-{number}" for number in range(20)]


def reserve(
    server: FakeApi,
    name: str = "web",
    kind: str = "StatefulSet",
    *,
    owner: str = "web",
    ifname: str = "",
    namespace: str = "ns",
) -> AddressReservation:
    """The reservation that a user writes."""
    spec = ReservationSpec(pool=POOL, owner=OwnerReference(kind=kind, name=owner, ifname=ifname))
    meta = Meta(name=name, namespace=namespace)
    return server.put(AddressReservation(metadata=meta, spec=spec))


@pytest.fixture
def server() -> FakeApi:
    server = FakeApi()
    put_pool(server, size=1)
    reserve(server)
    return server


@pytest.fixture
def nodes(server: FakeApi, memory_path: Path, stack: ExitStack) -> list[ClusterNode]:
    made = [ClusterNode(server, memory_path / name, f"node-{name}", kept=True) for name in "abc"]
    for node in made:
        node.clock = made[0].clock
        node.restart()
        stack.callback(node.close)
    return made


def add(node: ClusterNode, pod: str, **how: str) -> str:
    (address,) = node.add(pod, IPAM, **how)
    return address


def let_go(*nodes: ClusterNode) -> None:
    """Time for what a node does after its DELs."""
    for node in nodes:
        node.steps(3, 3.0)


def bound(server: FakeApi) -> dict[str, tuple[str, str]]:
    """Pod to node and state."""
    return {
        block.spec.sticky.pod: (block.spec.holder.node, block.spec.state)
        for block in server.look_at_all(AddressBlock).items
        if block.spec.sticky.pod
    }


def test_it_comes_back_to_the_same_node_before_and_after_it_was_let_go(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a = nodes[0]
    address = add(a, "web-0")
    a.delete("web-0")
    a.api.calls.clear()
    assert add(a, "web-0") == address
    assert not a.api.calls
    a.delete("web-0")
    let_go(a)
    assert add(a, "web-0") == address
    let_go(a)
    assert bound(server) == {"web-0": ("node-a", "Active")}
    audit_settled(server, [a])


def test_no_other_pod_gets_a_reserved_address(server: FakeApi, nodes: list[ClusterNode]) -> None:
    a, b, _ = nodes
    address = add(a, "web-0")
    a.delete("web-0")
    others = [a.add(f"p{number}")[0] for number in range(100)]
    let_go(a)
    others += [b.add(f"q{number}")[0] for number in range(100)]
    assert address not in others
    assert add(b, "web-0") == address


def test_a_pod_that_no_reservation_names_gets_any_address(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    for pod in ("webs-0", "web", "web-x", "db-0"):
        add(nodes[0], pod)
    assert bound(server) == {}
    assert nodes[0].add("web-0")  # a definition that is not sticky asks for no reservation
    assert bound(server) == {}


def test_a_reservation_of_another_namespace_is_not_the_pods(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    reserve(server, "db", owner="db", namespace="another")
    add(nodes[0], "db-0")
    assert bound(server) == {}


def test_each_interface_has_an_address_of_its_own(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b, _ = nodes
    reserve(server, "one", "Pod", owner="db", ifname="net1")
    first = add(a, "web-0", ifname="net1", network="n1")
    second = add(a, "web-0", ifname="net2", network="n2")
    one = add(a, "db", ifname="net1", network="n1")
    add(a, "db", ifname="net2", network="n2")
    assert len({first, second, one}) == 3
    assert sorted(bound(server)) == ["db", "web-0"]
    for attachment in {held.attachment for held in a.store.reservations()}:
        a.store.release(attachment)
    let_go(a)
    assert add(b, "web-0", ifname="net2", network="n2") == second
    assert add(b, "db", ifname="net1", network="n1") == one


def test_a_pool_of_larger_blocks_gives_the_pod_a_whole_one(memory_path: Path) -> None:
    server = FakeApi()
    put_pool(server, size=16, exclude=("10.0.0.0/29",))
    reserve(server)
    a = ClusterNode(server, memory_path / "a")
    b = ClusterNode(server, memory_path / "b", "node-b")
    address = add(a, "web-0")
    (block,) = server.look_at_all(AddressBlock).items
    assert block.spec.sticky.address == address
    others = {a.add(f"p{number}")[0] for number in range(40)}
    assert address not in others
    a.delete("web-0")
    let_go(a)
    assert add(b, "web-0") == address
    assert b.add("p")[0] not in others | {address}
    audit_settled(server, [a, b])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda address: {"exclude": [f"{address}/32"]}, "excludes this address"),
        (lambda address: {"routes": [{"dst": "10.8.0.0/16", "gw": address}]}, "or next hop"),
    ],
)
def test_an_address_that_the_definition_withholds_later_is_an_error(
    nodes: list[ClusterNode], change: Callable[[str], dict[str, object]], why: str
) -> None:
    a, b, _ = nodes
    address = add(a, "web-0")
    a.delete("web-0")
    let_go(a)
    error = error_of(lambda: b.add("web-0", {**IPAM, **change(address)}))
    assert error.code == Code.NO_FREE_ADDRESS
    assert why in error.message
    assert "AddressReservation ns/web" in error.message


def test_a_node_takes_over_no_more_blocks_than_the_pool_allows(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b, c = nodes
    given = add(a, "web-0")
    add(b, "web-1")
    a.delete("web-0")
    let_go(a)
    pool = server.look(AddressPool, POOL)
    server.put(replace(pool, spec=replace(pool.spec, max_blocks_per_node=1)))
    b.steps(1, 500.0)
    error = error_of(lambda: add(b, "web-0"))
    assert error.code == Code.NO_FREE_ADDRESS
    assert "maxBlocksPerNode" in error.message
    assert bound(server)["web-0"] == ("node-a", "Draining")
    assert add(c, "web-0") == given
    c.delete("web-0")
    assert add(c, "web-0") == given, "the node has the block"


def test_a_new_pod_of_the_name_waits_for_the_del_of_the_former_one(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    """A pod that was deleted by force is gone from the API server before its sandbox is."""
    a = nodes[0]
    address = add(a, "web-0", uid="uid-1")
    a.api.calls.clear()
    error = error_of(lambda: add(a, "web-0", uid="uid-2", container="web-0-2"))
    assert error.code == Code.TRY_AGAIN
    assert "an earlier sandbox of the pod still has this address" in error.message
    assert sum(a.api.calls.values()) <= 4, "each attempt asks the API server"
    a.delete("web-0")
    assert add(a, "web-0", uid="uid-2", container="web-0-2") == address


def test_another_reservation_does_not_change_the_address(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b, c = nodes
    address = add(a, "web-0")
    reserve(server, "a-first", owner="web")
    reserve(server, "the-pod", "Pod", owner="web-0")
    a.delete("web-0")
    let_go(a)
    assert add(b, "web-0") == address
    assert add(c, "web-1") != address
    assert {
        block.spec.sticky.pod: block.spec.sticky.reservation
        for block in server.look_at_all(AddressBlock).items
    } == {"web-0": "ns/web", "web-1": "ns/a-first"}


def test_a_reservation_made_again_for_another_pool_gives_addresses_of_that(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b, _ = nodes
    add(a, "web-0")
    a.delete("web-0")
    let_go(a)
    server.remove(AddressReservation, "web", "ns")
    pool = put_pool(server, "10.9.0.0/24", size=1)
    reservation = reserve(server)
    spec = replace(reservation.spec, pool=pool.metadata.name)
    server.put(replace(reservation, spec=spec))
    (address,) = b.add("web-0", {"range": "10.9.0.0/24", "sticky": True})
    assert address.startswith("10.9.0.")


def test_a_second_block_of_a_pod_does_not_change_its_address(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    """A node claimed it beside the first one and died: it is older, and let go."""
    a, b, _ = nodes
    address = add(a, "web-0")
    (block,) = server.look_at_all(AddressBlock).items
    other = "10.0.0.0"  # what is made in one second is compared by name
    sticky = replace(block.spec.sticky, address=other)
    dead = replace(block.spec.holder, instance="dead", node="dead")
    spec = replace(block.spec, range=f"{other}/32", sticky=sticky, state="Draining", holder=dead)
    server.remove(AddressBlock, block.metadata.name)
    server.put(replace(block, metadata=Meta(name=f"default.{other}-32"), spec=spec))
    server.put(block)
    error = error_of(lambda: add(b, "web-0"))
    assert (
        f"{address} is reserved for pod web-0, but node node-a still has this address"
        in error.message
    )


@pytest.mark.parametrize(
    ("first", "prefix", "space"),
    [("10.0.0.16", 29, "default"), ("10.0.0.20", 32, "default"), ("10.0.0.16", 28, "other")],
)
def test_a_forged_block_for_a_pods_name_gives_no_address_that_another_node_has(
    memory_path: Path, first: str, prefix: int, space: str
) -> None:
    """One node's token may write any block: of another size than the pool's, or another space."""
    server = FakeApi()
    put_pool(server, size=16)
    reserve(server)
    forged = BlockSpec(
        pool=POOL,
        range=f"{first}/{prefix}",
        sticky=StickySpec(reservation="ns/web", pod="web-0", ifname="eth0", address="10.0.0.20"),
        state="Draining",
        holder=Holder(instance="bad", node="bad"),
    )
    meta = Meta(name=f"{space}.{first}-{prefix}")
    server.put(AddressBlock(metadata=meta, spec=forged))
    a = ClusterNode(server, memory_path / "a")
    b = ClusterNode(server, memory_path / "b", "node-b")
    config = {"capabilities": {"ips": True}, "runtimeConfig": {"ips": ["10.0.0.20"]}}
    assert a.add("any", config=config) == ["10.0.0.20"]
    assert add(b, "web-0") != "10.0.0.20"
    server.remove(AddressBlock, meta.name)
    audit(server, [a, b])


def test_a_requested_address_that_is_reserved_for_a_name_is_refused(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b, _ = nodes
    address = add(a, "web-0")
    config = {"capabilities": {"ips": True}, "runtimeConfig": {"ips": [address]}}
    for node in (a, b):
        node.api.calls.clear()
        error = error_of(lambda node=node: node.add("p", config=config))  # type: ignore[misc]
        assert error.code == Code.ADDRESS_TAKEN
        assert "is reserved for a pod by its name" in error.message
        assert "web" not in error.message  # it may be another tenant's
        assert sum(node.api.calls.values()) <= 12
    a.delete("web-0")
    let_go(a)
    assert error_of(lambda: a.add("p", config=config)).code == Code.ADDRESS_TAKEN


def test_a_store_that_was_put_back_does_not_hand_out_what_it_has_forgotten(
    server: FakeApi, nodes: list[ClusterNode], memory_path: Path
) -> None:
    a = nodes[0]
    a.add("p0")
    a.close()
    before = memory_path / "before"
    shutil.copytree(a.directory, before)
    a.restart()
    for _ in range(5):
        add(a, "web-0")
        a.delete("web-0")
    add(a, "web-0")
    a.steps(3, 30.0)  # the block's status says how far the store has come
    a.close()
    shutil.rmtree(a.directory)
    shutil.copytree(before, a.directory)
    a.restart()
    for _ in range(2):
        error = error_of(lambda: add(a, "web-0", uid="uid-2", container="web-0-2"))
        assert error.code == Code.TRY_AGAIN
        a.steps(1, 1.0)


def test_del_works_without_the_api_server_and_the_address_is_let_go_later(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b, _ = nodes
    address = add(a, "web-0")
    a.api.down = True
    a.delete("web-0")
    let_go(a)
    assert error_of(lambda: add(b, "web-0")).code == Code.TRY_AGAIN
    a.api.down = False
    a.steps(5, 10.0)
    assert add(b, "web-0") == address
    audit(server, nodes)


def test_a_late_request_to_let_go_does_not_take_the_address_from_a_pod(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b, _ = nodes
    address = add(a, "web-0")
    a.delete("web-0")

    def late(verb: str, kind: str, name: str) -> Fault | None:
        return Fault.LATE if verb == "update" else None

    a.api.faults = late
    let_go(a)
    a.api.faults = None
    assert a.rows()
    assert add(a, "web-0") == address
    server.deliver()
    assert bound(server) == {"web-0": ("node-a", "Active")}
    assert error_of(lambda: add(b, "web-0")).code == Code.TRY_AGAIN
    a.steps(2, 30.0)
    audit_settled(server, [a])


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.LOST_REQUEST, Fault.CONFLICT])
def test_a_take_over_whose_answer_is_lost_is_made_again(
    server: FakeApi, nodes: list[ClusterNode], fault: Fault
) -> None:
    a, b, c = nodes
    address = add(a, "web-0")
    a.delete("web-0")
    let_go(a)
    b.steps()
    failing = [fault]

    def once(verb: str, kind: str, name: str) -> Fault | None:
        return failing.pop() if verb == "update" and failing else None

    b.api.faults = once
    given = []
    for _ in range(3):
        with suppress(CNIError):
            given.append(add(b, "web-0"))
            break
    assert given == [address]
    assert not failing
    assert error_of(lambda: add(c, "web-0")).code == Code.TRY_AGAIN
    audit_settled(server, [b])


def test_two_nodes_that_reserve_at_once_make_one_reservation(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    """The pod came to b before a, which is slow, had its answer."""
    a, b, _ = nodes
    b.steps()
    raced: list[str | int] = []

    def beside(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("create", "AddressBlock") and not raced:
            raced.append(0)
            raced[0] = add(b, "web-0")

    a.api.faults = beside
    error = error_of(lambda: add(a, "web-0"))
    assert error.code == Code.TRY_AGAIN
    assert len(blocks_of(server)) == 1
    b.delete("web-0")
    let_go(b)
    assert [add(a, "web-0")] == raced


def test_a_new_boot_keeps_the_address_and_lets_it_go_when_the_pod_stays_away(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b, _ = nodes
    address = add(a, "web-0")
    server.machines["node-a"] = changed_node(server.machines["node-a"], boot_id="boot-2")
    a.restart("boot-2")
    assert error_of(lambda: add(b, "web-0")).code == Code.TRY_AGAIN
    a.steps(1, 0.0)
    assert bound(server) == {"web-0": ("node-a", "Active")}
    let_go(a)
    assert a.held() == set()
    assert bound(server) == {"web-0": ("node-a", "Draining")}
    assert add(b, "web-0") == address


def test_a_deleted_block_is_claimed_again_with_what_it_is_for(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b, _ = nodes
    address = add(a, "web-0")
    (name,) = blocks_of(server)
    server.remove(AddressBlock, name)
    a.steps(1, 500.0)
    assert bound(server) == {"web-0": ("node-a", "Active")}
    a.delete("web-0")
    let_go(a)
    assert add(b, "web-0") == address


def life(a: ClusterNode, b: ClusterNode, moved: list[str]) -> None:
    """A pod lives on one node, on the other, and on the first again."""
    for node in (a, b, a):
        moved.append(add(node, "web-0"))
        node.steps(1)
        node.delete("web-0")
        node.steps(3, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("boot", ["", "boot-2"])
def test_a_kill_at_any_boundary_neither_loses_nor_doubles_the_address(
    memory_path: Path, boot: str
) -> None:
    def cluster(name: str) -> tuple[FakeApi, ClusterNode, ClusterNode]:
        server = FakeApi()
        put_pool(server, size=1)
        reserve(server)
        a = ClusterNode(server, memory_path / f"{name}-a")
        return server, a, ClusterNode(server, memory_path / f"{name}-b", "node-b", clock=a.clock)

    _, a, b = cluster("count")
    count = Kill()
    armed(a, count)
    life(a, b, [])
    assert count.count > 30
    for at in range(1, count.count + 1):
        server, a, b = cluster(f"{boot}{at}")
        moved: list[str] = []
        armed(a, Kill(at))
        with suppress(Killed, CNIError):
            life(a, b, moved)
        disarmed(a, boot)
        if boot:
            machine = server.machines["node-a"]
            server.machines["node-a"] = changed_node(machine, boot_id=boot)
        for node in (a, b):
            audit(server, [a, b])
            node.delete("web-0")
            node.steps(4, 30.0)
        last = add(b, "web-0")
        assert not moved or set(moved) == {last}
        assert list(bound(server)) == ["web-0"]
        audit(server, [a, b])
        a.steps(2, 500.0)
        b.steps(2, 1.0)
        audit_settled(server, [b])


def test_a_block_of_a_lost_node_is_probed_by_the_pods_next_node_until_one_has_done_so(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b, c = nodes
    address = add(a, "web-0")
    (found,) = server.look_at_all(AddressBlock).items
    give_to_others(server, found, probe=True)  # as the controller does for a Node that is gone
    (let_go_of,) = server.look_at_all(AddressBlock).items
    assert (let_go_of.spec.state, let_go_of.spec.probe) == ("Draining", True)

    def grant_of(node: ClusterNode) -> Grant:
        return node.plugin.reserve(request("ADD", IPAM, "web-0-1", pod="web-0"))[1]

    grant = grant_of(b)
    assert grant.unprobed == (address,)
    b.delete("web-0")  # without a probe
    let_go(b)
    grant = grant_of(c)
    assert grant.unprobed == (address,)
    c.plugin.settle_probes(request("ADD", IPAM, "web-0-1", pod="web-0"), grant, {})
    c.delete("web-0")
    let_go(c)
    assert bound(server)["web-0"] == ("node-c", "Draining")
    assert grant_of(b).unprobed == ()


def test_a_reserved_address_that_another_machine_has_is_given_to_no_pod(
    server: FakeApi, nodes: list[ClusterNode]
) -> None:
    a, b, _ = nodes
    add(a, "web-0")
    (found,) = server.look_at_all(AddressBlock).items
    give_to_others(server, found, probe=True)
    asked = request("ADD", IPAM, "web-0-1", pod="web-0")
    grant = b.plugin.reserve(asked)[1]
    answers = dict.fromkeys(grant.unprobed, "02:00:00:00:00:02")
    with pytest.raises(AddressInUse):
        b.plugin.settle_probes(asked, grant, answers)
    b.plugin.undo(grant)
    error = error_of(lambda: add(b, "web-0"))
    assert error.code == Code.TRY_AGAIN
    assert "another machine on the link uses" in error.message
