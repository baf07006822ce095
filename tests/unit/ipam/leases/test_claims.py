"""An ADD that needs a block: who gets it, and what a lost answer or a lost race leaves."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import Code
from ipam.addresses import parse, text
from ipam.leases.objects import AddressBlock, AddressPool, ReclaimSpec
from ipam.plugin import AddressPlugin
from ipam.store_choice import Stores
from policy import rules
from tests.fake_api import FakeApi, Fault
from tests.unit.ipam.calls import error_of, request
from tests.unit.ipam.leases.audit import audit
from tests.unit.ipam.leases.nodes import (
    RANGE,
    ClusterNode,
    alias,
    blocks_of,
    put_map,
    put_pool,
)


def test_the_fullest_block_is_first_and_in_it_the_lowest_address(node: ClusterNode) -> None:
    pods = [f"p{number}" for number in range(20)]
    addresses = {pod: node.add(pod)[0] for pod in pods}
    blocks = {pod: int(address.rpartition(".")[2]) // 16 for pod, address in addresses.items()}
    full = blocks["p0"]
    node.delete("p1")
    assert node.add("new")[0] == addresses["p1"]
    assert blocks["p19"] != full


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.LOST_REQUEST])
@pytest.mark.parametrize("times", [1, 2])
def test_a_claim_whose_answer_is_lost_is_looked_up(
    server: FakeApi, node: ClusterNode, fault: Fault, times: int
) -> None:
    lost = times

    def faults(verb: str, kind: str, name: str) -> Fault | None:
        nonlocal lost
        if (verb, kind) == ("create", "AddressBlock") and lost:
            lost -= 1
            return fault
        return None

    node.api.faults = faults
    node.add("p0")
    assert blocks_of(server) == list(node.rows())


def test_a_claim_that_lands_late_is_found_by_the_next_confirmation(
    server: FakeApi, node: ClusterNode
) -> None:
    node.api.faults = lambda verb, kind, name: Fault.LATE if verb == "create" else None
    assert error_of(lambda: node.add("p0")).code == Code.TRY_AGAIN
    assert node.rows() == {}
    server.deliver()
    node.api.faults = None
    assert len(blocks_of(server)) >= 1
    node.clock.now += 500
    node.lessee.step()
    assert sorted(node.rows()) == sorted(blocks_of(server))
    node.add("p0")
    assert sorted(node.rows()) == sorted(blocks_of(server))


def test_a_delete_that_is_late_does_not_take_a_block_that_was_taken_over(
    server: FakeApi, node: ClusterNode
) -> None:
    """The pool changed after the POST, so the block is deleted, and that lands much later."""

    def faults(verb: str, kind: str, name: str) -> Fault | None:
        if (verb, kind) == ("create", "AddressBlock"):
            put_pool(server, state="Draining")
        return Fault.LATE if verb == "delete" else None

    node.api.faults = faults
    assert error_of(lambda: node.add("p0")).code == Code.TRY_AGAIN
    node.api.faults = None
    assert (len(blocks_of(server)), node.rows()) == (1, {})
    put_pool(server)
    node.steps(1, 500.0)
    (name,) = node.rows()
    node.add("p0")
    server.deliver()
    assert blocks_of(server) == [name] == list(node.rows())


@pytest.mark.parametrize(("mapped", "most"), [(False, 2), (True, 0)])
def test_blocks_of_others_are_passed_over_and_the_map_saves_the_attempts(
    server: FakeApi, memory_path: Path, mapped: bool, most: int
) -> None:
    pool = put_pool(server)
    other = ClusterNode(server, memory_path / "b", "node-b")
    for number in range(14 * 16 + 10):
        other.add(f"q{number}")
    if mapped:
        put_map(server, pool)
    node = ClusterNode(server, memory_path / "a")
    addresses = {node.add(f"p{number}")[0] for number in range(14)}
    assert not addresses & other.held()
    assert len(node.rows()) == 1
    assert node.lessee.counted().conflicts <= most


def test_an_exhausted_pool_is_110_and_names_pool_used_and_capacity(
    server: FakeApi, memory_path: Path
) -> None:
    put_pool(server, "10.1.0.0/28", size=4)
    nodes = [ClusterNode(server, memory_path / name, f"node-{name}") for name in "abcde"]
    ipam = {"range": "10.1.0.0/28"}
    for node in nodes[:4]:
        node.add("p0", ipam)
    error = error_of(lambda: nodes[4].add("p0", ipam))
    assert error.code == Code.NO_FREE_ADDRESS
    assert "10.1.0.0-28" in error.message
    assert "4 blocks of 4 addresses" in error.message
    nodes[4].lessee.step()
    nodes[4].clock.now += 2
    nodes[4].lessee.step()
    (event,) = server.events
    assert (event.reason, event.regarding["name"]) == ("AddressPoolExhausted", "p0")
    assert error_of(lambda: nodes[4].add("p0", ipam)).code == Code.NO_FREE_ADDRESS
    nodes[4].steps(3)
    assert len(server.events) == 1
    status = error_of(lambda: nodes[4].plugin.status(request("STATUS", ipam, "")))
    assert (status.code, "10.1.0.0-28" in status.message) == (Code.UNAVAILABLE, True)


def test_an_address_that_another_node_gave_back_is_found_although_the_map_is_old(
    server: FakeApi, memory_path: Path
) -> None:
    pool = put_pool(server, "10.1.0.0/29", size=1)
    ipam = {"range": "10.1.0.0/29"}
    first, second = (ClusterNode(server, memory_path / name, f"node-{name}") for name in "ab")
    for number in range(6):
        first.add(f"p{number}", ipam)
    put_map(server, pool)
    assert error_of(lambda: second.add("q", ipam)).code == Code.NO_FREE_ADDRESS
    first.delete("p3")
    first.steps(2)
    assert second.add("q", ipam)


@pytest.mark.parametrize("mapped", [True, False])
def test_sixty_addresses_are_enough_for_sixty_of_64_nodes(
    server: FakeApi, memory_path: Path, mapped: bool
) -> None:
    pool = put_pool(server, "10.2.0.0/26", size=1)
    ipam = {"range": "10.2.0.0/26", "exclude": ["10.2.0.61", "10.2.0.62"]}
    nodes = [ClusterNode(server, memory_path / f"{n}", f"node-{n}") for n in range(64)]
    seen = set()
    refused = 0
    for node in nodes:
        try:
            seen.add(node.add("p0", ipam)[0])
        except Exception as error:  # noqa: BLE001 - its code is what is looked at
            refused += getattr(error, "code", 0) == Code.NO_FREE_ADDRESS
        assert node.api.calls["create", "AddressBlock"] <= 9
        if mapped:
            put_map(server, pool)
    assert (len(seen), refused) == (60, 4)


def test_a_pool_whose_leases_are_over_at_once_is_not_leased_in_full(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pool(server, reclaim=ReclaimSpec(max_offline="5ms"))
    error = error_of(lambda: node.add("p0"))
    assert (error.code, "maxOffline: 0.005 s is too short" in error.message) == (
        Code.TRY_AGAIN,
        True,
    )
    assert not blocks_of(server)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda server: None, "podfabric's controller"),
        (lambda server: put_pool(server, "10.3.0.0/24", state="Draining"), "drained"),
        (lambda server: put_pool(server, "10.3.0.0/24", size=0), "has not made AddressPool"),
    ],
)
def test_a_pool_that_cannot_be_used_is_11_and_says_why(
    server: FakeApi,
    node: ClusterNode,
    make: Callable[[FakeApi], object],
    says: str,
) -> None:
    make(server)
    error = error_of(lambda: node.add("p0", {"range": "10.3.0.0/24"}))
    assert (error.code, says in error.message) == (Code.TRY_AGAIN, True), error.message


def test_no_more_blocks_than_the_pool_allows_a_node(server: FakeApi, node: ClusterNode) -> None:
    put_pool(server, "10.4.0.0/24", size=4, max_blocks_per_node=2)
    ipam = {"range": "10.4.0.0/24"}
    got = 0
    while True:
        try:
            node.add(f"p{got}", ipam)
        except Exception as error:  # noqa: BLE001 - its text is what is looked at
            assert "maxBlocksPerNode" in str(error)
            break
        got += 1
    assert 7 <= got <= 8


def test_a_block_is_of_addresses_that_the_network_may_use(
    server: FakeApi, node: ClusterNode
) -> None:
    ipam = {"range": RANGE, "range_start": "10.0.0.100", "range_end": "10.0.0.103"}
    assert [node.add(f"p{number}", ipam)[0] for number in range(4)] == [
        f"10.0.0.{number}" for number in range(100, 104)
    ]
    assert blocks_of(server) == ["default.10.0.0.96-28"]
    assert error_of(lambda: node.add("p4", ipam)).code == Code.NO_FREE_ADDRESS


def test_a_requested_address_leases_its_block_or_is_111(server: FakeApi, memory_path: Path) -> None:
    first, second = (ClusterNode(server, memory_path / name, f"node-{name}") for name in "ab")
    assert first.add("p0", args="IP=10.0.0.77") == ["10.0.0.77"]
    assert blocks_of(server) == ["default.10.0.0.64-28"]
    assert error_of(lambda: second.add("q0", args="IP=10.0.0.78")).code == Code.ADDRESS_TAKEN
    assert error_of(lambda: first.add("p1", args="IP=10.0.0.77")).code == Code.ADDRESS_TAKEN
    assert first.add("p1", args="IP=10.0.0.78") == ["10.0.0.78"]


def test_a_requested_address_that_is_taken_does_not_fail_status(
    server: FakeApi, node: ClusterNode, memory_path: Path
) -> None:
    ClusterNode(server, memory_path / "b", "node-b").add("q0", args="IP=10.0.0.77")
    assert error_of(lambda: node.add("p0", args="IP=10.0.0.78")).code == Code.ADDRESS_TAKEN
    node.plugin.status(request("STATUS", {"range": RANGE}, ""))


def test_a_static_address_outside_of_the_ranges_needs_no_block(
    server: FakeApi, node: ClusterNode
) -> None:
    ipam = {"range": RANGE, "addresses": [{"address": "192.168.7.1/24"}]}
    assert node.add("p0", ipam)[1] == "192.168.7.1"
    assert len(blocks_of(server)) == 1


def test_a_static_address_within_a_range_leases_its_block_whatever_its_prefix(
    server: FakeApi, memory_path: Path
) -> None:
    first, second = (ClusterNode(server, memory_path / name, f"node-{name}") for name in "ab")
    # Both wants of this ADD are fulfilled by one block.
    both = {"range": "10.6.0.0/28", "addresses": [{"address": "10.6.0.7/24"}]}
    put_pool(server, "10.6.0.0/28")
    assert first.add("p9", both) == ["10.6.0.1", "10.6.0.7"]
    ipam = {"range": RANGE, "addresses": [{"address": "10.0.0.200/32"}]}
    assert first.add("p0", ipam)[1] == "10.0.0.200"
    assert "default.10.0.0.192-28" in blocks_of(server, "node-a")
    assert error_of(lambda: second.add("q0", ipam)).code == Code.ADDRESS_TAKEN


def test_a_range_that_stands_for_a_full_one_gives_the_address(
    server: FakeApi, node: ClusterNode, memory_path: Path
) -> None:
    put_pool(server, "10.4.0.0/28")
    ClusterNode(server, memory_path / "b", "node-b").add("q0", {"range": "10.4.0.0/28"})
    either = {"ranges": [[{"subnet": "10.4.0.0/28"}, {"subnet": RANGE}]]}
    (address,) = node.add("p0", either)
    assert address.startswith("10.0.0.")


def test_both_families_are_needed_although_one_is_there(server: FakeApi, node: ClusterNode) -> None:
    both = {"ipRanges": [{"range": RANGE}, {"range": "fd00::/64"}]}
    error = error_of(lambda: node.add("p0", both))
    assert error.code == Code.TRY_AGAIN
    assert "does not exist yet" in error.message
    assert not node.held()


@pytest.mark.parametrize("start", ["", "fd00:0:0:ff00::"])
def test_a_huge_range_has_addresses(server: FakeApi, node: ClusterNode, start: str) -> None:
    put_pool(server, "fd00::/48")
    (address,) = node.add("p0", {"range": "fd00::/48", "range_start": start})
    assert parse(address) >= parse(start or "fd00::")


def test_a_pool_of_another_range_with_the_same_name_is_not_used(
    server: FakeApi, node: ClusterNode
) -> None:
    put_pool(server, "fd00:1::/64")
    ipam = {"range": "1::/64", "network_name": "fd00"}
    error = error_of(lambda: node.add("p0", ipam))
    assert error.code == Code.TRY_AGAIN
    assert "has the range fd00:1::/64, but the network has the range 1::/64" in error.message
    assert not blocks_of(server)


def test_a_private_range_beside_a_shared_one_uses_the_same_blocks(
    server: FakeApi, node: ClusterNode
) -> None:
    """The controller gives both pools of one range one space."""
    node.add("p0")
    alias(server)
    private = {"range": RANGE, "enable_overlapping_ranges": False}
    assert node.add("p1", private)[0] not in node.add("p2")
    assert len(blocks_of(server)) == 1
    assert len(node.held()) == 3


def test_what_a_pool_excludes_nobody_hands_out(server: FakeApi, node: ClusterNode) -> None:
    put_pool(server, "10.5.0.0/27", size=8, exclude=("10.5.0.0/28", "10.5.0.20-10.5.0.30"))
    ipam = {"range": "10.5.0.0/27"}
    got = {node.add(f"p{number}", ipam)[0] for number in range(4)}
    assert got == {f"10.5.0.{number}" for number in range(16, 20)}
    assert error_of(lambda: node.add("p4", ipam)).code == Code.NO_FREE_ADDRESS
    assert blocks_of(server) == ["default.10.5.0.16-29"]


@pytest.mark.parametrize("first", ["10.0.0.2", ""])
def test_a_requested_address_that_the_pool_excludes_is_111(
    server: FakeApi, node: ClusterNode, first: str
) -> None:
    """Also if its block is this node's: to lease it again would not help, for ever."""
    put_pool(server, exclude=("10.0.0.1",))
    if first:
        node.add("p0", args=f"IP={first}")
    error = error_of(lambda: node.add("p1", args="IP=10.0.0.1"))
    assert error.code == Code.ADDRESS_TAKEN
    assert "kept out of AddressPool 10.0.0.0-24" in error.message


def test_a_range_without_any_address_says_so(server: FakeApi, node: ClusterNode) -> None:
    put_pool(server, exclude=(RANGE,))
    error = error_of(lambda: node.add("p0"))
    assert error.code == Code.NO_FREE_ADDRESS
    assert "exclude every address" in error.message
    status = error_of(lambda: node.plugin.status(request("STATUS", {"range": RANGE}, "")))
    assert "(10.0.0.1-10.0.0.254): delete pods" in status.message


def test_addresses_that_are_held_elsewhere_leave_a_block(
    server: FakeApi, node: ClusterNode
) -> None:
    (address,) = node.add("p0")
    (name,) = blocks_of(server)
    block = server.look(AddressBlock, name)
    pool = server.look(AddressPool, block.spec.pool)
    first = parse(block.spec.range.partition("/")[0])
    free = [text(first + number) for number in range(1, 15) if text(first + number) != address]
    server.put(replace(pool, status=replace(pool.status, held=tuple(free[:10]))))
    node.steps(1, 500.0)
    server.down = True
    got = {node.add(f"p{number}")[0] for number in range(1, 4)}
    assert got <= set(free[10:]) | {text(first + 15), text(first)}


def test_an_add_gets_many_addresses_of_blocks_of_one(server: FakeApi, node: ClusterNode) -> None:
    put_pool(server, "10.4.0.0/28", size=1)
    assert len(set(node.add("p0", {"ipRanges": [{"range": "10.4.0.0/28"}] * 8}))) == 8


def test_an_add_whose_addresses_are_passed_over_leases_a_few_blocks_and_no_more(
    server: FakeApi, node: ClusterNode
) -> None:
    """Another network holds the whole range on the same link."""
    link = {"type": "macvlan", "master": "eth9"}
    for number in range(254):
        other = {"range": RANGE, "scope": "node", "network_name": "theirs"}
        node.plugin.reserve(request("ADD", other, f"o{number}", config=link, network="theirs"))
    policy = rules.of({"set": {"private_ranges": [True]}}, "config.yaml")
    plugin = AddressPlugin(
        Stores(node.files, lambda: "cluster", node.lessee, clock=node.clock, patience=60.0),
        lambda: node.boot,
        lambda: policy,
    )
    error = error_of(lambda: plugin.reserve(request("ADD", {"range": RANGE}, "c", config=link)))
    assert error.code == Code.NO_FREE_ADDRESS
    assert "on this link" in error.message
    assert len(blocks_of(server)) <= 4


def test_a_new_sandbox_keeps_its_address_where_the_pool_is_full(
    server: FakeApi, memory_path: Path
) -> None:
    put_pool(server, "10.70.0.0/29", size=8)
    node = ClusterNode(server, memory_path / "full")
    ipam = {"range": "10.70.0.0/29"}
    held = [node.add(f"p{number}", ipam, uid=f"uid-{number}") for number in range(6)]
    assert error_of(lambda: node.add("p6", ipam, uid="uid-6")).code == Code.NO_FREE_ADDRESS
    assert node.add("p2", ipam, uid="uid-2", container="p2-2") == held[2]
    audit(server, [node])


def test_an_add_ends_where_every_lease_is_in_vain(
    server: FakeApi, node: ClusterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other pods may take what is leased for it, each time."""
    node.add("p0")
    monkeypatch.setattr(node.lessee, "claim", lambda wants, deadline: None)
    error = error_of(lambda: node.add("p1", {"range": "10.71.0.0/24"}))
    assert error.code == Code.TRY_AGAIN
    assert "10.71.0.0/24" in error.message
