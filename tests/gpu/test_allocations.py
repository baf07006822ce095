"""Memory that a process allocates, of every kind, counts against the group's limit."""

from collections.abc import Callable

import msgspec
import pytest

from gpu import layout
from tests.gpu.conftest import MIB, Place
from tests.gpu.forms import FLOAT, array, on_device
from tests.standin.driver import UNTOUCHED, Driver, Out, packed
from tests.standin.gpus import Behaviour

OUT_OF_MEMORY, NOT_SUPPORTED, INVALID_CONTEXT = 2, 801, 201
Make = Callable[..., Place]


class Way(msgspec.Struct, frozen=True):
    """A way to allocate: what allocates so many bytes, and what frees them."""

    name: str
    take: Callable[[Driver, int], tuple[int, int]]  # result, handle
    free: Callable[[Driver, int], None]
    granule: int = 512


def _simple(symbol: str, *further: int) -> Callable[[Driver, int], tuple[int, int]]:
    def take(driver: Driver, bytes_: int) -> tuple[int, int]:
        answer = driver.call(symbol, Out(), bytes_, *further)
        return answer.result, answer.ints[0]

    return take


def _v1(driver: Driver, bytes_: int) -> tuple[int, int]:
    answer = driver.call("cuMemAlloc", Out(4), bytes_)
    return answer.result, int.from_bytes(answer.outputs[0], "little")


def _pitch(driver: Driver, bytes_: int) -> tuple[int, int]:
    answer = driver.call("cuMemAllocPitch_v2", Out(), Out(), 500, bytes_ // 512, 4)
    return answer.result, answer.ints[0]


def _physical(driver: Driver, bytes_: int) -> tuple[int, int]:
    answer = driver.call("cuMemCreate", Out(), bytes_, on_device(0), 0)
    return answer.result, answer.ints[0]


def _array(driver: Driver, bytes_: int) -> tuple[int, int]:
    answer = driver.call("cuArray3DCreate_v2", Out(), array(128, 128, bytes_ // (128 * 128 * 4)))
    return answer.result, answer.ints[0]


def _flat_array(driver: Driver, bytes_: int) -> tuple[int, int]:
    flat = packed("2QiI", 1024, bytes_ // 4096, FLOAT, 1)
    answer = driver.call("cuArrayCreate_v2", Out(), flat)
    return answer.result, answer.ints[0]


def _from_pool(driver: Driver, bytes_: int) -> tuple[int, int]:
    pool = driver.do("cuDeviceGetDefaultMemPool", Out(), 0)[0]
    answer = driver.call("cuMemAllocFromPoolAsync", Out(), bytes_, pool, 0)
    return answer.result, answer.ints[0]


def _freed_by(symbol: str, *further: int) -> Callable[[Driver, int], None]:
    def free(driver: Driver, handle: int) -> None:
        driver.do(symbol, handle, *further)
        driver.do("cuCtxSynchronize")

    return free


WAYS = [
    Way("linear", _simple("cuMemAlloc_v2"), _freed_by("cuMemFree_v2")),
    Way("linear, 32 bits", _v1, _freed_by("cuMemFree")),
    Way("rows", _pitch, _freed_by("cuMemFree_v2")),
    Way("managed", _simple("cuMemAllocManaged", 1), _freed_by("cuMemFree_v2"), 4096),
    Way("async", _simple("cuMemAllocAsync", 0), _freed_by("cuMemFreeAsync", 0), 2 * MIB),
    Way(
        "async, thread's",
        _simple("cuMemAllocAsync_ptsz", 0),
        _freed_by("cuMemFreeAsync_ptsz", 0),
        2 * MIB,
    ),
    Way("async, freed at once", _simple("cuMemAllocAsync", 0), _freed_by("cuMemFree_v2"), 2 * MIB),
    Way("pool", _from_pool, _freed_by("cuMemFreeAsync", 0), 2 * MIB),
    Way("physical", _physical, _freed_by("cuMemRelease"), 2 * MIB),
    Way("array", _array, _freed_by("cuArrayDestroy"), 65536),
    Way("flat array", _flat_array, _freed_by("cuArrayDestroy"), 65536),
]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


@ways
def test_each_kind_is_given_up_to_the_limit_and_not_beyond(place: Make, way: Way) -> None:
    here = place(memory=64 * MIB)
    driver = here.started()
    for bytes_ in (64 * MIB - way.granule, 64 * MIB):
        result, handle = way.take(driver, bytes_)
        assert result == 0
        assert here.group.used == here.resident() == bytes_
        way.free(driver, handle)
        driver.do("cuMemGetInfo_v2", Out(), Out())
        assert here.group.used == here.resident() == 0
    result, handle = way.take(driver, 64 * MIB + way.granule)
    assert (result, handle) == (OUT_OF_MEMORY, UNTOUCHED % 2**32 if "32" in way.name else UNTOUCHED)
    assert here.resident() == 0
    assert here.group.uses()[0].denied == 1


@ways
def test_an_allocation_that_the_driver_refuses_is_not_counted(place: Make, way: Way) -> None:
    here = place(memory=layout.NO_LIMIT, bytes=16 * MIB)
    driver = here.started()
    assert way.take(driver, 20 * MIB)[0] == OUT_OF_MEMORY
    assert here.group.used == 0


@ways
def test_each_kind_counts_on_the_gpu_that_it_lies_on(place: Make, way: Way) -> None:
    here = place(count=2, memory=64 * MIB)
    driver = here.started(device=1)
    _, handle = way.take(driver, 2 * MIB)
    own = 0 if way.name in ("physical", "pool") else 1  # which name GPU 0 themselves
    assert here.group.uses()[own].used_bytes == here.resident(own) == 2 * MIB
    assert here.group.uses()[1 - own].used_bytes == here.resident(1 - own) == 0
    way.free(driver, handle)


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
    driver = place(memory=layout.NO_LIMIT).started()
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


# ---- policies ------------------------------------------------------------------------------------


def test_managed_memory_can_be_denied_or_left_uncounted(place: Make) -> None:
    here = place(policy=layout.MANAGED_DENY)
    driver = here.started()
    answer = driver.call("cuMemAllocManaged", Out(), MIB, 1)
    assert (answer.result, answer.ints) == (NOT_SUPPORTED, [UNTOUCHED])


def test_managed_memory_can_be_left_uncounted(place: Make) -> None:
    here = place(policy=layout.MANAGED_IGNORE)
    driver = here.started()
    [pointer] = driver.do("cuMemAllocManaged", Out(), MIB, 1)
    assert here.group.used == 0
    driver.do("cuMemFree_v2", pointer)
    assert here.group.used == 0


# ---- contexts ------------------------------------------------------------------------------------


def test_a_context_takes_its_allocations_with_it(place: Make) -> None:
    here = place(context=MIB)
    driver = here.started()
    driver.do("cuMemAlloc_v2", Out(), 4 * MIB)
    [context] = driver.do("cuCtxCreate_v2", Out(), 0, 0)
    driver.do("cuMemAlloc_v2", Out(), 8 * MIB)
    driver.do("cuArrayCreate_v2", Out(), packed("2QiI", 128, 128, FLOAT, 1))
    driver.do("cuCtxDestroy_v2", context)
    assert here.group.used == 5 * MIB
    driver.do("cuDevicePrimaryCtxReset_v2", 0)
    assert here.group.used == here.resident() == 0


def test_a_primary_context_ends_with_its_last_release(place: Make) -> None:
    here = place(context=MIB)
    driver = here.started()
    driver.do("cuDevicePrimaryCtxRetain", Out(), 0)
    driver.do("cuMemAlloc_v2", Out(), 4 * MIB)
    driver.do("cuDevicePrimaryCtxRelease_v2", 0)
    assert here.group.used == 5 * MIB
    driver.do("cuDevicePrimaryCtxRelease_v2", 0)
    assert here.group.used == here.resident() == 0


# ---- which GPUs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("visible", ["1,0", "GPU-00000001", "1"])
def test_gpus_are_told_apart_by_their_uuid(place: Make, visible: str) -> None:
    here = place(count=2)
    driver = here.process(CUDA_VISIBLE_DEVICES=visible)
    driver.start(0)
    driver.do("cuMemAlloc_v2", Out(), MIB)
    assert [use.used_bytes for use in here.group.uses()] == [0, MIB]


def test_a_gpu_that_the_group_has_not_gives_nothing(place: Make) -> None:
    here = place(count=2, only=slice(1, 2))
    driver = here.process()
    driver.do("cuInit", 0)
    assert driver.result("cuDevicePrimaryCtxRetain", Out(), 0) == OUT_OF_MEMORY
    assert driver.result("cuMemCreate", Out(), 2 * MIB, on_device(0), 0) == OUT_OF_MEMORY
    driver.do("cuMemCreate", Out(), 2 * MIB, on_device(1), 0)
    assert here.resident(0) == 0
    assert here.resident(1) == 2 * MIB


# ---- what a process sees -------------------------------------------------------------------------


def test_the_total_is_the_limit_and_what_is_free_is_never_negative(place: Make) -> None:
    here = place(memory=16 * MIB)
    driver = here.started()
    assert driver.do("cuDeviceTotalMem_v2", Out(), 0) == [16 * MIB]
    driver.do("cuMemAlloc_v2", Out(), 12 * MIB)
    assert driver.do("cuMemGetInfo_v2", Out(), Out()) == [4 * MIB, 16 * MIB]
    here.group.set_memory(8 * MIB)
    assert driver.do("cuMemGetInfo_v2", Out(), Out()) == [0, 8 * MIB]
    assert driver.do("cuMemGetInfo", Out(4), Out(4)) == [0, 8 * MIB]
    assert driver.do("cuDeviceTotalMem", Out(4), 0) == [8 * MIB]


def test_a_limit_above_what_the_gpu_has_shows_what_it_has(place: Make) -> None:
    gib = 1024 * MIB
    driver = place(memory=64 * gib, bytes=8 * gib).started()
    assert driver.do("cuDeviceTotalMem_v2", Out(), 0) == [8 * gib]
    assert driver.do("cuMemGetInfo_v2", Out(), Out()) == [8 * gib, 8 * gib]
    assert driver.do("cuMemGetInfo", Out(4), Out(4)) == [2**32 - 1, 2**32 - 1]
    assert driver.do("cuDeviceTotalMem", Out(4), 0) == [2**32 - 1]


def test_launches_are_counted(place: Make) -> None:
    here = place()
    driver = here.started()
    driver.do("cuMemAlloc_v2", Out(), MIB)
    assert here.group.uses()[0].launches == 0
