"""The stand-in for libcuda: physical memory, and where it is mapped."""

from collections.abc import Callable

import pytest

from tests.standin.driver import Driver, Out, packed
from tests.standin.gpus import GIB, MIB, Node, gpus

Run = Callable[..., Driver]
MakeNode = Callable[..., Node]

INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE = 1, 2, 101
DEVICE, HOST, HOST_NUMA, LOCALITY_DOMAIN = 1, 2, 3, 6
CHUNK = 2 * MIB


def _properties(location: int = DEVICE, number: int = 0, handle_types: int = 0) -> bytes:
    """CUmemAllocationProp, pinned."""
    return packed("iiiiQ8s", 1, handle_types, location, number, 0, bytes(8))


def _access(device: int = 0) -> bytes:
    """CUmemAccessDesc: the device may read and write."""
    return packed("iii", DEVICE, device, 3)


@pytest.fixture
def driver(node: Node, run: Run) -> Driver:
    return run(node)


def _resident(node: Node, gpu: int = 0) -> int:
    return node.read().gpus[gpu].resident


def test_physical_memory_lives_from_create_to_release(node: Node, driver: Driver) -> None:
    [handle, _] = driver.do("cuMemCreate", Out(), 3 * CHUNK, _properties(), 0)
    assert _resident(node) == 3 * CHUNK
    assert node.read().process(driver.pid).gpus[0].of("physical") == 3 * CHUNK
    driver.do("cuMemRelease", handle)
    assert _resident(node) == 0


def test_sizes_are_multiples_of_the_granularity(driver: Driver) -> None:
    assert driver.do("cuMemGetAllocationGranularity", Out(), _properties(), 0)[0] == CHUNK
    assert driver.result("cuMemCreate", Out(), CHUNK + 4096, _properties(), 0) == INVALID_VALUE
    assert driver.result("cuMemCreate", Out(), 0, _properties(), 0) == INVALID_VALUE
    assert driver.result("cuMemAddressReserve", Out(), 4096, 0, 0, 0) == INVALID_VALUE


def test_memory_lies_where_its_location_says_whatever_context_is_current(
    make_node: MakeNode, run: Run
) -> None:
    node = make_node(gpus(3))
    driver = run(node)
    driver.do("cuMemCreate", Out(), CHUNK, _properties(DEVICE, 2), 0)
    driver.do("cuMemCreate", Out(), CHUNK, _properties(LOCALITY_DOMAIN, 0x0101), 0)
    driver.do("cuMemCreate", Out(), CHUNK, _properties(HOST), 0)
    driver.do("cuMemCreate", Out(), CHUNK, _properties(HOST_NUMA, 1), 0)
    assert [_resident(node, gpu) for gpu in range(3)] == [0, CHUNK, CHUNK]
    assert driver.result("cuMemCreate", Out(), CHUNK, _properties(DEVICE, 3), 0) == INVALID_DEVICE


def test_memory_can_be_made_without_a_context(node: Node, run: Run) -> None:
    driver = run(node, start=False)
    driver.do("cuInit", 0)
    driver.do("cuMemCreate", Out(), 8 * GIB, _properties(), 0)
    assert driver.result("cuMemCreate", Out(), CHUNK, _properties(), 0) == OUT_OF_MEMORY


def test_memory_lives_until_it_is_released_and_unmapped(node: Node, driver: Driver) -> None:
    [handle, _] = driver.do("cuMemCreate", Out(), 2 * CHUNK, _properties(), 0)
    [start] = driver.do("cuMemAddressReserve", Out(), 8 * CHUNK, 0, 0, 0)
    driver.do("cuMemMap", start, CHUNK, 0, handle, 0)
    driver.do("cuMemMap", start + 4 * CHUNK, CHUNK, CHUNK, handle, 0)
    driver.do("cuMemRelease", handle)
    assert driver.result("cuMemRelease", handle) == INVALID_VALUE
    driver.do("cuMemUnmap", start, CHUNK)
    assert _resident(node) == 2 * CHUNK
    driver.do("cuMemUnmap", start + 4 * CHUNK, CHUNK)
    assert _resident(node) == 0
    driver.do("cuMemAddressFree", start, 8 * CHUNK)


def test_a_retained_handle_must_be_released_as_well(node: Node, driver: Driver) -> None:
    [handle, _] = driver.do("cuMemCreate", Out(), CHUNK, _properties(), 0)
    [start] = driver.do("cuMemAddressReserve", Out(), CHUNK, 0, 0, 0)
    driver.do("cuMemMap", start, CHUNK, 0, handle, 0)
    assert driver.do("cuMemRetainAllocationHandle", Out(), start + 4096) == [handle]
    driver.do("cuMemRelease", handle)
    driver.do("cuMemUnmap", start, CHUNK)
    assert _resident(node) == CHUNK
    driver.do("cuMemRelease", handle)
    assert _resident(node) == 0


def test_an_import_in_the_same_process_counts_as_one_more_handle(
    node: Node, driver: Driver
) -> None:
    [handle, _] = driver.do("cuMemCreate", Out(), CHUNK, _properties(handle_types=1), 0)
    [file] = driver.do("cuMemExportToShareableHandle", Out(4), handle, 1, 0)
    assert driver.do("cuMemImportFromShareableHandle", Out(), file, 1) == [handle]
    driver.do("cuMemRelease", handle)
    assert _resident(node) == CHUNK
    driver.do("cuMemRelease", handle)
    assert _resident(node) == 0


def test_mappings_may_not_overlap_or_be_unmapped_in_part(driver: Driver) -> None:
    [handle, _] = driver.do("cuMemCreate", Out(), 2 * CHUNK, _properties(), 0)
    [start] = driver.do("cuMemAddressReserve", Out(), 4 * CHUNK, 0, 0, 0)
    driver.do("cuMemMap", start, 2 * CHUNK, 0, handle, 0)
    assert driver.result("cuMemMap", start + CHUNK, CHUNK, 0, handle, 0) == INVALID_VALUE
    assert driver.result("cuMemMap", start + 3 * CHUNK, 2 * CHUNK, 0, handle, 0) == INVALID_VALUE
    assert driver.result("cuMemUnmap", start, CHUNK) == INVALID_VALUE
    assert driver.result("cuMemUnmap", start, 3 * CHUNK) == INVALID_VALUE
    assert driver.result("cuMemAddressFree", start, 4 * CHUNK) == INVALID_VALUE


def test_mapped_memory_is_usable_once_access_is_set(driver: Driver) -> None:
    [handle, _] = driver.do("cuMemCreate", Out(), CHUNK, _properties(), 0)
    [start] = driver.do("cuMemAddressReserve", Out(), 2 * CHUNK, 0, 0, 0)
    driver.do("cuMemMap", start, CHUNK, 0, handle, 0)
    assert driver.result("cuMemsetD8_v2", start, 0, CHUNK) == INVALID_VALUE
    driver.do("cuMemSetAccess", start, CHUNK, _access(), 1)
    driver.do("cuMemsetD8_v2", start, 0, CHUNK)
    assert driver.do("cuMemGetAccess", Out(), packed("ii", DEVICE, 0), start)[0] == 3
    assert driver.result("cuMemsetD8_v2", start, 0, CHUNK + 1) == INVALID_VALUE
