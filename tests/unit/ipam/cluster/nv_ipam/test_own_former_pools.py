"""Pools in mode own that are gone or have another range, while their pods run: these addresses are
given by no pool that overlapped them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cni.spec.errors import CNIError
from ipam.cluster.nv_ipam.objects import NvCIDRPool, NvIPPool
from ipam.cluster.objects import AddressPool
from tests.unit.ipam.cluster.nv_ipam.nodes import NAMESPACE, FollowingNode
from tests.unit.ipam.cluster.nv_ipam.own import OwnNode
from tests.unit.ipam.cluster.nv_ipam.test_own import World
from tests.unit.ipam.cluster.nv_ipam.test_own_mixed_overlaps import (
    EARLY,
    LATE,
    ROUTED,
    add,
    fills_routed,
    put,
    put_routed,
)
from tests.unit.ipam.cluster.nv_ipam.test_own_overlaps import address_pool, fills, twice
from tests.unit.ipam.cluster.nv_ipam.test_takeover import _interleaved as interleaved

SUBNET = "10.0.0.0/27"
ENDS: dict[str, Callable[[World], object]] = {
    "moves": lambda world: put(world, "10.9.0.0/27", EARLY),
    "shrinks": lambda world: put(world, "10.0.0.24/29", EARLY),
    "is deleted": lambda world: world.server.remove(NvIPPool, "pool", NAMESPACE),
}


@pytest.mark.parametrize("how", ENDS)
def test_an_ippool_that_is_younger_gives_what_it_had_when_its_pods_have_ended(
    world: World, how: str
) -> None:
    put(world, SUBNET, EARLY)
    put(world, SUBNET, LATE, "young")
    world.settle(4)
    a, b = world.nodes["a"], world.nodes["b"]
    held = {add(world, a, f"p{number}") for number in range(6)}
    ENDS[how](world)
    world.settle(6)
    given = fills(world, b, "young")
    assert given
    assert not given & held
    for number in range(6):
        a.delete(f"p{number}")
    world.settle(30, 60.0)
    free = held - {f"10.0.0.{last}" for last in range(24, 32) if how == "shrinks"}
    assert free <= given | fills(world, b, "young", "more-")
    assert not twice(world)


@pytest.mark.parametrize("how", ENDS)
def test_a_cidrpool_that_is_younger_gives_what_it_had_when_its_pods_have_ended(
    world: World, how: str
) -> None:
    put(world, SUBNET, EARLY)
    put_routed(world, SUBNET, LATE, prefix=28)
    world.settle(4)
    a, b = world.nodes["a"], world.nodes["b"]
    held = {add(world, a, f"p{number}") for number in range(6)}
    ENDS[how](world)
    world.settle(6)
    given = fills_routed(world, a) | fills_routed(world, b)
    assert given
    assert not given & held
    for number in range(6):
        a.delete(f"p{number}")
    world.settle(30, 60.0)
    more = fills_routed(world, a, "more-") | fills_routed(world, b, "more-")
    assert len(given | more) == (21 if how == "shrinks" else 28)
    assert not twice(world)


@pytest.mark.parametrize("how", ["moves", "is deleted"])
def test_an_ippool_gives_what_a_cidrpool_had_when_its_pods_have_ended(
    world: World, how: str
) -> None:
    put_routed(world, SUBNET, EARLY)
    put(world, SUBNET, LATE)
    world.settle(4)
    a, b = world.nodes["a"], world.nodes["b"]
    held = {add(world, a, f"p{number}", ROUTED) for number in range(3)}
    if how == "moves":
        put_routed(world, "10.9.0.0/27", EARLY)
    else:
        world.server.remove(NvCIDRPool, "routed", NAMESPACE)
    world.settle(6)
    given = fills(world, b, "pool")
    assert given
    assert not given & held
    for number in range(3):
        a.delete(f"p{number}")
    world.settle(10, 60.0)
    assert held <= given | fills(world, b, "pool", "more-")
    assert not twice(world)


def test_a_pool_that_gets_a_wider_range_gives_what_is_free_in_its_former_blocks(
    world: World,
) -> None:
    put(world, "10.0.0.0/29")
    world.settle(4)
    a, b = world.nodes["a"], world.nodes["b"]
    held = {add(world, a, "p0"), add(world, b, "p0")}
    put(world, "10.0.0.0/28")
    world.settle(30, 60.0)
    given = fills(world, a, "pool") | fills(world, b, "pool")
    assert held | given == {f"10.0.0.{last}" for last in range(1, 15)}
    assert not twice(world)


def test_nothing_is_leased_of_the_range_that_a_pool_had(world: World) -> None:
    put(world, SUBNET)
    world.settle(4)
    former = address_pool(world, "pool").metadata.name
    put(world, "10.0.0.0/28")
    world.settle(2)
    there = world.server.look(AddressPool, former)
    assert there.spec.exclude == ("10.0.0.16-10.0.0.31",)
    world.server.remove(NvIPPool, "pool", NAMESPACE)
    world.settle(2)
    assert {each.spec.exclude for each in world.server.look_at_all(AddressPool).items} == {
        ("10.0.0.0-10.0.0.15",),
        ("10.0.0.0-10.0.0.31",),
    }
    put(world, SUBNET)
    world.settle(2)
    assert not address_pool(world, "pool").spec.exclude


@pytest.mark.parametrize("how", ["moves", "is deleted"])
def test_at_each_request_of_a_node_its_cidrpool_may_end_and_an_ippool_have_its_addresses(
    memory_path: Path, how: str
) -> None:
    """What the watch has shown when the node began is over when it takes an address."""
    for number in range(100):
        world = World(memory_path / str(number))
        a, b = world.node("a"), world.node("b")
        put_routed(world, SUBNET, EARLY)
        put(world, SUBNET, LATE)
        for _ in range(2):
            world.controller.round()
            b.step()

        def routes(a: OwnNode = a) -> None:
            a.step(1.0)
            fills_routed(world, a)  # noqa: B023 - called in this turn

        def ends(world: World = world, b: OwnNode = b) -> None:
            if how == "moves":
                put_routed(world, "10.9.0.0/27", EARLY)
            else:
                world.server.remove(NvCIDRPool, "routed", NAMESPACE)
            for _ in range(3):
                world.controller.round()
                b.step(1.0)
                for pod in range(4):
                    try:
                        b.add(f"q{pod}")
                    except CNIError:
                        b.leases.lessee.step()

        is_over = interleaved(number, a.api, routes, ends)
        assert not twice(world), number
        for turn in range(2):
            routes()
            world.settle(1)
            fills(world, b, "pool", f"turn{turn}-")
            assert not twice(world), number
        if is_over:
            break
    else:
        pytest.fail("it asks without end")
    assert number >= 2


def test_a_node_that_still_follows_takes_nothing_of_its_prefix_that_others_lease(
    world: World,
) -> None:
    b = world.nodes["b"]
    put(world, SUBNET)
    c = FollowingNode(world.server, world.directory, "c", clock=world.clock)
    world.settle(4)
    assert len(fills(world, b, "pool")) == 30
    held = b.store.reservations()
    put_routed(world, SUBNET, EARLY, prefix=29)

    def given() -> set[str]:
        for _ in range(3):
            c.step()
            world.settle(1)
        found: set[str] = set()
        with pytest.raises(CNIError):
            for number in range(9):
                pod = f"c{number}-{len(c.held())}"
                found |= {each.partition("/")[0] for each in c.add(pod, ROUTED)}
        return found

    assert not given()
    for each in held:
        b.delete(each.pod)
    world.settle(30, 60.0)
    assert len(given()) == 6
    assert not {held.address for held in b.store.reservations()}
