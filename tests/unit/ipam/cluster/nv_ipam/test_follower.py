"""A node follows nv-ipam's pools: what pods get, and what happens when entries move."""

from pathlib import Path

import pytest

from cni.spec.errors import CNIError, Code
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.cluster.nv_ipam.nodes import (
    Cutter,
    FollowingNode,
    duplicates,
    put_cidrpool,
    put_ippool,
    share_of,
)

ENTRY = {"a": ("10.0.0.1", "10.0.0.10"), "b": ("10.0.0.11", "10.0.0.20")}


@pytest.fixture
def server() -> FakeApi:
    return FakeApi()


@pytest.fixture
def a(server: FakeApi, memory_path: Path) -> FollowingNode:
    return FollowingNode(server, memory_path, "a")


@pytest.fixture
def b(server: FakeApi, memory_path: Path) -> FollowingNode:
    return FollowingNode(server, memory_path, "b")


def code_of(node: FollowingNode, pod: str = "p", **ipam: object) -> tuple[int, str]:
    with pytest.raises(CNIError) as caught:
        node.add(pod, ipam)
    return caught.value.code, caught.value.message


def test_a_pod_gets_the_lowest_address_of_the_nodes_entry_with_gateway_and_routes(
    server: FakeApi, a: FollowingNode
) -> None:
    from ipam.cluster.nv_ipam.objects import ExcludedIndexes, ExcludedRun, PoolRoute

    put_ippool(
        server,
        ENTRY,
        gateway="10.0.0.1",
        exclusions=(ExcludedRun(start="10.0.0.3", end="10.0.0.4"),),
        per_node_exclusions=(ExcludedIndexes(start_index=4, end_index=5),),
        default_gateway=True,
        routes=(PoolRoute(dst="10.9.0.0/16"), PoolRoute(dst="10.1.0.0/16")),
    )
    a.step()
    result = a.result("p0")
    assert [(ip.address, ip.gateway) for ip in result.ips] == [("10.0.0.2/24", "10.0.0.1")]
    assert [(route.dst, route.gw) for route in result.routes] == [
        ("0.0.0.0/0", "10.0.0.1"),
        ("10.1.0.0/16", "10.0.0.1"),
        ("10.9.0.0/16", "10.0.0.1"),
    ]
    assert a.add("p1") == ["10.0.0.7/24"]


def test_a_cidr_pool_gives_a_routed_prefix_and_counts_indexes_from_its_network_address(
    server: FakeApi, a: FollowingNode
) -> None:
    from ipam.cluster.nv_ipam.objects import ExcludedIndexes

    put_cidrpool(
        server,
        {"a": ("10.8.0.8/29", "10.8.0.9"), "b": ("10.8.0.16/29", "10.8.0.17")},
        per_node_exclusions=(ExcludedIndexes(start_index=2, end_index=2),),
    )
    a.step()
    ipam = {"poolName": "routed", "poolType": "CIDRPool"}
    result = a.result("p0", ipam)
    assert [(ip.address, ip.gateway) for ip in result.ips] == [("10.8.0.11/29", "10.8.0.9")]
    assert result.routes == ()
    given = [a.add(f"p{number}", ipam)[0] for number in range(1, 4)]
    assert given == ["10.8.0.12/29", "10.8.0.13/29", "10.8.0.14/29"]
    code, message = code_of(a, "p9", **ipam)
    assert code == Code.NO_FREE_ADDRESS
    assert "cidrpool/routed: node a has 10.8.0.9 to 10.8.0.14" in message
    assert "1 other nodes have 6 addresses" in message


def test_two_pools_give_an_address_each_in_the_order_of_the_definition(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    put_ippool(server, {"a": ("fd00::1", "fd00::9")}, "fd00::/64", "six", gateway="fd00::ff")
    a.step()
    result = a.result("p0", {"poolName": "six , pool"})
    assert [(ip.address, ip.gateway) for ip in result.ips] == [
        ("fd00::1/64", "fd00::ff"),
        ("10.0.0.1/24", None),
    ]


def test_an_add_needs_no_api_server_after_a_restart_of_the_agent(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    a.add("p0")
    server.down = True
    for number in range(1, 6):
        a.restart()
        a.step()
        assert a.add(f"p{number}") == [f"10.0.0.{number + 1}/24"]
        a.delete(f"p{number - 1}")
        a.add(f"p{number - 1}")
    assert len(a.held()) == 6


def test_a_pool_without_an_entry_and_an_unknown_pool_are_told_apart(
    server: FakeApi, a: FollowingNode
) -> None:
    code, message = code_of(a)
    assert (code, "has not read nv-ipam's pools yet" in message) == (Code.TRY_AGAIN, True)
    put_ippool(server, {"b": ENTRY["b"]})
    a.step()
    code, message = code_of(a)
    assert (code, "gives this node no addresses of ippool/pool" in message) == (11, True)
    code, message = code_of(a, poolName="other")
    assert (code, "has no pool ippool/other" in message) == (11, True)


def test_an_entry_that_moves_to_another_node_gives_no_address_twice(
    server: FakeApi, a: FollowingNode, b: FollowingNode
) -> None:
    put_ippool(server, {"a": ENTRY["a"]})
    a.step()
    assert a.add("p0") == ["10.0.0.1/24"]
    put_ippool(server, {"b": ENTRY["a"]})
    b.step()
    # a has not seen that yet: all of it may be in use there
    code, _ = code_of(b)
    assert code == Code.NO_FREE_ADDRESS
    assert a.add("p1") == ["10.0.0.2/24"]
    a.step()
    code, message = code_of(a)
    assert (code, "no addresses of ippool/pool" in message) == (Code.TRY_AGAIN, True)
    b.step()
    assert b.add("q0") == ["10.0.0.3/24"]
    assert not duplicates((a, b))
    # each side says so
    (outside,) = (each for each in share_of(server, "a").status.conditions if each.status == "True")
    assert outside.type == "Outside"
    assert "10.0.0.1, 10.0.0.2" in outside.message
    assert "node b" in outside.message
    (blocked,) = (each for each in share_of(server, "b").status.conditions if each.status == "True")
    assert (blocked.type, "are in use on node a" in blocked.message) == ("Blocked", True)
    assert a.follower.states["ippool/pool"].outside == 2
    assert b.follower.states["ippool/pool"].blocked == 2
    reasons = {event.reason for event in server.events}
    assert {"AddressesOutside", "AddressesBlocked", "AddressOutsideOfEntry"} <= reasons
    # and the addresses come back
    a.delete("p0")
    a.delete("p1")
    a.step()
    assert share_of(server, "a") is None
    b.step()
    assert b.add("q1") == ["10.0.0.1/24"]
    assert b.follower.states["ippool/pool"].is_plain


def test_a_pod_that_comes_back_keeps_its_address_in_its_entry_only(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    a.add("p0")
    assert a.add("p1", uid="u1") == ["10.0.0.2/24"]
    assert a.add("p1", container="p1-2", uid="u1") == ["10.0.0.2/24"]


def test_requested_addresses_are_given_where_no_other_node_has_them(
    server: FakeApi, a: FollowingNode, b: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    b.step()
    ask = {"args": {"cni": {"ips": ["10.0.0.200"]}}}
    assert a.add("p0", config=ask) == ["10.0.0.200/24"]
    with pytest.raises(CNIError, match="in use on node a") as caught:
        b.add("q0", config=ask)
    assert caught.value.code == Code.ADDRESS_TAKEN
    with pytest.raises(CNIError, match="node b, whose entry has it"):
        a.add("p1", config={"runtimeConfig": {"ips": ["10.0.0.12/24"]}})
    assert a.add("p1", args="IP=10.0.0.9") == ["10.0.0.9/24"]
    assert a.add("p2") == ["10.0.0.1/24"]
    a.delete("p0")
    a.step(100.0)
    b.step()
    assert b.add("q0", config=ask) == ["10.0.0.200/24"]
    assert a.follower.states["ippool/pool"].is_plain


def test_a_requested_address_needs_the_agent_and_its_api_server(
    server: FakeApi, a: FollowingNode
) -> None:
    put_ippool(server, ENTRY)
    a.step()
    ask = {"args": {"cni": {"ips": ["10.0.0.200"]}}}
    server.down = True
    with pytest.raises(CNIError, match="API server is away"):
        a.add("p0", config=ask)
    server.down = False
    a.restart(follows=False)
    with pytest.raises(CNIError, match="only podfabric's agent can ask for it"):
        a.add("p0", config=ask)


def test_one_pod_is_the_gateway_of_an_ip_pool(
    server: FakeApi, a: FollowingNode, b: FollowingNode
) -> None:
    put_ippool(server, ENTRY, gateway="10.0.0.12", default_gateway=True)
    a.step()
    b.step()
    ask = {"args": {"cni": {"allocateDefaultGateway": True}}}
    result = a.result("router", config=ask)
    assert [(ip.address, ip.gateway) for ip in result.ips] == [("10.0.0.12/24", None)]
    assert result.routes == ()
    with pytest.raises(CNIError, match="in use on node a"):
        b.add("router", config=ask)
    assert b.add("q0") == ["10.0.0.11/24"]
    assert b.add("q1") == ["10.0.0.13/24"]


def test_an_index_counts_from_the_first_address_and_passes_over_exclusions(
    server: FakeApi, a: FollowingNode
) -> None:
    from ipam.cluster.nv_ipam.objects import ExcludedIndexes

    put_ippool(
        server,
        ENTRY,
        gateway="10.0.0.3",
        per_node_exclusions=(ExcludedIndexes(start_index=0, end_index=5),),
    )
    a.step()
    ask = {"args": {"cni": {"allocateIPWithIndex": 1}}}
    result = a.result("p0", config=ask)
    assert [(ip.address, ip.gateway) for ip in result.ips] == [("10.0.0.2/24", "10.0.0.3")]
    with pytest.raises(CNIError, match="in use by another attachment"):
        a.add("p1", config=ask)
    with pytest.raises(CNIError, match="the highest index is 9"):
        a.add("p1", config={"args": {"cni": {"allocateIPWithIndex": 10}}})
    with pytest.raises(CNIError, match="is the gateway"):
        a.add("p1", config={"args": {"cni": {"allocateIPWithIndex": 2}}})


def test_nothing_is_handed_out_before_the_share_is_written_and_the_others_were_read(
    server: FakeApi, memory_path: Path
) -> None:
    put_ippool(server, ENTRY)
    asked: list[str] = []
    failed: list[str] = []

    def faults(verb: str, kind: str, name: str) -> Fault | None:
        request = f"{verb} {kind} {len(asked)}"  # the number tells the two LISTs apart
        asked.append(request)
        if request in failed:
            return None
        failed.append(request)
        return Fault.LOST_ANSWER

    node = FollowingNode(server, memory_path, "a", faults=faults)
    for _ in range(4):
        asked.clear()
        assert node.step(100.0) < 100.0
        assert code_of(node)[0] in (Code.NO_FREE_ADDRESS, Code.TRY_AGAIN)
    assert failed == [
        "get Node 0",
        "list AddressShare 1",
        "create AddressShare 2",
        "get AddressShare 0",
    ]
    for _ in range(9):
        asked.clear()
        node.step(100.0)
    assert "list AddressShare 2" in failed
    assert node.add("p0") == ["10.0.0.1/24"]


def test_an_add_during_a_call_to_the_api_server_gets_nothing_that_was_lost(
    server: FakeApi, memory_path: Path
) -> None:
    """ADDs run beside the follower: here in the middle of each of its calls."""
    number = 0

    def faults(verb: str, kind: str, name: str) -> None:
        nonlocal number
        if kind == "AddressShare":
            number += 1
            for node in nodes:
                try:
                    node.add(f"p{number}-{node.name}")
                except CNIError as error:
                    assert error.code in (Code.NO_FREE_ADDRESS, Code.TRY_AGAIN)
            assert not duplicates(nodes)

    nodes = [FollowingNode(server, memory_path, name, faults=faults) for name in "ab"]
    for round_ in range(8):
        owner = nodes[round_ // 2 % 2]
        put_ippool(server, {owner.name: ENTRY["a"]})
        for node in (owner, *nodes):
            node.step()
        for held in nodes[round_ % 2].store.reservations()[::2]:
            nodes[round_ % 2].delete(held.pod)
        assert not duplicates(nodes)
    assert number > 20


CHURN = ("node deleted", "label lost and back", "block size", "typo", "all at once")


@pytest.mark.parametrize("what", CHURN)
def test_no_churn_of_nodes_and_pools_gives_an_address_twice(
    server: FakeApi, memory_path: Path, what: str
) -> None:
    names = [f"n{index}" for index in range(1, 9)]
    cutter = Cutter(server, 4)
    cutter.nodes = set(names)
    cutter.cut()
    nodes = {name: FollowingNode(server, memory_path, name) for name in (*names, "aa")}
    number = 0

    def work(order: list[str]) -> None:
        """Each node looks and takes what it can, at most three pods."""
        nonlocal number
        for name in order:
            nodes[name].step()
            for _ in range(3):
                number += 1
                try:
                    nodes[name].add(f"p{number}")
                except CNIError as error:
                    assert error.code in (Code.NO_FREE_ADDRESS, Code.TRY_AGAIN), error
        assert not duplicates(nodes.values())

    work(names)
    for round_ in range(3):
        if what in ("node deleted", "label lost and back", "all at once"):
            cutter.nodes = {"aa", *names} - {f"n{round_ + 1}"}
            cutter.cut()
        if what in ("block size", "all at once"):
            cutter.size = (2, 8, 4)[round_]
            cutter.cut()
        if what in ("typo", "all at once"):
            cutter.valid = False
            cutter.cut()
            work(["n3", "n1"])
            cutter.valid = True
            cutter.nodes.add("aa")
            cutter.cut()
        # Some have seen the change and some have not.
        work(["aa", *names[::2]])
        if what == "label lost and back":
            cutter.nodes |= set(names)
            cutter.cut()
        work([*names[::-1], "aa"])
    assert any(node.follower.states["ippool/pool"].outside for node in nodes.values())
    # Once the pods have gone, all is as the pool says.
    for node in nodes.values():
        for held in node.store.reservations():
            node.delete(held.pod)
    for _ in range(2):
        for node in nodes.values():
            node.step()
    for name in cutter.entries:
        assert nodes[name].follower.states["ippool/pool"].is_plain, name
        nodes[name].add("last")


@pytest.mark.parametrize("verb", ["get", "create", "update", "update_status", "delete", "list"])
@pytest.mark.parametrize("fault", list(Fault))
def test_no_fault_of_the_api_server_gives_an_address_twice(
    server: FakeApi, memory_path: Path, verb: str, fault: Fault
) -> None:
    """Entries move while every third call of a verb fails in one of the ways."""
    calls = 0

    def faults(asked: str, kind: str, name: str) -> Fault | None:
        nonlocal calls
        if (asked, kind) != (verb, "AddressShare"):
            return None
        calls += 1
        return fault if calls % 3 == 1 else None

    nodes = [FollowingNode(server, memory_path, name, faults=faults) for name in ("a", "b", "c")]
    entry = ENTRY["a"]
    for round_ in range(9):
        owner = nodes[round_ % 3]
        put_ippool(server, {owner.name: entry})
        for node in (nodes[(round_ + 1) % 3], owner, nodes[(round_ + 2) % 3]) * 2:
            node.step()
            if round_ % 2:
                node.restart()
            try:
                node.add(f"p{round_}-{node.name}")
            except CNIError as error:
                assert error.code in (Code.NO_FREE_ADDRESS, Code.TRY_AGAIN, Code.ALREADY_ATTACHED)
        server.deliver()
        assert not duplicates(nodes)
        if round_ == 4:
            nodes[0].delete(f"p{round_}-a")


def test_a_kill_between_any_two_steps_of_the_follower_gives_no_address_twice(
    server: FakeApi, memory_path: Path
) -> None:
    """The agent dies at each call to the API server in turn, before or after its effect."""

    class Killed(BaseException):
        pass

    for at in range(1, 40):
        die_at, seen = at, 0

        def faults(verb: str, kind: str, name: str) -> Fault | None:
            nonlocal seen
            seen += 1
            if seen == die_at:  # noqa: B023 - called within the turn
                raise Killed
            return None

        cluster = FakeApi()
        put_ippool(cluster, {"a": ENTRY["a"]})
        a = FollowingNode(cluster, memory_path / str(at), "a", faults=faults)
        b = FollowingNode(cluster, memory_path / str(at), "b")
        for round_ in range(6):
            owner = "ab"[round_ // 2 % 2]
            put_ippool(cluster, {owner: ENTRY["a"]})
            for node in (a, b):
                try:
                    node.step()
                    node.add(f"p{round_}")
                except Killed:
                    node.restart()
                except CNIError as error:
                    assert error.code in (Code.NO_FREE_ADDRESS, Code.TRY_AGAIN)
            assert not duplicates((a, b)), at
