"""Memory that a process allocates, of every kind, counts against the group's limit."""

from collections.abc import Callable

import pytest

from tests.gpu import launcher
from tests.gpu.conftest import MIB, Place
from tests.gpu.forms import on_device, pool_on
from tests.gpu.group import ANY
from tests.gpu.ways import WAYS, Way
from tests.standin.driver import UNTOUCHED, Out
from tests.standin.gpus import Behaviour

OUT_OF_MEMORY, NOT_SUPPORTED, INVALID_CONTEXT = 2, 801, 201
Make = Callable[..., Place]


ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


@ways
def test_each_kind_is_given_up_to_the_limit_and_not_beyond(place: Make, way: Way) -> None:
    here = place(memory=64 * MIB)
    driver = here.started()
    for bytes_ in (64 * MIB - way.granule, 64 * MIB):
        taken = way.take(driver, bytes_)
        assert taken.result == 0
        assert here.group.used == here.resident() == bytes_
        way.free(driver, taken.ints[0])
        driver.do("cuMemGetInfo_v2", Out(), Out())
        assert here.group.used == here.resident() == 0
    refused = way.take(driver, 64 * MIB + way.granule)
    assert refused.result == OUT_OF_MEMORY
    assert all(set(output) == {0xEE} for output in refused.outputs[: way.outputs])
    assert here.resident() == 0
    assert here.group.use().denied == 1


def test_rows_count_with_the_pitch_that_the_driver_chooses(place: Make) -> None:
    """A longer one than the shim foresees, too: then what is allocated is given back."""
    here = place(memory=64 * MIB, behaviour=Behaviour(pitch=4096))
    driver = here.started()
    [pointer, pitch] = driver.do("cuMemAllocPitch_v2", Out(), Out(), 500, 16384, 4)
    assert pitch == 4096
    assert here.group.used == here.resident() == 64 * MIB
    driver.do("cuMemFree_v2", pointer)
    answer = driver.call("cuMemAllocPitch_v2", Out(), Out(), 500, 16385, 4)
    assert (answer.result, answer.ints) == (OUT_OF_MEMORY, [UNTOUCHED, UNTOUCHED])
    assert here.group.used == here.resident() == 0


@ways
def test_an_allocation_that_the_driver_refuses_is_not_counted(place: Make, way: Way) -> None:
    here = place(memory=ANY, bytes=16 * MIB)
    driver = here.started()
    assert way.take(driver, 20 * MIB).result == OUT_OF_MEMORY
    assert here.group.used == 0


def test_without_a_context_nothing_is_counted(place: Make) -> None:
    here = place(context_bytes=40 * MIB)
    driver = here.process()
    driver.do("cuInit", 0)
    assert here.resident() == 0, "cuInit makes no context"
    assert driver.result("cuMemAlloc_v2", Out(), MIB) == INVALID_CONTEXT
    assert driver.result("cuMemAllocAsync", Out(), MIB, 0) == INVALID_CONTEXT
    assert driver.result("cuMemGetInfo_v2", Out(), Out()) == INVALID_CONTEXT
    assert driver.do("cuMemCreate", Out(), 2 * MIB, on_device(0), 0)  # needs none
    assert here.group.used == 2 * MIB


def test_a_size_that_overflows_is_out_of_memory(place: Make) -> None:
    driver = place(memory=ANY).started()
    assert driver.result("cuMemAlloc_v2", Out(), 2**64 - 1) == OUT_OF_MEMORY
    assert driver.result("cuMemAllocAsync", Out(), 2**64 - 1, 0) == OUT_OF_MEMORY
    assert driver.result("cuMemAllocPitch_v2", Out(), Out(), 2**40, 2**40, 4) == OUT_OF_MEMORY


def test_freeing_twice_or_a_foreign_pointer_counts_nothing(place: Make) -> None:
    here = place(behaviour=Behaviour(reuse_addresses=True))
    driver = here.started()
    [kept] = driver.do("cuMemAlloc_v2", Out(), 3 * MIB)
    [pointer] = driver.do("cuMemAlloc_v2", Out(), MIB)
    driver.do("cuMemFree_v2", pointer)
    assert driver.result("cuMemFree_v2", pointer) != 0
    assert driver.result("cuMemFree_v2", kept + 512) != 0
    driver.do("cuMemFree_v2", 0)
    assert here.group.used == here.resident() == 3 * MIB


# ---- which GPUs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("visible", ["1,0", "GPU-00000001", "1"])
def test_gpus_are_told_apart_by_their_uuid(place: Make, visible: str) -> None:
    here = place(count=2, ours=1)
    driver = here.process(CUDA_VISIBLE_DEVICES=visible)
    driver.start(0)
    driver.do("cuMemAlloc_v2", Out(), MIB)
    assert here.group.used == here.resident(1) == MIB


def test_a_gpu_that_the_group_has_not_gives_nothing(place: Make) -> None:
    here = place(count=2, ours=1)
    driver = here.process()
    driver.do("cuInit", 0)
    assert driver.result("cuDevicePrimaryCtxRetain", Out(), 0) == OUT_OF_MEMORY
    assert driver.result("cuMemCreate", Out(), 2 * MIB, on_device(0), 0) == OUT_OF_MEMORY
    driver.do("cuMemCreate", Out(), 2 * MIB, on_device(1), 0)
    driver.start(1)
    pool = driver.do("cuMemPoolCreate", Out(), pool_on(0))[0]
    assert driver.result("cuMemAllocFromPoolAsync", Out(), 2 * MIB, pool, 0) == OUT_OF_MEMORY
    assert here.resident(0) == 0
    assert here.group.used == here.resident(1) == 2 * MIB


FORMER = (
    *("cuMemAlloc", "cuMemAllocPitch", "cuMemFree", "cuMemGetInfo", "cuDeviceTotalMem"),
    *("cuArrayCreate", "cuArray3DCreate"),
    *launcher.FORMER,
)


@pytest.mark.parametrize("symbol", FORMER)
def test_former_functions_are_refused(place: Make, symbol: str) -> None:
    """They are no way round the limit and the share."""
    here = place()
    assert here.started().result(symbol, Out(), Out(), 512, 512, 4) == NOT_SUPPORTED
    assert here.group.used == here.resident() == 0


# ---- what a process sees -------------------------------------------------------------------------


def test_the_total_is_the_limit_and_what_is_free_is_never_negative(place: Make) -> None:
    here = place(memory=16 * MIB)
    driver = here.started()
    assert driver.do("cuDeviceTotalMem_v2", Out(), 0) == [16 * MIB]
    driver.do("cuMemAlloc_v2", Out(), 12 * MIB)
    assert driver.do("cuMemGetInfo_v2", Out(), Out()) == [4 * MIB, 16 * MIB]
    here.group.set_memory(8 * MIB)
    assert driver.do("cuMemGetInfo_v2", Out(), Out()) == [0, 8 * MIB]


def test_a_limit_above_what_the_gpu_has_shows_what_it_has(place: Make) -> None:
    gib = 1024 * MIB
    driver = place(memory=64 * gib, bytes=8 * gib).started()
    assert driver.do("cuDeviceTotalMem_v2", Out(), 0) == [8 * gib]
    assert driver.do("cuMemGetInfo_v2", Out(), Out()) == [8 * gib, 8 * gib]
