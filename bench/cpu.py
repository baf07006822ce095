"""CPU time of the agent for each call, natively: of user code and of the kernel.

Run as root: `python -m bench.cpu`; in the virtual machine `python -m bench.vm_cpu`.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Self

from bench.agent import Agent
from bench.attach import cable_calls, cables, environ, ipam_config
from bench.processes import Call, run

CALLS = 200
WARM = 5  # calls before the first that counts
TICKS = os.sysconf("SC_CLK_TCK")
MICROSECONDS = 1e6


class Usage(NamedTuple):
    """What a process has used: seconds of CPU, user's part of them, times it gave up a CPU."""

    cpu: float
    user: float
    switches: float

    @classmethod
    def of(cls, pid: int) -> Self:
        """The usage of all threads of a process until now."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        switches = 0
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            with suppress(ProcessLookupError, FileNotFoundError):  # a thread that has just ended
                for line in status.read_text().splitlines():
                    if line.startswith("voluntary_ctxt_switches:"):
                        switches += int(line.split()[1])
        # The clock of a process: clock_getcpuclockid(3), CPUCLOCK_SCHED in linux/posix-timers.h
        return cls(time.clock_gettime(~pid << 3 | 2), int(fields[11]) / TICKS, switches)

    def per_call(self, before: Self, calls: int) -> "Usage":
        """The mean of so many calls that were made since `before`."""
        return Usage(*((now - then) / calls for now, then in zip(self, before, strict=True)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=CALLS)
    measure(parser.parse_args().calls)


def measure(calls: int = CALLS) -> None:
    """Print the table."""
    header()
    with ExitStack() as stack:
        directory = tempfile.TemporaryDirectory(prefix="podfabric-bench-", dir="/var/tmp")
        agent = stack.enter_context(Agent(Path(stack.enter_context(directory)) / "agent"))
        ours = agent.executables / "podfabric-ipam"
        config = ipam_config(ours, Path())

        def address(command: str, number: int) -> Call:
            return Call(ours, environ(ours, agent, command, f"c{number}"), config)

        rows("an address", agent, calls, address)
        pair = stack.enter_context(cables(1))
        moved = agent.executables / "moved"

        def interface(command: str, number: int) -> Call:
            return cable_calls(moved, agent, Path(), pair, command, number)[0]

        rows("an interface and an address", agent, calls, interface)


def header() -> None:
    """Print what the columns are."""
    print(f"{'CPU of the agent for one call':44}{'all':>12}{'user':>12}{'waits':>8}")


def rows(label: str, agent: Agent, calls: int, call: Callable[[str, int], Call]) -> None:
    """Make ADDs and DELs in turns, and print the mean of each."""
    used: dict[str, list[Usage]] = {"ADD": [], "DEL": []}
    for number in range(-WARM, calls):
        for command in ("ADD", "DEL"):
            before = Usage.of(agent.pid)
            run(call(command, number + WARM))
            after = Usage.of(agent.pid)
            if number >= 0:
                used[command].append(after.per_call(before, 1))
    for command, usages in used.items():
        row(f"{label}, {command}", mean(usages))


def mean(usages: Sequence[Usage]) -> Usage:
    """The mean usage."""
    return Usage(*(sum(column) / len(usages) for column in zip(*usages, strict=True)))


def row(label: str, usage: Usage) -> None:
    """Print one row."""
    cpu, user = usage.cpu * MICROSECONDS, usage.user * MICROSECONDS
    print(f"{label:44}{cpu:9.0f} µs{user:9.0f} µs{usage.switches:8.1f}", flush=True)


if __name__ == "__main__":
    main()
