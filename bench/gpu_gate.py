"""What the GPU library adds to a launch: with the whole GPU, and with a share that does not wait.

    .venv/bin/python -m bench.gpu_gate

The driver is the stand-in of the tests. Its launches do less than a real driver's, so that ratios
are worse than there. What is added in ns is what the library does, and in launches that it times
also what the driver's events cost. Rounds of all three alternate in one run.
"""

import os
import statistics
import subprocess
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpu.limits_file import LimitsFile
from tests.gpu import group as groups
from tests.gpu.group import Group, Libraries
from tests.standin.gpus import Behaviour, Node, gpus

SOURCE = Path(__file__).with_name("gpu_gate.c")
LAUNCHES = 20_000
ROUNDS = 21


class Launch(NamedTuple):
    """Nanoseconds of one launch."""

    median: float
    p99: float
    timed: float  # median of those that are timed with events


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="podfabric-bench-", dir="/var/tmp") as name:
        measure(Path(name))


def measure(directory: Path) -> None:
    """Measure in a directory of its own, and print the table."""
    program = directory / "gpu_gate"
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    libraries = groups.libraries()
    # A share of 0.99, and kernels that take no time: the gate counts and never waits.
    shares = {"without the library": None, "with the whole GPU": 1.0, "with a share of 0.99": 0.99}
    rounds: dict[str, list[Launch]] = {name: [] for name in shares}
    with (
        chdir(directory),
        Node(directory, gpus(1), Behaviour()) as node,
        Group(directory, node.gpus) as group,
    ):
        for _ in range(ROUNDS):
            for name, share in shares.items():
                rounds[name].append(_round(program, node, libraries, group, share))
    _print(rounds)


def _round(
    program: Path, node: Node, libraries: Libraries, group: Group, share: float | None
) -> Launch:
    if share is not None:
        with LimitsFile(group.limits) as opened:
            [limit] = opened.gpus()
            opened.write([msgspec.structs.replace(limit, share=share)])
    found = libraries.plain if share is None else libraries.shim
    environment = {**os.environ, **node.environment, "LD_LIBRARY_PATH": str(found)}
    done = subprocess.run(
        [str(program), str(LAUNCHES)], env=environment, check=True, capture_output=True, text=True
    )
    return Launch(*map(float, done.stdout.split()))


def _print(rounds: dict[str, list[Launch]]) -> None:
    plain = rounds["without the library"]
    columns = ("median", "p99", "timed")
    print(
        f"{'ns of a launch':24}"
        + "".join(f"{name:>10}{'ratio':>8}{'added':>8}" for name in columns)
    )
    for name, launches in rounds.items():
        row = f"{name:24}"
        for column in columns:
            # Each round beside that without the library: a slow round makes both slower.
            pairs = [
                (getattr(one, column), getattr(without, column))
                for one, without in zip(launches, plain, strict=True)
            ]
            row += f"{statistics.median(one for one, _ in pairs):10.0f}"
            row += f"{statistics.median(one / without for one, without in pairs):8.2f}"
            row += f"{statistics.median(one - without for one, without in pairs):8.0f}"
        print(row)


if __name__ == "__main__":
    main()
