"""The stand-in for libcuda: linear memory."""

from collections.abc import Callable

import pytest

from tests.standin.driver import UNTOUCHED, Driver, Out
from tests.standin.gpus import GIB, MIB, Node, gpus

Run = Callable[..., Driver]
MakeNode = Callable[..., Node]

OUT_OF_MEMORY = 2


def test_memory_is_resident_from_alloc_to_free(node: Node, run: Run) -> None:
    driver = run(node)
    [pointer] = driver.do("cuMemAlloc_v2", Out(), 5 * MIB)
    assert node.read().gpus[0].resident == 5 * MIB
    assert node.read().process(driver.pid).gpus[0].of("linear") == 5 * MIB
    assert driver.do("cuMemGetInfo_v2", Out(), Out()) == [8 * GIB - 5 * MIB, 8 * GIB]
    driver.do("cuMemFree_v2", pointer)
    assert node.read().gpus[0].resident == 0


def test_memory_up_to_the_last_byte_is_given_and_not_one_more(node: Node, run: Run) -> None:
    driver = run(node)
    [pointer] = driver.do("cuMemAlloc_v2", Out(), 8 * GIB)
    answer = driver.call("cuMemAlloc_v2", Out(), 1)
    assert (answer.result, answer.ints) == (OUT_OF_MEMORY, [UNTOUCHED])
    driver.do("cuMemFree_v2", pointer)
    driver.do("cuMemAlloc_v2", Out(), 1)


def test_memory_of_a_killed_process_is_free_at_once(node: Node, run: Run) -> None:
    first, second = run(node), run(node)
    first.do("cuMemAlloc_v2", Out(), 8 * GIB)
    assert second.result("cuMemAlloc_v2", Out(), 1) == OUT_OF_MEMORY
    first.kill()
    assert node.read().gpus[0].resident == 0
    second.do("cuMemAlloc_v2", Out(), 8 * GIB)
    assert not node.read().process(first.pid).alive


def test_memory_that_was_freed_may_not_be_used(node: Node, run: Run) -> None:
    driver = run(node)
    [pointer] = driver.do("cuMemAlloc_v2", Out(), MIB)
    driver.do("cuMemFree_v2", pointer)
    driver.send("cuMemFree_v2", pointer)
    code, said = driver.ended()
    assert code == -6
    assert "use of freed memory" in said


@pytest.mark.parametrize(
    ("device", "context", "expected"), [(0, 300 * MIB, 300 * MIB), (1, 300 * MIB, 300 * MIB)]
)
def test_a_context_occupies_memory_of_its_gpu(
    make_node: MakeNode, run: Run, device: int, context: int, expected: int
) -> None:
    node = make_node(gpus(2, context_bytes=context))
    driver = run(node, start=False)
    driver.start(device)
    assert node.read().gpus[device].resident == expected
    assert node.read().gpus[1 - device].resident == 0
    driver.do("cuDevicePrimaryCtxRelease_v2", device)
    assert node.read().gpus[device].resident == 0
