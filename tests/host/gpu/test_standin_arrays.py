"""The stand-in for libcuda: arrays and mipmapped arrays."""

from collections.abc import Callable

import pytest

from tests.standin.driver import Driver, Out, packed
from tests.standin.gpus import GIB, Node

Run = Callable[..., Driver]

INVALID_VALUE, OUT_OF_MEMORY = 1, 2
UINT8, FLOAT, NV12, BC1, BC7 = 0x01, 0x20, 0xB0, 0x91, 0x9D
LAYERED, CUBEMAP, SPARSE, DEFERRED = 0x01, 0x04, 0x40, 0x80
ROUND = 64 << 10


def _three(width: int, height: int, depth: int, form: int, channels: int, flags: int = 0) -> bytes:
    """CUDA_ARRAY3D_DESCRIPTOR_v2."""
    return packed("QQQiII", width, height, depth, form, channels, flags)


@pytest.fixture
def driver(node: Node, run: Run) -> Driver:
    return run(node)


def _resident(node: Node) -> int:
    return node.read().gpus[0].resident


@pytest.mark.parametrize(
    ("symbol", "descriptor"),
    [
        ("cuArrayCreate", ("IIiI", 1024, 1024, FLOAT, 4)),
        ("cuArrayCreate_v2", ("QQiI", 1024, 1024, FLOAT, 4)),
        ("cuArray3DCreate", ("IIIiII", 1024, 1024, 0, FLOAT, 4, 0)),
        ("cuArray3DCreate_v2", ("QQQiII", 1024, 1024, 0, FLOAT, 4, 0)),
    ],
)
def test_an_array_occupies_its_elements_in_every_abi(
    node: Node, driver: Driver, symbol: str, descriptor: tuple[str, *tuple[int, ...]]
) -> None:
    array = driver.do(symbol, Out(), packed(*descriptor))[0]
    assert _resident(node) == 1024 * 1024 * 16
    driver.do("cuArrayDestroy", array)
    assert _resident(node) == 0


@pytest.mark.parametrize(
    ("descriptor", "expected"),
    [
        ((1, 0, 0, UINT8, 1), ROUND),
        ((1 << 16, 0, 0, UINT8, 1), ROUND),
        (((1 << 16) + 1, 0, 0, UINT8, 1), 2 * ROUND),
        ((256, 256, 16, UINT8, 4), 256 * 256 * 16 * 4),
        ((1024, 1024, 0, NV12, 3), 1024 * 1024 * 3 // 2),
        ((1024, 1024, 0, BC1, 4), 1024 * 1024 // 2),
        ((1024, 1024, 0, BC7, 4), 1024 * 1024),
        ((1022, 1021, 0, BC7, 4), 1024 * 1024),
        ((1024, 1024, 0, FLOAT, 4, SPARSE), 0),
        ((1024, 1024, 0, FLOAT, 4, DEFERRED), 0),
    ],
)
def test_an_arrays_memory_follows_its_format_and_is_rounded_to_64_kib(
    node: Node, driver: Driver, descriptor: tuple[int, ...], expected: int
) -> None:
    driver.do("cuArray3DCreate_v2", Out(), _three(*descriptor))
    assert _resident(node) == expected


@pytest.mark.parametrize(
    ("descriptor", "levels", "elements"),
    [
        ((1024, 1024, 0, FLOAT, 1), 1, 1024 * 1024),
        ((1024, 1024, 0, FLOAT, 1), 2, 1024 * 1024 + 512 * 512),
        ((64, 64, 64, FLOAT, 1), 2, 64**3 + 32**3),
        ((256, 256, 6, FLOAT, 1, CUBEMAP), 2, 6 * (256 * 256 + 128 * 128)),
        ((256, 256, 4, FLOAT, 1, LAYERED), 2, 4 * (256 * 256 + 128 * 128)),
        ((1024, 1024, 0, FLOAT, 1), 99, sum(4**level for level in range(11))),
    ],
)
def test_a_mipmapped_array_occupies_all_its_levels(
    node: Node, driver: Driver, descriptor: tuple[int, ...], levels: int, elements: int
) -> None:
    array = driver.do("cuMipmappedArrayCreate", Out(), _three(*descriptor), levels)[0]
    assert _resident(node) == -(-elements * 4 // ROUND) * ROUND
    [level] = driver.do("cuMipmappedArrayGetLevel", Out(), array, 0)
    assert driver.result("cuArrayDestroy", level) == 400
    driver.do("cuMipmappedArrayDestroy", array)
    assert _resident(node) == 0


def test_an_array_that_does_not_fit_is_refused(node: Node, driver: Driver) -> None:
    driver.do("cuMemAlloc_v2", Out(), 8 * GIB - ROUND)
    wide = _three(ROUND + 1, 0, 0, UINT8, 1)
    assert driver.result("cuArray3DCreate_v2", Out(), wide) == OUT_OF_MEMORY
    driver.do("cuArray3DCreate_v2", Out(), _three(ROUND, 0, 0, UINT8, 1))
    unknown = _three(16, 16, 0, 0x7F, 1)
    assert driver.result("cuArray3DCreate_v2", Out(), unknown) == INVALID_VALUE
