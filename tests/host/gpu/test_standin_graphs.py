"""The stand-in for libcuda: graphs and the memory that they allocate."""

from collections.abc import Callable

import pytest

from tests.standin.driver import Driver, Out, packed
from tests.standin.gpus import GIB, MIB, Node

Run = Callable[..., Driver]

INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED = 1, 2, 801
KERNEL, ALLOC, FREE = 0, 10, 11
USED, RESERVED = 0, 2
AUTO_FREE = 1
CHUNK = 32 * MIB


@pytest.fixture
def driver(node: Node, run: Run) -> Driver:
    return run(node)


def _memory(size: int) -> bytes:
    """CUDA_MEM_ALLOC_NODE_PARAMS of device 0."""
    pool = packed("iiiiQQ56s", 1, 0, 1, 0, 0, 0, bytes(56))
    return pool + packed("QQQQ", 0, 0, size, 0)


def _parameters(kind: int, content: bytes) -> bytes:
    """CUgraphNodeParams."""
    return packed("iiii", kind, 0, 0, 0) + content.ljust(232, b"\0") + bytes(8)


def _graph(driver: Driver) -> int:
    return driver.do("cuGraphCreate", Out(), 0)[0]


def _alloc_node(driver: Driver, graph: int, size: int) -> int:
    """The address of the memory."""
    answer = driver.call("cuGraphAddMemAllocNode", Out(), graph, None, 0, _memory(size))
    assert answer.result == 0
    return int.from_bytes(answer.outputs[1][-8:], "little")


def _ready(driver: Driver, graph: int, flags: int = 0) -> int:
    return driver.do("cuGraphInstantiateWithFlags", Out(), graph, flags)[0]


def _graph_memory(driver: Driver, attribute: int) -> int:
    return driver.do("cuDeviceGetGraphMemAttribute", 0, attribute, Out())[0]


def _resident(node: Node) -> int:
    return node.read().gpus[0].resident


@pytest.mark.parametrize("launch", ["cuGraphLaunch", "cuGraphUpload", "cuGraphLaunch_ptsz"])
def test_a_graphs_memory_is_reserved_at_its_first_upload_or_launch(
    node: Node, driver: Driver, launch: str
) -> None:
    graph = _graph(driver)
    pointer = _alloc_node(driver, graph, 40 * MIB)
    driver.do("cuGraphAddMemFreeNode", Out(), graph, None, 0, pointer)
    ready = _ready(driver, graph)
    assert _resident(node) == 0
    driver.do(launch, ready, 0)
    assert _resident(node) == 2 * CHUNK == _graph_memory(driver, RESERVED)
    assert node.read().process(driver.pid).gpus[0].of("graph") == 2 * CHUNK
    driver.do("cuGraphLaunch", ready, 0)
    assert _resident(node) == 2 * CHUNK
    driver.do("cuGraphExecDestroy", ready)
    driver.do("cuDeviceGraphMemTrim", 0)
    assert _resident(node) == 0


def test_memory_freed_within_a_graph_is_used_again_in_it(node: Node, driver: Driver) -> None:
    graph = _graph(driver)
    for _ in range(4):
        pointer = _alloc_node(driver, graph, CHUNK)
        driver.do("cuGraphAddMemFreeNode", Out(), graph, None, 0, pointer)
    driver.do("cuGraphLaunch", _ready(driver, graph), 0)
    assert _resident(node) == CHUNK


def test_memory_that_a_graph_leaves_must_be_freed_before_the_next_launch(
    node: Node, driver: Driver
) -> None:
    graph = _graph(driver)
    pointer = _alloc_node(driver, graph, CHUNK)
    ready = _ready(driver, graph)
    driver.do("cuGraphLaunch", ready, 0)
    assert _graph_memory(driver, USED) == CHUNK
    driver.do("cuMemsetD8_v2", pointer, 0, CHUNK)
    assert driver.result("cuGraphLaunch", ready, 0) == INVALID_VALUE
    driver.do("cuMemFreeAsync", pointer, 0)
    assert _graph_memory(driver, USED) == 0
    driver.do("cuGraphLaunch", ready, 0)
    driver.do("cuMemFree_v2", pointer)
    driver.do("cuDeviceGraphMemTrim", 0)
    assert _resident(node) == 0


def test_a_graph_may_free_at_launch_what_it_left(driver: Driver) -> None:
    graph = _graph(driver)
    _alloc_node(driver, graph, CHUNK)
    ready = _ready(driver, graph, AUTO_FREE)
    for _ in range(3):
        driver.do("cuGraphLaunch", ready, 0)
    assert _graph_memory(driver, USED) == CHUNK


def test_a_launch_whose_memory_does_not_fit_is_refused(node: Node, driver: Driver) -> None:
    driver.do("cuMemAlloc_v2", Out(), 8 * GIB - CHUNK)
    graph = _graph(driver)
    _alloc_node(driver, graph, CHUNK + 1)
    ready = _ready(driver, graph)
    assert driver.result("cuGraphLaunch", ready, 0) == OUT_OF_MEMORY
    assert driver.result("cuGraphUpload", ready, 0) == OUT_OF_MEMORY
    assert _resident(node) == 8 * GIB - CHUNK


def test_a_graph_that_allocates_is_made_ready_once(driver: Driver) -> None:
    graph = _graph(driver)
    _alloc_node(driver, graph, CHUNK)
    ready = _ready(driver, graph)
    assert driver.result("cuGraphInstantiateWithFlags", Out(), graph, 0) == NOT_SUPPORTED
    driver.do("cuGraphExecDestroy", ready)
    _ready(driver, graph)


@pytest.mark.parametrize("symbol", ["cuGraphAddNode", "cuGraphAddNode_v2"])
def test_nodes_of_any_type_are_added_in_every_abi(node: Node, driver: Driver, symbol: str) -> None:
    edges = [None] if symbol.endswith("_v2") else []
    graph = _graph(driver)
    answer = driver.call(symbol, Out(), graph, None, *edges, 0, _parameters(ALLOC, _memory(MIB)))
    pointer = int.from_bytes(answer.outputs[1][16 + 112 : 16 + 120], "little")
    free = _parameters(FREE, packed("Q", pointer))
    first = answer.outputs[0]
    node_of_free = driver.call(symbol, Out(), graph, first, *edges, 1, free).ints[0]
    assert driver.do("cuGraphNodeGetType", node_of_free, Out(4)) == [FREE]
    driver.do("cuGraphLaunch", _ready(driver, graph), 0)
    assert _resident(node) == CHUNK


def test_child_graphs_run_with_their_parent(node: Node, driver: Driver) -> None:
    child, parent = _graph(driver), _graph(driver)
    _alloc_node(driver, child, CHUNK)
    _alloc_node(driver, parent, CHUNK)
    driver.do("cuGraphAddChildGraphNode", Out(), parent, None, 0, child)
    driver.do("cuGraphLaunch", _ready(driver, parent), 0)
    assert _resident(node) == 2 * CHUNK
