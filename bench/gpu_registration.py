"""How long cuInit takes in a process, and in many at once: they register with the agent.

    .venv/bin/python -m bench.gpu_registration [--against CHECKOUT] [--count 300] [--rounds 5]

The agent's registrar is a process of its own, the clients are processes in the cgroups of made-up
pods, with the library of gpu/shim over the stand-in for the driver. With `--against`, rounds with
the registrar of another checkout alternate with ours. "without" is cuInit of the stand-in alone.
"floor" is the same with an agent that answers at once, and does none of what it should
(bench/gpu_floor.c): what the machine needs to let so many processes ask and be answered. "inf" are
processes that were refused. The CPU time, of each process within cuInit and of the agent for each,
says more than the time that passes on a machine that is busy.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from bench.gpu_figures import figure, percentile
from bench.gpu_place import Place
from gpu.group_limits import Limit
from gpu.groups import Groups
from tests.gpu.group import BUILT, DIRECTORY
from tests.host.gpu.pods import MadeContainer, made_container
from tests.unit.gpu.groups import PlainRooms
from tools.compiling import CHECKOUT, compiled

ROW = "init"
WITHOUT, FLOOR, OURS = "without", "floor", "this checkout"
FLOOR_SOURCE = Path(__file__).with_name("gpu_floor.c")
IN_GROUP = 250  # processes; a group has 256 slots
AGENT = """
import sys, time
from pathlib import Path
from base.pod import Pod
from gpu.groups import Groups
from gpu.registration import Registrar
from gpu.tenants import Tenant, Tenants
root, uids = Path(sys.argv[1]), sys.argv[2:]
tenants = [
    Tenant(group=f"g{n}", pod=Pod("default", f"pod-{n}", uid), container="main")
    for n, uid in enumerate([*uids, *(f"{n:08}" for n in range(64 - len(uids)))])
]
registrar = Registrar(Groups(root), Tenants(lambda: tenants, root))
registrar.start()
print("serves", flush=True)
began = time.process_time()
sys.stdin.readline()
spent = time.process_time() - began
print(registrar.answered[0], spent, flush=True)
registrar.close()
"""


class Times(msgspec.Struct, frozen=True):
    """What many calls of cuInit at once took."""

    wall: list[float]  # milliseconds of each; "inf": it was refused
    client: float  # microseconds of CPU time, the mean of all
    agent: float  # the same of the agent, for each


class Registering:
    """Containers, and the stand-in's GPU, in a directory of its own."""

    def __init__(self, place: Place, containers: Sequence[MadeContainer]) -> None:
        self._place = place
        self._containers = containers
        self._root = place.directory / "groups"
        for n in range(len(containers)):
            directory = self._directory(n)
            directory.mkdir()
            (directory / DIRECTORY).symlink_to(self._root / f"g{n}")

    def with_agent(self, checkout: Path, count: int) -> Times:
        """So many processes, which an agent of that checkout registers."""
        self._make_groups()
        uids = [each.container.pod_uid for each in self._containers]
        return self._measured(
            [sys.executable, "-c", AGENT, str(self._root), *uids], checkout, count
        )

    def floor(self, count: int) -> Times:
        """The same with an agent that answers at once."""
        self._make_groups()
        options = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", str(FLOOR_SOURCE)]
        program = compiled(options, BUILT / "gpu_floor", [FLOOR_SOURCE])
        sockets = [f"groups/g{n}/agent/agent.sock" for n in range(len(self._containers))]
        return self._measured([str(program), *sockets], self._place.directory, count)

    def _measured(self, command: list[str], directory: Path, count: int) -> Times:
        with running_agent(command, directory) as agent, self._started(count, shim=True) as times:
            assert agent.stdin is not None and agent.stdout is not None
            agent.stdin.write("\n")
            agent.stdin.flush()
            registered, spent = map(float, agent.stdout.readline().split())
        if registered < count:
            print(f"{command[0]}: {registered:.0f} of {count} processes were registered in time")
        return msgspec.structs.replace(times, agent=spent / max(registered, 1) * 1e6)

    def without(self, count: int) -> Times:
        """The same without the shim."""
        with self._started(count, shim=False) as times:
            return times

    def rounds(
        self, kinds: Mapping[str, Path | None], count: int, rounds: int
    ) -> Mapping[str, Sequence[Times]]:
        """What so many processes took in rounds, each with all kinds of agents."""
        found: dict[str, list[Times]] = {name: [] for name in kinds}
        for _ in range(rounds):
            for name, checkout in kinds.items():
                if checkout is not None:
                    found[name].append(self.with_agent(checkout, count))
                elif name == FLOOR:
                    found[name].append(self.floor(count))
                else:
                    found[name].append(self.without(count))
        return found

    def _make_groups(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        groups = Groups(self._root, rooms=PlainRooms())
        for n in range(len(self._containers)):
            groups.make(f"g{n}", Limit(self._place.gpu.uuid, 2**64 - 1, 1.0))

    def _directory(self, n: int) -> Path:
        return self._place.directory / f"in-{n}"

    @contextmanager
    def _started(self, count: int, *, shim: bool) -> Iterator[Times]:
        """What processes took. None ends while another one waits: that needs a CPU, too."""
        running = [
            subprocess.Popen(
                [str(self._place.program), "init"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._place.environment(shim=shim),
                cwd=self._directory(n // IN_GROUP),
            )
            for n in range(count)
        ]
        for n, process in enumerate(running):
            self._containers[n // IN_GROUP].take(process.pid)
        for process in running:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        wall, cpu = [], []
        for process in running:
            assert process.stdout is not None
            wall.append(float(process.stdout.readline() or "inf") / 1e6)
            cpu.append(float(process.stdout.readline() or "nan") / 1e3)
        try:
            yield Times(wall, statistics.mean(cpu), 0.0)
        finally:
            for process in running:
                process.communicate()


@contextmanager
def running_agent(command: list[str], checkout: Path) -> "Iterator[subprocess.Popen[str]]":
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, cwd=checkout, env=environment, text=True
    ) as agent:
        assert agent.stdout is not None
        if agent.stdout.readline() != "serves\n":
            raise SystemExit("the agent did not start")
        yield agent


def main() -> None:
    """Print the table, and the figures."""
    parser = argparse.ArgumentParser(description="Measure how long processes take to register.")
    parser.add_argument("--against", type=Path, help="another checkout, whose registrar alternates")
    parser.add_argument("--count", type=int, default=300, help="processes")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    kinds: dict[str, Path | None] = {WITHOUT: None, FLOOR: None, OURS: CHECKOUT}
    if arguments.against is not None:
        kinds[str(arguments.against)] = arguments.against.resolve()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        place = Place(directory, None)
        stack.callback(place.close)
        count = -(-arguments.count // IN_GROUP)
        containers = [stack.enter_context(made_container()) for _ in range(count)]
        measured = Registering(place, containers)
        for count in sorted({1, arguments.count}):
            _print(count, measured.rounds(kinds, count, arguments.rounds))


def _print(count: int, rounds: Mapping[str, Sequence[Times]]) -> None:
    headers = f"{'p50 (ms)':>10}{'p99 (ms)':>10}{'CPU of each (us)':>18}{'of the agent (us)':>19}"
    print(f"{f'cuInit of {count} at once':40}{headers}")
    for name, of in rounds.items():
        client = statistics.median(times.client for times in of)
        agent = statistics.median(times.agent for times in of)
        print(f"{name:40}{_median(of, 50):10.1f}{_median(of, 99):10.1f}{client:18.0f}{agent:19.0f}")
    percent = 50 if count == 1 else 99
    wall, plain = (_median(rounds[name], percent) for name in (OURS, WITHOUT))
    if count == 1:
        figure(ROW, "cuInit alone, p50", wall - plain, "ms", 2, wall / plain)
    else:
        figure(ROW, f"cuInit of {count} at once, p99 in all", wall, "ms", 50, wall / plain)


def _median(rounds: Sequence[Times], percent: int) -> float:
    """The median of a percentile over the rounds."""
    return statistics.median(percentile(of.wall, percent) for of in rounds)


if __name__ == "__main__":
    main()
