"""The stand-in for libcuda: linear memory."""

import time
from collections.abc import Callable

import pytest

from tests.standin import build
from tests.standin.driver import UNTOUCHED, Argument, Driver, Out
from tests.standin.gpus import GIB, MIB, Node, gpus

Run = Callable[..., Driver]
MakeNode = Callable[..., Node]

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, CONTEXT_IS_DESTROYED = 1, 2, 201, 709
GLOBAL = 1


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


@pytest.mark.parametrize(("alloc", "free"), [("", ""), ("_v2", "_v2"), ("", "_v2")])
def test_memory_is_given_and_freed_in_every_abi(
    node: Node, run: Run, alloc: str, free: str
) -> None:
    driver = run(node)
    width = 8 if alloc else 4
    [pointer] = driver.do(f"cuMemAlloc{alloc}", Out(width), MIB)
    [row, pitch] = driver.do(f"cuMemAllocPitch{alloc}", Out(width), Out(width), 1000, 100, 4)
    assert pitch == 1024
    assert node.read().gpus[0].resident == MIB + 1024 * 100
    assert driver.do(f"cuMemGetAddressRange{alloc}", Out(width), Out(width), pointer + 5) == [
        pointer,
        MIB,
    ]
    for address in (pointer, row):
        driver.do(f"cuMemFree{free}", address)
    assert node.read().gpus[0].resident == 0


def test_the_oldest_abi_shows_no_more_than_32_bits(node: Node, run: Run) -> None:
    driver = run(node)
    driver.do("cuMemAlloc_v2", Out(), 6 * GIB)
    assert driver.do("cuMemGetInfo", Out(4), Out(4)) == [2 * GIB, 2**32 - 1]
    assert driver.do("cuDeviceTotalMem", Out(4), 0) == [2**32 - 1]
    assert driver.do("cuDeviceTotalMem_v2", Out(), 0) == [8 * GIB]


def test_bad_requests_are_refused_and_charge_nothing(node: Node, run: Run) -> None:
    driver = run(node)
    refused: list[tuple[str, *tuple[Argument, ...]]] = [
        ("cuMemAlloc_v2", Out(), 0),
        ("cuMemAlloc_v2", None, MIB),
        ("cuMemAllocPitch_v2", Out(), Out(), 64, 64, 3),
        ("cuMemAllocPitch_v2", Out(), Out(), 0, 64, 4),
        ("cuMemAllocManaged", Out(), MIB, 0),
        ("cuMemFree_v2", 12345),
    ]
    assert [driver.result(*call) for call in refused] == [INVALID_VALUE] * len(refused)
    assert driver.result("cuMemAlloc_v2", Out(), 2**63) == OUT_OF_MEMORY
    driver.do("cuMemFree_v2", 0)
    assert node.read().gpus[0].resident == 0


def test_without_a_context_there_is_no_memory(node: Node, run: Run) -> None:
    driver = run(node, start=False)
    driver.do("cuInit", 0)
    assert driver.result("cuMemAlloc_v2", Out(), MIB) == INVALID_CONTEXT
    assert driver.result("cuMemGetInfo_v2", Out(), Out()) == INVALID_CONTEXT


def test_managed_memory_counts_and_the_cpu_may_touch_it(node: Node, run: Run) -> None:
    driver = run(node)
    [pointer] = driver.do("cuMemAllocManaged", Out(), MIB + 1, GLOBAL)
    assert node.read().process(driver.pid).gpus[0].of("managed") == MIB + 4096
    assert driver.touch(pointer + MIB)
    driver.do("cuMemFree_v2", pointer)
    assert not driver.touch(pointer)


def test_host_memory_occupies_no_gpu(node: Node, run: Run) -> None:
    driver = run(node)
    for call in (("cuMemAllocHost_v2",), ("cuMemHostAlloc",)):
        [pointer] = driver.do(*call, Out(), MIB, 0)
        assert node.read().gpus[0].resident == 0
        driver.do("cuMemFreeHost", pointer)


def test_host_memory_that_is_registered_occupies_no_gpu(node: Node, run: Run) -> None:
    driver = run(node)
    start = 4096 * 99
    for version in ("", "_v2"):
        driver.do(f"cuMemHostRegister{version}", start, MIB, 0)
        assert driver.result(f"cuMemHostRegister{version}", start + 4096, MIB, 0) == 712
        assert node.read().gpus[0].resident == 0
        driver.do("cuMemHostUnregister", start)
    assert driver.result("cuMemHostUnregister", start) == 713


@pytest.mark.parametrize(
    ("symbol", "further"),
    [("cuCtxCreate", 0), ("cuCtxCreate_v2", 0), ("cuCtxCreate_v3", 2), ("cuCtxCreate_v4", 1)],
)
@pytest.mark.parametrize("destroy", ["cuCtxDestroy", "cuCtxDestroy_v2"])
def test_a_context_frees_what_was_made_in_it(
    make_node: MakeNode, run: Run, symbol: str, further: int, destroy: str
) -> None:
    node = make_node(gpus(2, context_bytes=300 * MIB, module_bytes=MIB))
    driver = run(node)
    driver.do("cuMemAlloc_v2", Out(), MIB)
    [context] = driver.do(symbol, Out(), *[0] * further, 0, 1)
    driver.do("cuMemAlloc_v2", Out(), MIB)
    driver.do("cuModuleLoadData", Out(), b"image")
    held = node.read().process(driver.pid)
    assert [use.bytes for use in held.gpus[:2]] == [301 * MIB, 302 * MIB]
    driver.do(destroy, context)
    held = node.read().process(driver.pid)
    assert [use.bytes for use in held.gpus[:2]] == [301 * MIB, 0]
    driver.do("cuMemAlloc_v2", Out(), MIB)  # the context that was current before
    assert node.read().gpus[0].resident == 302 * MIB


def test_the_primary_context_ends_with_its_last_release_or_a_reset(
    make_node: MakeNode, run: Run
) -> None:
    node = make_node(gpus(1, context_bytes=300 * MIB))
    driver = run(node)
    driver.do("cuMemAlloc_v2", Out(), MIB)
    driver.do("cuDevicePrimaryCtxRetain", Out(), 0)
    driver.do("cuDevicePrimaryCtxRelease_v2", 0)
    assert node.read().gpus[0].resident == 301 * MIB
    driver.do("cuDevicePrimaryCtxReset", 0)
    assert node.read().gpus[0].resident == 0
    assert driver.do("cuDevicePrimaryCtxGetState", 0, Out(4), Out(4)) == [0, 0]
    assert driver.result("cuMemAlloc_v2", Out(), MIB) == CONTEXT_IS_DESTROYED


def test_a_context_that_does_not_fit_is_refused(make_node: MakeNode, run: Run) -> None:
    node = make_node(gpus(1, bytes=GIB, context_bytes=300 * MIB))
    first, second = run(node), run(node, start=False)
    first.do("cuMemAlloc_v2", Out(), 500 * MIB)
    second.do("cuInit", 0)
    assert second.result("cuDevicePrimaryCtxRetain", Out(), 0) == OUT_OF_MEMORY


def test_a_library_occupies_a_gpu_from_the_first_use_of_a_function(
    make_node: MakeNode, run: Run
) -> None:
    node = make_node(gpus(1, module_bytes=3 * MIB))
    driver = run(node)
    library = driver.do("cuLibraryLoadData", Out(), b"image", 0, 0, 0, 0, 0, 0)[0]
    kernel = driver.do("cuLibraryGetKernel", Out(), library, "matmul_1us")[0]
    assert node.read().gpus[0].resident == 0
    for _ in range(2):
        driver.do("cuLaunchKernel", kernel, 1, 1, 1, 32, 1, 1, 0, 0, None, None)
    assert node.read().gpus[0].resident == 3 * MIB
    driver.do("cuLibraryUnload", library)
    assert node.read().gpus[0].resident == 0


def test_memory_opened_by_another_process_is_charged_to_its_maker(node: Node, run: Run) -> None:
    maker, user = run(node), run(node)
    [pointer] = maker.do("cuMemAlloc_v2", Out(), MIB)
    handle = maker.call("cuIpcGetMemHandle", Out(64), pointer).outputs[0]
    for symbol in ("cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2"):
        [there] = user.by_value(symbol, handle, 1)
        user.do("cuMemsetD8_v2", there, 0, MIB)
        assert node.read().gpus[0].resident == MIB
        assert user.result("cuMemFree_v2", there) == INVALID_VALUE
        user.do("cuIpcCloseMemHandle", there)
    assert node.read().process(user.pid).gpus[0].bytes == 0


def test_an_address_is_used_again_where_the_node_says_so(make_node: MakeNode, run: Run) -> None:
    for reuse in (True, False):
        driver = run(make_node(reuse_addresses=reuse))
        [first] = driver.do("cuMemAlloc_v2", Out(), MIB)
        driver.do("cuMemFree_v2", first)
        [second] = driver.do("cuMemAlloc_v2", Out(), MIB)
        assert (second == first) == reuse


@pytest.mark.parametrize(
    ("symbol", "arguments"),
    [
        ("cuMemcpyHtoD_v2", (b"content", 7)),
        ("cuMemcpyDtoDAsync_v2_ptsz", ("memory", 512, 0)),
        ("cuMemsetD32Async", (0, 128, 0)),
    ],
)
def test_copies_into_freed_memory_end_the_process(
    node: Node, run: Run, symbol: str, arguments: tuple[object, ...]
) -> None:
    driver = run(node)
    [pointer] = driver.do("cuMemAlloc_v2", Out(), 512)
    given = [pointer if one == "memory" else one for one in arguments]
    driver.do(symbol, pointer, *given)  # type: ignore[arg-type]
    driver.do("cuMemFree_v2", pointer)
    driver.send(symbol, pointer, *given)  # type: ignore[arg-type]
    assert driver.ended()[0] == -6


def test_copies_beyond_the_end_are_refused(node: Node, run: Run) -> None:
    driver = run(node)
    [pointer] = driver.do("cuMemAlloc_v2", Out(), 512)
    assert driver.result("cuMemsetD32_v2", pointer, 0, 129) == INVALID_VALUE
    assert driver.result("cuMemcpyDtoH_v2", Out(8), pointer + 508, 8) == INVALID_VALUE


def test_a_call_takes_as_long_as_the_node_says(make_node: MakeNode, run: Run) -> None:
    driver = run(make_node(latency_ns={"cuMemAlloc_v2": 30_000_000}))
    began = time.monotonic()
    driver.do("cuMemAlloc_v2", Out(), MIB)
    assert time.monotonic() - began >= 0.03


@pytest.mark.parametrize("reenter", [False, True])
def test_exports_call_each_other_where_the_node_says_so(
    make_node: MakeNode, run: Run, reenter: bool
) -> None:
    node = make_node(reenter=reenter)
    driver = run(node, library=str(build.libraries() / "interposable/libcuda.so.1"))
    driver.do("cuMemAllocPitch_v2", Out(), Out(), 64, 64, 4)
    assert node.read().process(driver.pid).called("cuMemAlloc_v2") == reenter
