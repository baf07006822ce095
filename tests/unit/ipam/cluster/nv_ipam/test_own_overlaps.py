"""IPPools that overlap in mode own: the older one gives an address, and no pod gets it twice."""

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import parse, parse_interval
from ipam.cluster.api import ApiError
from ipam.cluster.nv_ipam.objects import ExcludedRun, NvIPPool
from ipam.cluster.nv_ipam.own_pools import name_of
from ipam.cluster.objects import AddressBlock, AddressPool
from tests.fake_api import Fault
from tests.unit.ipam.cluster.nv_ipam.nodes import NAMESPACE, put_ippool
from tests.unit.ipam.cluster.nv_ipam.own import OwnNode
from tests.unit.ipam.cluster.nv_ipam.test_own import World
from tests.unit.ipam.cluster.nv_ipam.test_takeover import _interleaved as interleaved

# Of pools that are made within a second the one whose key is first counts as older: ippool/pool.
YOUNG = {"poolName": "young"}
SUBNET = "10.0.0.0/27"


def put(world: World, subnet: str, name: str = "pool", **spec: Any) -> NvIPPool:  # noqa: ANN401
    return put_ippool(world.server, {}, subnet, name, per_node_block_size=4, **spec)


def address_pool(world: World, name: str) -> AddressPool:
    pools = world.server.look_at_all(NvIPPool, namespace=NAMESPACE).items
    pool = next(each for each in pools if each.metadata.name == name)
    return world.server.look(AddressPool, name_of(pool))


def fills(world: World, node: OwnNode, pool: str, prefix: str = "") -> set[str]:
    """What the pool gives on the node, until it has none left."""
    found: set[str] = set()
    for number in range(300):
        pod = f"{prefix}{pool}-{node.name}-{number}"
        for _ in range(10):
            try:
                found |= {each.partition("/")[0] for each in node.add(pod, {"poolName": pool})}
                break
            except CNIError as error:
                if error.code == Code.NO_FREE_ADDRESS:
                    return found
                assert error.code == Code.TRY_AGAIN, error
            world.settle(1, 1.0)
        else:
            return found
    return found


def twice(world: World) -> dict[str, int]:
    """Addresses that two pods have, whatever pools they are of."""
    held = Counter(
        each.address for node in world.nodes.values() for each in node.store.reservations()
    )
    return {address: count for address, count in held.items() if count > 1}


def events(world: World) -> list[str]:
    return [each.message for each in world.server.events if each.reason == "AddressesOverlap"]


def test_of_two_pools_of_one_subnet_the_younger_gives_nothing_and_names_the_older(
    world: World,
) -> None:
    put(world, SUBNET)
    put(world, SUBNET, "young")
    world.settle()
    a, b = world.nodes["a"], world.nodes["b"]
    with pytest.raises(CNIError) as caught:
        a.add("p", YOUNG)
    assert caught.value.code == Code.NO_FREE_ADDRESS
    assert "ippool/young are also of ippool/pool, which is older" in caught.value.message
    with pytest.raises(CNIError) as caught:
        a.add("p", YOUNG, config={"args": {"cni": {"ips": ["10.0.0.9"]}}})
    assert (caught.value.code, "ippool/pool" in caught.value.message) == (
        Code.NO_FREE_ADDRESS,
        True,
    )
    assert len(fills(world, a, "pool") | fills(world, b, "pool")) == 30
    assert not twice(world)
    (event,) = events(world)
    assert "ippool/young are also of ippool/pool" in event
    assert "ipam.podfabric.io/private=true" in event
    blocks = world.server.look_at_all(AddressBlock).items
    assert {each.spec.pool for each in blocks} == {address_pool(world, "pool").metadata.name}


def test_the_younger_pool_gives_what_the_older_one_has_not(world: World) -> None:
    put(world, SUBNET, exclusions=(ExcludedRun(start="10.0.0.1", end="10.0.0.3"),))
    put(world, "10.0.0.0/26", "young")
    world.settle()
    a, b = world.nodes["a"], world.nodes["b"]
    given = fills(world, a, "young")
    # The other half, and what the older one excludes.
    assert given == {f"10.0.0.{last}" for last in (*range(1, 4), *range(32, 63))}
    assert fills(world, b, "pool") == {f"10.0.0.{last}" for last in range(4, 31)}
    assert not twice(world)
    with pytest.raises(CNIError, match="ippool/young are also of ippool/pool, which is older"):
        a.add("more", YOUNG)
    with pytest.raises(CNIError, match=r"also of ippool/pool, which is older") as caught:
        a.add("named", YOUNG, config={"args": {"cni": {"ips": ["10.0.0.9"]}}})
    assert caught.value.code == Code.ADDRESS_TAKEN


def test_a_private_pool_overlaps_none(world: World) -> None:
    put(world, SUBNET)
    young = put(world, SUBNET, "young")
    notes = {"ipam.podfabric.io/private": "true"}
    world.server.put(replace(young, metadata=replace(young.metadata, annotations=notes)))
    world.settle()
    assert len(fills(world, world.nodes["a"], "young")) == 30
    assert not events(world)


def test_what_pods_have_by_the_younger_pool_is_not_given_when_it_comes_to_overlap(
    world: World,
) -> None:
    put(world, "10.9.0.0/27")
    put(world, SUBNET, "young")
    world.settle()
    a, b = world.nodes["a"], world.nodes["b"]
    held = {world_add(world, a, f"p{number}") for number in range(6)}
    put(world, SUBNET)  # the older pool has another range now
    world.settle(4)
    given = fills(world, b, "pool")
    assert given
    assert not given & held
    assert not twice(world)
    # The pods end, their blocks go back, and the older pool has the rest.
    for number in range(6):
        a.delete(f"p{number}")
    world.settle(30, 60.0)
    assert held <= given | fills(world, b, "pool", "more-")
    assert not twice(world)


def world_add(world: World, node: OwnNode, pod: str) -> str:
    for _ in range(10):
        try:
            return node.add(pod, YOUNG)[0].partition("/")[0]
        except CNIError as error:
            assert error.code == Code.TRY_AGAIN, error
        world.settle(1, 1.0)
    raise AssertionError(f"no address for {pod}")


def some(world: World, node: OwnNode) -> None:
    """Further pods of the older pool, as many as fill three of its blocks."""
    for number in range(12):
        if number % 4 == 0:
            world.settle(1, 1.0)
        with suppress(CNIError):
            node.add(f"last-{number}")


@pytest.mark.parametrize("of", ["controller", "node"])
def test_at_each_request_the_other_side_may_do_all_of_its_work(memory_path: Path, of: str) -> None:
    """The older pool comes to overlap while a node leases of the younger one."""
    for number in range(200):
        world = World(memory_path / str(number))
        a, b = world.node("a"), world.node("b")
        put(world, "10.9.0.0/27")
        put(world, SUBNET, "young")
        world.settle()
        world_add(world, a, "first")
        put(world, SUBNET)

        def leases(a: OwnNode = a) -> None:
            for pod in range(9):
                try:
                    a.add(f"more-{pod}", YOUNG)
                except CNIError:
                    a.leases.lessee.step()

        def rounds(world: World = world, b: OwnNode = b) -> None:
            world.controller.round()
            b.step(1.0)
            for pod in range(4):
                try:
                    b.add(f"q{pod}")
                except CNIError:
                    b.leases.lessee.step()

        is_over = (
            interleaved(number, world.controller.client, rounds, leases)
            if of == "controller"
            else interleaved(number, a.api, leases, rounds)
        )
        assert not twice(world)
        for _ in range(2):
            world.controller.round()
            rounds()
            leases()
            assert not twice(world)
        some(world, b)
        assert not twice(world)
        if is_over:
            break
    else:
        pytest.fail("it asks without end")
    assert number >= 3


@pytest.mark.parametrize("fault", list(Fault))
def test_a_controller_that_fails_at_any_request_gives_nothing_twice(
    memory_path: Path, fault: Fault
) -> None:
    for at in range(1, 100):
        world = World(memory_path / str(at))
        a, b = world.node("a"), world.node("b")
        put(world, "10.9.0.0/27")
        put(world, SUBNET, "young")
        world.settle()
        for number in range(3):
            world_add(world, a, f"first-{number}")
        put(world, SUBNET)
        count = 0

        def faults(verb: str, kind: str, name: str) -> Fault | None:
            nonlocal count
            count += 1
            return fault if count == at else None  # noqa: B023 - called in this turn

        world.controller.client.faults = faults
        for _ in range(2):
            with suppress(ApiError):  # of what it reads first
                world.controller.round()
            b.step(1.0)
            for pod in range(3):
                try:
                    b.add(f"q{pod}")
                except CNIError:
                    b.leases.lessee.step()
            assert not twice(world)
        world.controller.client.faults = None
        world.server.deliver()
        world.settle(2)
        some(world, b)
        assert not twice(world)
        if count < at:
            break
    else:
        pytest.fail("it asks without end")
    assert at > 10


def test_the_older_pool_excludes_no_more_than_the_younger_has(world: World) -> None:
    put(world, "10.9.0.0/24")
    put(world, "10.0.0.0/26", "young")
    world.settle()
    a = world.nodes["a"]
    first = world_add(world, a, "p")
    put(world, "10.0.0.0/24")
    world.settle(4)
    (block,) = [
        each
        for each in world.server.look_at_all(AddressBlock).items
        if each.spec.pool == address_pool(world, "young").metadata.name
    ]
    excluded = list(map(parse_interval, address_pool(world, "pool").spec.exclude))
    assert len(excluded) == 1
    assert excluded[0].first == parse(block.spec.first)
    assert excluded[0].first <= parse(first) <= excluded[0].last == excluded[0].first + 3
