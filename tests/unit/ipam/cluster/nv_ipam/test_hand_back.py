"""Back from mode own to nv-ipam's own daemon, without a drain: it gives nothing that we gave."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from base.files import write_atomically
from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse, text
from ipam.cluster.api import ApiError
from ipam.cluster.nv_ipam.hand_back import NotPossible, hand_back, revoke
from ipam.cluster.nv_ipam.objects import NvIPPool, NvIPPoolStatus
from ipam.cluster.nv_ipam.own_pools import HANDED_BACK
from ipam.cluster.nv_ipam.selectors import NodeSelector, Requirement, SelectorTerm
from ipam.cluster.objects import AddressBlock, AddressPool, AddressShare
from ipam.nv_ipam import exporting, importing
from ipam.nv_ipam.exporting import export, forget_freed, reopen
from tests.fake_api import Fault
from tests.unit.ipam.cluster.nv_ipam.nodes import (
    NAMESPACE,
    duplicates,
    put_cidrpool,
    put_ippool,
)
from tests.unit.ipam.cluster.nv_ipam.own import OwnNode, own_pool
from tests.unit.ipam.cluster.nv_ipam.test_own import World, daemon_writes, import_, share_of
from tests.unit.ipam.cluster.nv_ipam.test_takeover import _interleaved as interleaved

SUBNET = "10.0.0.0/26"
OLD = "10.0.0.3"  # what nv-ipam's daemon gave to a pod that runs all the time


class Daemon:
    """nv-ipam's daemon with the store that it had: it gives each address of the node's entry that
    this store has not."""

    def __init__(self, world: World, node: str, known: Sequence[str] = (OLD,)) -> None:
        self.world = world
        self.node = node
        self.known = set(known)

    def entry(self) -> Interval | None:
        """As its watch of the IPPool shows it."""
        (pool,) = self.world.server.look_at_all(NvIPPool, namespace=NAMESPACE).items
        return next((each.interval for each in pool.entries(self.node)), None)

    def gives(self) -> set[str]:
        """All that it would give, one after the other."""
        entry = self.entry()
        if entry is None:
            return set()
        return {text(each) for each in range(entry.first, entry.last + 1)} - self.known


def moved_over(directory: Path, subnet: str = SUBNET) -> World:
    """Node a was nv-ipam's, and joined; node b is podfabric's. Both have pods."""
    world = World(directory)
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.8")}, subnet, per_node_block_size=8)
    a, b = world.node("a"), world.node("b")
    daemon_writes(a, OLD, subnet=subnet)
    import_(a)
    world.settle()
    for number in range(3):
        world.add(a, f"p{number}")
        world.add(b, f"q{number}")
    return world


@pytest.fixture
def world(memory_path: Path) -> World:
    return moved_over(memory_path)


def say(world: World, node: str = "a", *, leave_cidrpools: bool = False) -> list[str]:
    """`podfabric ipam hand-back`."""
    client = world.controller.client
    return list(hand_back(client, NAMESPACE, node, leave_cidrpools=leave_cidrpools))


def check(world: World, daemon: Daemon) -> None:
    """No address that the daemon could give is one of podfabric's pods, wherever they are."""
    assert not duplicates(world.nodes.values())
    held = {address for node in world.nodes.values() for address in node.held()}
    assert not daemon.gives() & held


def fills(world: World, node: OwnNode, pod: str) -> int:
    """ADDs until there is no address; how many there were."""
    for number in range(64):
        try:
            world.add(node, f"{pod}{number}")
        except CNIError as error:
            assert error.code in (Code.NO_FREE_ADDRESS, Code.TRY_AGAIN), error
            return number
    return 64


def test_the_daemon_gives_nothing_that_podfabric_gave_and_keeps_its_entry(world: World) -> None:
    a, b = world.nodes["a"], world.nodes["b"]
    daemon = Daemon(world, "a")
    assert daemon.entry() is None
    store = a.daemon_store.read_bytes()
    before = world.server.look_at_all(AddressBlock).items
    held = a.held() | b.held()
    (line,) = say(world)
    assert world.server.look_at_all(AddressBlock).items == before
    assert len(daemon.gives()) == 8
    assert line.startswith("ippool/pool: a has 10.0.0.")
    check(world, daemon)
    assert a.held() | b.held() == held
    assert a.daemon_store.read_bytes() == store
    # Time goes on, and the rest of the pool is given: by the agent of node a, too.
    entry = daemon.entry()
    world.settle()
    a.step(500.0)
    b.step(500.0)
    assert fills(world, b, "more") + fills(world, a, "also") > 20
    check(world, daemon)
    assert daemon.entry() == entry
    assert OLD in own_pool(world.server).spec.exclude


def test_the_entry_stays_while_the_daemon_is_away_or_has_given_nothing(world: World) -> None:
    """Its store is as it was imported: so a node that was not handed back would join."""
    say(world)
    entry = Daemon(world, "a").entry()
    for _ in range(3):
        world.controller.restart()
        world.settle(1, 400.0)
    assert Daemon(world, "a").entry() == entry
    world.nodes["a"].restart()
    world.settle(3, 400.0)
    assert Daemon(world, "a").entry() == entry


def test_it_may_be_said_again_and_moving_over_again_needs_an_import(world: World) -> None:
    a = world.nodes["a"]
    said = say(world)
    assert say(world) == said
    given = sorted(Daemon(world, "a").gives(), key=parse)[0]
    daemon_writes(a, OLD, given, subnet=SUBNET)  # a pod of the daemon's, which goes on running
    world.settle(2, 400.0)
    (line,) = revoke(world.controller.client, NAMESPACE, "a")
    assert "joins when its store has" in line
    assert not list(revoke(world.controller.client, NAMESPACE, "a"))
    world.settle(3, 400.0)
    assert Daemon(world, "a").entry() is not None
    import_(a)
    world.settle(3, 400.0)
    assert Daemon(world, "a").entry() is None
    share = share_of(world, "a")
    assert share is not None
    assert given in share.spec.ranges
    fills(world, world.nodes["b"], "more")
    assert not duplicates(world.nodes.values())


def test_a_node_whose_entry_somebody_removed_gets_another(world: World) -> None:
    say(world)
    (pool,) = world.server.look_at_all(NvIPPool, namespace=NAMESPACE).items
    world.server.put(replace(pool, status=NvIPPoolStatus()))
    (line,) = say(world)
    daemon = Daemon(world, "a")
    assert len(daemon.gives()) == 8, line
    check(world, daemon)
    assert own_pool(world.server).metadata.annotations[HANDED_BACK] == "a"


def test_an_entry_has_no_address_of_another_pool(memory_path: Path) -> None:
    """Younger pools overlap, one of them wholly: there nv-ipam would give addresses twice."""
    world = moved_over(memory_path)
    put_ippool(world.server, {}, "10.0.0.0/25", "wide", per_node_block_size=8)
    put_ippool(world.server, {}, "10.0.0.0/27", "within", per_node_block_size=8)
    world.settle()
    lines = say(world)
    assert "ippool/within: all of its addresses are also of older pools, which have them" in lines
    pools = world.server.look_at_all(NvIPPool, namespace=NAMESPACE).items
    found = {pool.metadata.name: list(pool.entries("a")) for pool in pools}
    (entry,) = found["wide"]
    assert entry.interval.first > parse("10.0.0.63")
    assert (len(found["pool"]), found["within"]) == (1, [])


def test_every_node_can_go_back_and_each_entry_is_its_own(world: World) -> None:
    said = [line for node in ("a", "b") for line in say(world, node)]
    assert len(said) == 2
    daemons = [Daemon(world, node) for node in ("a", "b")]
    assert not daemons[0].gives() & daemons[1].gives()
    for daemon in daemons:
        assert len(daemon.gives()) == 8
        check(world, daemon)
    (pool,) = world.server.look_at_all(NvIPPool, namespace=NAMESPACE).items
    first = parse("10.0.0.1")
    assert all((each.interval.first - first) % 8 == 0 for each in pool.entries())


def test_a_full_pool_is_refused_and_nothing_is_promised(world: World) -> None:
    fills(world, world.nodes["b"], "more")
    with pytest.raises(NotPossible, match=r"no run of 8 addresses .* drain nodes"):
        say(world)
    world.settle()
    assert Daemon(world, "a").entry() is None


def test_what_cannot_be_safe_is_refused(world: World) -> None:
    with pytest.raises(NotPossible, match="there is no Node nowhere"):
        say(world, "nowhere")
    put_cidrpool(world.server, {}, "10.8.0.0/28", per_node_network_prefix=30)
    world.settle()
    with pytest.raises(NotPossible, match=r"prefix of cidrpool/routed.*--leave-cidrpools"):
        say(world)
    assert Daemon(world, "a").entry() is None
    assert say(world, leave_cidrpools=True)
    assert Daemon(world, "a").entry() is not None


def test_a_node_that_has_not_joined_keeps_its_entry(memory_path: Path) -> None:
    world = World(memory_path)
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.8")}, SUBNET, per_node_block_size=8)
    a = world.node("a")
    daemon_writes(a, OLD, subnet=SUBNET)
    with pytest.raises(NotPossible, match="there is no AddressPool"):
        say(world)
    world.settle()
    (line,) = say(world)
    assert "has not joined" in line
    assert Daemon(world, "a").entry() == Interval(parse("10.0.0.1"), parse("10.0.0.8"))
    import_(a)
    a.step()  # its share says that it has joined, and the controller has not seen that
    with pytest.raises(NotPossible, match="has just joined"):
        say(world)


def test_only_pools_that_select_the_node_have_an_entry_for_it(world: World) -> None:
    only = NodeSelector(
        node_selector_terms=(SelectorTerm(match_expressions=(Requirement("x", "Exists", ()),)),)
    )
    put_ippool(world.server, {}, "10.1.0.0/24", "other", per_node_block_size=8, node_selector=only)
    world.settle()
    lines = say(world)
    assert any("does not select a" in line for line in lines)
    pools = world.server.look_at_all(NvIPPool, namespace=NAMESPACE).items
    assert [len(pool.status.allocations or ()) for pool in pools] == [0, 1]


@pytest.mark.parametrize("of", ["command", "controller", "node"])
def test_at_each_request_the_others_may_do_all_of_their_work(memory_path: Path, of: str) -> None:
    """The other node leases all that it can between two requests of the command; the command is
    said between two requests of the controller's, which removes the entries of joined nodes, and of
    the other node's claims."""
    pods = 0
    for number in range(100):
        world = moved_over(memory_path / str(number), "10.0.0.0/25")
        b, daemon = world.nodes["b"], Daemon(world, "a")
        said: list[str] = []

        def command(world: World = world, said: list[str] = said) -> None:
            client = world.server.client("operator")
            try:
                said.extend(hand_back(client, NAMESPACE, "a"))
            except (NotPossible, ApiError):
                return

        def work(world: World = world, b: OwnNode = b) -> None:
            nonlocal pods
            world.settle(1)
            for _ in range(40):
                pods += 1
                try:
                    b.add(f"more{pods}")
                except CNIError:
                    b.step(1.0)

        if of == "command":
            client = world.server.client("operator")

            def commanded(client: object = client, said: list[str] = said) -> None:
                said.extend(hand_back(client, NAMESPACE, "a"))  # type: ignore[arg-type]

            is_over = interleaved(number, client, commanded, work)
        elif of == "controller":
            world.server.put(with_label(own_pool(world.server), number))
            is_over = interleaved(number, world.controller.client, work, command)
        else:
            is_over = interleaved(number, b.api, work, command)
        if not said:
            say(world)
        assert daemon.entry() is not None
        check(world, daemon)
        world.settle(2, 500.0)
        work()
        check(world, daemon)
        if is_over:
            break
    else:
        pytest.fail("it asks without end")
    assert number >= 4


def with_label(pool: AddressPool, number: int) -> AddressPool:
    """The pool as somebody else has just changed it."""
    pool.metadata.labels[f"n{number}"] = "x"
    return pool


@pytest.mark.parametrize("fault", list(Fault))
def test_a_command_that_fails_at_any_request_goes_on_when_it_is_said_again(
    memory_path: Path, fault: Fault
) -> None:
    for at in range(1, 60):
        world = moved_over(memory_path / str(at), "10.0.0.0/25")
        b, daemon = world.nodes["b"], Daemon(world, "a")
        client = world.server.client("operator")
        count = 0

        def faults(verb: str, kind: str, name: str) -> Fault | None:
            nonlocal count
            count += 1
            return fault if count == at else None  # noqa: B023 - called in this turn

        client.faults = faults
        done = True
        try:
            list(hand_back(client, NAMESPACE, "a"))
        except ApiError:
            done = False
        world.settle(2)
        fills_some(world, b)
        if not done:
            say(world)
        world.server.deliver()
        world.settle(1, 500.0)
        assert daemon.entry() is not None
        fills_some(world, b)
        check(world, daemon)
        if count < at:
            break
    else:
        pytest.fail("it asks without end")
    assert at > 8


def fills_some(world: World, node: OwnNode) -> None:
    has = len(node.held())
    for number in range(has, has + 20):
        world.add(node, f"some{number}")


def test_a_share_that_its_node_writes_meanwhile_does_not_end_the_entry(world: World) -> None:
    """A pod of the daemon's ends: the node writes its share, with the word that it has joined."""
    say(world)
    a = world.nodes["a"]
    entry = Daemon(world, "a").entry()
    (held,) = [each for each in a.store.reservations() if each.network == importing.IMPORTED]
    a.store.forget(held)
    world.settle(4, 400.0)
    assert Daemon(world, "a").entry() == entry
    assert own_pool(world.server).metadata.annotations[HANDED_BACK] == "a"
    assert len(world.server.look_at_all(AddressShare).items) == 1


# --- prefixes of CIDRPools -------------------------------------------------------------------

ROUTED: dict[str, object] = {"poolName": "routed", "poolType": "cidrpool"}


def routed(directory: Path) -> tuple[World, OwnNode]:
    """A node with pods of its prefix."""
    world = World(directory)
    put_cidrpool(world.server, {}, "10.8.0.0/28", per_node_network_prefix=29)
    a = world.node("a")
    world.settle()
    for number in range(3):
        a.add(f"p{number}", ROUTED)
    return world, a


def test_a_node_whose_daemon_was_given_what_pods_hold_needs_no_word_on_cidrpools(
    memory_path: Path,
) -> None:
    world, a = routed(memory_path)
    with pytest.raises(NotPossible, match=r"prefix of cidrpool/routed.*podfabric ipam export"):
        say(world)
    export(a.store, a.daemon_store)
    with pytest.raises(CNIError, match="given back to nv-ipam's daemon") as caught:
        a.add("more", ROUTED)
    assert caught.value.code == Code.TRY_AGAIN
    a.step()
    (line,) = say(world)
    assert "cidrpool/routed: a keeps its prefix" in line
    world.settle()
    assert share_of(world, "a") is not None  # no other node gets the prefix
    # And to podfabric once more.
    import_(a)
    reopen(a.directory)
    world.settle()
    assert a.add("more", ROUTED)
    with pytest.raises(NotPossible, match="podfabric ipam export"):
        say(world)


def test_an_export_that_was_killed_is_no_word_on_cidrpools(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, a = routed(memory_path)

    def fails(*arguments: object) -> None:
        raise OSError(28, "No space left on device", "store")

    monkeypatch.setattr(importing, "mark", fails)
    with pytest.raises(OSError, match="No space"):
        export(a.store, a.daemon_store)
    world.settle()
    with pytest.raises(NotPossible, match="podfabric ipam export"):
        say(world)
    monkeypatch.undo()
    export(a.store, a.daemon_store)
    world.settle()
    assert say(world)


def test_nothing_is_forgotten_that_the_daemon_was_not_given(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command died before it wrote the daemon's store, which has not changed since."""
    _, a = routed(memory_path)
    daemon_writes(a)
    content = a.daemon_store.read_bytes()

    def fails(path: Path, *arguments: object) -> None:
        if path == a.daemon_store:
            raise OSError(28, "No space left on device", str(path))
        write_atomically(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(exporting, "write_atomically", fails)
    with pytest.raises(OSError, match="No space"):
        export(a.store, a.daemon_store)
    assert a.daemon_store.read_bytes() == content
    with pytest.raises(CNIError, match="given back"):
        a.add("more", ROUTED)
    assert not forget_freed(a.store, a.daemon_store, content)
    assert len(a.held()) == 3
