"""The stand-in for libcuda: entry points, and which ABI a look-up gets."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.standin.driver import UNTOUCHED, Driver, Out
from tests.standin.gpus import GIB, Failure, Node, exports, gpus, table

Run = Callable[..., Driver]
MakeNode = Callable[..., Node]

INVALID_VALUE, NOT_INITIALIZED, NO_DEVICE, NOT_FOUND = 1, 3, 100, 500
FOUND, NO_SUCH_NAME, NEWER_ONLY = 0, 1, 2
PER_THREAD = 2


def _symbol_found(driver: Driver, base: str, version: int, flags: int = 0) -> str:
    """The symbol whose address a look-up gives: each counts its own calls."""
    result, address, status = driver.proc(base, version, flags)
    assert (result, status) == (0, FOUND)
    [symbol] = [symbol for symbol in exports() if driver.address(symbol) == address]
    return symbol


@pytest.mark.parametrize(
    ("base", "version", "flags", "symbol"),
    [
        ("cuMemAlloc", 2000, 0, "cuMemAlloc"),
        ("cuMemAlloc", 3010, 0, "cuMemAlloc"),
        ("cuMemAlloc", 3020, 0, "cuMemAlloc_v2"),
        ("cuMemAlloc", 13050, 0, "cuMemAlloc_v2"),
        ("cuMemAlloc", 13050, PER_THREAD, "cuMemAlloc_v2"),
        ("cuCtxCreate", 11040, 0, "cuCtxCreate_v3"),
        ("cuCtxCreate", 12040, 0, "cuCtxCreate_v3"),
        ("cuCtxCreate", 12050, 0, "cuCtxCreate_v4"),
        ("cuLaunchKernel", 4000, 0, "cuLaunchKernel"),
        ("cuLaunchKernel", 7000, 0, "cuLaunchKernel"),
        ("cuLaunchKernel", 7000, 1, "cuLaunchKernel"),
        ("cuLaunchKernel", 7000, PER_THREAD, "cuLaunchKernel_ptsz"),
        ("cuLaunchKernel", 6000, PER_THREAD, "cuLaunchKernel"),
        ("cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
        ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
        ("cuMemcpyHtoD", 7000, PER_THREAD, "cuMemcpyHtoD_v2_ptds"),
    ],
)
def test_a_look_up_gets_the_newest_abi_that_the_caller_knows(
    node: Node, run: Run, base: str, version: int, flags: int, symbol: str
) -> None:
    assert _symbol_found(run(node, start=False), base, version, flags) == symbol


@pytest.mark.parametrize(
    ("base", "version", "status"),
    [
        ("", 0, NO_SUCH_NAME),
        ("cuNoSuchThing", 13050, NO_SUCH_NAME),
        ("cuMemAlloc_v2", 13050, NO_SUCH_NAME),
        ("cuLaunchKernelEx", 11050, NEWER_ONLY),
    ],
)
def test_what_a_look_up_does_not_find_is_null_or_an_error_in_the_old_form(
    node: Node, run: Run, base: str, version: int, status: int
) -> None:
    driver = run(node, start=False)
    assert driver.proc(base, version) == (0, 0, status)
    old = driver.call("cuGetProcAddress", base, Out(), version, 0)
    assert (old.result, old.ints) == (NOT_FOUND, [0])


def test_a_look_up_for_a_newer_driver_or_with_unknown_flags_is_refused(
    make_node: MakeNode, run: Run
) -> None:
    driver = run(make_node(cuda=12090), start=False)
    assert driver.proc("cuInit", 12090)[0] == 0
    assert driver.proc("cuInit", 13000)[0] == INVALID_VALUE
    assert driver.proc("cuInit", 12090, 3)[0] == INVALID_VALUE
    assert driver.proc("cuInit", 12090, 4)[0] == INVALID_VALUE


def test_the_address_that_is_looked_up_is_that_of_the_export(node: Node, run: Run) -> None:
    driver = run(node)
    address = driver.proc("cuMemGetInfo", 3020)[1]
    assert driver.do(address, Out(), Out()) == [8 * GIB, 8 * GIB]
    assert node.read().process(driver.pid).called("cuMemGetInfo_v2") == 1


def test_every_abi_has_an_address_of_its_own(node: Node, run: Run) -> None:
    driver = run(node, start=False)
    addresses = {driver.address(symbol) for symbol in exports()}
    assert len(addresses) == len(table())


def test_export_tables_of_the_runtime_are_not_found(node: Node, run: Run) -> None:
    driver = run(node, start=False)
    runtime = bytes.fromhex("6bd5fb6c") + bytes(12)
    assert driver.result("cuGetExportTable", Out(), runtime) == NOT_FOUND
    [table_address, _] = driver.do("cuGetExportTable", Out(), b"stand-in's table")
    assert table_address not in (0, UNTOUCHED)


def test_calls_before_init_are_refused(node: Node, run: Run) -> None:
    driver = run(node, start=False)
    assert driver.result("cuDeviceGetCount", Out(4)) == NOT_INITIALIZED
    driver.do("cuInit", 0)
    assert driver.do("cuDeviceGetCount", Out(4)) == [1]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("1", [1]),
        ("0,7,1", [0]),
        ("GPU-00000002", [2]),
        ("GPU-00000001-57a0,GPU-00000000", [1, 0]),
    ],
)
def test_visible_devices_are_those_of_the_environment_in_its_order(
    make_node: MakeNode, run: Run, visible: str | None, seen: list[int]
) -> None:
    node = make_node(gpus(3))
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    driver = run(node, start=False, **env)
    driver.do("cuInit", 0)
    assert driver.do("cuDeviceGetCount", Out(4)) == [len(seen)]
    for device, gpu in enumerate(seen):
        uuid = driver.call("cuDeviceGetUuid_v2", Out(16), device).outputs[0]
        assert uuid.hex() == node.gpus[gpu].uuid.removeprefix("GPU-").replace("-", "")


@pytest.mark.parametrize("visible", ["", "-1", "0,0", "9"])
def test_without_a_visible_device_there_is_none(
    make_node: MakeNode, run: Run, visible: str
) -> None:
    driver = run(make_node(gpus(3)), start=False, CUDA_VISIBLE_DEVICES=visible)
    assert driver.result("cuInit", 0) == NO_DEVICE


def test_a_process_has_the_gpus_whose_nodes_it_can_open(
    tmp_path: Path, make_node: MakeNode, run: Run
) -> None:
    (tmp_path / "nvidia1").touch()
    node = make_node(gpus(3), nodes=str(tmp_path))
    driver = run(node, start=False)
    driver.do("cuInit", 0)
    assert driver.do("cuDeviceGetCount", Out(4)) == [1]
    [uuid] = driver.call("cuDeviceGetUuid_v2", Out(16), 0).outputs
    assert uuid.hex().startswith("00000001")
    nvml = run(node, start=False, library="libnvidia-ml.so.1")
    nvml.do("nvmlInit_v2")
    assert nvml.do("nvmlDeviceGetCount_v2", Out(4)) == [1]


def test_the_nth_call_of_each_process_fails_as_the_node_says(make_node: MakeNode, run: Run) -> None:
    node = make_node(failures=(Failure("cuMemAlloc_v2", 2, 2), Failure("cuMemAlloc_v2", 4, "kill")))
    for _ in range(2):
        driver = run(node)
        results = [driver.result("cuMemAlloc_v2", Out(), 4096) for _ in range(3)]
        assert results == [0, 2, 0]
        driver.send("cuMemAlloc_v2", Out(), 4096)
        assert driver.ended()[0] == -9
        assert node.read().process(driver.pid).called("cuMemAlloc_v2") == 4
