"""Ids that may not be handed out though their HCA's port works."""

import pytest
from msgspec.structs import replace

from deviceplugin.availability import (
    changes,
    held_elsewhere,
    ids_held_elsewhere,
    own_ports_count,
    unavailable,
)
from deviceplugin.checkpoint import Allocation
from deviceplugin.health import GONE
from deviceplugin.pools.pool import Pool
from host.discovery import HCA, CharacterDevice
from host.selectors import Selector
from tests.unit.deviceplugin.cards import sf, vf
from tests.unit.deviceplugin.made import A, B, allocation, hca, pool, rdma

TWO = [hca(A, rdma(0)), hca(B, rdma(1))]
PF = TWO[0]
VF, SF = vf(PF, 0, rdma(2)), sf(PF, 4, rdma(3))
DOWN = "port 1 of mlx5_2 is DOWN (Disabled)"


def held(of: Pool, device_id: str, *hcas: HCA) -> dict[str, Allocation]:
    return {device_id: allocation(of, device_id, *hcas)}


def test_fault_of_an_hca_is_that_of_its_slots() -> None:
    shared = pool(TWO, mode="shared", slots=2)
    assert unavailable(shared, {A: "down"}, {}) == {f"{A}-0": "down", f"{A}-1": "down"}


def test_one_well_hca_is_enough_for_the_holder_of_all() -> None:
    everything = pool(TWO, mode="all", amount=2)
    assert unavailable(everything, {A: "down"}, {}) == {}
    assert unavailable(everything, {A: "down", B: "gone"}, {}) == {"0": "down", "1": "down"}


@pytest.mark.parametrize(
    ("mode", "held_id", "contested"),
    [
        ("exclusive", f"{A}-3", [A]),  # it was shared before
        ("exclusive", "0", [A]),  # it was one of all
        ("shared", A, [f"{A}-0", f"{A}-1"]),  # its holder had it alone
        ("shared", f"{A}-7", []),  # there were more slots
        ("all", f"{A}-1", []),
    ],
)
def test_holder_of_before_a_change_of_mode_keeps_what_it_was_promised(
    mode: str, held_id: str, contested: list[str]
) -> None:
    now = pool(TWO, mode=mode, slots=2)
    found = unavailable(now, {}, held(now, held_id, TWO[0]))
    assert sorted(found) == contested
    assert all(held_id in why for why in found.values())


def test_hca_without_its_rdma_device_is_not_given() -> None:
    bare = replace(TWO[0], rdma=(), rdma_names=())
    shared = pool([bare, TWO[1]], mode="shared", slots=1)
    assert list(unavailable(shared, {}, {})) == [f"{A}-0"]
    assert unavailable(pool([bare], mode="exclusive", rdma=False), {}, {}) == {}


def test_hca_without_uverbs_device_is_not_given() -> None:
    bare = replace(TWO[0], rdma=(replace(TWO[0].rdma[0], uverbs=None),))
    found = unavailable(pool([bare, TWO[1]]), {A: None, B: None}, {})
    assert found == {A: "mlx5_0 has no uverbs device: is the module ib_uverbs loaded?"}
    assert unavailable(pool([bare], rdma=False), {A: None}, {}) == {}


def test_hca_whose_rdma_device_is_in_a_pod_is_that_pods_alone() -> None:
    away = replace(TWO[0], rdma=())
    shared = pool([away], mode="shared", slots=2)
    found = unavailable(shared, {}, held(shared, f"{A}-0", TWO[0]))
    why = f"the RDMA device of {A} is in another network namespace: it is back when that is gone"
    assert found == {f"{A}-1": why}


def test_id_whose_holder_has_other_device_numbers_is_not_given_again() -> None:
    renumbered = replace(
        TWO[0], rdma=(replace(TWO[0].rdma[0], uverbs=CharacterDevice("uverbs5", 231, 197)),)
    )
    now = pool([renumbered], mode="shared", slots=2)
    found = unavailable(now, {}, held(now, f"{A}-0", TWO[0]))
    assert list(found) == [f"{A}-0"]
    assert "/dev/infiniband/uverbs0 (231:192)" in found[f"{A}-0"]
    by_name = pool([renumbered], mode="shared", slots=2, cdi=True)
    assert unavailable(by_name, {}, held(by_name, f"{A}-0", TWO[0])) == {}


@pytest.mark.parametrize("function", [VF, SF])
@pytest.mark.parametrize(
    ("mode", "of_pf", "why"),
    [
        ("exclusive", None, None),  # sriov sets it up, with the pod
        ("exclusive", "it is down", f"its PF {A} is unhealthy: it is down"),
        ("exclusive", GONE, DOWN),  # a PF that cannot be seen says nothing
        ("shared", None, DOWN),  # it is not set up later
        ("all", None, DOWN),
    ],
)
def test_port_of_a_function_that_is_set_up_with_its_pod_is_its_pfs(
    function: HCA, mode: str, of_pf: str | None, why: str | None
) -> None:
    offered = pool([function], mode=mode, slots=1)
    found = unavailable(offered, {A: of_pf, function.id: DOWN}, {})
    assert list(found.values()) == ([] if why is None else [why])
    assert own_ports_count(offered, function, {A: of_pf}) is (why == DOWN)


def test_port_of_a_vf_without_its_pf_on_the_node_is_its_own() -> None:
    """As a virtual machine has it."""
    assert unavailable(pool([VF]), {VF.id: DOWN}, {}) == {VF.id: DOWN}


def test_pf_that_is_down_counts_while_the_vfs_rdma_device_is_in_a_pod() -> None:
    offered = pool([VF])
    with_pod = held(offered, VF.id, VF)
    away = pool([replace(VF, rdma=())])
    assert unavailable(away, {A: None, VF.id: None}, with_pod) == {}
    assert list(unavailable(away, {A: "it is down", VF.id: None}, with_pod)) == [VF.id]


@pytest.mark.parametrize(
    "without",
    [{"rdma": False}, {"selectors": (Selector(isRdma=True, drivers=("igb",)), Selector())}],
)
def test_rdma_ports_are_nothing_to_a_pool_that_gives_no_verbs(without: dict[str, object]) -> None:
    offered = pool([PF, VF], **without)
    assert unavailable(offered, {A: "it is down", VF.id: DOWN}, {}) == {}
    assert unavailable(offered, {A: None, VF.id: GONE}, {}) == {VF.id: GONE}


@pytest.mark.parametrize(
    ("mode", "other_mode", "other_id", "kept"),
    [
        ("exclusive", "exclusive", A, [A]),
        ("exclusive", "shared", f"{A}-3", [A]),
        ("exclusive", "all", "0", [A]),
        ("shared", "exclusive", A, [A]),
        ("all", "exclusive", A, [A]),
        ("shared", "shared", f"{A}-3", []),
        ("shared", "all", "0", []),
        ("all", "shared", f"{A}-3", []),
    ],
)
def test_what_another_resource_holds_is_alone_or_shared_but_not_both(
    mode: str, other_mode: str, other_id: str, kept: list[str]
) -> None:
    mine, other = pool(TWO, mode=mode, slots=2), pool(TWO, mode=other_mode)
    theirs = allocation(other, other_id, PF, resource="rdma/other")
    taken = held_elsewhere(mine, [theirs])
    assert list(taken) == kept
    assert all(f"is held by id {other_id} of rdma/other" in why for why in taken.values())
    found = unavailable(mine, {}, {}, taken)
    # The holder of all gets what is left.
    assert (
        found
        == {slot.id: taken[A] for slot in mine.slots if kept and slot.hcas == (A,)}
        == ids_held_elsewhere(mine, mine.slots, {}, taken)
    )


def test_own_holders_are_not_elsewhere() -> None:
    offered = pool(TWO)
    assert held_elsewhere(offered, held(offered, A, PF).values()) == {}


def test_id_of_all_is_unavailable_if_its_one_hca_is_held_exclusively() -> None:
    everything = pool([PF], mode="all", amount=2)
    theirs = allocation(pool(TWO), A, PF, resource="rdma/other")
    taken = held_elsewhere(everything, [theirs])
    assert unavailable(everything, {}, {}, taken) == {"0": taken[A], "1": taken[A]}


def test_hardware_bars_nothing() -> None:
    offered = pool([replace(PF, rdma=(), rdma_names=())])
    assert unavailable(offered, {A: GONE}, {})
    assert ids_held_elsewhere(offered, offered.slots, held(offered, A, PF), {}) == {}


def test_changes_are_told_once_and_those_of_an_hca_together() -> None:
    offered = pool(TWO, mode="shared", slots=3)
    down = {f"{A}-{slot}": DOWN for slot in range(3)}
    worse = {**down, f"{B}-1": "stale", f"{A}-2": "stale"}
    assert list(changes(offered, {}, down)) == [(f"{A}-0 and 2 more", DOWN)]
    assert list(changes(offered, down, down)) == []
    assert list(changes(offered, down, worse)) == [(f"{A}-2", "stale"), (f"{B}-1", "stale")]
    assert list(changes(offered, down, {})) == [(f"{A}-0 and 2 more", None)]
