"""The stand-in for libcuda: streams that are captured into graphs."""

from collections.abc import Callable

import pytest

from tests.standin.driver import Driver, Out, packed
from tests.standin.gpus import MIB, Node

Run = Callable[..., Driver]

ILLEGAL_STATE = 401
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT = range(900, 907)
CAPTURED_EVENT, WRONG_THREAD = 907, 908
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NONE, ACTIVE, INVALID = 0, 1, 2
NON_BLOCKING = 1
CHUNK = 32 * MIB


@pytest.fixture
def driver(node: Node, run: Run) -> Driver:
    return run(node)


def _stream(driver: Driver, flags: int = NON_BLOCKING) -> int:
    return driver.do("cuStreamCreate", Out(), flags)[0]


def _capture(driver: Driver, mode: int = GLOBAL) -> int:
    stream = _stream(driver)
    driver.do("cuStreamBeginCapture_v2", stream, mode)
    return stream


def _status(driver: Driver, stream: int) -> int:
    return driver.do("cuStreamIsCapturing", stream, Out(4))[0]


def _kernel(driver: Driver, name: str = "work_1ms") -> int:
    [module, _] = driver.do("cuModuleLoadData", Out(), b"image")
    return driver.do("cuModuleGetFunction", Out(), module, name)[0]


def _launch(driver: Driver, kernel: int, stream: int, symbol: str = "cuLaunchKernel") -> int:
    return driver.result(symbol, kernel, 1, 1, 1, 32, 1, 1, 0, stream, None, None)


def test_allocations_and_launches_are_recorded_and_charged_at_the_graphs_launch(
    node: Node, driver: Driver
) -> None:
    kernel, stream = _kernel(driver), _capture(driver)
    [pointer] = driver.do("cuMemAllocAsync", Out(), CHUNK, stream)
    assert _launch(driver, kernel, stream) == 0
    driver.do("cuMemFreeAsync", pointer, stream)
    assert (_status(driver, stream), node.read().gpus[0].resident) == (ACTIVE, 0)
    assert node.read().process(driver.pid).gpus[0].launches == 0
    [graph] = driver.do("cuStreamEndCapture", stream, Out())
    assert _status(driver, stream) == NONE
    assert driver.do("cuGraphGetNodes", graph, None, packed("Q", 0)) == [3]
    [ready] = driver.do("cuGraphInstantiateWithFlags", Out(), graph, 0)
    driver.do("cuGraphLaunch", ready, stream)
    use = node.read().process(driver.pid).gpus[0]
    assert (use.of("graph"), use.launches) == (CHUNK, 1)


@pytest.mark.parametrize(
    "call",
    [
        ("cuMemAlloc_v2", Out(), 4096),
        ("cuMemAllocPitch_v2", Out(), Out(), 64, 64, 4),
        ("cuMemAllocManaged", Out(), 4096, 1),
        ("cuMemFree_v2", "memory"),
        ("cuCtxSynchronize",),
        ("cuEventQuery", "event"),
        ("cuEventSynchronize", "event"),
    ],
)
@pytest.mark.parametrize(
    ("mode", "thread", "refused"),
    [(GLOBAL, 0, True), (GLOBAL, 1, True), (THREAD_LOCAL, 0, True), (THREAD_LOCAL, 1, False)],
)
def test_unsafe_calls_are_refused_and_spoil_the_capture(
    driver: Driver, call: tuple[str, ...], mode: int, thread: int, refused: bool
) -> None:
    [context] = driver.do("cuCtxGetCurrent", Out())
    driver.do("cuCtxSetCurrent", context, thread=1)
    known = {
        "memory": driver.do("cuMemAlloc_v2", Out(), 4096)[0],
        "event": driver.do("cuEventCreate", Out(), 0)[0],
    }
    symbol, *arguments = [known.get(one, one) if isinstance(one, str) else one for one in call]
    stream = _capture(driver, mode)
    result = driver.result(str(symbol), *arguments, thread=thread)
    assert result == (UNSUPPORTED if refused else 0)
    assert _status(driver, stream) == (INVALID if refused else ACTIVE)
    ended = driver.call("cuStreamEndCapture", stream, Out())
    assert ended.result == (INVALIDATED if refused else 0)
    assert (ended.ints == [0]) == refused


def test_a_thread_that_says_so_may_call_what_is_unsafe(driver: Driver) -> None:
    stream = _capture(driver, GLOBAL)
    assert driver.do("cuThreadExchangeStreamCaptureMode", packed("i", RELAXED)) == [GLOBAL]
    driver.do("cuMemAlloc_v2", Out(), 4096)
    assert driver.do("cuThreadExchangeStreamCaptureMode", packed("i", GLOBAL)) == [RELAXED]
    assert _status(driver, stream) == ACTIVE


def test_a_relaxed_capture_refuses_nothing(driver: Driver) -> None:
    stream = _capture(driver, RELAXED)
    driver.do("cuMemAlloc_v2", Out(), 4096)
    driver.do("cuStreamEndCapture", stream, Out())


@pytest.mark.parametrize("symbol", ["cuStreamSynchronize", "cuStreamQuery"])
def test_a_captured_stream_cannot_be_waited_for(driver: Driver, symbol: str) -> None:
    stream = _capture(driver, RELAXED)
    assert driver.result(symbol, stream) == UNSUPPORTED
    assert driver.result("cuStreamEndCapture", stream, Out()) == INVALIDATED


def test_the_legacy_stream_cannot_be_used_beside_a_captured_blocking_stream(driver: Driver) -> None:
    kernel, stream = _kernel(driver), _stream(driver, 0)
    driver.do("cuStreamBeginCapture_v2", stream, RELAXED)
    assert driver.result("cuStreamIsCapturing", 0, Out(4)) == IMPLICIT
    assert _launch(driver, kernel, 0, "cuLaunchKernel_ptsz") == 0
    assert _launch(driver, kernel, 0) == IMPLICIT
    assert driver.result("cuStreamEndCapture", stream, Out()) == INVALIDATED


def test_a_capture_ends_where_it_began(driver: Driver) -> None:
    stream = _stream(driver)
    assert driver.result("cuStreamEndCapture", stream, Out()) == ILLEGAL_STATE
    assert driver.result("cuStreamBeginCapture_v2", 0, GLOBAL) == UNSUPPORTED
    driver.do("cuStreamBeginCapture", stream)
    assert driver.result("cuStreamBeginCapture", stream) == ILLEGAL_STATE
    [context] = driver.do("cuCtxGetCurrent", Out())
    driver.do("cuCtxSetCurrent", context, thread=1)
    assert driver.result("cuStreamEndCapture", stream, Out(), thread=1) == WRONG_THREAD
    driver.do("cuStreamEndCapture", stream, Out())


def test_another_stream_joins_by_an_event_and_must_be_joined_again(driver: Driver) -> None:
    kernel, other = _kernel(driver), _stream(driver)
    fork, join = (driver.do("cuEventCreate", Out(), 0)[0] for _ in range(2))
    for joined in (False, True):
        stream = _capture(driver)
        driver.do("cuEventRecord", fork, stream)
        assert driver.result("cuEventQuery", fork) == CAPTURED_EVENT
        driver.do("cuStreamWaitEvent", other, fork, 0)
        assert _status(driver, other) == ACTIVE
        assert _launch(driver, kernel, other) == 0
        if joined:
            driver.do("cuEventRecord", join, other)
            driver.do("cuStreamWaitEvent", stream, join, 0)
        else:
            assert driver.result("cuStreamEndCapture", other, Out()) == UNMATCHED
            driver.do("cuStreamDestroy_v2", other)
            other = _stream(driver)
            assert driver.result("cuStreamEndCapture", stream, Out()) == INVALIDATED
            continue
        driver.do("cuStreamEndCapture", stream, Out())


def test_a_fork_that_is_not_joined_is_an_error(driver: Driver) -> None:
    stream, other = _capture(driver), _stream(driver)
    [fork] = driver.do("cuEventCreate", Out(), 0)
    driver.do("cuEventRecord", fork, stream)
    driver.do("cuStreamWaitEvent", other, fork, 0)
    assert driver.result("cuStreamEndCapture", stream, Out()) == UNJOINED
    assert _status(driver, other) == NONE


def test_captures_do_not_mix_with_other_work_or_with_each_other(driver: Driver) -> None:
    [outside] = driver.do("cuEventCreate", Out(), 0)
    [inside] = driver.do("cuEventCreate", Out(), 0)
    driver.do("cuEventRecord", outside, 0)
    stream = _capture(driver)
    assert driver.result("cuStreamWaitEvent", stream, outside, 0) == ISOLATION
    driver.result("cuStreamEndCapture", stream, Out())
    first, second = _capture(driver), _capture(driver)
    driver.do("cuEventRecord", inside, first)
    assert driver.result("cuStreamWaitEvent", second, inside, 0) == MERGE
    for stream in (first, second):
        assert driver.result("cuStreamEndCapture", stream, Out()) == INVALIDATED


def test_every_form_of_capture_info_tells_the_same(driver: Driver) -> None:
    stream = _capture(driver)
    old = driver.do("cuStreamGetCaptureInfo", stream, Out(4), Out())
    two = driver.do("cuStreamGetCaptureInfo_v2", stream, Out(4), Out(), Out(), None, None)
    three = driver.do("cuStreamGetCaptureInfo_v3", stream, Out(4), Out(), Out(), None, None, None)
    assert old == two[:2] == three[:2]
    assert two == three
    assert old[0] == ACTIVE
