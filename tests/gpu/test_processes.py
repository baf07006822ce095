"""Processes of a group come and go, and are killed anywhere: what they had is counted exactly."""

import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gpu.limits import layout
from gpu.limits.region import Region
from tests.gpu import group as groups
from tests.gpu.conftest import MIB, Place
from tests.gpu.programs import program
from tests.standin.driver import Out
from tools.compiling import CHECKOUT

Make = Callable[..., Place]
OUT_OF_MEMORY, NOT_INITIALIZED, SYSTEM_NOT_READY = 2, 3, 802


def run(here: Place, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=here.environment, capture_output=True, text=True, timeout=120
    )


def test_the_last_bytes_are_given_to_one_of_many(place: Make) -> None:
    here = place(memory=16 * MIB)
    done = run(here, [str(program("race")), "8", "10000", str(4 * MIB)])
    assert done.returncode == 0, done.stderr
    assert here.node.read().gpus[0].peak <= 16 * MIB
    assert here.group.use().denied > 0
    assert here.group.use().peak_bytes <= 16 * MIB
    for _, pid in here.group.registered:
        here.group.bury(pid)
    with here.started() as driver:
        assert driver.do("cuMemGetInfo_v2", Out(), Out()) == [16 * MIB, 16 * MIB]


def test_who_waits_for_the_lock_of_a_process_that_is_killed_has_it_within_10_ms(
    place: Make,
) -> None:
    """The median of many kills, because each process may wait for a CPU on a busy machine.

    It is the time from the kill to the end of the waiting process' cuMemAlloc. The memory of the
    killed process counts until the agent has noticed the kill.
    """
    here = place(memory=64 * MIB)
    here.libraries = groups.libraries(steps=True)
    done = run(here, [str(program("heir")), "41"])
    assert done.returncode == 0, done
    assert statistics.median(map(int, done.stdout.split())) <= 10_000
    with Region(here.group.region, groups.ALLOCATION) as region:
        assert region.use().lock_recoveries == 41
    assert here.group.used == sum(here.group.slots().values()) == 41 * MIB


def test_a_denied_process_frees_the_slots_of_the_dead_itself(place: Make) -> None:
    here = place(memory=8 * MIB)
    survivor = here.started()
    with here.started() as other:
        other.do("cuMemAlloc_v2", Out(), 8 * MIB)
        assert survivor.result("cuMemAlloc_v2", Out(), MIB) == OUT_OF_MEMORY
        other.kill()
    survivor.do("cuMemAlloc_v2", Out(), 8 * MIB)
    assert len(here.group.slots()) == 1


def test_threads_that_find_their_slot_lost_at_once_have_one_slot_again(place: Make) -> None:
    here = place(memory=8 * MIB)
    here.libraries = groups.libraries(steps=True)
    done = run(here, [str(program("lost", f"-I{CHECKOUT}")), str(here.group.region)])
    assert done.returncode == 0, done
    assert list(here.group.slots().values()) == [3 * MIB]
    assert here.group.used == 3 * MIB


def test_a_measured_context_counts_instead_of_the_reserve(place: Make) -> None:
    here = place(memory=100 * MIB, context=40 * MIB)
    driver = here.started()
    assert here.group.used == 40 * MIB
    driver.do("cuMemAlloc_v2", Out(), MIB)
    [(slot, pid)] = here.group.registered
    here.group.know(slot, 1, pid, alive=True, overhead=7 * MIB)
    assert driver.do("cuMemGetInfo_v2", Out(), Out())[0] == 92 * MIB
    driver.do("cuDevicePrimaryCtxReset_v2", 0)
    here.group.know(slot, 1, pid, alive=True, overhead=0)
    assert driver.do("cuDevicePrimaryCtxRetain", Out(), 0)
    assert here.group.used == 0


def test_a_context_that_does_not_fit_is_denied(place: Make) -> None:
    here = place(memory=100 * MIB, context=60 * MIB)
    here.started()
    with here.process() as second:
        second.do("cuInit", 0)
        assert second.result("cuDevicePrimaryCtxRetain", Out(), 0) == OUT_OF_MEMORY


def test_each_process_that_begins_anew_has_a_slot_of_its_own(place: Make) -> None:
    here = place()
    for _ in range(3):
        with here.started() as driver:
            driver.do("cuMemAlloc_v2", Out(), MIB)
    assert [slot for slot, _ in here.group.registered] == [0, 1, 2]
    [slot] = [slot for slot in here.group.slots() if slot == 2]
    assert slot == 2


FORK = """
import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
pointer, context = ctypes.c_uint64(), ctypes.c_void_p()
cuda.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
def start():
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
def take(mib):
    result = cuda.cuMemAlloc_v2(ctypes.byref(pointer), mib << 20)
    assert result == 0, result
def say(what):
    os.write(1, what + b"\\n")
    os.read(0, 1)
"""

BEFORE_INIT = (
    FORK
    + """
if os.fork() == 0:
    start(); take(2)
    os._exit(0)
os.wait()
start(); take(3); say(b"ready")
"""
)

AFTER_INIT = (
    FORK
    + """
start(); take(3)
child = os.fork()
if child == 0:
    # The driver refuses a child, but the library that is asked first must not be confused.
    os._exit(cuda.cuMemAlloc_v2(ctypes.byref(pointer), 2 << 20) % 200)
_, status = os.waitpid(child, 0)
say(b"%d" % os.waitstatus_to_exitcode(status))
take(1); say(b"ready")
"""
)

EXEC = (
    FORK
    + """
start(); take(3)
os.execve(sys.executable, [sys.executable, "-c", '''{}
start(); take(1); say(b"ready")'''], os.environ)
""".format(FORK.replace("\\n", "\\\\n"))
)


def script(here: Place, text: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", text]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=here.environment
    )


def line(process: "subprocess.Popen[bytes]") -> bytes:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def answer(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.write(b".")
    process.stdin.flush()


def test_a_child_before_the_start_counts_for_itself(place: Make) -> None:
    here = place()
    with script(here, BEFORE_INIT) as process:
        assert line(process) == b"ready"
        assert len(here.group.registered) == 2
        here.group.bury(here.group.registered[0][1])
        assert sorted(here.group.slots().values())[-1] == 3 * MIB
        answer(process)


def test_a_child_of_a_started_process_has_nothing_of_its_parents(place: Make) -> None:
    here = place()
    with script(here, AFTER_INIT) as process:
        assert line(process) == str(NOT_INITIALIZED).encode()
        assert here.group.used == 3 * MIB
        answer(process)
        assert line(process) == b"ready"
        assert here.group.used == 4 * MIB
        answer(process)


def test_a_program_that_is_executed_counts_for_itself(place: Make) -> None:
    here = place()
    with script(here, EXEC) as process:
        assert line(process) == b"ready"
        [(first, pid), (second, same)] = here.group.registered
        assert pid == same == process.pid
        assert here.group.slots()[second] == MIB
        assert first == second or first not in here.group.slots()
        assert here.group.used == MIB
        answer(process)


TWICE = """
import ctypes, os
cuda = ctypes.CDLL("libcuda.so.1")
dl = ctypes.CDLL(None)
dl.dlmopen.restype = dl.dlsym.restype = ctypes.c_void_p
dl.dlmopen.argtypes = [ctypes.c_long, ctypes.c_char_p, ctypes.c_int]
dl.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
again = dl.dlmopen(-1, b"libcuda.so.1", 2)
assert again
one = lambda name: ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)(
    ctypes.cast(cuda[name], ctypes.c_void_p).value)
two = lambda name: ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)(
    dl.dlsym(again, name.encode()))
for copy, mib in ((one, 1), (two, 2)):
    context, pointer = ctypes.c_uint64(), ctypes.c_uint64()
    assert copy("cuInit")(0, 0) == 0
    assert copy("cuDevicePrimaryCtxRetain")(ctypes.addressof(context), 0) == 0
    assert copy("cuCtxSetCurrent")(context.value, 0) == 0
    assert copy("cuMemAlloc_v2")(ctypes.addressof(pointer), mib << 20) == 0
os.write(1, b"ready\\n")
os.read(0, 1)
"""


def test_a_second_copy_of_the_library_in_a_process_has_a_slot_of_its_own(place: Make) -> None:
    here = place()
    with script(here, TWICE) as process:
        assert line(process) == b"ready"
        assert sorted(here.group.slots().values()) == [MIB, 2 * MIB]
        assert here.group.used == here.resident() == 3 * MIB
        answer(process)


def fill_slots(here: Place, pid: int, start_time: int) -> None:
    """Let one process have all slots but the first."""
    slot = layout.PfSlot()
    slot.state, slot.pid, slot.start_time, slot.image = 1, pid, start_time, 7
    slot.registration, slot.pid_namespace = 999, Path("/proc/self/ns/pid").stat().st_ino
    content = bytes(slot)
    with here.group.region.open("r+b") as file:
        for index in range(1, layout.SLOTS):
            file.seek(layout.SLOT_AT + index * len(content))
            file.write(content)


def start_time_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[19])


def test_the_257th_process_is_refused(place: Make) -> None:
    here = place()
    fill_slots(here, os.getpid(), start_time_of(os.getpid()))
    driver = here.started()
    driver.do("cuMemAlloc_v2", Out(), MIB)
    with here.process() as last:
        assert last.result("cuInit", 0) == SYSTEM_NOT_READY
        _, said = last.ended()
    words = "256 processes of this container use a GPU; more are not allowed"
    assert said == f"podfabric: {words}\n"
    with Region(here.group.region, groups.ALLOCATION) as region:
        assert region.use().refused_slots == 1


def test_the_slots_of_processes_whose_pid_is_anothers_now_are_taken(place: Make) -> None:
    here = place()
    fill_slots(here, os.getpid(), start_time_of(os.getpid()) + 1)
    here.started()
    here.started().do("cuMemAlloc_v2", Out(), MIB)
    assert len(here.group.slots()) == 2


def test_a_stopped_process_holds_nobody_up(place: Make) -> None:
    here = place()
    driver = here.started()
    driver.do("cuMemAlloc_v2", Out(), MIB)
    os.kill(driver.pid, signal.SIGSTOP)
    here.started().do("cuMemAlloc_v2", Out(), MIB)
    os.kill(driver.pid, signal.SIGCONT)
    driver.do("cuMemAlloc_v2", Out(), MIB)
