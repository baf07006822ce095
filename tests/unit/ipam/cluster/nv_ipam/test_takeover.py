"""From mode follow to mode own, node by node: none takes what another may lease or hold."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from ipam.cluster.objects import AddressPool, AddressShare
from ipam.nv_ipam import importing
from tests.fake_api import Fault
from tests.unit.ipam.cluster.nv_ipam.nodes import FollowingNode, duplicates, known_to, put_ippool
from tests.unit.ipam.cluster.nv_ipam.own import OwnNode, own_pool
from tests.unit.ipam.cluster.nv_ipam.test_own import World, daemon_writes, import_, share_of

WISH = {"args": {"cni": {"ips": ["10.0.0.77"]}}}  # in no entry
ENTRIES = {"a": ("10.0.0.1", "10.0.0.20"), "b": ("10.0.0.21", "10.0.0.40")}


@pytest.fixture
def world(memory_path: Path) -> World:
    return World(memory_path)


def following(world: World, name: str) -> FollowingNode:
    """A node whose agent still runs in mode follow. `owning` restarts it."""
    node = FollowingNode(world.server, world.directory, name, clock=world.clock)
    node.directory = world.directory / name  # where its agent in mode own has its store
    node.restart()
    return node


def owning(world: World, node: FollowingNode) -> OwnNode:
    """The agent of the node, restarted in mode own."""
    return world.node(node.name)


def wish(node: FollowingNode | OwnNode, pod: str = "wish") -> str | None:
    """The address that the pod asks for by name; None if the node cannot give it now."""
    try:
        (address,) = node.add(pod, config=WISH)
    except CNIError as error:
        assert error.code in (Code.TRY_AGAIN, Code.ADDRESS_TAKEN), error
        return None
    return address


def test_a_node_that_follows_gives_nothing_by_name_once_others_lease(world: World) -> None:
    put_ippool(world.server, ENTRIES, per_node_block_size=16)
    a, b = following(world, "a"), world.node("b")
    a.step()
    world.settle()
    assert wish(b) == "10.0.0.77/24"
    b.delete("wish")
    with pytest.raises(CNIError, match=r"AddressPool .* is there") as caught:
        a.add("wish", config=WISH)
    assert caught.value.code == Code.TRY_AGAIN
    a.step()
    share = share_of(world, "a")
    assert share is not None
    assert share.spec.ranges == ("10.0.0.1-10.0.0.20",)
    assert a.add("p") == ["10.0.0.1/24"]  # its entry stays its own
    assert wish(b) == "10.0.0.77/24"


def test_what_a_node_that_follows_gave_by_name_before_is_left_alone(world: World) -> None:
    put_ippool(world.server, ENTRIES, per_node_block_size=16)
    a = following(world, "a")
    a.step()
    assert wish(a) == "10.0.0.77/24"
    b = world.node("b")
    world.settle()
    assert "10.0.0.77" in own_pool(world.server).spec.exclude
    assert wish(b) is None
    a.step()
    assert not duplicates((a, b))
    # Also when the node owns the pools, and when it has restarted before.
    a.restart()
    a.step()
    assert "10.0.0.77" in known_to(a)["ippool/pool"].beside
    owned = owning(world, a)
    world.settle()
    assert wish(b) is None
    owned.delete("wish")
    world.settle()
    b.step(500.0)
    assert wish(b) == "10.0.0.77/24"


def test_a_node_that_follows_again_takes_no_entry_that_others_lease(world: World) -> None:
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.254")}, per_node_block_size=254)
    a = following(world, "a")
    a.step()
    owning(world, a)
    b = world.node("b")
    world.settle()
    given = world.add(b, "p")
    back = following(world, "a")
    for _ in range(3):
        back.step()
    with pytest.raises(CNIError):
        back.add("q")
    assert given[0] in ("10.0.0.1/24", "10.0.0.128/24")  # of either block, which chance decides
    assert not duplicates((back, b))


def test_a_share_that_somebody_deleted_gives_nothing_back_once_others_lease(world: World) -> None:
    put_ippool(world.server, ENTRIES, per_node_block_size=16)
    a = following(world, "a")
    a.step()
    assert wish(a) == "10.0.0.77/24"
    a.delete("wish")
    world.node("b")
    world.settle()
    share = share_of(world, "a")
    assert share is not None
    world.server.remove(AddressShare, share.metadata.name)
    a.step(400.0)
    with pytest.raises(CNIError):
        a.add("p")
    assert wish(a) is None


def test_nodes_follow_again_when_the_address_pool_is_deleted(world: World) -> None:
    put_ippool(world.server, ENTRIES, per_node_block_size=16)
    world.settle()
    a = following(world, "a")
    a.step()
    with pytest.raises(CNIError):
        a.add("p")
    world.server.remove(AddressPool, own_pool(world.server).metadata.name)
    a.step(60.0)
    assert a.add("p") == ["10.0.0.1/24"]
    assert wish(a) == "10.0.0.77/24"


@pytest.mark.parametrize("of", ["node", "controller"])
def test_at_each_request_the_other_side_may_do_all_of_its_work(memory_path: Path, of: str) -> None:
    """A node that follows is asked for an address by name; controller and a node in mode own come
    between two of its requests, or it between two of the controller's."""
    given = set()
    for number in range(100):
        world = World(memory_path / str(number))
        put_ippool(world.server, ENTRIES, per_node_block_size=16)
        a, b = following(world, "a"), world.node("b")
        a.step()

        def take_over(world: World = world, b: OwnNode = b) -> None:
            world.settle(2)
            wish(b)

        def ask(a: FollowingNode = a) -> None:
            wish(a)
            a.step()

        is_over = (
            _interleaved(number, a.api, ask, take_over)
            if of == "node"
            else _interleaved(number, world.controller.client, take_over, ask)
        )
        assert not duplicates((a, b))
        world.settle()
        a.step()
        wish(a, "again")
        wish(b, "again")
        assert not duplicates((a, b))
        given |= {node.name for node in (a, b) if "10.0.0.77" in node.held()}
        if is_over:
            break
    else:
        pytest.fail("the agent asks without end")
    assert number >= 3
    assert given == {"a", "b"}


def _interleaved(
    number: int, client: object, first: Callable[[], None], other: Callable[[], None]
) -> bool:
    """`first`, and before its request of that number `other`. Whether there are fewer requests."""
    count = 0

    def before(verb: str, kind: str, name: str) -> Fault | None:
        nonlocal count
        count += 1
        if count == number + 1:
            other()
        return None

    client.faults = before  # type: ignore[attr-defined]
    first()
    client.faults = None  # type: ignore[attr-defined]
    return count <= number


def test_a_leader_that_dies_after_it_made_a_pool_leaves_nothing_to_lease(world: World) -> None:
    put_ippool(world.server, ENTRIES, per_node_block_size=16)
    a, b = following(world, "a"), world.node("b")
    a.step()

    def dies(verb: str, kind: str, name: str) -> Fault | None:
        return Fault.LOST_REQUEST if (verb, kind) == ("update", "AddressPool") else None

    world.controller.client.faults = dies
    world.controller.round()
    pool = own_pool(world.server)
    assert (pool.spec.exclude, pool.metadata.annotations) == (("10.0.0.0-10.0.0.255",), {})
    world.controller.client.faults = None
    b.step()
    assert wish(b) is None
    world.controller.restart()
    world.settle()
    assert own_pool(world.server).spec.exclude == ("10.0.0.1-10.0.0.20",)  # b has joined
    assert wish(b) == "10.0.0.77/24"


# --- joining ---------------------------------------------------------------------------------


def test_an_import_that_ends_while_the_node_looks_is_in_its_share(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_ippool(world.server, ENTRIES, per_node_block_size=16)
    a = world.node("a")
    daemon_writes(a, "10.0.0.3")
    looked = importing.why_unfinished

    def meanwhile(*where: object) -> str | None:
        import_(a)
        return looked(*where)  # type: ignore[arg-type]

    monkeypatch.setattr(importing, "why_unfinished", meanwhile)
    a.owner.step()
    share = share_of(world, "a")
    assert share is not None
    assert share.spec.ranges == ("10.0.0.3",)


def test_a_node_joins_only_when_no_call_can_go_by_its_former_entry(world: World) -> None:
    put_ippool(world.server, ENTRIES, per_node_block_size=16)
    before = following(world, "a")
    before.step()
    a = owning(world, before)
    a.owner.step()  # its follower has not begun yet
    share = share_of(world, "a")
    assert share is not None
    assert share.spec.ranges == ("10.0.0.1-10.0.0.20",)
    assert before.add("late") == ["10.0.0.1/24"]  # a call that began in mode follow
    a.step()
    a.step()
    with pytest.raises(CNIError):
        before.add("later")
    share = share_of(world, "a")
    assert share is not None
    assert share.spec.ranges == ("10.0.0.1",)


def test_nodes_go_on_leasing_while_others_join(world: World) -> None:
    put_ippool(world.server, ENTRIES, per_node_block_size=16)
    a, b = world.node("a"), world.node("b")
    daemon_writes(a, "10.0.0.3")
    world.settle()
    import_(a)
    b.step()
    a.step()
    before = b.api.calls["get", "AddressPool"]

    def is_closed(verb: str, kind: str, name: str) -> Fault | None:
        return Fault.LOST_REQUEST if (verb, kind) == ("update", "AddressPool") else None

    world.controller.client.faults = is_closed
    world.controller.round()  # the entry of a is gone, and the AddressPool is not changed yet
    b.owner.step()
    assert b.owner.why_not("nv-ipam/ippool/pool") is None
    assert b.api.calls["get", "AddressPool"] == before


def test_a_request_that_fails_is_not_taken_for_an_answer(world: World) -> None:
    put_ippool(world.server, ENTRIES, per_node_block_size=16)
    a = following(world, "a")
    a.step()

    def fails(verb: str, kind: str, name: str) -> Fault | None:
        return Fault.LOST_REQUEST if kind == "AddressPool" else None

    a.api.faults = fails
    assert wish(a) is None
    a.api.faults = None
    a.step()
    assert wish(a) == "10.0.0.77/24"
