"""An IPPool and a CIDRPool that overlap in mode own: the older one gives an address, once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.cluster.nv_ipam.objects import ExcludedRun, NvCIDRPool, NvCIDRPoolEntry, NvIPPool
from ipam.cluster.objects import AddressShare
from tests.unit.ipam.cluster.nv_ipam.nodes import NAMESPACE, put_cidrpool, put_ippool
from tests.unit.ipam.cluster.nv_ipam.own import OwnNode
from tests.unit.ipam.cluster.nv_ipam.test_own import World, daemon_writes, import_
from tests.unit.ipam.cluster.nv_ipam.test_own_overlaps import address_pool, events, fills, twice
from tests.unit.ipam.cluster.nv_ipam.test_takeover import _interleaved as interleaved

ROUTED: dict[str, object] = {"poolName": "routed", "poolType": "cidrpool"}
EARLY, LATE = 1_000.0, 2_000.0  # seconds since 1970
APART = "10.9.0.0/26"


@contextmanager
def at(world: World, made: float) -> Iterator[None]:
    """What is created then, by the server's clock."""
    clock = world.server.clock
    world.server.clock = lambda: made
    yield
    world.server.clock = clock


def put(
    world: World,
    subnet: str,
    made: float = LATE,
    name: str = "pool",
    **spec: Any,  # noqa: ANN401
) -> NvIPPool:
    with at(world, made):
        return put_ippool(world.server, {}, subnet, name, per_node_block_size=4, **spec)


def put_routed(
    world: World,
    cidr: str,
    made: float = LATE,
    prefix: int = 29,
    **spec: Any,  # noqa: ANN401
) -> NvCIDRPool:
    former = world.server.look_at_all(NvCIDRPool, namespace=NAMESPACE).items
    entries = {
        entry.node: (entry.prefix, entry.gateway)
        for pool in former
        for entry in pool.status.allocations or ()
    }
    with at(world, made):
        return put_cidrpool(world.server, entries, cidr, per_node_network_prefix=prefix, **spec)


def add(world: World, node: OwnNode, pod: str, ipam: dict[str, object] | None = None) -> str:
    """ADD as the runtime repeats it."""
    for _ in range(20):
        try:
            return node.add(pod, ipam or {"poolName": "pool"})[0].partition("/")[0]
        except CNIError as error:
            assert error.code == Code.TRY_AGAIN, error
        world.settle(1, 1.0)
    raise AssertionError(f"no address for {pod}")


def fills_routed(world: World, node: OwnNode, prefix: str = "") -> set[str]:
    """What the node's prefix gives, until it has none left."""
    found: set[str] = set()
    with suppress(CNIError):
        for number in range(100):
            found.add(node.add(f"{prefix}r{number}", ROUTED)[0].partition("/")[0])
    return found


def shares(world: World, pool: str) -> list[AddressShare]:
    return list(world.server.look_at_all(AddressShare, {"spec.pool": pool}).items)


def overlap_of(world: World) -> str:
    """The condition Overlap of the AddressPool."""
    conditions = address_pool(world, "pool").status.conditions
    return next((each.message for each in conditions if each.type == "Overlap"), "")


def test_a_younger_cidrpool_gives_no_address_of_an_ippool_and_names_it(world: World) -> None:
    put(world, "10.0.0.0/27", EARLY)
    put_routed(world, "10.0.0.0/27")
    world.settle(4)
    a, b = world.nodes["a"], world.nodes["b"]
    for node in (a, b):
        with pytest.raises(CNIError, match="also of ippool/pool, which is older") as caught:
            node.add("p", ROUTED)
        assert caught.value.code == Code.NO_FREE_ADDRESS
    assert len(fills(world, a, "pool") | fills(world, b, "pool")) == 30
    assert not twice(world)
    assert any(
        "addresses of cidrpool/routed are also of ippool/pool" in each
        and "annotate cidrpool.nv-ipam.nvidia.com routed" in each
        for each in events(world)
    )
    assert "also of cidrpool/routed, which is younger" in overlap_of(world)
    # The nodes have joined: so the IPPool need not leave their prefixes alone.
    assert [(each.spec.node, each.spec.ranges) for each in shares(world, "cidrpool/routed")] == [
        ("a", ()),
        ("b", ()),
    ]


def test_a_younger_ippool_gives_what_an_older_cidrpool_does_not(world: World) -> None:
    hole = (ExcludedRun(start="10.0.0.4", end="10.0.0.5"),)
    put_routed(world, "10.0.0.0/28", EARLY, exclusions=hole)
    put(world, "10.0.0.0/27")
    world.settle(4)
    a, b = world.nodes["a"], world.nodes["b"]
    ours = {f"10.0.0.{last}" for last in (4, 5, *range(16, 31))}
    assert fills(world, a, "pool") | fills(world, b, "pool") == ours
    routed = fills_routed(world, a) | fills_routed(world, b)
    assert routed == {f"10.0.0.{last}" for last in (1, 2, 3, 6, *range(9, 15))}
    assert not twice(world)
    with pytest.raises(CNIError, match=r"also of cidrpool/routed, which is older"):
        a.add("named", config={"args": {"cni": {"ips": ["10.0.0.9"]}}})
    assert "addresses of ippool/pool are also of cidrpool/routed" in overlap_of(world)


def test_pools_whose_networks_are_apart_say_so_and_give_all(world: World) -> None:
    put(world, "10.0.0.0/28", EARLY)
    routed = put_routed(world, "10.0.0.0/28")
    notes = {"ipam.podfabric.io/private": "true"}
    world.server.put(replace(routed, metadata=replace(routed.metadata, annotations=notes)))
    world.settle(4)
    assert len(fills_routed(world, world.nodes["a"])) == 6
    assert len(fills(world, world.nodes["b"], "pool")) == 14
    assert not events(world)
    assert not overlap_of(world)


def test_what_pods_have_of_a_prefix_is_not_given_by_an_ippool_that_comes_there(
    world: World,
) -> None:
    put(world, APART, EARLY)
    put_routed(world, "10.0.0.0/28")
    world.settle(4)
    a, b = world.nodes["a"], world.nodes["b"]
    held = {add(world, a, f"p{number}", ROUTED) for number in range(3)}
    put(world, "10.0.0.0/27", EARLY)
    world.settle(6)
    given = fills(world, b, "pool")
    assert given
    assert not given & held
    assert not twice(world)
    with pytest.raises(CNIError, match="older"):
        a.add("more", ROUTED)
    for number in range(3):
        a.delete(f"p{number}")
    world.settle(10, 60.0)
    assert held <= given | fills(world, b, "pool", "more-")
    assert not twice(world)


def test_what_pods_have_by_an_ippool_is_not_given_by_a_cidrpool_that_comes_there(
    world: World,
) -> None:
    put(world, "10.0.0.0/27")
    put_routed(world, APART, EARLY)
    world.settle(4)
    a, b = world.nodes["a"], world.nodes["b"]
    held = {add(world, b, f"p{number}") for number in range(6)}
    put_routed(world, "10.0.0.0/27", EARLY)  # the older pool
    world.settle(6)
    given = fills_routed(world, a)
    assert not given & held
    assert not twice(world)
    # The pods end, their blocks go back, and the prefix has the rest.
    for number in range(6):
        b.delete(f"p{number}")
    world.settle(30, 60.0)
    assert len(given | fills_routed(world, a, "more-")) == 6
    assert not twice(world)


def test_what_an_older_ippool_excludes_now_is_given_when_its_pods_have_ended(world: World) -> None:
    put(world, "10.0.0.0/28", EARLY)
    put_routed(world, "10.0.0.0/28", prefix=28)
    world.settle(4)
    a, b = world.nodes["a"], world.nodes["b"]
    held = {add(world, b, f"p{number}") for number in range(14)}
    hole = (ExcludedRun(start="10.0.0.8", end="10.0.0.15"),)
    put(world, "10.0.0.0/28", EARLY, exclusions=hole)
    world.settle(6)
    assert not fills_routed(world, a)
    assert not twice(world)
    for number in range(14):
        b.delete(f"p{number}")
    world.settle(30, 60.0)
    given = fills_routed(world, a)
    assert given == {f"10.0.0.{last}" for last in range(8, 15)} <= held
    fills(world, b, "pool", "more-")
    assert not twice(world)


def test_what_an_older_ippool_excludes_now_is_given_by_no_other_ippool_before(
    world: World,
) -> None:
    put(world, "10.0.0.0/28", EARLY)
    put(world, "10.0.0.0/28", LATE, "young")
    world.settle(4)
    a, b = world.nodes["a"], world.nodes["b"]
    for number in range(14):
        add(world, b, f"p{number}")
    put(world, "10.0.0.0/28", EARLY, exclusions=(ExcludedRun(start="10.0.0.8", end="10.0.0.15"),))
    world.settle(6)
    assert not fills(world, a, "young")
    assert not twice(world)
    for number in range(14):
        b.delete(f"p{number}")
    world.settle(30, 60.0)
    assert fills(world, a, "young") == {f"10.0.0.{last}" for last in range(8, 15)}
    fills(world, b, "pool", "more-")
    assert not twice(world)


def test_prefixes_of_nodes_that_have_not_joined_are_left_alone_by_an_older_ippool(
    world: World,
) -> None:
    a, b = world.nodes["a"], world.nodes["b"]
    daemon_writes(a, "10.0.0.3", subnet="10.0.0.0/29", pool="cidrpool/routed")
    put(world, "10.0.0.0/28", EARLY)
    routed = put_routed(world, "10.0.0.0/28")
    entry = NvCIDRPoolEntry(node="a", prefix="10.0.0.0/29")
    world.server.put(replace(routed, status=replace(routed.status, allocations=(entry,))))
    world.settle(6)
    assert fills(world, b, "pool") == {f"10.0.0.{last}" for last in range(8, 15)}


def test_a_node_takes_no_address_before_the_controller_has_excluded_it(world: World) -> None:
    """Without a controller nothing is given of what the nodes of the IPPool may lease."""
    put(world, APART)
    put_routed(world, "10.0.0.0/28", EARLY)
    world.settle(4)
    put(world, "10.0.0.0/27")
    a = world.nodes["a"]
    a.restart()
    a.step()
    assert not fills_routed(world, a)
    world.settle(4)
    assert len(fills_routed(world, a)) == 6


def go_on(world: World, turns: int, *works: Callable[[], None]) -> None:
    """All do their work some more times; no address is given twice, then or before."""
    assert not twice(world)
    for _ in range(turns):
        for work in works:
            work()
            assert not twice(world)


def overlapping_later(directory: Path, older: str) -> tuple[World, Callable[[], None]]:
    """Two pools, and what makes them overlap."""
    world = World(directory)
    for name in ("a", "b"):
        world.node(name)
    made = (EARLY, LATE) if older == "ippool" else (LATE, EARLY)
    put(world, APART, made[0])
    put_routed(world, "10.0.0.0/28", made[1])
    world.settle(4)
    add(world, world.nodes["a"], "first", ROUTED)

    def overlap() -> None:
        put(world, "10.0.0.0/27", made[0])

    return world, overlap


@pytest.mark.parametrize("older", ["ippool", "cidrpool"])
@pytest.mark.parametrize("of", ["controller", "routed node", "leasing node"])
def test_at_each_request_the_others_may_do_all_of_their_work(
    memory_path: Path, of: str, older: str
) -> None:
    for number in range(300):
        world, overlap = overlapping_later(memory_path / str(number), older)
        a, b = world.nodes["a"], world.nodes["b"]

        def routes(a: OwnNode = a, world: World = world) -> None:
            a.step(1.0)
            fills_routed(world, a, "more-")

        def leases(b: OwnNode = b) -> None:
            b.step(1.0)
            for pod in range(12):
                try:
                    b.add(f"q{pod}")
                except CNIError:
                    b.leases.lessee.step()

        def rounds(world: World = world) -> None:
            world.controller.round()

        work: dict[str, Callable[[], None]] = {
            "controller": rounds,
            "routed node": routes,
            "leasing node": leases,
        }
        clients = {
            "controller": world.controller.client,
            "routed node": a.api,
            "leasing node": b.api,
        }

        def others(of: str = of, work: dict[str, Callable[[], None]] = work) -> None:
            for _ in range(2):
                for name in work:
                    if name != of:
                        work[name]()

        overlap()
        is_over = interleaved(number, clients[of], work[of], others)
        go_on(world, 2, *work.values())
        if is_over:
            break
    else:
        pytest.fail("it asks without end")
    assert number >= 2


def test_at_each_request_another_node_may_join_and_keeps_what_its_pods_have(
    memory_path: Path,
) -> None:
    """The daemon gave an address of the IPPool there, which was in the node's entry until then."""
    for number in range(100):
        world = World(memory_path / str(number))
        a, b = world.node("a"), world.node("b")
        daemon_writes(b, "10.0.0.3", subnet="10.0.0.0/27")
        put_routed(world, APART, EARLY)
        with at(world, LATE):
            put_ippool(
                world.server, {"b": ("10.0.0.1", "10.0.0.4")}, "10.0.0.0/27", per_node_block_size=4
            )
        world.settle(4)
        put_routed(world, "10.0.0.0/28", EARLY)
        world.controller.round()

        def routes(a: OwnNode = a) -> None:
            a.step(1.0)
            fills_routed(world, a)  # noqa: B023 - called in this turn

        def joins(world: World = world, b: OwnNode = b) -> None:
            import_(b)
            for _ in range(2):
                b.step(1.0)
                world.controller.round()

        is_over = interleaved(number, a.api, routes, joins)
        go_on(world, 3, joins, routes)
        if is_over:
            break
    else:
        pytest.fail("it asks without end")
    assert number >= 2
    assert {each.address for each in b.store.reservations()} == {"10.0.0.3"}
    a.step(60.0)
    fills_routed(world, a, "late-")
    assert len(a.held()) == 5  # the others of the entry are free
