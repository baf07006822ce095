"""IPPools of nv-ipam as podfabric's own: nodes lease blocks; none gives what another may hold."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code
from cni.spec.result import Route
from ipam.addresses import parse
from ipam.cluster.api import ApiError
from ipam.cluster.nv_ipam.objects import ExcludedIndexes, ExcludedRun, NvIPPool, PoolRoute
from ipam.cluster.nv_ipam.own_pools import TAKEN_OVER
from ipam.cluster.nv_ipam.selectors import NodeSelector, Requirement, SelectorTerm, selects
from ipam.cluster.objects import (
    AddressBlock,
    AddressCounts,
    AddressPool,
    AddressShare,
    Meta,
    ShareSpec,
)
from ipam.importing import import_all
from ipam.nv_ipam import importing
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.cluster.nodes import Clock
from tests.unit.ipam.cluster.nv_ipam.nodes import NAMESPACE, duplicates, put_ippool
from tests.unit.ipam.cluster.nv_ipam.own import Controller, OwnNode, own_pool
from tests.unit.ipam.nv_ipam.test_importing import checksummed

GATEWAY = {"gateway": "10.0.0.1"}


class World:
    """An API server, the controller, and nodes that own the pools."""

    def __init__(self, directory: Path) -> None:
        self.server = FakeApi()
        self.clock = Clock()
        self.controller = Controller(self.server, self.clock)
        self.directory = directory
        self.nodes: dict[str, OwnNode] = {}

    def node(self, name: str) -> OwnNode:
        self.nodes[name] = OwnNode(self.server, self.directory, name, clock=self.clock)
        return self.nodes[name]

    def settle(self, rounds: int = 3, seconds: float = 5.0) -> None:
        """What controller and agents do in a while."""
        for _ in range(rounds):
            self.controller.round()
            for node in self.nodes.values():
                node.step(seconds)

    def add(self, node: OwnNode, pod: str) -> list[str]:
        """ADD, which asks each second while it waits."""
        for _ in range(10):
            try:
                return node.add(pod)
            except CNIError as error:
                if error.code != Code.TRY_AGAIN:
                    raise
            self.settle(1, 1.0)
        return node.add(pod)


@pytest.fixture
def world(memory_path: Path) -> World:
    return World(memory_path)


def daemon_writes(
    node: OwnNode, *addresses: str, subnet: str = "10.0.0.0/24", pool: str = "pool"
) -> None:
    """nv-ipam's daemon had given these to pods of the node."""
    snapshot = json.dumps({"subnet": subnet})
    entries = {
        f"old{address}_net1": {
            "container_id": f"old{address}",
            "interface_name": "net1",
            "ip_address": address,
            "metadata": {"pod_name": f"old-{address}", "pool_config_snapshot": snapshot},
        }
        for address in addresses
    }
    pools = {pool: {"name": pool, "entries": entries}} if addresses else {}
    node.daemon_store.parent.mkdir(exist_ok=True)
    node.daemon_store.write_bytes(checksummed({"version": 1, "checksum": 0, "pools": pools}))


def import_(node: OwnNode) -> None:
    """As `podfabric ipam import` does."""
    import_all(node.store, importing.reservations(node.daemon_store, node.boot))
    ids: list[str] = []
    node.store.look(lambda tables: ids.append(tables.meta.store))
    importing.mark(node.directory, ids[0], node.daemon_store.read_bytes())


def share_of(world: World, node: str) -> AddressShare | None:
    shares = world.server.look_at_all(AddressShare, {"spec.node": node}).items
    return shares[0] if shares else None


def test_a_node_with_a_full_block_leases_another_until_the_pool_is_full(world: World) -> None:
    put_ippool(world.server, {}, "10.0.0.0/27", per_node_block_size=4, **GATEWAY)
    a = world.node("a")
    world.settle()
    given = [address for number in range(29) for address in a.add(f"p{number}")]
    assert sorted(map(parse, (each.partition("/")[0] for each in given))) == [
        parse("10.0.0.0") + number for number in range(2, 31)
    ]
    assert {each.partition("/")[2] for each in given} == {"27"}
    with pytest.raises(CNIError, match=r"ippool/pool on node a: AddressPool") as caught:
        world.add(a, "p30")
    assert caught.value.code == Code.NO_FREE_ADDRESS


def test_eight_nodes_share_a_pool_that_has_blocks_for_five(world: World) -> None:
    put_ippool(world.server, {}, "10.0.0.0/26", per_node_block_size=12, **GATEWAY)
    nodes = [world.node(f"n{number}") for number in range(8)]
    world.settle()
    assert own_pool(world.server).status.block_size == 8
    for number in range(61):  # all that there is
        world.add(nodes[0 if number > 20 else number % 8], f"p{number}")
    assert not duplicates(nodes)
    assert sum(len(node.held()) for node in nodes) == 61


def test_the_result_is_that_of_mode_follow(world: World) -> None:
    put_ippool(
        world.server,
        {},
        per_node_block_size=16,
        default_gateway=True,
        routes=(PoolRoute("10.9.0.0/16"),),
        **GATEWAY,
    )
    put_ippool(world.server, {}, "fd00::/120", name="six", per_node_block_size=16)
    a = world.node("a")
    world.settle()
    found = a.result("p", {"poolName": "pool,six"})
    four, six = found.ips
    assert (four.gateway, six.gateway) == ("10.0.0.1", None)
    assert (four.address.endswith("/24"), six.address.endswith("/120")) == (True, True)
    assert found.routes == (
        Route(dst="0.0.0.0/0", gw="10.0.0.1"),
        Route(dst="10.9.0.0/16", gw="10.0.0.1"),
    )


def test_requested_addresses_and_the_gateway_are_given_to_one_pod(world: World) -> None:
    put_ippool(world.server, {}, per_node_block_size=16, **GATEWAY)
    a, b = world.node("a"), world.node("b")
    world.settle()
    ask = {"args": {"cni": {"ips": ["10.0.0.77"]}}}
    assert a.add("p", config=ask) == ["10.0.0.77/24"]
    with pytest.raises(CNIError) as caught:
        b.add("q", config=ask)
    assert caught.value.code in (Code.ADDRESS_TAKEN, Code.TRY_AGAIN)
    assert not duplicates((a, b))
    gateway = {"args": {"cni": {"allocateDefaultGateway": True}}}
    (ip,) = a.result("router", config=gateway).ips
    assert (ip.address, ip.gateway) == ("10.0.0.1/24", None)
    with pytest.raises(CNIError, match=r"args\.cni\.ips") as refused:
        a.add("r", config={"args": {"cni": {"allocateIPWithIndex": 3}}})
    assert refused.value.code == Code.INVALID_CONFIG


def test_exclusions_are_those_of_nv_ipam(world: World) -> None:
    put_ippool(
        world.server,
        {},
        "10.0.0.0/28",
        per_node_block_size=5,
        exclusions=(ExcludedRun(start="10.0.0.13", end="10.0.0.20"),),
        per_node_exclusions=(ExcludedIndexes(start_index=0, end_index=1),),
    )
    a = world.node("a")
    world.settle()
    given = {address for number in range(6) for address in a.add(f"p{number}")}
    # Of the runs .1-.5, .6-.10 and .11-.14 the first two are kept out, and .13 and .14.
    assert given == {f"10.0.0.{last}/28" for last in (3, 4, 5, 8, 9, 10)}
    world.settle(8)
    (pool,) = world.server.look_at_all(AddressPool).items
    assert pool.status.addresses == AddressCounts(capacity=6, used=6)
    exhausted = {each.type: each.status for each in pool.status.conditions}["Exhausted"]
    assert exhausted == "True"


def test_only_selected_nodes_get_addresses(world: World) -> None:
    only = NodeSelector(
        node_selector_terms=(
            SelectorTerm(match_expressions=(Requirement("rdma", "In", ("yes",)),)),
        )
    )
    put_ippool(world.server, {}, per_node_block_size=16, node_selector=only)
    a, b = world.node("a"), world.node("b")
    machines = world.server.machines
    machines["a"] = replace(machines["a"], labels={"rdma": "yes"})
    world.settle()
    assert a.add("p")
    with pytest.raises(CNIError, match="nodeSelector selects the node"):
        b.add("q")
    machines["b"] = replace(machines["b"], labels={"rdma": "yes"})
    b.step(400.0)
    assert world.add(b, "q")


@pytest.mark.parametrize(
    ("operator", "values", "selected"),
    [
        ("In", ("1", "5"), True),
        ("In", ("1",), False),
        ("NotIn", ("1",), True),
        ("Exists", (), True),
        ("DoesNotExist", (), False),
        ("Gt", ("4",), True),
        ("Gt", ("5",), False),
        ("Lt", ("6",), True),
        ("Lt", ("x",), False),
        ("Like", ("5",), False),
    ],
)
def test_selectors_are_those_of_kubernetes(
    operator: str, values: tuple[str, ...], selected: bool
) -> None:
    term = SelectorTerm(match_expressions=(Requirement("key", operator, values),))
    selector = NodeSelector(node_selector_terms=(SelectorTerm(), term))
    assert selects(selector, "n", {"key": "5"}) is selected


def test_a_term_without_requirements_selects_no_node_and_a_field_names_one() -> None:
    assert not selects(NodeSelector(node_selector_terms=(SelectorTerm(),)), "n", {})
    named = SelectorTerm(match_fields=(Requirement("metadata.name", "In", ("n",)),))
    assert selects(NodeSelector(node_selector_terms=(named,)), "n", {})
    assert not selects(NodeSelector(node_selector_terms=(named,)), "m", {})
    both = SelectorTerm(match_fields=(Requirement("metadata.name", "In", ("n", "m")),))
    assert not selects(NodeSelector(node_selector_terms=(both,)), "n", {})  # an error in Kubernetes


def test_entries_of_nodes_that_have_not_joined_are_left_alone(world: World) -> None:
    entries = {"a": ("10.0.0.1", "10.0.0.100"), "b": ("10.0.0.101", "10.0.0.200")}
    put_ippool(world.server, entries, per_node_block_size=100)
    a = world.node("a")
    daemon_writes(a, "10.0.0.3")
    world.settle()
    given = {a.add(f"p{number}")[0] for number in range(54)}
    assert given == {f"10.0.0.{last}/24" for last in range(201, 255)}
    with pytest.raises(CNIError) as caught:
        a.add("p")
    assert caught.value.code in (Code.NO_FREE_ADDRESS, Code.TRY_AGAIN)
    # Of its own entry it may hand out all but what its pods have, when these are in its store.
    import_(a)
    world.settle()
    share = share_of(world, "a")
    assert share is not None
    assert share.spec.ranges == ("10.0.0.3",)
    given = {world.add(a, f"q{number}")[0] for number in range(99)}
    assert given == {f"10.0.0.{last}/24" for last in range(1, 101) if last != 3}
    # The old pod's address is free when the pod is gone; that of node b is not.
    a.store.release(importing_attachment("10.0.0.3"))
    world.settle()
    a.step(500.0)  # its blocks are confirmed, by what the pool excludes now
    assert a.add("r") == ["10.0.0.3/24"]


def importing_attachment(address: str) -> Attachment:
    return Attachment(importing.IMPORTED, f"old{address}", "net1")


def test_a_node_without_anything_of_the_daemon_joins_by_itself(world: World) -> None:
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.254")}, per_node_block_size=254)
    a = world.node("a")
    world.settle()
    share = share_of(world, "a")
    assert share is not None
    assert share.spec.ranges == ()
    assert world.add(a, "p")


@pytest.mark.parametrize("spoilt", ["running", "changed", "unseen"])
def test_a_node_does_not_join_while_its_store_may_lack_something(
    world: World, spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.254")}, per_node_block_size=254)
    a = world.node("a")
    daemon_writes(a, "10.0.0.3")
    import_(a)
    if spoilt == "running":

        def answers(path: Path) -> None:
            raise CNIError(Code.TRY_AGAIN, "nv-ipam's daemon answers")

        monkeypatch.setattr(importing, "require_stopped", answers)
    elif spoilt == "changed":
        daemon_writes(a, "10.0.0.3", "10.0.0.4")
    else:
        monkeypatch.setattr(a.owner, "_daemon_store", Path("/nowhere/nv-ipam/store"))
    world.settle()
    assert share_of(world, "a") is None
    with pytest.raises(CNIError):
        a.add("p")


def test_nothing_is_leased_before_the_controller_has_the_entries(world: World) -> None:
    put_ippool(world.server, {}, per_node_block_size=16)
    a = world.node("a")
    a.step()
    with pytest.raises(CNIError, match="there is no AddressPool") as caught:
        a.add("p")
    assert caught.value.code == Code.TRY_AGAIN
    world.settle()
    assert a.add("p")
    # nv-ipam's controller has been back, and has given a node an entry.
    put_ippool(world.server, {"x": ("10.0.0.1", "10.0.0.254")}, per_node_block_size=16)
    a.step()
    for number in range(20):
        try:
            a.add(f"q{number}")
        except CNIError as error:
            assert error.code == Code.TRY_AGAIN
            assert "does not have the allocations" in error.message
            break
    else:
        pytest.fail("it leased another block")
    assert len(world.server.look_at_all(AddressBlock).items) <= 2


def test_an_address_pool_has_what_the_ippool_says_and_keeps_what_others_write(
    world: World,
) -> None:
    put_ippool(world.server, {}, per_node_block_size=50)
    world.controller.round()
    pool = own_pool(world.server)
    assert pool.metadata.name.endswith("-10.0.0.0-24")
    assert (pool.spec.network_name, pool.spec.range) == ("nv-ipam/ippool/pool", "10.0.0.0/24")
    assert (pool.spec.block_size, pool.spec.exclude) == (32, ())
    world.server.put(replace(pool, spec=replace(pool.spec, max_blocks_per_node=2)))
    put_ippool(world.server, {"b": ("10.0.0.1", "10.0.0.9")}, per_node_block_size=9)
    world.controller.round()
    spec = own_pool(world.server).spec
    assert (spec.block_size, spec.exclude) == (8, ("10.0.0.1-10.0.0.9",))
    assert spec.max_blocks_per_node == 2


def test_many_entries_are_excluded_by_few_runs_and_none_is_missed(world: World) -> None:
    entries = {
        f"n{number:03}": (f"10.0.{number}.{number % 7}", f"10.0.{number}.{50 + number % 7}")
        for number in range(200)
    }
    put_ippool(world.server, entries, "10.0.0.0/16", per_node_block_size=51)
    world.controller.round()
    exclude = own_pool(world.server).spec.exclude
    assert len(exclude) <= 64
    runs = [tuple(map(parse, run.split("-"))) for run in exclude]
    for first, last in entries.values():
        assert any(run[0] <= parse(first) and parse(last) <= run[1] for run in runs)


def test_an_invalid_pool_gets_no_address_pool_and_an_event(world: World) -> None:
    put_ippool(world.server, {"a": ("10.1.0.1", "10.1.0.9")}, per_node_block_size=9)
    assert world.controller.round().unusable == 1
    assert [event.reason for event in world.server.events] == ["InvalidPool"]
    assert not world.server.look_at_all(AddressPool).items


def test_a_network_has_pools_of_one_kind(world: World) -> None:
    a = world.node("a")
    world.settle()
    with pytest.raises(CNIError, match="either IPPools or CIDRPools") as caught:
        a.add("p", {"poolName": "pool,cidrpool/routed"})
    assert caught.value.code == Code.INVALID_CONFIG


def test_another_store_of_a_node_does_not_free_what_the_former_one_held(world: World) -> None:
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.20")}, per_node_block_size=20)
    a = world.node("a")
    daemon_writes(a, "10.0.0.3")
    import_(a)
    world.settle()
    for file in a.directory.iterdir():
        if file.is_file():
            file.unlink()
    a.daemon_store.unlink()
    a.restart()
    world.settle()
    assert "10.0.0.3" in own_pool(world.server).spec.exclude


def test_pods_get_addresses_of_leased_blocks_without_the_api_server(world: World) -> None:
    put_ippool(world.server, {}, per_node_block_size=16)
    a = world.node("a")
    world.settle()
    a.add("p")
    world.server.down = True
    a.owner.step()
    assert a.add("q")
    a.delete("p")


@pytest.mark.parametrize("fault", [Fault.LOST_REQUEST, Fault.LOST_ANSWER])
def test_no_fault_at_any_request_lets_a_node_give_what_another_holds(
    memory_path: Path, fault: Fault
) -> None:
    number, is_over = 0, False
    while not is_over:
        is_over = _joins_with_fault(memory_path / str(number), number, fault)
        number += 1
        assert number < 100
    assert number > 10


def _joins_with_fault(directory: Path, number: int, fault: Fault) -> bool:
    """Node a joins and node b leases, with one fault. Then a new agent and a new leader go on.

    Whether there are fewer requests.
    """
    world = World(directory)
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.20")}, "10.0.0.0/27", per_node_block_size=8)
    count = 0

    def faulty(verb: str, kind: str, name: str) -> Fault | None:
        nonlocal count
        if kind not in ("AddressPool", "AddressShare", "IPPool"):
            return None  # what goes wrong with blocks has tests of its own
        count += 1
        return fault if count == number + 1 else None

    world.controller.client.faults = faulty
    a, b = world.node("a"), world.node("b")
    a.api.faults = b.api.faults = faulty
    daemon_writes(a, "10.0.0.3", "10.0.0.9")

    def both(act: Callable[[], object]) -> None:
        try:
            act()
        except (CNIError, ApiError, OSError):  # the process ends
            a.restart()
            b.restart()
            world.controller.restart()
        assert not duplicates((a, b))
        assert not b.held() & {"10.0.0.3", "10.0.0.9"}

    for each in range(4):
        both(world.controller.round)
        both(a.step)
        both(b.step)
        both(lambda each=each: b.add(f"b{each}"))  # type: ignore[misc]
        if each == 1:
            import_(a)
    is_over = count <= number
    world.controller.client.faults = a.api.faults = b.api.faults = None
    world.settle(4)
    for each in range(40):
        try:
            world.add(b, f"c{each}")
        except CNIError as error:
            assert error.code == Code.NO_FREE_ADDRESS
            break
    assert not b.held() & {"10.0.0.3", "10.0.0.9"}
    assert not duplicates((a, b))
    assert len(b.held()) >= 20
    return is_over


def test_the_annotation_is_of_the_entries_and_not_of_their_order(world: World) -> None:
    entries = {"a": ("10.0.0.1", "10.0.0.4"), "b": ("10.0.0.5", "10.0.0.8")}
    pool = put_ippool(world.server, entries, per_node_block_size=4)
    world.controller.round()
    noted = own_pool(world.server).metadata.annotations[TAKEN_OVER]
    turned = tuple(reversed(pool.status.allocations or ()))
    world.server.put(replace(pool, status=replace(pool.status, allocations=turned)))
    world.controller.round()
    assert own_pool(world.server).metadata.annotations[TAKEN_OVER] == noted


def test_the_entry_of_a_node_that_has_joined_ends_with_the_node(world: World) -> None:
    entries = {"a": ("10.0.0.1", "10.0.0.100"), "gone": ("10.0.0.101", "10.0.0.200")}
    put_ippool(world.server, entries, per_node_block_size=100)
    world.node("a")
    b = world.node("b")
    world.settle()
    assert own_pool(world.server).spec.exclude == ("10.0.0.101-10.0.0.200",)
    (share,) = world.server.look_at_all(AddressShare, {"spec.node": "a"}).items
    world.server.remove(AddressShare, share.metadata.name)  # as after a proof of death
    del world.nodes["a"], world.server.machines["a"]
    world.settle()
    assert own_pool(world.server).spec.exclude == ("10.0.0.101-10.0.0.200",)
    (pool,) = world.server.look_at_all(NvIPPool, namespace=NAMESPACE).items
    assert [each.node for each in pool.status.allocations or ()] == ["gone"]
    assert world.add(b, "p")


def test_a_share_that_is_left_of_mode_follow_does_not_stand_for_an_entry(world: World) -> None:
    put_ippool(world.server, {"a": ("10.0.0.1", "10.0.0.100")}, per_node_block_size=100)
    world.server.put(
        AddressShare(
            metadata=Meta(name="left"),
            spec=ShareSpec(pool="ippool/pool", node="a", ranges=("10.0.0.201-10.0.0.210",)),
        )
    )
    a = world.node("a")
    daemon_writes(a, "10.0.0.3")
    world.settle()
    assert own_pool(world.server).spec.exclude == (
        "10.0.0.1-10.0.0.100",
        "10.0.0.201-10.0.0.210",
    )
