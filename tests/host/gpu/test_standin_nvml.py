"""The stand-in for libnvidia-ml, asked with its vendor's client."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.standin.driver import Driver, Out
from tests.standin.gpus import GIB, MIB, Failure, Node, gpus

Run = Callable[..., Driver]
MakeNode = Callable[..., Node]

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 3, 4, 6
OUT_OF_MEMORY = 2
MS = 1_000_000


def _ask(node: Node, *lines: str) -> Any:  # noqa: ANN401 - JSON
    """The value of the last line after the others, in a process that has NVML initialised."""
    *first, last = lines
    text = "\n".join(
        (
            "import json, pynvml as n, ctypes",
            "def code(call, *a):",
            "    try:",
            "        return call(*a)",
            "    except n.NVMLError as error:",
            "        return error.value",
            "n.nvmlInit()",
            "gpu = n.nvmlDeviceGetHandleByIndex(0)",
            *first,
            f"print(json.dumps({last}))",
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, **node.environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_devices_are_found_by_index_uuid_and_pci_address(make_node: MakeNode) -> None:
    node = make_node(gpus(3))
    wanted = node.gpus[2]
    found = _ask(
        node,
        f"by_uuid = n.nvmlDeviceGetHandleByUUID(b'{wanted.uuid}')",
        f"by_pci = n.nvmlDeviceGetHandleByPciBusId(b'{wanted.pci}')",
        "by_sysfs = n.nvmlDeviceGetHandleByPciBusId(b'0000:12:00.0')",
        "[n.nvmlDeviceGetIndex(d) for d in (by_uuid, by_pci, by_sysfs)]"
        " + [n.nvmlDeviceGetCount(), n.nvmlDeviceGetUUID(by_pci), n.nvmlDeviceGetName(by_pci),"
        "    n.nvmlDeviceGetPciInfo(by_pci).busId, n.nvmlDeviceGetMinorNumber(by_pci),"
        "    n.nvmlSystemGetDriverVersion(),"
        "    code(n.nvmlDeviceGetHandleByUUID, b'GPU-none')]",
    )
    assert found == [2, 2, 2, 3, wanted.uuid, wanted.name, wanted.pci, 2, "615.20.01", NOT_FOUND]


def test_without_a_driver_nvml_does_not_start(node: Node) -> None:
    text = "import pynvml as n\ntry: n.nvmlInit()\nexcept n.NVMLError as error: print(error.value)"
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "LD_LIBRARY_PATH": node.environment["LD_LIBRARY_PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "9\n", done.stderr


def test_memory_counts_the_drivers_share_in_the_old_form_only(
    make_node: MakeNode, run: Run
) -> None:
    node = make_node(gpus(1, bytes=8 * GIB, reserved_bytes=600 * MIB))
    driver = run(node)
    driver.do("cuMemAlloc_v2", Out(), GIB)
    old, new = _ask(
        node,
        "m, v = n.nvmlDeviceGetMemoryInfo(gpu), n.nvmlDeviceGetMemoryInfo(gpu, n.nvmlMemory_v2)",
        "[[m.total, m.used, m.free], [v.total, v.reserved, v.used, v.free]]",
    )
    assert old == [8 * GIB, GIB + 600 * MIB, 7 * GIB - 600 * MIB]
    assert new == [8 * GIB, 600 * MIB, GIB, 7 * GIB - 600 * MIB]
    seen_by_cuda = driver.do("cuMemGetInfo_v2", Out(), Out())
    assert seen_by_cuda == [7 * GIB - 600 * MIB, 8 * GIB - 600 * MIB]


@pytest.mark.parametrize("form", ["", "_v2", "_v3"])
def test_running_processes_are_those_with_a_context_and_their_bytes(
    make_node: MakeNode, run: Run, form: str
) -> None:
    node = make_node(gpus(2, context_bytes=300 * MIB))
    first, second, idle = run(node), run(node, start=False), run(node, start=False)
    idle.do("cuInit", 0)
    second.start(1)
    first.do("cuMemAlloc_v2", Out(), MIB)
    call = f"n.nvmlDeviceGetComputeRunningProcesses{form}"
    lines = (
        "both = [gpu, n.nvmlDeviceGetHandleByIndex(1)]",
        f"[[[p.pid, p.usedGpuMemory] for p in {call}(g)] for g in both]",
    )
    assert _ask(node, *lines) == [[[first.pid, 301 * MIB]], [[second.pid, 300 * MIB]]]
    first.kill()
    assert _ask(node, *lines) == [[], [[second.pid, 300 * MIB]]]
    details = "[[p.pid, p.usedGpuMemory] for p in"
    details += " n.nvmlDeviceGetRunningProcessDetailList(both[1], n.nvmlProcessDetailList_v1, 0)]"
    assert _ask(node, lines[0], details) == [[second.pid, 300 * MIB]]


def _work(driver: Driver, name: str) -> None:
    [module, _] = driver.do("cuModuleLoadData", Out(), b"image")
    [function, _] = driver.do("cuModuleGetFunction", Out(), module, name), 0
    driver.do("cuLaunchKernel", function[0], 1, 1, 1, 32, 1, 1, 0, 0, None, None)


_SAMPLES = "[[s.pid, s.timeStamp, s.smUtil] for s in r] if not isinstance(r, int) else r"


def _samples(node: Node, since_us: int = 0) -> list[list[int]] | int:
    found: list[list[int]] | int = _ask(
        node, f"r = code(n.nvmlDeviceGetProcessUtilization, gpu, {since_us})", _SAMPLES
    )
    return found


def test_utilization_is_the_mean_of_each_process_since_the_last_question(
    make_node: MakeNode, run: Run
) -> None:
    node = make_node(manual_clock=True, slice_ns=5 * MS, sample_ns=100 * MS)
    first, second = run(node), run(node)
    assert _samples(node) == NOT_FOUND
    _work(first, "a_75ms")
    _work(second, "b_25ms")
    node.let_pass(99 * MS)
    assert _samples(node) == NOT_FOUND
    node.let_pass(1 * MS)
    assert _samples(node) == [[first.pid, 100_000, 75], [second.pid, 100_000, 25]]
    assert _ask(node, "n.nvmlDeviceGetUtilizationRates(gpu).gpu") == 100
    _work(second, "c_30ms")
    node.let_pass(100 * MS)
    assert _samples(node) == [[first.pid, 100_000, 38], [second.pid, 200_000, 28]]
    assert _samples(node, 100_000) == [[second.pid, 200_000, 30]]
    assert _samples(node, 200_000) == NOT_FOUND
    newer = _ask(node, "r = n.nvmlDeviceGetProcessesUtilizationInfo(gpu, 100000)", _SAMPLES)
    assert newer == [[second.pid, 200_000, 30]]


def test_a_sample_is_shown_as_late_as_the_node_says(make_node: MakeNode, run: Run) -> None:
    node = make_node(manual_clock=True, sample_ns=100 * MS, sample_age_ns=500 * MS)
    driver = run(node)
    _work(driver, "a_100ms")
    node.let_pass(599 * MS)
    assert _samples(node) == NOT_FOUND
    node.let_pass(1 * MS)
    assert _samples(node) == [[driver.pid, 100_000, 100]]


@pytest.mark.parametrize("result", [NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, 999])
def test_a_call_fails_as_the_node_says(make_node: MakeNode, result: int) -> None:
    failures = (Failure("nvmlDeviceGetMinorNumber", 2, result),)
    node = make_node(failures=failures)
    ask = "code(n.nvmlDeviceGetMinorNumber, gpu)"
    assert _ask(node, f"[{ask}, {ask}, {ask}]") == [0, result, 0]
