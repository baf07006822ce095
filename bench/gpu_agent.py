"""What the agent's part of GPU limits needs: CPU time, and memory for each container.

    .venv/bin/python -m bench.gpu_agent [--against CHECKOUT] [--tenants 64] [--working N]
                                        [--seconds 10] [--scrape 5] [--rounds 3]

Eight GPUs of the stand-in for the driver, of which the containers have equal parts. Each container
has a registered process with a context. Those of `--working` launch kernels all the time, and wait
for their share: first none does, and then all do. With `--against`, rounds with the agent of
another checkout alternate with ours, for the same processes.

The agent here is a process with `gpu.service`, as the agent runs it: it answers processes that
register, compares with limits each second, and corrects shares each half second. It also has the
agent's `/metrics`, with the families of GPUs alone, which are read each `--scrape` seconds; a
Prometheus does that each 15 to 30 s. What else an agent does is not here: CNI calls, the device
plugin and its questions to the kubelet, events.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench.gpu_figures import figure
from bench.gpu_place import Place
from bench.gpu_registration import running_agent
from gpu.group_limits import Limit
from gpu.groups import Groups
from tests.gpu.group import DIRECTORY, environment, libraries
from tests.host.gpu.driver_root import installed, paths_with
from tests.host.gpu.pods import made_container
from tests.standin.gpus import GIB, MIB, Behaviour, Node, gpus
from tests.unit.gpu.groups import PlainRooms
from tests.waiting import until
from tools.compiling import CHECKOUT

ROW = "agent"
EIGHT = gpus(8, bytes=64 * GIB, context_bytes=300 * MIB)
SETTLING = 3.0  # seconds
AGENT = """
import json, sys, time
from pathlib import Path
from base.paths import Paths
from base.pod import Pod
from agent.http import Endpoint
from agent.metrics import Metrics
from gpu.service import GpuService
from gpu.settings import GpuLimitSettings
from gpu.tenants import Tenant
from tests.unit.gpu.groups import PlainRooms
directory, uids = Path(sys.argv[1]), json.loads(sys.argv[2])
tenants = [
    Tenant(group=f"g{n}", pod=Pod("default", f"p{n}", uid), container="main")
    for n, uid in enumerate(uids)
]
run = directory / ("run" if uids else "empty")
paths = Paths(proc=directory / "proc", run=run, sys=directory / "sys")
settings = GpuLimitSettings(driver_root=directory / "driver")
service = GpuService(paths, lambda: tenants, settings, rooms=PlainRooms())
service.start()
metrics = Metrics((), tuple, dict)
metrics.more.append(service.families)
well = lambda: (True, "")
endpoint = Endpoint("127.0.0.1:0", metrics.exposition, well, well)
print("serves", flush=True)
print(endpoint.address, flush=True)
for _ in sys.stdin:
    [resident] = [line for line in Path("/proc/self/status").open() if line.startswith("VmRSS:")]
    alive = sum(each.processes for each in service.sample.tenants)
    print(time.process_time(), time.monotonic(), resident.split()[1], alive, flush=True)
endpoint.close()
service.close()
"""


class Spent(msgspec.Struct, frozen=True):
    """What an agent needed."""

    cpu: float  # of one CPU
    resident: int  # KiB


class Tenancies:
    """Containers with a process each."""

    def __init__(self, directory: Path, node: Node, program: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._node = node
        self._program = program
        self._stack = stack
        paths = paths_with(directory, EIGHT)
        self._groups = Groups(paths.run / "gpu", rooms=PlainRooms())
        self._processes: list[subprocess.Popen[bytes]] = []
        self.uids: list[str] = []

    def make(self, number: int, count: int, words: Sequence[str]) -> None:
        """One of `count` containers, and a process that waits until `begin`."""
        container = self._stack.enter_context(made_container())
        self.uids.append(container.container.pod_uid)
        device = number % len(EIGHT)
        limit = Limit(EIGHT[device].uuid, GIB, min(len(EIGHT) / count, 1.0))
        directory = self._directory / f"in-{number}"
        directory.mkdir()
        (directory / DIRECTORY).symlink_to(self._groups.make(f"g{number}", limit))
        process = self._stack.enter_context(
            subprocess.Popen(
                ["sh", "-c", 'read -r begin; exec "$0" "$@"', str(self._program), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd=directory,
                env={
                    **environment(self._node, libraries()),
                    "PATH": "/usr/bin:/bin",
                    "CUDA_VISIBLE_DEVICES": str(device),
                },
            )
        )
        self._stack.callback(process.kill)
        container.take(process.pid)
        self._processes.append(process)

    def begin(self) -> None:
        """Let all processes use CUDA, while an agent registers them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()


def _asked(agent: "subprocess.Popen[str]") -> list[float]:
    """CPU time and time of an agent, seconds; KiB that it holds; the processes that it sees."""
    assert agent.stdin is not None and agent.stdout is not None
    agent.stdin.write("\n")
    agent.stdin.flush()
    return [float(word) for word in agent.stdout.readline().split()]


class Bench:
    """Agents of checkouts, over the same containers."""

    def __init__(
        self, directory: Path, tenancies: Tenancies, seconds: float, between: float
    ) -> None:
        self._directory = directory
        self._tenancies = tenancies
        self._seconds = seconds
        self._between = between  # seconds from one scrape to the next

    def agent(self, checkout: Path, *, tenants: bool = True, begins: bool = False) -> Spent:
        """Run an agent for a while; `begins`: the processes register with it."""
        uids = json.dumps(self._tenancies.uids if tenants else [])
        command = [sys.executable, "-c", AGENT, str(self._directory), uids]
        with running_agent(command, checkout) as agent:
            assert agent.stdin is not None and agent.stdout is not None
            address = agent.stdout.readline().strip()
            if begins:
                self._tenancies.begin()
            if tenants:
                count = len(self._tenancies.uids)
                until(lambda: _asked(agent)[3] == count, what="look at all processes")
            self._scraped(address, 0 if begins else min(SETTLING, self._seconds))
            cpu, clock, _, _ = _asked(agent)
            self._scraped(address, self._seconds if tenants and not begins else 0)
            cpu_then, clock_then, resident, _ = _asked(agent)
            agent.stdin.close()
        return Spent((cpu_then - cpu) / (clock_then - clock), int(resident))

    def _scraped(self, address: str, seconds: float) -> None:
        """Let time pass, in which the metrics are read, as Prometheus does: at least once."""
        end = time.monotonic() + seconds
        while True:
            with urllib.request.urlopen(f"http://{address}/metrics") as answer:
                assert b"podfabric_gpu_nvml_up" in answer.read()
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(self._between, left))


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description="Measure the agent's part of GPU limits.")
    parser.add_argument("--against", type=Path, help="another checkout, whose service alternates")
    parser.add_argument("--tenants", type=int, default=64)
    parser.add_argument(
        "--working", type=int, help="of them, those that launch: none, and then all"
    )
    parser.add_argument("--seconds", type=float, default=10, help="that a round takes")
    parser.add_argument("--scrape", type=float, default=5, help="seconds between two scrapes")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    both = (0, arguments.tenants)
    for working in both if arguments.working is None else (arguments.working,):
        _measure(arguments, working)


def _measure(arguments: argparse.Namespace, working: int) -> None:
    count: int = arguments.tenants
    checkouts = [CHECKOUT, *([arguments.against.resolve()] if arguments.against else [])]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        (directory / "bench").mkdir()
        place = Place(directory / "bench", None)
        stack.callback(place.close)
        node = stack.enter_context(installed(directory / "driver", EIGHT, Behaviour()))
        tenancies = Tenancies(directory, node, place.program, stack)
        bench = Bench(directory, tenancies, arguments.seconds, arguments.scrape)
        empty = {of: bench.agent(of, tenants=False).resident for of in checkouts}
        idle = ["fill", "alloc", str(65 * GIB)]  # which it does not get
        work = ["work", "work_1ms", "1000000", "1"]
        for number in range(count):
            tenancies.make(number, count, work if number < working else idle)
        bench.agent(CHECKOUT, begins=True)
        rounds = [{of: bench.agent(of) for of in checkouts} for _ in range(arguments.rounds)]
    for of in checkouts:
        _print(of, count, working, empty[of], [each[of] for each in rounds])


def _print(of: Path, count: int, working: int, empty: int, rounds: Sequence[Spent]) -> None:
    """The figures of an agent, which held so many KiB before it had containers."""
    whose = "" if of == CHECKOUT else f" ({of})"
    what = f"{working} of {count} containers launch{whose}"
    cpu = [spent.cpu * 100 for spent in rounds]
    grown = statistics.median(spent.resident - empty for spent in rounds) / count
    figure(ROW, f"CPU time, {what}", statistics.median(cpu), "% of a CPU", 2)
    figure(ROW, f"CPU time in the worst of {len(cpu)} rounds, {what}", max(cpu), "% of a CPU", 2)
    figure(ROW, f"resident memory for each container, {what}", grown, "KiB", 200)


if __name__ == "__main__":
    main()
