"""What a call of CUDA costs more with the libraries of gpu/shim, over the stand-in for the driver.

    .venv/bin/python -m bench.gpu_shim [--short]

Each call is timed with and without them, in turns, in one process (bench/gpu_calls.c). A figure is
the difference of the two medians, or 99th percentiles, and the ratio is that of the same two. The
stand-in's calls take as long as they do, so ratios to a real driver's are others: the differences
count. Of a start of the runtime and of its cuInit the CPU time is shown: cuInit waits for an agent,
here one in Python that shares the machine's CPUs with the rest. Many processes that start at once
are measured by `bench.gpu_registration`, with the agent's own registrar.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, chdir
from pathlib import Path

import msgspec

from bench.gpu_figures import figure, percentile
from tests.gpu import group as groups
from tests.gpu.group import Group, Libraries
from tests.gpu.test_runtime import RUNTIMES, runtime
from tests.standin.gpus import GIB, Behaviour, Node, gpus
from tools.compiling import compiled

SOURCE = Path(__file__).with_name("gpu_calls.c")
ROW = "shim"
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
        return percentile(self.with_shim, percent) - percentile(self.without, percent)

    def ratio(self, percent: int) -> float:
        return percentile(self.with_shim, percent) / percentile(self.without, percent)


class Effort(msgspec.Struct, frozen=True):
    """How much is measured."""

    calls: int
    live: int  # allocations beside which others are timed
    starts: int  # of processes, one after the other


FULL = Effort(calls=50_000, live=1_000_000, starts=60)
SHORT = Effort(calls=500, live=10_000, starts=2)


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

    def runtimes(self, version: str, count: int) -> tuple[Times, Times]:
        """The same of so many starts, in turns."""
        found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for number in range(count):
            for with_shim in (number % 2 == 0, number % 2 != 0):
                found[with_shim].append(self.runtime(version, with_shim))
        starts, initialisations = (
            Times([times[n] for times in found[True]], [times[n] for times in found[False]])
            for n in (0, 1)
        )
        return starts, initialisations


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure what calls of CUDA cost more.")
    parser.add_argument("--short", action="store_true", help="few calls, to try the bench itself")
    effort = SHORT if parser.parse_args().short else FULL
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(chdir(directory))
        cards = gpus(1, bytes=64 * GIB)
        behaviour = Behaviour(reuse_addresses=True)
        node = stack.enter_context(Node(directory, cards, behaviour))
        group = stack.enter_context(Group(directory, cards[0]))
        command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", str(SOURCE)]
        program = compiled(command, groups.BUILT / "gpu_calls", [SOURCE])
        bench = Bench(node, group, groups.libraries(), program)
        _calls(bench, effort)
        _begins(bench, effort)
        _memory(bench, effort)


def _calls(bench: Bench, effort: Effort) -> None:
    launch = bench.times("launch", str(2 * effort.calls))
    _added("launch with the whole GPU, p50", launch, 50, 30)
    _added("launch with the whole GPU, p99", launch, 99, 100)
    few, many = (bench.times("alloc", str(effort.calls), str(of)) for of in (10, effort.live))
    for among, pair in ((10, few), (effort.live, many)):
        _added(f"cuMemAlloc and cuMemFree among {among} others, p50", pair, 50, 1000)
        _added(f"cuMemAlloc and cuMemFree among {among} others, p99", pair, 99, 10000)
    growth = many.added(50) / max(few.added(50), 1)
    figure(ROW, f"added among {effort.live} to that among 10, p50", growth, "times", 2)
    asked = bench.times("address", str(effort.calls))
    _added("cuGetProcAddress, p50", asked, 50, 200)


def _begins(bench: Bench, effort: Effort) -> None:
    alone = Times(
        *(
            [bench.starts(1, with_shim=with_shim)[0] for _ in range(effort.starts)]
            for with_shim in (True, False)
        )
    )
    figure(ROW, "cuInit, p50", alone.added(50) / 1e6, "ms", 2, alone.ratio(50))
    for version in RUNTIMES:
        start, initialisation = bench.runtimes(version, effort.starts)
        for what, times, target in (
            (f"start of CUDA {version}'s runtime, CPU, p50", start, 0.2),
            (f"cuInit of CUDA {version}'s runtime, CPU, p50", initialisation, 2),
        ):
            figure(ROW, what, times.added(50) / 1e6, "ms", target, times.ratio(50))


def _memory(bench: Bench, effort: Effort) -> None:
    none = bench.resident(0, True) - bench.resident(0, False)
    figure(ROW, "resident memory without allocations", none / 1024, "KiB", 1024)
    many = bench.resident(effort.live, True) - bench.resident(effort.live, False)
    each = (many - none) / effort.live
    figure(ROW, "resident memory for each live allocation", each, "bytes", 64)


def _added(what: str, times: Times, percent: int, target: float) -> None:
    figure(ROW, what, times.added(percent), "ns", target, times.ratio(percent))


if __name__ == "__main__":
    main()
