"""The stand-in for libcuda: memory from pools, in the order of a stream."""

from collections.abc import Callable

import pytest

from tests.standin.driver import UNTOUCHED, Driver, Out, packed
from tests.standin.gpus import GIB, MIB, Node, gpus

Run = Callable[..., Driver]
MakeNode = Callable[..., Node]

INVALID_VALUE, OUT_OF_MEMORY = 1, 2
DEVICE, HOST = 1, 2
THRESHOLD, RESERVED, RESERVED_PEAK, USED, USED_PEAK = 4, 5, 6, 7, 8
CHUNK = 32 * MIB


def _properties(location: int = DEVICE, number: int = 0, most: int = 0) -> bytes:
    """CUmemPoolProps, pinned."""
    return packed("iiiiQQ56s", 1, 0, location, number, 0, most, bytes(56))


@pytest.fixture
def driver(node: Node, run: Run) -> Driver:
    return run(node)


def _default(driver: Driver) -> int:
    return driver.do("cuDeviceGetDefaultMemPool", Out(), 0)[0]


def _attribute(driver: Driver, pool: int, attribute: int) -> int:
    return driver.do("cuMemPoolGetAttribute", pool, attribute, Out())[0]


def _resident(node: Node, gpu: int = 0) -> int:
    return node.read().gpus[gpu].resident


@pytest.mark.parametrize("suffix", ["", "_ptsz"])
def test_a_pool_reserves_whole_chunks_and_keeps_them_until_the_cpu_waits(
    node: Node, driver: Driver, suffix: str
) -> None:
    pool = _default(driver)
    [first] = driver.do(f"cuMemAllocAsync{suffix}", Out(), MIB, 0)
    [second] = driver.do(f"cuMemAllocAsync{suffix}", Out(), CHUNK, 0)
    assert _resident(node) == 2 * CHUNK == _attribute(driver, pool, RESERVED)
    assert _attribute(driver, pool, USED) == CHUNK + MIB
    driver.do(f"cuMemFreeAsync{suffix}", second, 0)
    assert (_attribute(driver, pool, USED), _resident(node)) == (MIB, 2 * CHUNK)
    driver.do(f"cuStreamSynchronize{suffix}", 0)
    assert _resident(node) == CHUNK
    driver.do("cuMemFree_v2", first)
    driver.do("cuCtxSynchronize")
    assert _resident(node) == 0
    assert _attribute(driver, pool, RESERVED_PEAK) == 2 * CHUNK
    assert _attribute(driver, pool, USED_PEAK) == CHUNK + MIB


def test_a_pool_keeps_as_much_as_its_threshold_says_until_it_is_trimmed(
    node: Node, driver: Driver
) -> None:
    pool = _default(driver)
    driver.do("cuMemPoolSetAttribute", pool, THRESHOLD, packed("Q", 2 * CHUNK))
    [pointer] = driver.do("cuMemAllocAsync", Out(), 3 * CHUNK, 0)
    driver.do("cuMemFreeAsync", pointer, 0)
    driver.do("cuStreamSynchronize", 0)
    assert _resident(node) == 2 * CHUNK
    driver.do("cuMemPoolTrimTo", pool, CHUNK)
    assert _resident(node) == CHUNK
    driver.do("cuMemPoolTrimTo", pool, 0)
    assert _resident(node) == 0


def test_what_a_pool_reserved_is_given_again_without_new_memory(node: Node, driver: Driver) -> None:
    [pointer] = driver.do("cuMemAllocAsync", Out(), CHUNK, 0)
    driver.do("cuMemFreeAsync", pointer, 0)
    driver.do("cuMemAllocAsync", Out(), CHUNK // 2, 0)
    assert _resident(node) == CHUNK


def test_a_chunk_that_does_not_fit_is_made_as_small_as_needed(node: Node, driver: Driver) -> None:
    driver.do("cuMemAlloc_v2", Out(), 8 * GIB - 3 * MIB)
    driver.do("cuMemAllocAsync", Out(), MIB, 0)
    assert _resident(node) == 8 * GIB - MIB
    answer = driver.call("cuMemAllocAsync", Out(), 2 * MIB + 1, 0)
    assert (answer.result, answer.ints) == (OUT_OF_MEMORY, [UNTOUCHED])


def test_a_pool_of_its_own_ends_when_its_last_memory_is_freed(node: Node, driver: Driver) -> None:
    [pool, _] = driver.do("cuMemPoolCreate", Out(), _properties())
    [pointer] = driver.do("cuMemAllocFromPoolAsync", Out(), MIB, pool, 0)
    driver.do("cuMemPoolDestroy", pool)
    assert _resident(node) == CHUNK
    driver.do("cuMemFreeAsync", pointer, 0)
    assert _resident(node) == 0


def test_a_pool_gives_no_more_than_its_greatest_size(driver: Driver) -> None:
    [pool, _] = driver.do("cuMemPoolCreate", Out(), _properties(most=3 * MIB))
    driver.do("cuMemAllocFromPoolAsync", Out(), 2 * MIB, pool, 0)
    again = ("cuMemAllocFromPoolAsync", Out(), 2 * MIB, pool, 0)
    assert driver.result(*again) == OUT_OF_MEMORY


def test_a_pool_of_host_memory_occupies_no_gpu(node: Node, driver: Driver) -> None:
    [pool, _] = driver.do("cuMemPoolCreate", Out(), _properties(HOST))
    driver.do("cuMemAllocFromPoolAsync", Out(), MIB, pool, 0)
    assert _resident(node) == 0


def test_memory_comes_from_the_pool_that_was_chosen_for_the_device(
    node: Node, driver: Driver
) -> None:
    [pool, _] = driver.do("cuMemPoolCreate", Out(), _properties())
    driver.do("cuDeviceSetMemPool", 0, pool)
    assert driver.do("cuDeviceGetMemPool", Out(), 0) == [pool]
    assert driver.do("cuMemGetMemPool", Out(), packed("ii", DEVICE, 0), 1)[0] == pool
    driver.do("cuMemAllocAsync", Out(), MIB, 0)
    assert _attribute(driver, pool, USED) == MIB
    assert _attribute(driver, _default(driver), USED) == 0


def test_a_pool_charges_its_own_gpu(make_node: MakeNode, run: Run) -> None:
    node = make_node(gpus(2))
    driver = run(node)
    [pool, _] = driver.do("cuMemPoolCreate", Out(), _properties(number=1))
    driver.do("cuMemAllocFromPoolAsync", Out(), MIB, pool, 0)
    assert [_resident(node, gpu) for gpu in range(2)] == [0, CHUNK]


def test_the_end_of_the_primary_context_frees_what_pools_gave(node: Node, driver: Driver) -> None:
    driver.do("cuMemAllocAsync", Out(), MIB, 0)
    driver.do("cuMemAlloc_v2", Out(), MIB)
    driver.do("cuDevicePrimaryCtxReset_v2", 0)
    assert _resident(node) == 0
