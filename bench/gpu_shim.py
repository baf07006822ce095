"""What a call of CUDA costs more with the libraries of gpu/shim, over the stand-in for the driver.

    .venv/bin/python -m bench.gpu_shim

Each call is timed with and without them, in turns, in one process (bench/gpu_calls.c). "added" is
the difference of the two medians or 99th percentiles; the ratio is that of the medians. The
stand-in's calls take as long as they do, so ratios to a real driver's are others: the differences
count. Of a start of the runtime and of its cuInit the CPU time is shown: cuInit waits for an agent,
here one in Python that shares the machine's CPUs with the rest. Many processes that start at once
are measured by `bench.gpu_registration`, with the agent's own registrar.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, chdir
from pathlib import Path

import msgspec

from tests.gpu import group as groups
from tests.gpu.group import Group, Libraries
from tests.gpu.test_runtime import RUNTIMES, runtime
from tests.standin.gpus import GIB, Behaviour, Node, gpus
from tools.compiling import compiled

SOURCE = Path(__file__).with_name("gpu_calls.c")
MANY = 1_000_000  # live allocations
STARTS = 60
RUNTIME = """
import ctypes, sys, time
count, runtime = ctypes.c_int(), ctypes.CDLL(sys.argv[1])
began = time.process_time_ns()
driver = ctypes.CDLL("libcuda.so.1")
loaded = time.process_time_ns()
driver.cuInit(0)
initialised = time.process_time_ns()
runtime.cudaGetDeviceCount(ctypes.byref(count))
print(loaded - began, initialised - loaded, time.process_time_ns() - initialised)
"""


class Times(msgspec.Struct, frozen=True):
    """Nanoseconds of each call."""

    with_shim: list[int]
    without: list[int]

    def added(self, percent: int) -> float:
        return _percentile(self.with_shim, percent) - _percentile(self.without, percent)

    @property
    def ratio(self) -> float:
        return statistics.median(self.with_shim) / statistics.median(self.without)


class Bench:
    """A node with one large GPU, and a group that has all of it."""

    def __init__(self, node: Node, group: Group, libraries: Libraries, program: Path) -> None:
        self._node = node
        self._group = group
        self._libraries = libraries
        self._program = program

    def _environment(self, with_shim: bool) -> dict[str, str]:
        plain = str(self._libraries.plain)
        shimmed = groups.environment(self._node, self._libraries)
        return {**os.environ, **shimmed, **({} if with_shim else {"LD_LIBRARY_PATH": plain})}

    def times(self, *arguments: str) -> Times:
        """The times of a program's calls."""
        command = [str(self._program), "libcuda.so.1", *arguments]
        environment = self._environment(with_shim=True)
        text = subprocess.check_output(command, env=environment, text=True)
        found: dict[str, list[int]] = {"with": [], "without": []}
        for line in text.splitlines():
            name, _, ns = line.partition(" ")
            found[name].append(int(ns))
        return Times(found["with"], found["without"])

    def resident(self, live: int, with_shim: bool) -> int:
        """Resident bytes of a process with so many allocations."""
        command = [str(self._program), "libcuda.so.1", "memory", str(live)]
        return int(subprocess.check_output(command, env=self._environment(with_shim)))

    def starts(self, count: int, with_shim: bool) -> list[int]:
        """Nanoseconds of cuInit in so many processes that all start at once."""
        command = [str(self._program), "libcuda.so.1", "init"]
        environment = self._environment(with_shim)
        pipe = subprocess.PIPE
        running = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
            for _ in range(count)
        ]
        for process in running:
            assert process.stdin is not None
            process.stdin.close()
        times = []
        for process in running:
            assert process.stdout is not None
            times.append(int(process.stdout.read()))
            process.wait()
            self._group.bury(process.pid) if with_shim else None
        return times

    def runtime(self, version: str, with_shim: bool) -> tuple[int, int]:
        """Nanoseconds of CPU time: the start of a CUDA runtime without cuInit, and cuInit's.

        Its first call loads the driver, initialises it, and asks for all functions.
        """
        command = [sys.executable, "-c", RUNTIME, str(runtime(version)[0])]
        environment = self._environment(with_shim)
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            load, initialise, call = map(int, process.stdout.read().split())
        self._group.bury(process.pid) if with_shim else None
        return load + call, initialise

    def runtimes(self, version: str) -> tuple[Times, Times]:
        """The same of many starts, in turns."""
        found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for number in range(STARTS):
            for with_shim in (number % 2 == 0, number % 2 != 0):
                found[with_shim].append(self.runtime(version, with_shim))
        starts, initialisations = (
            Times([times[n] for times in found[True]], [times[n] for times in found[False]])
            for n in (0, 1)
        )
        return starts, initialisations


def main() -> None:
    """Print the table."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(chdir(directory))
        cards = gpus(1, bytes=64 * GIB)
        behaviour = Behaviour(reuse_addresses=True)
        node = stack.enter_context(Node(directory, cards, behaviour))
        group = stack.enter_context(Group(directory, cards))
        command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", str(SOURCE)]
        program = compiled(command, groups.BUILT / "gpu_calls", [SOURCE])
        bench = Bench(node, group, groups.libraries(), program)
        print(f"{'':44}{'added':>12}{'ratio':>8}   target")
        _calls(bench)
        _begins(bench)
        _memory(bench)


def _calls(bench: Bench) -> None:
    launch = bench.times("launch", "100000")
    _row("launch at a share of 1, p50 (ns)", launch.added(50), launch.ratio, 30)
    _row("launch at a share of 1, p99 (ns)", launch.added(99), None, 100)
    few, many = bench.times("alloc", "50000", "10"), bench.times("alloc", "50000", str(MANY))
    _row("cuMemAlloc and cuMemFree, p50 (ns)", few.added(50), few.ratio, 1000)
    _row("cuMemAlloc and cuMemFree, p99 (ns)", few.added(99), None, 10000)
    _row(f"  among {MANY} others, p50 (ns)", many.added(50), many.ratio, 1000)
    growth = many.added(50) / max(few.added(50), 1)
    print(f"{'  the same, to that among 10':44}{'':12}{growth:8.2f}   2")
    asked = bench.times("address", "60000")
    _row("cuGetProcAddress, p50 (ns)", asked.added(50), asked.ratio, 200)


def _begins(bench: Bench) -> None:
    alone = [bench.starts(1, with_shim=True)[0] for _ in range(STARTS)]
    plain = [bench.starts(1, with_shim=False)[0] for _ in range(STARTS)]
    added = (statistics.median(alone) - statistics.median(plain)) / 1e6
    _row("cuInit (ms)", added, statistics.median(alone) / statistics.median(plain), 2)
    for version in RUNTIMES:
        start, initialisation = bench.runtimes(version)
        _row(
            f"start of CUDA {version}'s runtime, CPU (ms)", start.added(50) / 1e6, start.ratio, 0.2
        )
        added = initialisation.added(50) / 1e6
        _row("  its cuInit, CPU (ms)", added, initialisation.ratio, 2)


def _memory(bench: Bench) -> None:
    none = bench.resident(0, True) - bench.resident(0, False)
    _row("resident without allocations (KiB)", none / 1024, None, 1024)
    many = bench.resident(MANY, True) - bench.resident(MANY, False)
    _row("resident for each live allocation (bytes)", (many - none) / MANY, None, 64)


def _row(what: str, added: float, ratio: float | None, target: float) -> None:
    shown = f"{ratio:8.2f}" if ratio is not None else f"{'':8}"
    print(f"{what:44}{added:12.2f}{shown}   {target:g}", flush=True)


def _percentile(times: list[int], percent: int) -> float:
    return sorted(times)[min(len(times) - 1, len(times) * percent // 100)]


if __name__ == "__main__":
    main()
