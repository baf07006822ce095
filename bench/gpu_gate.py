"""What the GPU library adds to a launch: with the whole GPU, and with a share that does not wait.

    .venv/bin/python -m bench.gpu_gate [--short]

The driver is the stand-in of the tests. Its launches do less than a real driver's, so that ratios
are worse than there. What is added in ns is what the library does, and in launches that it times
also what the driver's events cost. Rounds of all three alternate in one run, and a figure is the
median of the rounds, each beside that without the library.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.gpu_figures import figure, line
from gpu.limits_file import LimitsFile
from tests.gpu import group as groups
from tests.gpu.group import Group
from tests.standin.gpus import Behaviour, Node, gpus

ROW = "gate"
SOURCE = Path(__file__).with_name("gpu_gate.c")
WITHOUT, WHOLE, SHARED = "without the library", "with the whole GPU", "with a share"
# A share of 0.99, and kernels that take no time: the gate counts and never waits.
SHARES = {WITHOUT: None, WHOLE: 1.0, SHARED: 0.99}


class Launch(NamedTuple):
    """Nanoseconds of one launch, and of one that is timed with events."""

    p50: float
    p99: float
    timed_p50: float
    timed_p99: float


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure what a launch costs more.")
    parser.add_argument("--short", action="store_true", help="few calls, to try the bench itself")
    launches, rounds = (3_000, 3) if parser.parse_args().short else (20_000, 21)
    with tempfile.TemporaryDirectory(prefix="podfabric-bench-", dir="/var/tmp") as name:
        _print(measured(Path(name), launches, rounds))


def measured(directory: Path, launches: int, rounds: int) -> Mapping[str, Sequence[Launch]]:
    """Launches in so many rounds, each with all of `SHARES`, in a directory of its own."""
    program = directory / "gpu_gate"
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    libraries = groups.libraries()
    found: dict[str, list[Launch]] = {name: [] for name in SHARES}
    with (
        chdir(directory),
        Node(directory, gpus(1), Behaviour()) as node,
        Group(directory, node.gpus[0]) as group,
    ):
        for _ in range(rounds):
            for name, share in SHARES.items():
                _set(group, share or 1.0)
                path = libraries.plain if share is None else libraries.shim
                environment = {**os.environ, **node.environment, "LD_LIBRARY_PATH": str(path)}
                times = subprocess.check_output([str(program), str(launches)], env=environment)
                found[name].append(Launch(*map(float, times.split())))
    return found


def _set(group: Group, share: float) -> None:
    with LimitsFile(group.limits) as opened:
        limit = opened.gpu()
        opened.write(msgspec.structs.replace(limit, share=share))


def _print(rounds: Mapping[str, Sequence[Launch]]) -> None:
    for name in ("p50", "p99"):
        ns = statistics.median(getattr(launch, name) for launch in rounds[WITHOUT])
        line(ROW, f"launch {WITHOUT}, {name}", f"{ns:.0f} ns", "-", True)
    _added(rounds, WHOLE, "p50", 30)
    _added(rounds, WHOLE, "p99", 100)
    _added(rounds, SHARED, "p50", 150)
    _added(rounds, SHARED, "p99", 1000)
    _added(rounds, SHARED, "timed_p50", 5000)
    _added(rounds, SHARED, "timed_p99", 5000)


def _added(
    rounds: Mapping[str, Sequence[Launch]], kind: str, percentile: str, target: float
) -> None:
    pairs = [
        (getattr(one, percentile), getattr(without, percentile))
        for one, without in zip(rounds[kind], rounds[WITHOUT], strict=True)
    ]
    added = statistics.median(one - without for one, without in pairs)
    ratio = statistics.median(one / without for one, without in pairs)
    timed = ", timed (1 in 256)" if percentile.startswith("timed") else ""
    what = f"launch {kind}{timed}, {percentile.removeprefix('timed_')}"
    figure(ROW, what, added, "ns", target, ratio)


if __name__ == "__main__":
    main()
