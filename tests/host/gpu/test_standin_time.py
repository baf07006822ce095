"""The stand-in for libcuda: how long kernels run, and how processes share a GPU."""

import struct
from collections.abc import Callable

import pytest

from tests.standin.driver import Driver, Out, packed
from tests.standin.gpus import Node
from tests.waiting import until

Run = Callable[..., Driver]
MakeNode = Callable[..., Node]

INVALID_VALUE, INVALID_HANDLE, NOT_READY = 1, 400, 600
US, MS = 1_000, 1_000_000
EVENT = 0.00128  # ms, which the second event takes itself
QUEUE = 1024


def _function(driver: Driver, name: str) -> int:
    [module, _] = driver.do("cuModuleLoadData", Out(), b"image")
    return driver.do("cuModuleGetFunction", Out(), module, name)[0]


def _launch(driver: Driver, function: int, count: int = 1) -> None:
    for _ in range(count):
        driver.do("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, 0, None, None)


@pytest.fixture
def still(make_node: MakeNode) -> Node:
    """A node whose clock stands still, with turns of 2 ms."""
    return make_node(manual_clock=True, slice_ns=2 * MS, sample_ns=100 * MS)


@pytest.fixture
def driver(still: Node, run: Run) -> Driver:
    return run(still)


def _config(driver: Driver, stream: int = 0) -> bytes:
    """CUlaunchConfig of one block."""
    return packed("IIIIIIIQQI", 1, 1, 1, 32, 1, 1, 0, stream, 0, 0) + bytes(4)


GRID = (1, 1, 1, 32, 1, 1, 0)


@pytest.mark.parametrize(
    "symbol",
    [
        "cuLaunchKernel",
        "cuLaunchKernel_ptsz",
        "cuLaunchKernelEx",
        "cuLaunchKernelEx_ptsz",
        "cuLaunchCooperativeKernel",
        "cuLaunchCooperativeKernel_ptsz",
        "cuLaunchCooperativeKernelMultiDevice",
        "cuLaunch",
        "cuLaunchGrid",
        "cuLaunchGridAsync",
    ],
)
def test_every_launch_starts_the_kernel(still: Node, driver: Driver, symbol: str) -> None:
    function = _function(driver, "matmul_3ms")
    driver.do("cuFuncSetBlockShape", function, 32, 1, 1)
    [stream] = driver.do("cuStreamCreate", Out(), 1)
    each = packed("QIIIIIIIQQ", function, *GRID, stream, 0)
    arguments = {
        "cuLaunchKernel": (function, *GRID, 0, None, None),
        "cuLaunchKernelEx": (_config(driver), function, None, None),
        "cuLaunchCooperativeKernel": (function, *GRID, 0, None),
        "cuLaunchCooperativeKernelMultiDevice": (each, 1, 0),
        "cuLaunch": (function,),
        "cuLaunchGrid": (function, 4, 4),
        "cuLaunchGridAsync": (function, 4, 4, stream),
    }
    driver.do(symbol, *arguments[symbol.removesuffix("_ptsz")])
    use = still.read().process(driver.pid).gpus[0]
    assert (use.launches, use.backlog_ns) == (1, 3 * MS)
    still.let_pass(3 * MS)
    assert still.read().process(driver.pid).gpus[0].busy_ns == 3 * MS
    driver.do("cuCtxSynchronize")


def test_a_launch_of_nothing_is_refused(driver: Driver) -> None:
    function = _function(driver, "matmul")
    empty = (function, 0, 1, 1, 32, 1, 1, 0, 0, None, None)
    assert driver.result("cuLaunchKernel", *empty) == INVALID_VALUE
    assert driver.result("cuLaunchKernel", 4096, *GRID, 0, None, None) == INVALID_HANDLE


def test_a_kernels_name_says_how_long_it_runs(still: Node, driver: Driver) -> None:
    for name in ("a_7ns", "b_6us", "c_5ms", "d_1s", "e", "f_5", "g_5xs"):
        _launch(driver, _function(driver, name))
    expected = 7 + 6 * US + 5 * MS + 1000 * MS
    assert still.read().process(driver.pid).gpus[0].backlog_ns == expected


def test_events_tell_when_the_work_before_them_ended(still: Node, driver: Driver) -> None:
    function = _function(driver, "matmul_5ms")
    first, second = (driver.do("cuEventCreate", Out(), 0)[0] for _ in range(2))
    driver.do("cuEventRecord", first, 0)
    _launch(driver, function, 3)
    driver.do("cuEventRecord", second, 0)
    assert driver.result("cuEventQuery", first) == 0
    assert driver.result("cuEventQuery", second) == NOT_READY
    assert driver.result("cuStreamQuery", 0) == NOT_READY
    assert driver.result("cuEventElapsedTime_v2", Out(4), first, second) == NOT_READY
    still.let_pass(15 * MS - 1)
    assert driver.result("cuEventQuery", second) == NOT_READY
    still.let_pass(1)
    assert driver.result("cuEventQuery", second) == 0
    for symbol in ("cuEventElapsedTime", "cuEventElapsedTime_v2"):
        answer = driver.call(symbol, Out(4), first, second)
        assert struct.unpack("f", answer.outputs[0]) == (pytest.approx(15 + EVENT),)


def test_an_events_time_is_kept_when_much_is_launched_after_it(still: Node, driver: Driver) -> None:
    function = _function(driver, "matmul_1us")
    first, second = (driver.do("cuEventCreate", Out(), 0)[0] for _ in range(2))
    driver.do("cuEventRecord", first, 0)
    _launch(driver, function, 9)
    driver.do("cuEventRecord", second, 0)
    for _ in range(3):
        still.let_pass(QUEUE * US)
        _launch(driver, function, QUEUE // 2)
    answer = driver.call("cuEventElapsedTime", Out(4), first, second)
    assert struct.unpack("f", answer.outputs[0]) == (pytest.approx(0.009 + EVENT),)


def test_processes_take_turns_however_much_each_has_launched(still: Node, run: Run) -> None:
    first, second = run(still), run(still)
    _launch(first, _function(first, "small_100us"), 600)
    _launch(second, _function(second, "large_200ms"))
    still.let_pass(40 * MS)
    for driver in (first, second):
        assert still.read().process(driver.pid).gpus[0].busy_ns == 20 * MS
    still.let_pass(80 * MS)
    assert still.read().process(first.pid).gpus[0].busy_ns == 60 * MS
    still.let_pass(30 * MS)  # alone now
    assert still.read().process(second.pid).gpus[0].busy_ns == 90 * MS


def test_the_work_of_a_killed_process_ends_with_it(still: Node, run: Run) -> None:
    first, second = run(still), run(still)
    for driver in (first, second):
        _launch(driver, _function(driver, "matmul_1s"))
    still.let_pass(8 * MS)
    first.kill()
    still.let_pass(10 * MS)
    assert still.read().process(second.pid).gpus[0].busy_ns == 14 * MS


def test_a_launch_waits_while_the_queue_is_full(still: Node, driver: Driver) -> None:
    function = _function(driver, "matmul_1ms")
    _launch(driver, function, QUEUE)
    driver.send("cuLaunchKernel", function, *GRID, 0, None, None)
    assert still.read().process(driver.pid).gpus[0].queued == QUEUE
    calls = "cuLaunchKernel"
    until(lambda: still.read().process(driver.pid).called(calls) == QUEUE + 1, what="launch")
    assert still.read().process(driver.pid).gpus[0].queued == QUEUE
    still.let_pass(1 * MS)
    assert driver.receive().result == 0


def test_on_a_running_clock_a_wait_lasts_as_long_as_the_work(node: Node, run: Run) -> None:
    driver = run(node)
    first, second = (driver.do("cuEventCreate", Out(), 0)[0] for _ in range(2))
    driver.do("cuEventRecord", first, 0)
    _launch(driver, _function(driver, "matmul_30ms"))
    driver.do("cuEventRecord", second, 0)
    driver.do("cuEventSynchronize", second)
    answer = driver.call("cuEventElapsedTime", Out(4), first, second)
    assert struct.unpack("f", answer.outputs[0])[0] >= 30.0
    assert node.read().process(driver.pid).gpus[0].busy_ns == 30 * MS
