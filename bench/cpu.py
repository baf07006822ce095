"""CPU time of the agent for each call, beside the call's wall time and the floor's.

As root: `python -m bench.cpu`.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Self

from bench import floor
from bench.agent import Agent
from bench.attach import cable_calls, cables, environ, ipam_config
from bench.processes import Call, run

CALLS = 200
WARM = 5  # calls before the first that counts
TICKS = os.sysconf("SC_CLK_TCK")
BARE = 30  # calls of the floor's program
Kind = tuple[str, Callable[[str, int], Call], Callable[[str, int], Call] | None]
"""A label, what makes a call of ours by verb and number, and what makes one of the floor's."""


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

    def since(self, before: Self) -> "Usage":
        """The usage since `before`."""
        return Usage(*(now - then for now, then in zip(self, before, strict=True)))


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
        root = Path(stack.enter_context(directory))
        agent = stack.enter_context(Agent(root / "agent"))
        for label, call, bare in kinds(stack, agent, floor.build(root)):
            rows(label, agent, calls, call, bare)


def kinds(stack: ExitStack, agent: Agent, program: Path) -> Iterator[Kind]:
    """An address alone, and one with an interface that exists."""
    ours = agent.executables / "podfabric-ipam"
    config = ipam_config(ours, Path())

    def address(verb: str, number: int) -> Call:
        return Call(ours, environ(ours, agent, verb, f"c{number}"), config)

    yield "an address", address, None
    (cable,) = stack.enter_context(cables(1))
    moved = agent.executables / "moved"

    def interface(verb: str, number: int) -> Call:
        return cable_calls(moved, agent, Path(), [cable], verb, number)[0]

    def bare(verb: str, number: int) -> Call:
        return floor.call(program, verb, cable.netns, cable.name)

    yield "an interface and an address", interface, bare


def header() -> None:
    """Print what the columns are."""
    print(
        f"\n{'the agent, for each call':34}{'CPU':>10}{'user':>10}{'waits':>7}{'wall':>11}"
        f"{'floor: CPU':>13}{'wall':>11}"
    )


def rows(
    label: str,
    agent: Agent,
    calls: int,
    call: Callable[[str, int], Call],
    bare: Callable[[str, int], Call] | None,
) -> None:
    """Make ADDs and DELs in turns, ours and the floor's, and print what each took."""
    used: dict[str, list[Usage]] = {"ADD": [], "DEL": []}
    wall: dict[str, list[float]] = {"ADD": [], "DEL": []}
    least: dict[str, list[dict[str, float]]] = {"ADD": [], "DEL": []}
    for number in range(-WARM, calls):
        for verb in ("ADD", "DEL"):
            made = call(verb, number + WARM)
            before = Usage.of(agent.pid)
            run(made)
            after = Usage.of(agent.pid)
            if number >= 0:
                used[verb].append(after.since(before))
                wall[verb].append(made.seconds)
        if bare is not None and 0 <= number < BARE:
            for verb in ("ADD", "DEL"):
                least[verb].append(run(bare(verb, number)))
    for verb in ("ADD", "DEL"):
        row(f"{label}, {verb}", mean(used[verb]), statistics.median(wall[verb]), least[verb])


def mean(usages: Sequence[Usage]) -> Usage:
    """The mean usage."""
    return Usage(*(sum(column) / len(usages) for column in zip(*usages, strict=True)))


def row(label: str, usage: Usage, wall: float, least: Sequence[Mapping[str, float]]) -> None:
    """Print one row; `least` is what the floor's program answered."""
    bare = ""
    if least:
        cpu, seconds = (
            statistics.median(answer[key] for answer in least) for key in ("cpu", "wall")
        )
        bare = f"{cpu / 1e3:10.0f} µs{seconds / 1e6:8.2f} ms"
    print(
        f"{label:34}{usage.cpu * 1e6:7.0f} µs{usage.user * 1e6:7.0f} µs{usage.switches:7.1f}"
        f"{wall * 1e3:8.2f} ms{bare}",
        flush=True,
    )


if __name__ == "__main__":
    main()
