"""One row of bench/gpu.sh: measures it and prints a line for each number.

    python -m bench.gpu.rows ROW [--real LIBCUDA] [--short]

A line is "ROW what: number | target | ok, miss, or skipped: why". Without `--real` the driver is
the stand-in of the tests, and the numbers say nothing about a GPU.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.gpu import framework_rows, shared
from bench.gpu.place import (
    CONTEXT,
    LIMIT,
    PIECE,
    BenchGroup,
    Place,
    begin,
    figure,
    finished,
    line,
    numbers,
)
from bench.processes import quantile
from tests.gpu.group import hooked
from tests.standin.gpus import GIB, MIB, table

SLACK = 2 * PIECE  # below a limit: a pool grows in pieces, and the last one may not fit
KINDS = ("alloc", "physical", "async")
OUT_OF_MEMORY = 2
MOST_IN_GROUP = 250  # processes; a group has room for 256


class Rows:
    """Rows that need only a driver. `short`: few rounds, to try the script."""

    def __init__(self, place: Place, *, short: bool) -> None:
        self.place = place
        self.short = short
        self._used = 0  # numbers of groups

    def g2(self) -> None:
        """Check that cuGetProcAddress answers the addresses that dlsym finds, for each hook."""
        names = hooked()
        asked = [(base, at, symbol, 2 if own else 1) for base, at, symbol, own in table()]
        asked = [each for each in asked if each[2] in names]
        command = [sys.executable, "-c", ADDRESSES]
        process = self.place.group("g2").popen(command, shim=False)
        same, other, missing = json.loads(finished(process, json.dumps(asked)))
        what = "hooks whose address by cuGetProcAddress is dlsym's"
        value = f"{len(same)} of {len(same) + len(other)}"
        more = f", {len(missing)} are not in this driver" if missing else ""
        differ = f" ({', '.join(other[:4])} differ)" if other else ""
        line("G2", what, f"{value}{differ}{more}", "all", bool(same) and not other)

    def g3(self) -> None:
        """Check that memory of each kind is available up to the limit, and that the limit is the
        total."""
        for kind in KINDS:
            group = self.place.group(f"g3-{kind}", memory=LIMIT, context=CONTEXT)
            got, total, result = map(int, group.say("fill", kind, str(PIECE)).split())
            well = LIMIT - CONTEXT - SLACK <= got <= LIMIT and (total, result) == (
                LIMIT,
                OUT_OF_MEMORY,
            )
            value = f"{got / GIB:.2f} GiB, total {total / GIB:.2f} GiB, then error {result}"
            line(
                "G3",
                f"{kind} at a limit of {LIMIT / GIB:.0f} GiB",
                value,
                "the limit, error 2",
                well,
            )

    def g6(self) -> None:
        """The cost that a launch adds, with the whole GPU and with a share that the launches do
        not use up."""
        count, rounds = (3_000, 3) if self.short else (50_000, 21)
        group = self.place.group("g6")
        times: dict[float, list[list[float]]] = {0.0: [], 1.0: [], 0.99: []}
        for _ in range(rounds):  # alternating, so that a slow moment affects all of them
            for share, of in times.items():
                group.set_share(share or 1.0)
                of.append(numbers(group.say("launch", str(count), shim=share > 0)))
        for what, share, targets in (
            ("launch at s = 1", 1.0, (30, 100)),
            ("launch at s < 1, not held back", 0.99, (150, 1000, 5000, 5000)),
        ):
            _added("G6", what, times[share], times[0.0], targets)

    def g7(self) -> None:
        """The cost that an allocation with its free adds, and a look-up of an address."""
        count, rounds, live = (500, 3, 10_000) if self.short else (10_000, 10, 1_000_000)
        for what, words, targets in (
            ("alloc and free of 1 MiB", ("alloc", str(count), str(MIB)), (1000, 10_000)),
            ("alloc and free of 64 MiB", ("alloc", str(count), str(64 * MIB)), (1000, 10_000)),
            ("alloc and free among 10", ("alloc", str(count), "512", "10"), (1000, 10_000)),
            (
                f"alloc and free among {live}",
                ("alloc", str(count), "512", str(live)),
                (1000, 10_000),
            ),
            ("cuGetProcAddress", ("address", str(count)), (200,)),
        ):
            group = self.place.group(f"g7-{self._number()}")
            both: dict[bool, list[list[float]]] = {True: [], False: []}
            for _ in range(rounds):
                for shim, of in both.items():
                    of.append(numbers(group.say(*words, shim=shim)))
            _added("G7", what, both[True], both[False], targets)

    def g8(self) -> None:
        """Measure cuInit in many processes at once."""
        for count in (8,) if self.short else (1, 64, 300):
            with_shim: list[float] = []
            without: list[float] = []
            for _ in range(21 if count == 1 else 1):
                with_shim += self._starts(count, shim=True)
                without += self._starts(count, shim=False)
            at, target = (50, 2.0) if count == 1 else (99, 50.0)
            added = quantile(with_shim, at / 100) - quantile(without, at / 100)
            value = (
                f"p50 {quantile(with_shim, 0.5):.1f}, p99 {quantile(with_shim, 0.99):.1f} ms; "
                f"without {quantile(without, 0.5):.1f}, {quantile(without, 0.99):.1f} ms"
            )
            line(
                "G8",
                f"cuInit of {count} at once",
                value,
                f"p{at} +{target:.0f} ms",
                added <= target,
            )

    def g10(self) -> None:
        """Kill processes while they allocate: nothing stays counted, and nothing hangs."""
        kills = 10 if self.short else 200
        group = self.place.group("g10", memory=LIMIT)
        chance = random.Random(1)
        running: list[subprocess.Popen[str]] = []
        for number in range(kills + 8):
            if len(running) == 8:
                _kill(group, running.pop(chance.randrange(8)))
            process = group.start("churn", str(number))
            assert process.stdout is not None
            if process.stdout.readline() != "begins\n":
                line("G10", "kills", f"process {number} did not start", "no hang", False)
                return
            running.append(process)
        for process in running:
            _kill(group, process)
        got, total, _ = map(int, group.say("fill", "alloc", str(PIECE)).split())
        value = f"{got / GIB:.2f} of {total / GIB:.2f} GiB are free after {kills + 8} kills"
        line("G10", "kill -9 among 8 processes", value, "all", got >= total - PIECE)

    def _starts(self, count: int, *, shim: bool) -> list[float]:
        """Milliseconds of cuInit in processes that start at once."""
        number = self._number()
        of = [self.place.group(f"g8-{number}-{n}") for n in range(0, count, MOST_IN_GROUP)]
        running = [of[n // MOST_IN_GROUP].start("init", shim=shim) for n in range(count)]
        begin(running)
        times = []
        for process in running:
            assert process.stdout is not None
            times.append(float(process.stdout.readline() or "nan") / 1e6)
        for process in running:  # none ends while another one still needs a CPU
            process.communicate()
        return times

    def _number(self) -> int:
        self._used += 1
        return self._used


def _added(
    row: str,
    what: str,
    with_shim: Sequence[Sequence[float]],
    without: Sequence[Sequence[float]],
    targets: Sequence[float],
) -> None:
    """Print the additional cost of the median call, of the 99th percentile, and both for timed
    calls: medians of all rounds, in ns."""
    names = ("p50", "p99", "timed (1 in 256), p50", "timed (1 in 256), p99")
    for index, target in enumerate(targets):
        pairs = [
            (ours[index], other[index]) for ours, other in zip(with_shim, without, strict=True)
        ]
        added = statistics.median(ours - other for ours, other in pairs)
        ratio = statistics.median(ours / other for ours, other in pairs)
        figure(row, f"{what}, {names[index]}, added", added, "ns", target, ratio)


ADDRESSES = """
import ctypes, json, sys
library = ctypes.CDLL("libcuda.so.1")
same, other, missing = [], [], []
for base, version, symbol, flags in json.load(sys.stdin):
    try:
        found = ctypes.cast(library[symbol], ctypes.c_void_p).value
    except AttributeError:
        missing.append(symbol)
        continue
    pointer, status = ctypes.c_void_p(), ctypes.c_int(-1)
    asked = base.encode(), ctypes.byref(pointer), ctypes.c_int(version), ctypes.c_uint64(flags)
    result = library.cuGetProcAddress_v2(*asked, ctypes.byref(status))
    (same if result == 0 and pointer.value == found else other).append(symbol)
print(json.dumps([same, other, missing]))
"""


def _kill(group: BenchGroup, process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()
    group.group.bury(process.pid)


def main() -> int:
    """Measure a row; returns 0 unless it could not be measured."""
    parser = argparse.ArgumentParser(description="Measure a row of bench/gpu.sh.")
    parser.add_argument("row")
    parser.add_argument("--real", type=Path, help="the machine's libcuda.so.1")
    parser.add_argument("--short", action="store_true", help="few rounds, to try the script")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="podfabric-bench-", dir="/var/tmp") as name:
        place = Place(Path(name), arguments.real)
        try:
            rows = Rows(place, short=arguments.short)
            of_frameworks = framework_rows.ToolRows(place, short=arguments.short)
            measures: dict[str, Callable[[], object]] = {
                **{row: getattr(rows, row) for row in ("g2", "g3", "g6", "g7", "g8", "g10")},
                "g9": lambda: shared.measure(place, short=arguments.short),
                **{row: getattr(of_frameworks, row) for row in ("g3t", "g4", "g5", "g11", "g12")},
            }
            if arguments.real is None:
                from bench.gpu import standin  # its imports are missing on a machine with a GPU

                measures |= standin.rows(place, short=arguments.short)
            if arguments.row in measures:
                measures[arguments.row]()
            else:
                line(arguments.row.upper(), "what a node needs", "-", "-", "it needs the stand-in")
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            line(arguments.row.upper(), "could not be measured", str(error), "-", False)
            return 1
        finally:
            place.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
