"""Defects that other libraries of this kind had, and the test of each here.

HAMi-core and vcuda stand in for the driver's library, too. `DEFECTS` lists what programs saw go
wrong there, and the test that fails if it goes wrong here.

Sources: the code of Project-HAMi/HAMi-core, and its threads (or HAMi's) of the numbers here.
"""

import ast
import subprocess
import time
from collections.abc import Callable

import msgspec
import pytest

from gpu.limits import layout
from gpu.limits.limits_file import LimitsFile
from gpu.limits.region import RegionUse
from tests.gpu.conftest import MIB, Place
from tests.gpu.group import ANY, hooked
from tests.gpu.launcher import LAUNCHES, Launcher
from tests.gpu.programs import program
from tests.standin.driver import Out
from tests.standin.gpus import Behaviour, table
from tests.waiting import until
from tools import build_shim
from tools.compiling import CHECKOUT

Make = Callable[..., Place]
S = 1_000_000_000  # nanoseconds

DEFECTS = """
cuGetProcAddress ignores the stream's flag: the thread's stream gets the legacy launch
  tests/gpu/test_runtime.py::test_the_runtime_gets_each_hook_and_the_driver_for_all_else
the forms of cuGetProcAddress with four and five arguments are mixed up (#36)
  tests/gpu/test_loading.py::test_each_version_of_a_function_leads_to_its_own_hook
a newer version of a function is answered by its name, with the older hook (#233)
  tests/gpu/test_loading.py::test_a_version_that_the_shim_does_not_know_is_not_handed_out
functions of graphs are left out of cuGetProcAddress (#192)
  tests/gpu/test_known_defects.py::test_functions_of_graphs_are_found_by_address_as_by_name
graphs and cooperative kernels are never held back
  tests/gpu/test_known_defects.py::test_every_way_to_launch_is_held_back
without a current context the device is not initialised (#187, #188)
  tests/gpu/test_allocations.py::test_without_a_context_nothing_is_counted
cuMemCreate counts on the current context's GPU, not on the one that it names
  tests/gpu/test_allocations.py::test_a_gpu_that_the_group_has_not_gives_nothing
what is free wraps around below zero to 18 EB (#200)
  tests/gpu/test_allocations.py::test_the_total_is_the_limit_and_what_is_free_is_never_negative
cuMemGetInfo fails while more is used than the limit (HAMi #1370)
  tests/gpu/test_allocations.py::test_the_total_is_the_limit_and_what_is_free_is_never_negative
an asynchronous allocation beyond the limit answers -1 and not 2 (#55, #217)
  tests/gpu/test_allocations.py::test_each_kind_is_given_up_to_the_limit_and_not_beyond
host memory is refused for the GPU's limit
  tests/gpu/test_known_defects.py::test_host_memory_is_neither_counted_nor_refused
each free walks a list of all allocations
  tests/gpu/test_known_defects.py::test_a_free_is_as_short_among_many_allocations_as_among_few
an order in CUDA_VISIBLE_DEVICES makes the process another one (#225)
  tests/gpu/test_allocations.py::test_gpus_are_told_apart_by_their_uuid
one build lacks the NVML library, so programs that ask it take too much (#181, #182)
  tests/gpu/test_known_defects.py::test_each_build_has_the_nvml_library_with_what_programs_ask_for_memory
every name that begins with cu is taken, also cudnnCreate, which calls itself (#215)
  tests/gpu/test_loading.py::test_the_shim_hooks_at_most_90_functions_and_exports_nothing_else
dlsym with RTLD_NEXT finds nothing when it is asked again
  tests/gpu/test_loading.py::test_a_linked_program_is_led_to_the_shim
a process that is killed while it has the lock hangs all others (HAMi #2500)
  tests/gpu/test_processes.py::test_who_waits_for_the_lock_of_a_process_that_is_killed_has_it_within_10_ms
a dead process keeps its slot once its pid is another's (#191)
  tests/gpu/test_processes.py::test_the_slots_of_processes_whose_pid_is_anothers_now_are_taken
a time-out ends the limit of the GPU's time for good
  tests/gpu/test_known_defects.py::test_launches_are_held_back_while_the_agent_is_away
a launch that waited as long as it may ends the limit of the GPU's time for good
  tests/gpu/test_gate_processes.py::test_processes_that_waited_for_as_long_as_they_may_are_held_back_on
what is used of the GPU's time reads 0 unless it is limited (HAMi #1864)
  tests/host/gpu/test_watch.py::test_the_time_that_a_container_used_a_gpu_is_seen_with_and_without_limits
"""


@pytest.mark.parametrize("named", sorted(set(DEFECTS.split("\n")[2::2])))
def test_each_listed_defect_has_the_test_that_is_named(named: str) -> None:
    file, _, test = named.strip().partition("::")
    tree = ast.parse((CHECKOUT / file).read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == test]
    assert len(found) == 1
    assert any(isinstance(node, ast.Assert) for node in ast.walk(found[0]))


# ---- which functions are taken, and how they are found


def test_functions_of_graphs_are_found_by_address_as_by_name(place: Make) -> None:
    with place().process() as driver:
        ours = [row for row in table() if row[2].startswith("cuGraph") and row[2] in hooked()]
        assert {"cuGraphLaunch", "cuGraphLaunch_ptsz"} <= {symbol for _, _, symbol, _ in ours}
        for base, version, symbol, own in ours:
            result, address, _ = driver.proc(base, version, 2 if own else 0)
            assert (result, address) == (0, driver.address(symbol)), symbol


def test_each_build_has_the_nvml_library_with_what_programs_ask_for_memory() -> None:
    for target in ("", "aarch64-linux-gnu"):
        _, library = build_shim.build(target)
        text = subprocess.check_output(["nm", "-D", "--defined-only", str(library)], text=True)
        names = {line.split()[-1] for line in text.splitlines()}
        assert {"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"} <= names


# ---- memory


HOST_MEMORY: dict[str, tuple[Out | int, ...]] = {
    "cuMemHostAlloc": (Out(), 256 * MIB, 0),
    "cuMemAllocHost": (Out(), 256 * MIB),
    "cuMemAllocHost_v2": (Out(), 256 * MIB),
    "cuMemHostRegister": (2**32, 256 * MIB, 0),  # of the program's own
    "cuMemHostRegister_v2": (2**32, 256 * MIB, 0),
}


@pytest.mark.parametrize("symbol", HOST_MEMORY)
def test_host_memory_is_neither_counted_nor_refused(place: Make, symbol: str) -> None:
    here = place(memory=16 * MIB)
    driver = here.started()
    driver.do("cuMemAlloc_v2", Out(), 16 * MIB)
    pointers = driver.do(symbol, *HOST_MEMORY[symbol])
    assert here.group.used == here.resident() == 16 * MIB
    if pointers:
        driver.do("cuMemFreeHost", *pointers)
    else:
        driver.do("cuMemHostUnregister", 2**32)
    assert here.group.used == 16 * MIB


def test_a_free_is_as_short_among_many_allocations_as_among_few(place: Make) -> None:
    """The instructions that the shim adds to a free, among ten allocations and among 20,000."""
    here = place(memory=ANY, behaviour=Behaviour(reuse_addresses=True))

    def added(live: int) -> int:
        plain = {**here.environment, "LD_LIBRARY_PATH": str(here.libraries.plain)}
        command = [str(program("steps", "-ldl")), str(live)]
        with_shim = int(subprocess.check_output(command, env=here.environment))
        return with_shim - int(subprocess.check_output(command, env=plain))

    few, many = added(10), added(20_000)
    assert few > 0
    assert many <= 4 * few  # a walk through all would be a hundred times as many


# ---- processes


# ---- the GPU's time


class _Launcher:
    """A process whose group has half of a GPU's time, and has used some time in advance."""

    def __init__(self, here: Place) -> None:
        self.here = here
        self._share(0.5)
        self.launcher = Launcher(here.started(), "work_1ms")

    def is_held_back(self, symbol: str) -> bool:
        """Launch with that function while the group's debt is 20 s. End the wait once the launch
        waits.
        """
        before = self._use()
        self._owe(20 * S)
        self.launcher.send(symbol)
        until(lambda: self._use().backlogged_at > before.backlogged_at, what=f"wait of {symbol}")
        self._share(1.0)
        assert self.launcher.driver.receive().result == 0, symbol
        self._share(0.5)
        return self._use().throttled == before.throttled + 1

    def _share(self, share: float) -> None:
        with LimitsFile(self.here.group.limits) as opened:
            limit = opened.limit()
            opened.write(msgspec.structs.replace(limit, compute_share=share))

    def _owe(self, ns: int) -> None:
        """Let the group have used more than its share."""
        with self.here.group.region.open("r+b") as region:
            region.seek(layout.USE_AT + layout.PfGpu.tat.offset)
            region.write((time.monotonic_ns() + ns).to_bytes(8, "little"))

    def _use(self) -> RegionUse:
        return self.here.group.use()


def test_every_way_to_launch_is_held_back(place: Make) -> None:
    launcher = _Launcher(place())
    for symbol in LAUNCHES:
        assert launcher.is_held_back(symbol), symbol


def test_launches_are_held_back_while_the_agent_is_away(place: Make) -> None:
    here = place()
    launcher = _Launcher(here)
    here.group.stop_agent()
    for _ in range(5):
        assert launcher.is_held_back("cuLaunchKernel")
