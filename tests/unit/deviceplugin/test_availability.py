"""Ids that may not be handed out though their HCA's port works."""

from msgspec.structs import replace

from deviceplugin.availability import unavailable
from deviceplugin.checkpoint import Allocation
from deviceplugin.health import GONE
from deviceplugin.pools.pool import Pool
from host.sysfs.discovery import HCA, CharacterDevice
from tests.unit.deviceplugin.cards import sf, vf
from tests.unit.deviceplugin.made import A, B, allocation, hca, pool, rdma

TWO = [hca(A, rdma(0)), hca(B, rdma(1))]
PF = TWO[0]
VF, SF = vf(PF, 0, rdma(2)), sf(PF, 4, rdma(3))


def held(of: Pool, device_id: str, *hcas: HCA) -> dict[str, Allocation]:
    return {device_id: allocation(of, device_id, *hcas)}


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
    why = (
        f"the RDMA device of {A} is in another network namespace: it is back when that namespace "
        "is gone"
    )
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


def test_pf_that_is_down_counts_while_the_vfs_rdma_device_is_in_a_pod() -> None:
    offered = pool([VF])
    with_pod = held(offered, VF.id, VF)
    away = pool([replace(VF, rdma=())])
    assert unavailable(away, {A: None, VF.id: None}, with_pod) == {}
    assert list(unavailable(away, {A: "it is down", VF.id: None}, with_pod)) == [VF.id]


def test_hardware_bars_nothing() -> None:
    offered = pool([replace(PF, rdma=(), rdma_names=())])
    assert unavailable(offered, {A: GONE}, {})
    assert unavailable(offered, None, held(offered, A, PF)) == {}
