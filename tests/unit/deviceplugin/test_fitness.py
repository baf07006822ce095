"""Ids that may not be handed out though their HCA's port works."""

import pytest
from msgspec.structs import replace

from deviceplugin.checkpoint import Allocation
from deviceplugin.fitness import unfit
from deviceplugin.grants.allocation import recorded
from deviceplugin.pools.pool import Pool
from host.adapters import Adapter, Node
from tests.unit.deviceplugin.made import adapter, pool, rdma

A, B = "0000:3b:00.0", "0000:5e:00.0"
HCA = "rdma/hca"
TWO = [adapter(A, rdma(0)), adapter(B, rdma(1))]


def held(of: Pool, device_id: str, *adapters: Adapter) -> dict[str, Allocation]:
    devices = tuple(recorded(of, one) for one in adapters)
    return {
        device_id: Allocation(
            resource=HCA, id=device_id, devices=devices, time="2026-01-02T03:04:05Z", boot_id="b"
        )
    }


def test_fault_of_an_adapter_is_that_of_its_slots() -> None:
    shared = pool(TWO, mode="shared", slots=2)
    assert unfit(shared, {A: "down"}, {}) == {f"{A}-0": "down", f"{A}-1": "down"}


def test_one_well_adapter_is_enough_for_the_holder_of_all() -> None:
    everything = pool(TWO, mode="all", amount=2)
    assert unfit(everything, {A: "down"}, {}) == {}
    assert unfit(everything, {A: "down", B: "gone"}, {}) == {"0": "down", "1": "down"}


@pytest.mark.parametrize(
    ("mode", "held_id", "contested"),
    [
        ("exclusive", f"{A}-3", [A]),  # it was shared before
        ("exclusive", "0", [A]),  # it was one of all
        ("shared", A, [f"{A}-0", f"{A}-1"]),  # it was somebody's alone
        ("shared", f"{A}-7", []),  # there were more slots
        ("all", f"{A}-1", []),
    ],
)
def test_holder_of_before_a_change_of_mode_keeps_what_it_was_promised(
    mode: str, held_id: str, contested: list[str]
) -> None:
    now = pool(TWO, mode=mode, slots=2)
    found = unfit(now, {}, held(now, held_id, TWO[0]))
    assert sorted(found) == contested
    assert all(held_id in why for why in found.values())


def test_hca_without_its_rdma_device_is_not_given() -> None:
    bare = replace(TWO[0], rdma=(), verbs=())
    shared = pool([bare, TWO[1]], mode="shared", slots=1)
    assert list(unfit(shared, {}, {})) == [f"{A}-0"]
    assert unfit(pool([bare], mode="exclusive", rdma=False), {}, {}) == {}


def test_hca_whose_rdma_device_is_in_a_pod_is_that_pods_alone() -> None:
    away = replace(TWO[0], rdma=())
    shared = pool([away], mode="shared", slots=2)
    found = unfit(shared, {}, held(shared, f"{A}-0", TWO[0]))
    assert found == {f"{A}-1": f"the RDMA device of {A} is in another network namespace"}


def test_id_whose_holder_has_other_device_numbers_is_not_given_again() -> None:
    renumbered = replace(TWO[0], rdma=(replace(TWO[0].rdma[0], uverbs=Node("uverbs5", 231, 197)),))
    now = pool([renumbered], mode="shared", slots=2)
    found = unfit(now, {}, held(now, f"{A}-0", TWO[0]))
    assert list(found) == [f"{A}-0"]
    assert "/dev/infiniband/uverbs0 (231:192)" in found[f"{A}-0"]
    by_name = pool([renumbered], mode="shared", slots=2, cdi=True)
    assert unfit(by_name, {}, held(by_name, f"{A}-0", TWO[0])) == {}
