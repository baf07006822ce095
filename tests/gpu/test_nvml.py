"""NVML shows the group's limit, use and processes, through the vendor's own client."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.gpu.conftest import MIB, Place
from tests.gpu.launcher import Launcher
from tests.standin.driver import Driver, Out, packed
from tests.standin.gpus import Behaviour

Make = Callable[..., Place]
NOT_READY = 27

ASK = """
import json, pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
def code(call, *arguments):
    try:
        return call(*arguments)
    except n.NVMLError as error:
        return error.value
print(json.dumps({}))
"""


def ask(here: Place, expression: str, *, plain: bool = False) -> Any:  # noqa: ANN401 - JSON
    """The value of an expression over NVML, in a process of the container; or `plain` elsewhere."""
    environment = dict(here.environment)
    if plain:
        environment["LD_LIBRARY_PATH"] = str(here.libraries.plain)
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(expression)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MEMORY = "[[m.total, m.free, m.used] for m in (n.nvmlDeviceGetMemoryInfo(gpu),"
MEMORY += " n.nvmlDeviceGetMemoryInfo(gpu, version=n.nvmlMemory_v2))]"


def test_memory_is_what_cuda_shows(place: Make) -> None:
    here = place(memory=64 * MIB)
    driver = here.started()
    driver.do("cuMemAlloc_v2", Out(), 24 * MIB)
    assert ask(here, MEMORY) == [[64 * MIB, 40 * MIB, 24 * MIB]] * 2
    here.group.set_memory(16 * MIB)
    assert ask(here, MEMORY) == [[16 * MIB, 0, 24 * MIB]] * 2
    assert driver.do("cuMemGetInfo_v2", Out(), Out()) == [0, 16 * MIB]


def test_a_limit_above_what_the_gpu_has_shows_what_it_has(place: Make) -> None:
    here = place(memory=2**60, bytes=1024 * MIB)
    assert [total for total, _, _ in ask(here, MEMORY)] == [1024 * MIB, 1024 * MIB]


# The lists of processes, and which of the stand-in's lists that is.
LISTS = {
    f"nvmlDeviceGet{kind}RunningProcesses{version}": listed
    for kind, listed in (("Compute", "compute"), ("Graphics", "graphics"), ("MPSCompute", "mps"))
    for version in ("", "_v2", "_v3")
}


@contextmanager
def crowd(here: Place, kernel: str = "") -> Iterator[list[int]]:
    """Processes of this container and of others on one GPU, each with more memory; the own pids."""
    own, pids = (True, False, False, True, False, True), []
    with ExitStack() as stack:
        for number, ours in enumerate(own, 1):
            driver = here.process() if ours else stack.enter_context(here.stranger())
            driver.start()
            driver.do("cuMemAlloc_v2", Out(), number * MIB)
            if kernel:
                Launcher(driver, kernel).launch("cuLaunchKernel")
            pids += [driver.pid] if ours else []
        yield pids


def entries(nvml: Driver, symbol: str) -> list[bytes]:
    """The entries that a list has, as one process sees them."""
    size = 24 if symbol.endswith(("_v2", "_v3")) else 16
    nvml.do("nvmlInit_v2")
    [gpu] = nvml.do("nvmlDeviceGetHandleByIndex_v2", 0, Out())
    answer = nvml.call(symbol, gpu, packed("I", 16), Out(16 * size))
    assert answer.result == 0
    count, room = answer.ints[0], answer.outputs[1]
    return [room[at : at + size] for at in range(0, count * size, size)]


def pid_of(entry: bytes) -> int:
    return int.from_bytes(entry[:4], "little")


@pytest.mark.parametrize("symbol", LISTS)
def test_each_list_of_processes_has_the_containers_own_alone(place: Make, symbol: str) -> None:
    """In the driver's order, each with what the driver says of it."""
    here = place(memory=64 * MIB, behaviour=Behaviour(listed=LISTS[symbol]))
    with crowd(here) as own, here.stranger("libnvidia-ml.so.1") as nvml:
        everyone = entries(nvml, symbol)
        assert len(everyone) == 6
        shown = entries(here.process("libnvidia-ml.so.1"), symbol)
        assert shown == [entry for entry in everyone if pid_of(entry) in own]
        assert {pid_of(entry) for entry in shown} == set(own)


def test_the_list_with_details_has_the_containers_own_processes_alone(place: Make) -> None:
    here = place(memory=64 * MIB)
    details = "n.nvmlDeviceGetRunningProcessDetailList(gpu, n.nvmlProcessDetailList_v1, 0)"
    expression = f"[[p.pid, p.usedGpuMemory] for p in {details}]"
    with crowd(here) as own:
        everyone = ask(here, expression, plain=True)
        assert len(everyone) == 6
        shown = ask(here, expression)
        assert shown == [entry for entry in everyone if entry[0] in own]
        assert {pid for pid, _ in shown} == set(own)


@pytest.mark.parametrize(
    "call", ["nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"]
)
def test_the_use_of_the_gpu_is_that_of_the_containers_own_processes(place: Make, call: str) -> None:
    here = place(memory=64 * MIB, behaviour=Behaviour(manual_clock=True, sample_ns=10**9))
    expression = f"[[p.pid, p.timeStamp, p.smUtil] for p in n.{call}(gpu, 0)]"
    with crowd(here, kernel="work_100ms") as own:
        here.node.let_pass(2 * 10**9)
        everyone = ask(here, expression, plain=True)
        assert len(everyone) == 6
        shown = ask(here, expression)
        assert shown == [entry for entry in everyone if entry[0] in own]
        assert {pid for pid, _, _ in shown} == set(own)


def test_without_the_files_nothing_is_shown(place: Make) -> None:
    here = place(memory=64 * MIB)
    here.group.limits.unlink()
    assert ask(here, "code(n.nvmlDeviceGetMemoryInfo, gpu)") == NOT_READY
    assert ask(here, "n.nvmlDeviceGetCount()") == 1
