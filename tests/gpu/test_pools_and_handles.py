"""Memory that outlives what names it: handles and pools; and arrays."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.gpu.conftest import MIB, Place
from tests.gpu.forms import (
    ON_DEVICE,
    ON_HOST,
    ON_HOST_NODE,
    ON_OWN_HOST_NODE,
    array,
    on_device,
    pool_on,
)
from tests.standin.driver import UNTOUCHED, Out, packed
from tests.standin.gpus import Behaviour

OUT_OF_MEMORY = 2
Make = Callable[..., Place]


# ---- physical memory by handle -------------------------------------------------------------------


HOST_PLACES = pytest.mark.parametrize("kind", [ON_HOST, ON_HOST_NODE, ON_OWN_HOST_NODE])


@HOST_PLACES
def test_physical_memory_of_the_host_is_neither_counted_nor_refused(place: Make, kind: int) -> None:
    here = place(memory=4 * MIB)
    driver = here.started()
    driver.do("cuMemAlloc_v2", Out(), 4 * MIB)
    [handle, _] = driver.do("cuMemCreate", Out(), 64 * MIB, on_device(0, kind), 0)
    assert here.group.used == here.resident() == 4 * MIB
    driver.do("cuMemRelease", handle)
    assert here.group.used == here.resident() == 4 * MIB


def test_physical_memory_is_counted_until_it_is_neither_held_nor_mapped(place: Make) -> None:
    here = place()
    driver = here.started()
    handle = driver.do("cuMemCreate", Out(), 4 * MIB, on_device(0), 0)[0]
    [address] = driver.do("cuMemAddressReserve", Out(), 8 * MIB, 0, 0, 0)
    driver.do("cuMemMap", address, 2 * MIB, 0, handle, 0)
    driver.do("cuMemMap", address + 2 * MIB, 2 * MIB, 2 * MIB, handle, 0)
    driver.do("cuMemRelease", handle)
    assert here.group.used == here.resident() == 4 * MIB
    assert driver.do("cuMemRetainAllocationHandle", Out(), address) == [handle]
    driver.do("cuMemUnmap", address, 4 * MIB)
    assert here.group.used == here.resident() == 4 * MIB
    assert driver.result("cuMemUnmap", address, 4 * MIB) != 0
    driver.do("cuMemRelease", handle)
    assert here.group.used == here.resident() == 0


def test_refused_calls_on_handles_change_nothing(place: Make) -> None:
    here = place()
    driver = here.started()
    handle = driver.do("cuMemCreate", Out(), 2 * MIB, on_device(0), 0)[0]
    assert driver.result("cuMemMap", 4096, 2 * MIB, 0, handle, 0) != 0
    assert driver.result("cuMemMap", 4096, 2 * MIB, 0, 12345, 0) != 0
    driver.do("cuMemRelease", handle)
    assert here.group.used == here.resident() == 0


# ---- pools ---------------------------------------------------------------------------------------


def test_a_pool_counts_with_what_it_reserves(place: Make) -> None:
    here = place(behaviour=Behaviour(pool_chunk=8 * MIB), memory=64 * MIB)
    driver = here.started()
    [first] = driver.do("cuMemAllocAsync", Out(), MIB, 0)
    assert here.group.used == here.resident() == 8 * MIB
    [second] = driver.do("cuMemAllocAsync", Out(), MIB, 0)
    assert here.group.used == here.resident() == 8 * MIB
    driver.do("cuMemFreeAsync", first, 0)
    driver.do("cuMemFreeAsync", second, 0)
    driver.do("cuCtxSynchronize")
    assert driver.do("cuMemGetInfo_v2", Out(), Out()) == [64 * MIB, 64 * MIB]
    assert here.group.used == here.resident() == 0


POOLED = """
import ctypes, threading
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
def start():
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
def allocate(results):
    pointer = ctypes.c_uint64()
    assert cuda.cuCtxSetCurrent(context) == 0
    together.wait()
    results.append(cuda.cuMemAllocAsync(ctypes.byref(pointer), ctypes.c_size_t(6 << 20), None))
    together.wait()
    assert cuda.cuMemFreeAsync(pointer, None) == 0
together = threading.Barrier(8)
start()
pointer = ctypes.c_uint64()  # the first one shows in what pieces the pool grows
assert cuda.cuMemAllocAsync(ctypes.byref(pointer), ctypes.c_size_t(1), None) == 0
assert cuda.cuMemFreeAsync(pointer, None) == 0
for _ in range(20):
    assert cuda.cuCtxSynchronize() == 0
    results = []
    threads = [threading.Thread(target=allocate, args=(results,)) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(*results)
"""


def test_threads_that_allocate_from_a_pool_at_once_are_counted_once_each(place: Make) -> None:
    behaviour = Behaviour(pool_chunk=2 * MIB, latency_ns={"cuMemPoolGetAttribute": 200_000})
    here = place(behaviour=behaviour, memory=48 * MIB)
    printed = subprocess.check_output([sys.executable, "-c", POOLED], env=here.environment)
    assert printed.split() == [b"0"] * 8 * 20
    assert here.group.use().peak_bytes == here.node.read().gpus[0].peak == 48 * MIB


def test_unused_memory_of_pools_is_given_up_before_a_denial(place: Make) -> None:
    here = place(behaviour=Behaviour(pool_chunk=8 * MIB), memory=64 * MIB)
    driver = here.started()
    [pool] = driver.do("cuDeviceGetDefaultMemPool", Out(), 0)
    driver.do("cuMemPoolSetAttribute", pool, 4, packed("Q", 2**40))
    [pointer] = driver.do("cuMemAllocAsync", Out(), 24 * MIB, 0)
    driver.do("cuMemFreeAsync", pointer, 0)
    driver.do("cuCtxSynchronize")
    assert here.resident() == 24 * MIB
    driver.do("cuMemAlloc_v2", Out(), 64 * MIB)
    assert here.group.used == here.resident() == 64 * MIB


def test_memory_of_a_pool_fits_into_what_it_has(place: Make) -> None:
    here = place(behaviour=Behaviour(pool_chunk=8 * MIB), memory=64 * MIB)
    driver = here.started()
    driver.do("cuMemAllocAsync", Out(), MIB, 0)
    driver.do("cuMemAlloc_v2", Out(), 56 * MIB)
    driver.do("cuMemAllocAsync", Out(), 7 * MIB, 0)
    assert driver.result("cuMemAllocAsync", Out(), MIB, 0) == OUT_OF_MEMORY
    assert here.group.used == here.resident() == 64 * MIB


def test_a_pool_that_is_destroyed_counts_until_its_memory_is_freed(place: Make) -> None:
    here = place()
    driver = here.started()
    pool = driver.do("cuMemPoolCreate", Out(), pool_on(0))[0]
    [first] = driver.do("cuMemAllocFromPoolAsync", Out(), 4 * MIB, pool, 0)
    driver.do("cuMemPoolDestroy", pool)
    assert here.group.used == here.resident() == 4 * MIB
    driver.do("cuMemFreeAsync", first, 0)
    assert here.group.used == here.resident() == 0


@HOST_PLACES
def test_a_pool_in_host_memory_is_not_counted(place: Make, kind: int) -> None:
    here = place()
    driver = here.started()
    pool = driver.do("cuMemPoolCreate", Out(), pool_on(0, kind))[0]
    driver.do("cuMemAllocFromPoolAsync", Out(), 100 * MIB, pool, 0)
    assert here.group.used == here.resident() == 0


POOLS: dict[str, tuple[bytes | int, ...]] = {
    "cuDeviceGetDefaultMemPool": (1,),
    "cuDeviceGetMemPool": (1,),
    "cuMemGetDefaultMemPool": (packed("2i", ON_DEVICE, 1), 1),
    "cuMemGetMemPool": (packed("2i", ON_DEVICE, 1), 1),
}


@pytest.mark.parametrize("symbol", POOLS)
def test_a_pool_that_the_driver_has_made_counts(place: Make, symbol: str) -> None:
    here = place(count=2, ours=1, memory=64 * MIB)
    driver = here.started(device=1)
    pool = driver.do(symbol, Out(), *POOLS[symbol])[0]
    [pointer] = driver.do("cuMemAllocFromPoolAsync", Out(), 64 * MIB, pool, 0)
    assert here.group.used == here.resident(1) == 64 * MIB
    answer = driver.call("cuMemAllocFromPoolAsync", Out(), 2 * MIB, pool, 0)
    assert (answer.result, answer.ints) == (OUT_OF_MEMORY, [UNTOUCHED])
    driver.do("cuMemFreeAsync", pointer, 0)
    driver.do("cuMemPoolTrimTo", pool, 0)
    assert here.group.used == here.resident(1) == 0


def test_a_pool_that_is_trimmed_counts_with_what_it_keeps(place: Make) -> None:
    here = place()
    driver = here.started()
    pool = driver.do("cuMemPoolCreate", Out(), pool_on(0))[0]
    [pointer] = driver.do("cuMemAllocFromPoolAsync", Out(), 16 * MIB, pool, 0)
    driver.do("cuMemAllocFromPoolAsync", Out(), 2 * MIB, pool, 0)
    driver.do("cuMemFreeAsync", pointer, 0)
    for keep, left in ((64 * MIB, 18 * MIB), (8 * MIB, 8 * MIB), (0, 2 * MIB)):
        driver.do("cuMemPoolTrimTo", pool, keep)
        assert here.group.used == here.resident() == left


# ---- arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 4, 9])
@pytest.mark.parametrize("form", [0x01, 0x10, 0x20, 0x91, 0x9D, 0xB0, 0xB1, 0xC5, 0x5E])
def test_mipmapped_arrays_count_as_the_driver_lays_them_out(
    place: Make, levels: int, form: int
) -> None:
    here = place(memory=256 * MIB)
    driver = here.started()
    for depth, flags in ((0, 0), (16, 0), (6, 1)):
        described = array(250, 130, depth, flags, form)
        handle = driver.do("cuMipmappedArrayCreate", Out(), described, levels)[0]
        assert here.group.used == here.resident() > 0
        driver.do("cuMipmappedArrayDestroy", handle)
        assert here.group.used == 0


def test_an_array_whose_memory_comes_later_is_not_counted(place: Make) -> None:
    here = place()
    driver = here.started()
    for flags in (0x40, 0x80):
        driver.do("cuArray3DCreate_v2", Out(), array(1024, 1024, 0, flags))
    assert here.group.used == here.resident() == 0
