"""Beside whereabouts: no node hands out what whereabouts holds, and blocks are taken from it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from cni.spec.errors import Code
from ipam.addresses import parse
from ipam.controller.whereabouts_coexistence import LOOK_EVERY, PODS_EVERY, Mode
from ipam.controller.whereabouts_objects import (
    NAMESPACE,
    AnnotatedPod,
    IPAllocation,
    IPPool,
    IPPoolSpec,
    NodeSlicePool,
    SliceSpec,
    entries,
)
from ipam.leases.block_layout import pool_name
from ipam.leases.lessee import CONFIRM_EVERY
from ipam.leases.objects import AddressPool, PoolSpec
from kube.resources import Meta
from tests.fake_api import Fault
from tests.unit.ipam.calls import error_of
from tests.unit.ipam.controller.cluster import Cluster
from tests.unit.ipam.leases.nodes import ClusterNode

RANGE = "10.64.0.0/24"
NAME = "10.64.0.0-24"
STATUS = "k8s.v1.cni.cncf.io/network-status"


class Beside(Cluster):
    """A cluster in which whereabouts has given addresses to pods."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.change_to(mode)

    def change_to(self, mode: Mode) -> None:
        """The chart has another value: a new leader."""
        self.whereabouts = mode
        self.new_leader()

    def share(self, range_: str = RANGE, name: str = "", **spec: object) -> AddressPool:
        """A pool, as the controller makes one of a definition."""
        shared = bool(spec.get("shared", True))
        made = PoolSpec(range=range_, network_name=name, **spec)  # type: ignore[arg-type]
        meta = Meta(name=pool_name(name, range_, shared=shared))
        return self.api.create(AddressPool(metadata=meta, spec=made))

    def holds(
        self,
        offsets: Iterable[int],
        range_: str = RANGE,
        name: str = NAME,
        namespace: str = NAMESPACE,
    ) -> None:
        """whereabouts has given these addresses to pods, which run."""
        held = {str(each): IPAllocation(id=f"c{each}", podref=f"ns/old{each}") for each in offsets}
        spec = IPPoolSpec(range=range_, allocations=held)
        self.api.put(IPPool(metadata=Meta(name=name, namespace=namespace), spec=spec))
        for each in held.values():
            self.run_pod(each.podref)

    def run_pod(self, podref: str, *addresses: str) -> None:
        """A pod, with the addresses that Multus says it has; without any it says nothing yet."""
        networks = [{"name": "ns/n1", "ips": [*addresses]}, {"name": "kindnet"}]
        annotations = {STATUS: json.dumps(networks)} if addresses else {}
        namespace, _, name = podref.partition("/")
        meta = Meta(name=name, namespace=namespace, annotations=annotations)
        self.api.put(AnnotatedPod(metadata=meta))

    def allocations(self, name: str = NAME) -> Mapping[str, IPAllocation]:
        """The allocations in the IPPool."""
        return self.api.look(IPPool, name, NAMESPACE).spec.allocations or {}

    def placeholders(self, name: str = NAME) -> set[int]:
        """The offsets of our entries there."""
        found = self.allocations(name)
        return {int(each) for each in found if found[each].is_placeholder}

    def status(self, name: str = NAME) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
        """The addresses that the pool's status shows to nodes: those that are held, and those on
        offer.
        """
        status = self.api.look(AddressPool, name).status
        return status.held, status.offered

    def whereabouts_takes(self, offset: int, name: str = NAME) -> None:
        """A node of whereabouts hands out an address, as its plugin does."""
        pool = self.api.look(IPPool, name, NAMESPACE)
        value = {"id": f"c{offset}", "podref": f"ns/new{offset}"}
        path = f"/spec/allocations/{offset}"
        operations: list[Mapping[str, object]] = [
            {"op": "test", "path": path, "value": None},
            {"op": "add", "path": path, "value": value},
        ]
        self.api.patch(pool, operations)


@pytest.fixture
def reading() -> Beside:
    return Beside("Read")


@pytest.fixture
def coexisting() -> Beside:
    return Beside("Coexist")


def node_of(cluster: Cluster, directory: Path, name: str = "node-a") -> ClusterNode:
    return ClusterNode(cluster.api, directory / name, name, clock=cluster.clock)


def number(address: str) -> int:
    return int(address.rpartition(".")[2])


# --- Read ----------------------------------------------------------------------------------------


def test_what_whereabouts_holds_is_handed_out_by_no_node(
    reading: Beside, memory_path: Path
) -> None:
    held = set(range(1, 240, 3))
    reading.holds(held)
    reading.share()
    reading.run(3.0)
    nodes = [node_of(reading, memory_path, each) for each in ("a", "b", "c")]
    given = [node.add(f"p{each}", {"range": RANGE})[0] for each in range(50) for node in nodes]
    assert len(set(given)) == 150
    assert not held & set(map(number, given))
    kinds = {kind for node in nodes for _, kind in node.api.calls}
    assert "IPPool" not in kinds


def test_nothing_is_leased_before_the_objects_were_read(reading: Beside, memory_path: Path) -> None:
    reading.holds([1])
    reading.share()
    reading.client.faults = lambda verb, kind, name: (
        Fault.LOST_REQUEST if kind == "IPPool" else None
    )
    reading.run(3.0)
    assert reading.errors
    assert error_of(lambda: node_of(reading, memory_path).add("p0", {"range": RANGE})).code == (
        Code.TRY_AGAIN
    )
    reading.client.faults = None
    reading.run(3.0)
    assert reading.status() == (("10.64.0.1",), None)


def test_a_later_failure_leaves_what_was_told(reading: Beside) -> None:
    reading.holds([1, 2])
    reading.share()
    reading.run(3.0)
    reading.new_leader()
    reading.client.faults = lambda verb, kind, name: (
        Fault.LOST_REQUEST if kind == "IPPool" else None
    )
    reading.run(60.0)
    assert reading.status() == (("10.64.0.1-10.64.0.2",), None)


def test_the_addresses_of_pods_that_have_ended_are_free(reading: Beside, memory_path: Path) -> None:
    """One is gone, one has another address now, one says nothing of its addresses."""
    reading.share("10.64.0.0/28", exclude=("10.64.0.5-10.64.0.15",))
    reading.holds([1, 2, 3, 4], "10.64.0.0/28", "10.64.0.0-28")
    reading.run_pod("ns/old2", "10.64.0.9")
    reading.run_pod("ns/old4", "10.64.0.04")  # the same address, written otherwise
    reading.run(3.0)
    node = node_of(reading, memory_path)
    ipam = {"range": "10.64.0.0/28"}
    assert node.add("p2", ipam) == ["10.64.0.2"]
    assert error_of(lambda: node.add("p1", ipam)).code == Code.NO_FREE_ADDRESS
    reading.api.remove(AnnotatedPod, "old1", "ns")
    reading.run(PODS_EVERY + 2 * LOOK_EVERY, LOOK_EVERY)
    node.steps(1, CONFIRM_EVERY)
    assert node.add("p1", ipam) == ["10.64.0.1"]
    refused = error_of(lambda: node.add("p3", ipam))
    assert refused.code == Code.NO_FREE_ADDRESS
    assert "whereabouts have 2 addresses" in str(refused)


def test_an_entry_without_a_pod_is_held_for_good(reading: Beside) -> None:
    """whereabouts before 0.4.2 wrote none."""
    reading.share()
    spec = IPPoolSpec(range=RANGE, allocations={"7": IPAllocation(id="c7")})
    reading.api.put(IPPool(metadata=Meta(name=NAME, namespace=NAMESPACE), spec=spec))
    reading.run(PODS_EVERY + 60.0, LOOK_EVERY)
    assert reading.status()[0] == ("10.64.0.7",)


@pytest.mark.parametrize("shared", [True, False])
def test_slices_of_nodes_count_with_or_without_their_node_slice_pool(
    reading: Beside, shared: bool
) -> None:
    pool = reading.share(shared=shared)
    reading.holds([1], "10.64.0.128/25", "gpu-1-10.64.0.128-25")
    reading.run(3.0)
    assert reading.status(pool.metadata.name)[0] == ("10.64.0.129",)


def test_overlapping_ranges_of_a_network_name_count_and_those_of_another_do_not(
    reading: Beside,
) -> None:
    reading.share()
    private = reading.share("10.64.0.0/25", shared=False).metadata.name
    reading.share(name="blue")
    reading.holds([5], "10.64.0.0/16", "10.64.0.0-16")
    reading.holds([9], RANGE, "blue-10.64.0.0-24")
    reading.run(3.0)
    assert reading.status()[0] == ("10.64.0.5",)
    assert reading.status("blue-10.64.0.0-24")[0] == ("10.64.0.9",)
    assert reading.status(private)[0] == ()


def test_offsets_that_cannot_be_read_are_left_out() -> None:
    held = dict.fromkeys(["1", "x", "-1", "300", "9" * 40, "٣"], IPAllocation(id="c"))
    pool = IPPool(metadata=Meta(name=NAME), spec=IPPoolSpec(range=RANGE, allocations=held))
    assert [entry.address for entry in entries(pool)] == [parse("10.64.0.1")]
    broken = replace(pool, spec=IPPoolSpec(range="nonsense", allocations=held))
    assert list(entries(broken)) == []


def test_an_address_of_both_sides_is_told_once_by_the_pool(
    reading: Beside, memory_path: Path
) -> None:
    reading.whereabouts = "None"
    reading.new_leader()
    reading.share()
    reading.run(3.0)
    node = node_of(reading, memory_path)
    (first,) = node.add("p0", {"range": RANGE})
    node.steps(3, 11.0)
    reading.holds([number(first)])
    reading.change_to("Read")
    reading.run(3.0)
    conditions = reading.api.look(AddressPool, NAME).status.conditions
    (conflict,) = [each for each in conditions if each.type == "Conflict"]
    assert conflict.status == "True"
    assert f"whereabouts gave {first} to pod ns/old{number(first)}" in conflict.message
    assert "node-a" in conflict.message


# --- Coexist -------------------------------------------------------------------------------------


def test_a_block_is_on_offer_only_with_its_placeholders(
    coexisting: Beside, memory_path: Path
) -> None:
    coexisting.holds([1, 2, 3, 254])
    coexisting.share(block_size=16)
    node = node_of(coexisting, memory_path)
    assert error_of(lambda: node.add("p0", {"range": RANGE})).code == Code.TRY_AGAIN
    coexisting.run(3.0)
    held, offered = coexisting.status()
    assert held == ("10.64.0.1-10.64.0.3", "10.64.0.254")
    assert offered == ("10.64.0.208-10.64.0.239",)  # the highest of which nothing is held
    assert coexisting.placeholders() == set(range(208, 240))
    given = {number(node.add(f"p{each}", {"range": RANGE})[0]) for each in range(20)}
    assert given <= set(range(208, 240))


def test_more_is_offered_as_nodes_lease_until_whereabouts_has_the_rest(
    coexisting: Beside, memory_path: Path
) -> None:
    coexisting.holds(range(1, 100))
    coexisting.share(block_size=16)
    node = node_of(coexisting, memory_path)
    given: set[int] = set()
    for each in range(155):
        coexisting.run(3.0)
        given.add(number(node.add(f"p{each}", {"range": RANGE})[0]))
    assert given == set(range(100, 255))
    coexisting.run(2 * LOOK_EVERY)
    assert error_of(lambda: node.add("last", {"range": RANGE})).code == Code.NO_FREE_ADDRESS
    ours = {int(each) for each, entry in coexisting.allocations().items() if not entry.podref}
    assert not ours & set(range(1, 100))


def test_an_address_that_a_pod_of_whereabouts_leaves_in_a_block_gets_a_placeholder_first(
    coexisting: Beside, memory_path: Path
) -> None:
    ipam = {"range": "10.64.0.0/28"}
    coexisting.holds([1, 2, 14], "10.64.0.0/28", "10.64.0.0-28")
    coexisting.share("10.64.0.0/28", block_size=8)
    coexisting.run(3.0)
    node = node_of(coexisting, memory_path)
    given = {number(node.add(f"p{each}", ipam)[0]) for each in range(11)}
    assert given == set(range(3, 14))
    pool = coexisting.api.look(IPPool, "10.64.0.0-28", NAMESPACE)
    left = {key: each for key, each in (pool.spec.allocations or {}).items() if key != "14"}
    coexisting.api.put(replace(pool, spec=replace(pool.spec, allocations=left)))
    coexisting.client.faults = lambda verb, kind, name: (
        Fault.LOST_REQUEST if verb == "patch" else None
    )
    coexisting.run(2 * LOOK_EVERY)
    assert "10.64.0.14" in coexisting.status("10.64.0.0-28")[0]
    coexisting.client.faults = None
    coexisting.run(2 * LOOK_EVERY)
    assert 14 in coexisting.placeholders("10.64.0.0-28")
    node.steps(1, CONFIRM_EVERY)
    assert node.add("p14", ipam) == ["10.64.0.14"]


def test_each_range_that_overlaps_gets_placeholders_before_whereabouts_uses_it(
    coexisting: Beside,
) -> None:
    coexisting.share(block_size=16)
    coexisting.holds([10], "10.64.0.128/25", "gpu-1-10.64.0.128-25")
    coexisting.run(3.0)
    coexisting.share("10.64.0.0/16", block_size=16)
    coexisting.run(3.0)
    (first,) = coexisting.status()[1] or ()
    assert first == "10.64.0.224-10.64.0.255"
    for name, base in ((NAME, 0), ("10.64.0.0-16", 0), ("gpu-1-10.64.0.128-25", 128)):
        assert {each + base for each in coexisting.placeholders(name)} >= set(range(224, 256))
    wide = coexisting.status("10.64.0.0-16")
    assert wide == (("10.64.0.138",), ("10.64.0.224-10.64.0.255", *(wide[1] or ())[1:]))


def test_placeholders_that_somebody_removed_are_made_again(coexisting: Beside) -> None:
    coexisting.share(block_size=16)
    coexisting.run(3.0)
    before = coexisting.placeholders()
    coexisting.api.remove(IPPool, NAME, NAMESPACE)
    coexisting.run(2 * LOOK_EVERY)
    assert coexisting.placeholders() == before


def test_a_range_in_slices_is_refused(coexisting: Beside) -> None:
    coexisting.share()
    meta = Meta(name="slices", namespace=NAMESPACE)
    coexisting.api.put(NodeSlicePool(metadata=meta, spec=SliceSpec(range="10.64.0.0/16")))
    coexisting.run(3.0)
    assert "NodeSlicePool slices" in why_not_ready(coexisting)
    assert coexisting.status()[1] == ()
    coexisting.api.remove(NodeSlicePool, "slices", NAMESPACE)
    coexisting.run(2 * LOOK_EVERY)
    assert coexisting.status()[1]


def test_ippools_in_two_namespaces_are_refused(coexisting: Beside) -> None:
    coexisting.share()
    coexisting.holds([1], "10.9.0.0/24", "10.9.0.0-24", "one")
    coexisting.holds([1], "10.9.1.0/24", "10.9.1.0-24", "two")
    coexisting.run(3.0)
    assert "namespaces one and two" in why_not_ready(coexisting)


def test_an_ippool_of_another_range_under_that_name_is_refused(coexisting: Beside) -> None:
    coexisting.share()
    coexisting.holds([1], "10.64.0.0/25", NAME)
    coexisting.run(3.0)
    assert "10.64.0.0/25" in why_not_ready(coexisting)


def why_not_ready(cluster: Cluster) -> str:
    conditions = cluster.api.look(AddressPool, NAME).status.conditions
    (ready,) = [each for each in conditions if each.type == "Ready"]
    assert ready.status == "False"
    return ready.message


def test_a_pool_of_nv_ipam_is_no_business_of_whereabouts(coexisting: Beside) -> None:
    pool = PoolSpec(range=RANGE, network_name="nv-ipam/pools")
    coexisting.api.create(AddressPool(metadata=Meta(name="nv-10.64.0.0-24"), spec=pool))
    coexisting.share()
    coexisting.run(3.0)
    assert coexisting.status("nv-10.64.0.0-24") == ((), None)
    assert [each.metadata.name for each in coexisting.api.look_at_all(IPPool).items] == [NAME]


def test_a_large_ipv6_range_is_leased_where_whereabouts_reads_offsets(coexisting: Beside) -> None:
    coexisting.share("fd00:1::/64", block_size=16)
    coexisting.run(3.0)
    (offered,) = coexisting.status("fd00-1--0-64")[1] or ()
    assert offered == "fd00:1::7fff:ffff:ffff:ffe0-fd00:1::7fff:ffff:ffff:ffff"


def test_a_fixed_address_outside_of_what_is_offered_is_refused(
    coexisting: Beside, memory_path: Path
) -> None:
    coexisting.share(block_size=16)
    coexisting.run(3.0)
    node = node_of(coexisting, memory_path)
    refused = error_of(lambda: node.add("p0", {"range": RANGE}, args="IP=10.64.0.9"))
    assert refused.code == Code.ADDRESS_TAKEN
    assert "kept out of AddressPool" in str(refused)
