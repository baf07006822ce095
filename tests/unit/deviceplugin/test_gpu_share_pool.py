"""How many ids GPUs have, and which of them may be allocated."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from base.paths import Paths
from base.types import DeviceId
from deviceplugin.checkpoint import AllocatedGPU
from deviceplugin.ledger import Ledger
from gpu.driver.gpu_inventory import GpuMemory, NodeGPU
from gpu.gpu_pool import GpuPoolConfig, Shape
from gpu.pools.share_pool import Share, SharePool, healthy_ids, kinds
from host.sysfs.gpus import GPU
from tests.unit.host.servers import gpu_uuid

MIB, GIB = 1 << 20, 1 << 30
SLICES = GpuPoolConfig(shapes=(Shape(resource="a/b", memory=10 * GIB, compute=25),))
UNITS = GpuPoolConfig(mode="units")


def node(number: int, memory: GpuMemory | None) -> NodeGPU:
    gpu = GPU(uuid=gpu_uuid(number), address=f"0000:1{number}:00.0", minor=number, numa=None)
    return NodeGPU(gpu=gpu, minor=number, memory=memory)


@pytest.fixture(scope="module")
def any_pool(tmp_path_factory: pytest.TempPathFactory) -> SharePool:
    return SharePool(Ledger(Paths(state=tmp_path_factory.mktemp("state")), "boot", print))


@pytest.fixture
def pool(tmp_path: Path) -> SharePool:
    return SharePool(Ledger(Paths(state=tmp_path), "boot", print))


def test_capacity_is_never_rounded_up(pool: SharePool) -> None:
    """An H200 of 143771 MiB with 600 MiB reserved has 139 units of 1 GiB; by Alnair's rule 140."""
    pool.update(UNITS, [node(0, GpuMemory(total=143_771 * MIB, reserved=600 * MIB))])
    (gpu,) = pool.gpus.values()
    assert gpu.capacity == Share((143_771 - 600 - 256) * MIB, 100)
    memory, compute = kinds(UNITS)
    assert memory.ids(gpu) == [f"{gpu_uuid(0)}_{i}" for i in range(139)]
    assert compute.ids(gpu) == [f"{gpu_uuid(0)}_{i}" for i in range(100)]


@given(st.integers(1, 1 << 37), st.integers(0, 1 << 36), st.integers(256 * MIB, 1 << 36))
def test_units_never_exceed_what_programs_can_allocate(
    any_pool: SharePool, total: int, reserved: int, unit: int
) -> None:
    memory = GpuMemory(total=total, reserved=reserved)
    config = GpuPoolConfig(mode="units", unit=unit)
    any_pool.update(config, [node(0, memory)])
    (gpu,) = any_pool.gpus.values()
    count = len(kinds(config)[0].ids(gpu))
    assert count * unit <= max(total - reserved - config.reserve, 0)


def test_slices_are_named_after_gpu_and_shape(pool: SharePool) -> None:
    pool.update(SLICES, [node(0, GpuMemory(total=80 * GIB))])
    (gpu,) = pool.gpus.values()
    (kind,) = kinds(SLICES)
    short = gpu_uuid(0).removeprefix("GPU-")[:8]
    assert kind.ids(gpu) == [f"{short}.10g-25.{k}" for k in range(4)]
    assert max(map(len, kind.ids(gpu))) <= 63


def test_gpus_whose_uuids_begin_alike_have_ids_of_their_own(pool: SharePool) -> None:
    first, second = node(0, GpuMemory(total=80 * GIB)), node(1, GpuMemory(total=80 * GIB))
    alike = first.gpu.uuid[:-1] + "f"
    second = replace(second, gpu=replace(second.gpu, uuid=alike))
    pool.update(SLICES, [first, second])
    (kind,) = kinds(SLICES)
    ids = [device_id for gpu in pool.gpus.values() for device_id in kind.ids(gpu)]
    assert len(ids) == len(set(ids)) == 8


def test_gpu_of_unknown_memory_is_not_offered_and_named(pool: SharePool) -> None:
    pool.update(UNITS, [node(0, None), node(1, GpuMemory(total=GIB))])
    assert [gpu.node.name for gpu in pool.gpus.values()] == ["nvidia1"]
    assert pool.problem is not None
    assert "nvidia0" in pool.problem
    assert "set `memory` of the pool" in pool.problem


def test_configured_memory_replaces_nvmls(pool: SharePool) -> None:
    pool.update(GpuPoolConfig(mode="units", memory=4 * GIB, reserve=0), [node(0, None)])
    assert [gpu.capacity.memory for gpu in pool.gpus.values()] == [4 * GIB]


def test_allocations_of_other_resources_use_the_gpu_too(pool: SharePool) -> None:
    pool.update(SLICES, [node(0, GpuMemory(total=80 * GIB))])
    given = AllocatedGPU(
        uuid=gpu_uuid(0), bdf="0000:10:00.0", minor=0, memory_bytes=30 * GIB, compute_share=0.5
    )
    pool.ledger.record("other/resource", {DeviceId("x"): given})
    expected = Share(80 * GIB - 256 * MIB - 30 * GIB, 50)
    assert pool.free() == {"0000:10:00.0": expected}


def test_ids_that_do_not_fit_any_more_are_unhealthy() -> None:
    free = {"a": ["a.0", "a.1", "a.2"], "b": ["b.0", "b.1"]}
    assert healthy_ids(free, {"a": 1, "b": 2}) == {"a.0", "b.0", "b.1"}
    assert healthy_ids(free, {"a": 1, "b": 2}, pending=1) == {"a.0", "b.0"}
    assert healthy_ids(free, {"a": 0, "b": 0}) == set()


def test_id_of_a_full_gpu_stands_for_room_on_another() -> None:
    """One container has an id of `a` and is on `b`: four ids are left for four places."""
    free = {"a": ["a.1"], "b": ["b.0", "b.1"]}
    assert healthy_ids(free, {"a": 2, "b": 1}) == {"a.1", "b.0", "b.1"}
