"""Rails: a pod has the same index on all of them, in one block of one lease."""

from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam import fsck
from ipam.addresses import parse
from ipam.cluster.lessee import CONFIRM_EVERY
from ipam.cluster.objects import AddressBlock, AddressPool, PoolStatus
from tests.fake_api import FakeApi
from tests.unit.ipam.calls import error_of
from tests.unit.ipam.cluster.audit import audit, audit_settled
from tests.unit.ipam.cluster.nodes import ClusterNode, blocks_of, put_pool
from tests.unit.ipam.cluster.test_crashes import Kill, Killed, armed, disarmed

RAILS = [f"10.{64 + rail}.0.0/24" for rail in range(16)]
NICS = [f"net{rail}" for rail in range(16)]


def put_rails(server: FakeApi, size: int = 16, exclude: tuple[str, ...] = ()) -> AddressPool:
    """The pools as the controller leaves them."""
    pool = put_pool(server, RAILS[0], size=size, rails=tuple(RAILS[1:]), exclude=exclude)
    for rail in RAILS[1:]:
        made = put_pool(server, rail)
        status = PoolStatus(
            space="default", rail_of=pool.metadata.name, conditions=made.status.conditions
        )
        server.put(replace(made, status=status))
    return pool


@pytest.fixture
def server() -> FakeApi:
    server = FakeApi()
    put_rails(server)
    return server


@pytest.fixture
def node(server: FakeApi, memory_path: Path) -> ClusterNode:
    return ClusterNode(server, memory_path / "a")


def add(node: ClusterNode, pod: str, rail: int, ifname: str = "", **ipam: object) -> str:
    """ADD of one interface of the pod on a rail: its address."""
    how = {"network": f"rail{rail}", "ifname": ifname or NICS[rail]}
    (address,) = node.add(pod, {"range": RAILS[rail], **ipam}, uid=f"uid-{pod}", **how)
    assert parse(address) >> 8 == parse(RAILS[rail].partition("/")[0]) >> 8
    return address


def attach(node: ClusterNode, pod: str, rails: range = range(16)) -> set[int]:
    """The pod's indexes on all its rails."""
    return {parse(add(node, pod, rail)) & 255 for rail in rails}


def reboot(server: FakeApi, node: ClusterNode) -> None:
    """A new boot, whose leases are confirmed, before anything of the former one is swept."""
    server.machines[node.name] = replace(server.machines[node.name], boot_id="boot-2")
    node.restart("boot-2")
    node.steps(1, 0.0)


def detach(node: ClusterNode, pod: str, rail: int, container: str = "") -> None:
    """DEL of one interface."""
    held = {
        each.ifname: each.attachment
        for each in node.store.reservations()
        if each.container_id == (container or f"{pod}-1")
    }
    node.store.release(held[NICS[rail]])


def test_a_pod_has_one_index_on_all_rails_by_one_lease(server: FakeApi, node: ClusterNode) -> None:
    (index,) = attach(node, "p0")
    (name,) = blocks_of(server)
    block = server.look(AddressBlock, name)
    first = parse(block.spec.first) & 255
    assert first <= index < first + 16
    assert [parse(rail) & 255 for rail in block.spec.rails] == [first] * 15
    node.api.calls.clear()
    others = [attach(node, f"p{number}") for number in range(1, 14)]
    assert len({index, *(each for (each,) in others)}) == 14
    assert not node.api.calls
    audit(server, [node])


def test_the_first_add_may_be_of_any_rail(server: FakeApi, node: ClusterNode) -> None:
    assert len(attach(node, "p0", range(15, -1, -1))) == 1
    assert len(blocks_of(server)) == 1
    assert blocks_of(server)[0].startswith("default.10.64.0.")


def test_nobody_gets_an_index_that_is_held_on_another_rail(node: ClusterNode) -> None:
    one = parse(add(node, "p0", 3)) & 255
    (two,) = attach(node, "p1")
    three = parse(add(node, "p2", 3)) & 255
    assert len({one, two, three}) == 3


def test_a_second_interface_on_a_rail_gets_a_second_index(node: ClusterNode) -> None:
    (index,) = attach(node, "p0", range(2))
    second = parse(add(node, "p0", 0, ifname="second")) & 255
    assert second != index
    assert parse(add(node, "p0", 2)) & 255 == index
    (other,) = attach(node, "p1")
    assert other not in (index, second)


@pytest.mark.parametrize("order", [range(16), range(15, -1, -1), [7, *range(7), *range(8, 16)]])
def test_an_index_is_free_when_its_last_address_is_released(
    node: ClusterNode, order: list[int]
) -> None:
    (index,) = attach(node, "p0")
    for rail in order:
        (other,) = attach(node, f"beside-{rail}")
        assert other != index
        for each in range(16):
            detach(node, f"beside-{rail}", each)
        detach(node, "p0", rail)
    assert attach(node, "p1") == {index}


def test_an_interface_that_comes_again_gets_its_index_again(node: ClusterNode) -> None:
    (index,) = attach(node, "p0")
    attach(node, "p1")
    detach(node, "p0", 0)
    assert parse(add(node, "p0", 0)) & 255 == index


def test_a_new_sandbox_keeps_the_index(node: ClusterNode) -> None:
    (index,) = attach(node, "p0")
    attach(node, "p1", range(4))
    again = {
        parse(address) & 255
        for rail in range(16)
        for address in node.add(
            "p0",
            {"range": RAILS[rail]},
            uid="uid-p0",
            container="p0-2",
            network=f"rail{rail}",
            ifname=NICS[rail],
        )
    }
    assert again == {index}
    assert len(node.held()) == 20


def test_what_one_rail_excludes_is_kept_out_on_all(memory_path: Path) -> None:
    server = FakeApi()
    put_rails(server, 256, exclude=("10.64.0.1", "10.67.0.2-10.67.0.3", "10.79.0.4/32"))
    node = ClusterNode(server, memory_path / "a")
    assert attach(node, "p0") == {5}


def test_an_index_that_a_definition_excludes_is_replaced_on_that_rail_only(
    node: ClusterNode,
) -> None:
    index = parse(add(node, "p0", 0)) & 255
    other = parse(add(node, "p0", 1, exclude=[f"10.65.0.{index}/32"])) & 255
    assert other != index
    assert parse(add(node, "p0", 2)) & 255 in (index, other)
    (next_,) = attach(node, "p1")
    assert next_ not in (index, other)


def test_a_requested_address_leases_the_block_of_its_index(
    server: FakeApi, node: ClusterNode
) -> None:
    config = {"capabilities": {"ips": True}, "runtimeConfig": {"ips": ["10.66.0.77"]}}
    (address,) = node.add(
        "p0", {"range": RAILS[2]}, network="rail2", ifname="net2", config=config, uid="uid-p0"
    )
    assert address == "10.66.0.77"
    assert blocks_of(server) == ["default.10.64.0.64-28"]
    assert add(node, "p0", 5) == "10.69.0.77"


def test_a_requested_address_of_another_node_is_named_as_it_was_asked(
    server: FakeApi, node: ClusterNode, memory_path: Path
) -> None:
    other = ClusterNode(server, memory_path / "b", "node-b")
    address = add(other, "p0", 0)
    asked = address.replace("10.64.", "10.66.")
    config = {"capabilities": {"ips": True}, "runtimeConfig": {"ips": [asked]}}
    error = error_of(
        lambda: node.add("p1", {"range": RAILS[2]}, network="rail2", config=config, uid="uid-p1")
    )
    assert error.code == Code.ADDRESS_TAKEN
    assert asked in error.message


def test_a_block_is_given_back_only_when_all_rails_are_free(
    server: FakeApi, node: ClusterNode
) -> None:
    attach(node, "p0", range(3, 5))
    node.lessee.leaving = True
    detach(node, "p0", 3)
    node.steps(5)
    assert blocks_of(server)
    detach(node, "p0", 4)
    node.steps(5)
    assert not blocks_of(server)
    assert node.rows() == {}


def test_the_status_counts_indexes(server: FakeApi, node: ClusterNode) -> None:
    attach(node, "p0")
    attach(node, "p1", range(3))
    node.steps(3)
    (name,) = blocks_of(server)
    status = server.look(AddressBlock, name).status
    assert (status.used, status.free) == (2, 14)
    assert sorted(status.holders.values()) == ["ns/p0 net0", "ns/p1 net0"]


def test_a_rail_of_a_lease_that_is_not_confirmed_waits(server: FakeApi, node: ClusterNode) -> None:
    index = parse(add(node, "p0", 0)) & 255
    node.api.down = True
    node.clock.now += 1801
    error = error_of(lambda: add(node, "p0", 1))
    assert error.code == Code.TRY_AGAIN
    node.api.down = False
    node.steps(10, 10)
    assert parse(add(node, "p0", 1)) & 255 == index


def test_a_lost_store_takes_over_blocks_with_their_rails(
    server: FakeApi, node: ClusterNode, memory_path: Path
) -> None:
    attach(node, "p0")
    again = ClusterNode(
        server, memory_path / "again", "node-a", boot="boot-2", machine=node.machine
    )
    machine = server.machines["node-a"]
    server.machines["node-a"] = replace(machine, boot_id="boot-2")
    again.steps(2)
    assert again.rows() == dict.fromkeys(blocks_of(server), "usable")
    assert len(attach(again, "p1")) == 1
    assert len(blocks_of(server)) == 1


def test_a_rebuilt_store_knows_its_rails(server: FakeApi, node: ClusterNode) -> None:
    (index,) = attach(node, "p0", range(8))
    assert fsck.check(node.directory, print)
    assert fsck.rebuild(node.directory, lambda line: None)
    node.restart()
    node.steps(2)
    assert attach(node, "p0", range(8, 16)) == {index}
    assert attach(node, "p1").isdisjoint({index})


def life(node: ClusterNode) -> None:
    """A pod comes rail by rail, another one comes and goes, and the first one goes."""
    for rail in range(4):
        add(node, "p0", rail)
    node.steps(1)
    attach(node, "p1", range(4))
    for rail in (2, 0, 3, 1):
        detach(node, "p1", rail)
    node.steps(1, CONFIRM_EVERY)


@pytest.mark.parametrize("boot", ["", "boot-2"])
def test_a_kill_between_the_adds_of_a_pod_costs_no_index(
    server: FakeApi, memory_path: Path, boot: str
) -> None:
    """At every boundary of a call of the API or of a transaction of the lessee."""
    count = Kill()
    sound = ClusterNode(server, memory_path / "count", "node-count")
    armed(sound, count)
    life(sound)
    assert count.count > 10
    for at in range(1, count.count + 1):
        server = FakeApi()
        put_rails(server)
        node = ClusterNode(server, memory_path / f"{boot}{at}")
        other = ClusterNode(server, memory_path / f"{boot}{at}-b", "node-b", clock=node.clock)
        armed(node, Kill(at))
        with suppress(Killed, CNIError):
            life(node)
        disarmed(node, boot)
        if boot:
            machine = server.machines["node-a"]
            server.machines["node-a"] = replace(machine, boot_id=boot)
            node.store.release_stale()
        node.steps(3, 30)
        node.store.collect("rail0", [])  # the runtime knows no such sandbox
        for rail in range(1, 4):
            node.store.collect(f"rail{rail}", [])
        assert len(attach(node, "p2")) == 1
        attach(other, "p3")
        audit(server, [node, other])
        node.steps(2, CONFIRM_EVERY)
        audit_settled(server, [node])


def test_128_nodes_with_16_rails_write_at_most_three_times_each(memory_path: Path) -> None:
    """Row A2, one pool with 16 rails: cold nodes, one pod with 16 NICs each."""
    server = FakeApi()
    rails = [f"10.{64 + rail}.0.0/16" for rail in range(16)]
    put_pool(server, rails[0], size=8, rails=tuple(rails[1:]))
    indexes = set()
    for number in range(128):
        node = ClusterNode(server, memory_path / f"{number}", f"node-{number}", kept=True)
        given = [
            node.add("p", {"range": rail}, uid="u", network=f"rail{nic}", ifname=f"net{nic}")[0]
            for nic, rail in enumerate(rails)
        ]
        node.steps(2)
        node.close()
        (index,) = {parse(address) & 0xFFFF for address in given}
        indexes.add(index)
        writes = sum(
            count
            for (verb, kind), count in node.api.calls.items()
            if verb not in ("get", "list", "watch") and kind == "AddressBlock"
        )
        assert writes <= 3
    assert len(indexes) == 128


def test_a_requested_address_whose_index_is_another_pods_is_refused(
    server: FakeApi, node: ClusterNode
) -> None:
    asked = add(node, "p0", 3).replace("10.67.", "10.69.")
    config = {"capabilities": {"ips": True}, "runtimeConfig": {"ips": [asked]}}
    error = error_of(
        lambda: node.add("p1", {"range": RAILS[5]}, network="rail5", config=config, uid="uid-p1")
    )
    assert error.code == Code.ADDRESS_TAKEN
    assert asked in error.message
    assert "p0" not in error.message  # it may be another tenant's pod
    for container in ("p0-1", "p0-2"):  # a new sandbox beside the former one
        assert node.add(
            "p0",
            {"range": RAILS[5]},
            network="rail5",
            ifname="net5",
            config=config,
            uid="uid-p0",
            container=container,
        ) == [asked]
    audit(server, [node])


def test_what_an_earlier_boot_left_on_a_rail_blocks_no_index(memory_path: Path) -> None:
    server = FakeApi()
    put_rails(server, 256, exclude=("10.64.0.0-10.64.0.99", "10.64.0.101-10.64.0.255"))
    node = ClusterNode(server, memory_path / "a")
    assert parse(add(node, "p0", 3)) & 255 == 100
    reboot(server, node)
    assert attach(node, "p1", range(5)) == {100}
    audit(server, [node])


def test_an_index_that_an_earlier_boot_left_on_some_rails_is_one_on_all(
    server: FakeApi, node: ClusterNode
) -> None:
    left = parse(add(node, "p0", 3)) & 255
    attach(node, "p1")
    reboot(server, node)
    assert attach(node, "p2") == {left}
    audit(server, [node])


def test_a_pod_that_comes_back_after_a_reboot_keeps_its_index(
    server: FakeApi, node: ClusterNode
) -> None:
    attach(node, "p0")
    (index,) = attach(node, "p1")
    reboot(server, node)
    again = {
        parse(address) & 255
        for rail in range(16)
        for address in node.add(
            "p1",
            {"range": RAILS[rail]},
            uid="uid-p1",
            container="p1-2",
            network=f"rail{rail}",
            ifname=NICS[rail],
        )
    }
    assert again == {index}


def test_a_requested_address_whose_index_an_earlier_boot_left_is_granted(
    server: FakeApi, node: ClusterNode
) -> None:
    asked = add(node, "p0", 3).replace("10.67.", "10.69.")
    reboot(server, node)
    config = {"capabilities": {"ips": True}, "runtimeConfig": {"ips": [asked]}}
    assert node.add(
        "p1", {"range": RAILS[5]}, network="rail5", ifname="net5", config=config, uid="uid-p1"
    ) == [asked]
    audit(server, [node])


def put_private(server: FakeApi, rail: int) -> None:
    """The pool of a private network with the range of a rail, as the controller leaves it."""
    pool = put_pool(server, RAILS[rail], shared=False)
    main = server.look(AddressPool, "10.64.0.0-24")
    status = replace(main.status, rail_of=main.metadata.name, block_size=0)
    server.put(replace(pool, status=status))


@pytest.mark.parametrize("rail", [0, 5])
def test_a_private_network_with_the_range_of_a_rail_gives_no_address_twice(
    server: FakeApi, node: ClusterNode, memory_path: Path, rail: int
) -> None:
    put_private(server, rail)
    nodes = [node, ClusterNode(server, memory_path / "b", "node-b", clock=node.clock)]
    given: list[str] = []
    indexes: list[int] = []
    for number in range(6):
        for each in nodes:
            indexes += attach(each, f"r{number}", range(8, 10))
            private = each.add(
                f"q{number}",
                {"range": RAILS[rail], "enable_overlapping_ranges": False},
                network="private",
                uid=f"uid-q{number}",
            )
            given += [*private, add(each, f"p{number}", rail)]
            indexes += [parse(private[0]) & 255, *attach(each, f"p{number}", range(8, 10))]
    assert len(set(given)) == len(given) == 24
    assert len(set(indexes)) == 36, "no other pod has the index of a private address"
    for each in nodes:
        each.steps(3)
        audit_settled(server, [each])
