"""Memory of graphs counts when a graph is launched, however the graph was made."""

import time
from collections.abc import Callable

import msgspec
import pytest

from gpu.limits.limits_file import LimitsFile
from tests.gpu.conftest import MIB, Place
from tests.gpu.forms import on_device, pool_on
from tests.gpu.ways import graph_of
from tests.standin.driver import Argument, Driver, Out, packed
from tests.standin.gpus import Behaviour

OUT_OF_MEMORY = 2
MS = 1_000_000  # nanoseconds
IS_GRAPH, ALLOCATES = 4, 10  # CUgraphNodeType
UPLOADS = 2  # CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD
Make = Callable[..., Place]


def captured(driver: Driver, bytes_: int) -> tuple[int, int]:
    """A graph that allocates and frees, by capture; it and the stream."""
    [stream] = driver.do("cuStreamCreate", Out(), 1)
    driver.do("cuStreamBeginCapture_v2", stream, 0)
    [pointer] = driver.do("cuMemAllocAsync", Out(), bytes_, stream)
    driver.do("cuMemFreeAsync", pointer, stream)
    [graph] = driver.do("cuStreamEndCapture", stream, Out())
    return graph, stream


def test_memory_of_a_graph_counts_when_it_is_launched(place: Make) -> None:
    here = place(memory=64 * MIB)
    driver = here.started()
    graph, stream = captured(driver, 8 * MIB)
    [exec_] = driver.do("cuGraphInstantiateWithFlags", Out(), graph, 0)
    assert here.group.used == here.resident() == 0
    for _ in range(3):
        driver.do("cuGraphLaunch", exec_, stream)
        assert here.group.used == here.resident() == 8 * MIB
    driver.do("cuStreamSynchronize", stream)
    # Memory that graphs no longer use is freed for other allocations.
    driver.do("cuMemAlloc_v2", Out(), 64 * MIB)
    assert here.group.used == here.resident() == 64 * MIB
    assert driver.result("cuGraphLaunch", exec_, stream) == OUT_OF_MEMORY
    assert here.resident() == 64 * MIB


def test_a_launch_that_is_captured_counts_with_the_graph_that_it_becomes_a_part_of(
    place: Make,
) -> None:
    here = place(memory=64 * MIB)
    driver = here.started()
    _, inner = graph_of(driver, 66 * MIB)
    [stream] = driver.do("cuStreamCreate", Out(), 1)
    driver.do("cuStreamBeginCapture_v2", stream, 0)
    driver.do("cuGraphLaunch", inner, stream)
    [graph] = driver.do("cuStreamEndCapture", stream, Out())
    driver.do("cuGraphExecDestroy", inner)
    [outer] = driver.do("cuGraphInstantiateWithFlags", Out(), graph, 0)
    assert driver.result("cuGraphLaunch", outer, stream) == OUT_OF_MEMORY
    assert here.node.read().gpus[0].peak == 0


def test_memory_that_is_given_up_for_a_launch_is_not_there_for_it(place: Make) -> None:
    """The unused memory of one graph suffices for most of the next graph, until it is freed."""
    here = place(memory=128 * MIB)
    driver = here.started()
    graph, stream = captured(driver, 64 * MIB)
    [exec_] = driver.do("cuGraphInstantiateWithFlags", Out(), graph, 0)
    driver.do("cuGraphLaunch", exec_, stream)
    driver.do("cuMemAlloc_v2", Out(), 48 * MIB)
    _, larger = graph_of(driver, 96 * MIB)
    assert driver.result("cuGraphLaunch", larger, stream) == OUT_OF_MEMORY
    assert here.node.read().gpus[0].peak == 112 * MIB
    driver.do("cuGraphLaunch", exec_, stream)
    assert here.group.used == here.resident() == 112 * MIB


def test_launches_at_once_do_not_both_take_what_one_has_left(place: Make) -> None:
    """The driver reports its memory slowly, so both launches are checked before one runs."""
    slow = {"cuDeviceGetGraphMemAttribute": 30_000_000}
    here = place(memory=64 * MIB, behaviour=Behaviour(pool_chunk=2 * MIB, latency_ns=slow))
    driver = here.process()
    context = driver.start()
    driver.do("cuCtxSetCurrent", context, thread=1)
    graph, stream = captured(driver, 64 * MIB)
    [exec_] = driver.do("cuGraphInstantiateWithFlags", Out(), graph, 0)
    driver.do("cuGraphLaunch", exec_, stream)
    graphs = [graph_of(driver, 64 * MIB)[1] for _ in range(2)]
    for thread, executable in enumerate(graphs):
        driver.send("cuGraphLaunch", executable, 0, thread=thread)
    assert sorted(driver.receive().result for _ in graphs) == [0, OUT_OF_MEMORY]
    assert here.node.read().gpus[0].peak == 64 * MIB


def test_what_graphs_have_left_is_given_up_also_while_one_is_launched(place: Make) -> None:
    slow = {"cuDeviceGetGraphMemAttribute": 100_000_000}
    here = place(memory=64 * MIB, behaviour=Behaviour(pool_chunk=2 * MIB, latency_ns=slow))
    driver = here.process()
    context = driver.start()
    driver.do("cuCtxSetCurrent", context, thread=1)
    graph, stream = captured(driver, 64 * MIB)
    [idle] = driver.do("cuGraphInstantiateWithFlags", Out(), graph, 0)
    driver.do("cuGraphLaunch", idle, stream)
    driver.do("cuStreamSynchronize", stream)
    graph, stream = captured(driver, 2 * MIB)
    [small] = driver.do("cuGraphInstantiateWithFlags", Out(), graph, 0)
    driver.send("cuGraphLaunch", small, stream, thread=0)
    driver.send("cuMemAlloc_v2", Out(), 32 * MIB, thread=1)
    assert [driver.receive().result for _ in range(2)] == [0, 0]


def test_a_launch_that_waits_for_another_graphs_memory_is_not_timed_meanwhile(
    place: Make,
) -> None:
    slow = {"cuGraphInstantiateWithParams": 200_000_000}
    here = place(memory=256 * MIB, behaviour=Behaviour(pool_chunk=2 * MIB, latency_ns=slow))
    with LimitsFile(here.group.limits) as limits:
        entry = limits.limit()
        limits.write(msgspec.structs.replace(entry, compute_share=0.5))
    driver = here.process()
    context = driver.start()
    driver.do("cuCtxSetCurrent", context, thread=1)
    graph, stream = captured(driver, 2 * MIB)
    [exec_] = driver.do("cuGraphInstantiateWithFlags", Out(), graph, 0)
    for _ in range(4):
        large = empty_graph(driver)
        _memory_node(driver, large, 2 * MIB)
        driver.send("cuGraphInstantiateWithParams", Out(), large, with_parameters(2), thread=1)
        time.sleep(0.05)  # for it to have begun; if it has not, the launch waits for nothing
        driver.send("cuGraphLaunch", exec_, stream, thread=0)
        assert [driver.receive().result for _ in range(2)] == [0, 0]
        driver.do("cuStreamSynchronize", stream)
    use = here.group.use()
    assert use.paid_ns < 200 * MS  # the waits are 600 ms


def test_memory_nodes_of_a_graph_count_as_captured_ones_do(place: Make) -> None:
    here = place(memory=64 * MIB)
    driver = here.started()
    [graph] = driver.do("cuGraphCreate", Out(), 0)
    for bytes_, result in ((8 * MIB, 0), (100 * MIB, OUT_OF_MEMORY)):
        node = pool_on(0) + packed("4Q", 0, 0, bytes_, 0)
        driver.do("cuGraphAddMemAllocNode", Out(), graph, None, 0, node)
        [exec_] = driver.do("cuGraphInstantiate_v2", Out(), graph, None, None, 0)
        assert driver.result("cuGraphLaunch", exec_, 0) == result
        driver.do("cuGraphExecDestroy", exec_)
    assert here.node.read().gpus[0].peak <= 64 * MIB


def test_a_capture_is_not_disturbed(place: Make) -> None:
    """Allocations, denials and launches within it are legal; a launch waits for nothing."""
    here = place(memory=64 * MIB)
    driver = here.started()
    [stream] = driver.do("cuStreamCreate", Out(), 1)
    driver.do("cuMemAllocAsync", Out(), 2 * MIB, 0)
    driver.do("cuStreamBeginCapture_v2", stream, 0)
    driver.do("cuMemAllocAsync", Out(), 100 * MIB, stream)
    assert driver.result("cuMemCreate", Out(), 100 * MIB, on_device(0), 0) == OUT_OF_MEMORY
    [graph] = driver.do("cuStreamEndCapture", stream, Out())
    [exec_] = driver.do("cuGraphInstantiateWithFlags", Out(), graph, 0)
    assert driver.result("cuGraphLaunch", exec_, stream) == OUT_OF_MEMORY
    assert here.node.read().gpus[0].peak <= 64 * MIB


# ---- each way to make a graph, and to let it have its memory -------------------------------------


def node_of(bytes_: int) -> bytes:
    """CUDA_MEM_ALLOC_NODE_PARAMS."""
    return pool_on(0) + packed("4Q", 0, 0, bytes_, 0)


def any_node(kind: int, content: bytes) -> bytes:
    """CUgraphNodeParams."""
    return packed("i12x232s8x", kind, content)


def empty_graph(driver: Driver) -> int:
    return driver.do("cuGraphCreate", Out(), 0)[0]


def _by(symbol: str, *edges: None) -> Callable[[Driver, int, int], None]:
    """Add an allocation to a graph; `edges` is what the later versions take beside the nodes."""

    def add(driver: Driver, graph: int, bytes_: int) -> None:
        node = any_node(ALLOCATES, node_of(bytes_))
        driver.do(symbol, Out(), graph, None, *edges, 0, node)

    return add


def _memory_node(driver: Driver, graph: int, bytes_: int) -> None:
    driver.do("cuGraphAddMemAllocNode", Out(), graph, None, 0, node_of(bytes_))


def _child(driver: Driver, graph: int, bytes_: int) -> None:
    child = empty_graph(driver)
    _memory_node(driver, child, bytes_)
    driver.do("cuGraphAddChildGraphNode", Out(), graph, None, 0, child)


def _any_child(driver: Driver, graph: int, bytes_: int) -> None:
    child = empty_graph(driver)
    _memory_node(driver, child, bytes_)
    driver.do("cuGraphAddNode", Out(), graph, None, 0, any_node(IS_GRAPH, packed("Q", child)))


ADDITIONS = {
    "cuGraphAddMemAllocNode": _memory_node,
    "cuGraphAddNode": _by("cuGraphAddNode"),
    "cuGraphAddNode_v2": _by("cuGraphAddNode_v2", None),
    "cuGraphAddNode_v3": _by("cuGraphAddNode_v3", None),
    "cuGraphAddChildGraphNode": _child,
    "a child by cuGraphAddNode": _any_child,
}


@pytest.mark.parametrize("addition", ADDITIONS)
def test_each_way_to_add_an_allocation_counts_at_the_launch(place: Make, addition: str) -> None:
    """Two of them are beyond the limit, if both are added up."""
    here = place(memory=64 * MIB)
    driver = here.started()
    for count, result in ((1, 0), (2, OUT_OF_MEMORY)):
        graph = empty_graph(driver)
        for _ in range(count):
            ADDITIONS[addition](driver, graph, 40 * MIB)
        [executable] = driver.do("cuGraphInstantiateWithFlags", Out(), graph, 0)
        assert here.group.used == here.resident()
        assert driver.result("cuGraphLaunch", executable, 0) == result
    assert here.group.used == here.resident() == 40 * MIB
    assert here.node.read().gpus[0].peak == 40 * MIB


def with_parameters(flags: int) -> bytes:
    """CUDA_GRAPH_INSTANTIATE_PARAMS."""
    return packed("3Qi4x", flags, 0, 0, 0)


INSTANTIATIONS: dict[str, tuple[Argument, ...]] = {
    "cuGraphInstantiate": (None, None, 0),
    "cuGraphInstantiate_v2": (None, None, 0),
    "cuGraphInstantiateWithFlags": (0,),
    "cuGraphInstantiateWithParams": (with_parameters(0),),
    "cuGraphInstantiateWithParams_ptsz": (with_parameters(0),),
}


@pytest.mark.parametrize("symbol", INSTANTIATIONS)
def test_what_each_instantiation_makes_is_known(place: Make, symbol: str) -> None:
    here = place(memory=64 * MIB)
    driver = here.started()
    for bytes_, result in ((64 * MIB, 0), (66 * MIB, OUT_OF_MEMORY)):
        graph = empty_graph(driver)
        _memory_node(driver, graph, bytes_)
        executable = driver.do(symbol, Out(), graph, *INSTANTIATIONS[symbol])[0]
        driver.do("cuGraphDestroy", graph)  # the executable one needs it no longer
        assert here.group.used == here.resident()
        assert driver.result("cuGraphLaunch", executable, 0) == result
    assert here.node.read().gpus[0].peak == 64 * MIB


@pytest.mark.parametrize("symbol", ["cuGraphUpload", "cuGraphUpload_ptsz"])
def test_an_upload_takes_the_memory_of_a_graph(place: Make, symbol: str) -> None:
    here = place(memory=64 * MIB)
    driver = here.started()
    _, executable = graph_of(driver, 64 * MIB)
    driver.do(symbol, executable, 0)
    assert here.group.used == here.resident() == 64 * MIB
    driver.do("cuDeviceGraphMemTrim", 0)
    assert here.group.used == here.resident() == 0
    _, executable = graph_of(driver, 66 * MIB)
    assert driver.result(symbol, executable, 0) == OUT_OF_MEMORY
    assert here.group.used == here.resident() == 0


@pytest.mark.parametrize(
    "symbol", ["cuGraphInstantiateWithParams", "cuGraphInstantiateWithParams_ptsz"]
)
def test_an_instantiation_that_uploads_takes_the_memory_of_a_graph(
    place: Make, symbol: str
) -> None:
    here = place(memory=64 * MIB)
    driver = here.started()
    parameters = with_parameters(UPLOADS)
    graphs = [empty_graph(driver), empty_graph(driver)]
    for graph, bytes_ in zip(graphs, (64 * MIB, 66 * MIB), strict=True):
        _memory_node(driver, graph, bytes_)
    driver.do(symbol, Out(), graphs[0], parameters)
    assert here.group.used == here.resident() == 64 * MIB
    driver.do("cuDeviceGraphMemTrim", 0)
    answer = driver.call(symbol, Out(), graphs[1], parameters)
    assert (answer.result, set(answer.outputs[0])) == (OUT_OF_MEMORY, {0xEE})
    assert answer.outputs[1] == parameters
    assert here.group.used == here.resident() == 0


def test_the_driver_may_refuse_what_fits_into_the_limit(place: Make) -> None:
    here = place(bytes=32 * MIB, memory=128 * MIB)
    driver = here.started()
    _, executable = graph_of(driver, 64 * MIB)
    graph = empty_graph(driver)
    _memory_node(driver, graph, 64 * MIB)
    calls: tuple[tuple[str, tuple[Argument, ...]], ...] = (
        ("cuGraphUpload", (executable, 0)),
        ("cuGraphLaunch", (executable, 0)),
        ("cuGraphInstantiateWithParams", (Out(), graph, with_parameters(UPLOADS))),
    )
    for symbol, arguments in calls:
        assert driver.result(symbol, *arguments) == OUT_OF_MEMORY
        assert here.group.used == here.resident() == 0
