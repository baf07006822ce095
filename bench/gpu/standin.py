"""Rows G13 to G15 of bench/gpu.sh: the cost of GPU limits for processes and for the agent.

They need the stand-in for the driver; G14 and G15 use eight of its GPUs. Containers have equal
parts of them, and registered processes. The agent here is a process that runs `gpu.limit_service`
as an agent does. It answers processes that register, compares their use with the limits each
second, and corrects shares each half second. It also serves the agent's `/metrics`, limited to the
families of GPUs. The bench reads them every 5 s; a Prometheus reads every 15 to 30 s. The agent's
other work is missing here: CNI calls, the device plugin and its requests to the kubelet, events.
"""

import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from bench.gpu.place import Place, begin, figure, finished, numbers
from bench.processes import quantile
from gpu.limits.groups import Groups
from gpu.limits.limits_file import Limit
from tests.gpu.group import DIRECTORY, environment, libraries
from tests.gpu.test_runtime import RUNTIMES, runtime
from tests.host.gpu.driver_root import installed, paths_with
from tests.host.gpu.pods import made_container
from tests.standin.gpus import GIB, MIB, Behaviour, Node, gpus
from tests.unit.gpu.groups import PlainRegions
from tests.waiting import until
from tools.compiling import CHECKOUT

EIGHT = gpus(8, bytes=64 * GIB, context_bytes=300 * MIB)
SETTLING, BETWEEN_SCRAPES = 3.0, 5.0  # seconds
AT_ONCE, IN_GROUP = 300, 150  # processes; a group has 256 slots
AGENT = """
import json, sys, time
from pathlib import Path
from base.paths import Paths
from base.pod import Pod
from agent.observe.http import Endpoint
from agent.observe.metrics import Metrics
from gpu.limit_service import GpuService
from gpu.gpu_pool import GpuLimitSettings
from gpu.limits.tenants import Tenant
from tests.unit.gpu.groups import PlainRegions
directory, uids = Path(sys.argv[1]), json.loads(sys.argv[2])
tenants = [
    Tenant(group=f"g{n}", pod=Pod("default", f"p{n}", uid), container="main")
    for n, uid in enumerate(uids)
]
run = directory / ("run" if uids else "empty")
paths = Paths(proc=directory / "proc", run=run, sys=directory / "sys")
settings = GpuLimitSettings(driver_root=directory / "driver")
service = GpuService(paths, lambda: tenants, settings, regions=PlainRegions())
service.start()
metrics = Metrics((), tuple, dict)
metrics.add(service.families)
well = lambda: (True, "")
endpoint = Endpoint("127.0.0.1:0", metrics.exposition, well, well)
print(endpoint.address, flush=True)
for _ in sys.stdin:
    [resident] = [line for line in Path("/proc/self/status").open() if line.startswith("VmRSS:")]
    alive = sum(each.processes for each in service.sample.tenants)
    print(time.process_time(), time.monotonic(), resident.split()[1], alive, flush=True)
endpoint.close()
service.close()
"""


RUNTIME = """
import ctypes, sys, time
count, runtime = ctypes.c_int(), ctypes.CDLL(sys.argv[1])
began = time.process_time_ns()
driver = ctypes.CDLL("libcuda.so.1")
loaded = time.process_time_ns()
driver.cuInit(0)
initialised = time.process_time_ns()
runtime.cudaGetDeviceCount(ctypes.byref(count))
print(loaded - began + time.process_time_ns() - initialised, initialised - loaded)
"""
"""Nanoseconds of CPU time: the start of a CUDA runtime without cuInit, and cuInit's."""


def rows(place: Place, *, short: bool) -> dict[str, Callable[[], object]]:
    """The rows, by their names."""
    return {
        "g13": lambda: processes(place, short=short),
        "g14": lambda: registration(place, short=short),
        "g15": lambda: agent(place, short=short),
    }


def processes(place: Place, *, short: bool) -> None:
    """Row G13: memory that a process needs in addition, and the added cost of starting a CUDA
    runtime."""
    live, starts = (10_000, 2) if short else (1_000_000, 60)
    group = place.group("g13")
    none, many = (
        float(group.say("resident", str(count)))
        - float(group.say("resident", str(count), shim=False))
        for count in (0, live)
    )
    figure("G13", "resident memory without allocations", none / 1024, "KiB", 1024)
    each = (many - none) / live
    figure("G13", "resident memory for each live allocation", each, "bytes", 64)
    for version in RUNTIMES:
        command = [sys.executable, "-c", RUNTIME, str(runtime(version)[0])]
        both: dict[bool, list[list[float]]] = {True: [], False: []}
        for _ in range(starts):
            for shim, of in both.items():
                process = group.popen(command, shim=shim)
                of.append(numbers(finished(process)))
                group.group.bury(process.pid)
        for index, (what, target) in enumerate((("start", 0.2), ("cuInit", 2.0))):
            ours, others = (
                statistics.median(times[index] / 1e6 for times in both[shim])
                for shim in (True, False)
            )
            label = f"{what} of CUDA {version}'s runtime, CPU, p50"
            figure("G13", label, ours - others, "ms", target, ours / others)


class Agent:
    """A running agent, over the containers of a directory."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        assert process.stdout is not None
        self._address = process.stdout.readline().strip()

    def asked(self) -> list[float]:
        """CPU seconds, elapsed seconds, resident KiB, and the number of processes that the agent
        sees."""
        begin([self._process])
        assert self._process.stdout is not None
        return [float(word) for word in self._process.stdout.readline().split()]

    def scraped(self, seconds: float) -> None:
        """Let time pass while the metrics are read as Prometheus reads them, at least once."""
        end = time.monotonic() + seconds
        while True:
            with urllib.request.urlopen(f"http://{self._address}/metrics") as answer:
                assert b"podfabric_gpu_nvml_up" in answer.read()
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(BETWEEN_SCRAPES, left))


class Tenancies:
    """Containers with processes, each of which waits for a line before it uses CUDA."""

    def __init__(self, place: Place, name: str, stack: ExitStack) -> None:
        self.directory = place.directory / name
        self._program = place.program
        self._stack = stack
        node = stack.enter_context(installed(self.directory / "driver", EIGHT, Behaviour()))
        self._node: Node = node
        paths = paths_with(self.directory, EIGHT)
        self._groups = Groups(paths.run / "gpu", regions=PlainRegions())
        self.processes: list[subprocess.Popen[str]] = []
        self.uids: list[str] = []

    def make(self, share: float, words: Sequence[str], processes: int = 1) -> None:
        """Make a container with `processes` processes."""
        number = len(self.uids)
        container = self._stack.enter_context(made_container())
        self.uids.append(container.container.pod_uid)
        device = number % len(EIGHT)
        directory = self.directory / f"in-{number}"
        directory.mkdir()
        limit = Limit(EIGHT[device].uuid, GIB, min(share, 1.0))
        (directory / DIRECTORY).symlink_to(self._groups.make(f"g{number}", limit))
        for _ in range(processes):
            process = self._stack.enter_context(
                subprocess.Popen(
                    ["sh", "-c", 'read -r begin; exec "$0" "$@"', str(self._program), *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
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
            self.processes.append(process)

    @contextmanager
    def agent(self, *, tenants: bool = True) -> Iterator[Agent]:
        """An agent for the block. It knows these containers, or none."""
        uids = json.dumps(self.uids if tenants else [])
        command = [sys.executable, "-c", AGENT, str(self.directory), uids]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=CHECKOUT, text=True) as process:
            yield Agent(process)
            assert process.stdin is not None
            process.stdin.close()


def registration(place: Place, *, short: bool) -> None:
    """Row G14: seconds of cuInit in many processes that the agent registers at once."""
    count, rounds = (20, 1) if short else (AT_ONCE, 5)
    wall, clients, agents = [], [], []
    for number in range(rounds):
        with ExitStack() as stack:
            tenancies = Tenancies(place, f"g14-{number}", stack)
            for first in range(0, count, IN_GROUP):
                tenancies.make(1.0, ["init"], min(IN_GROUP, count - first))
            with tenancies.agent() as ours:
                begin(tenancies.processes)
                time.sleep(1.0)  # all programs have started and wait for their second line
                before, *_ = ours.asked()
                begin(tenancies.processes)
                took = [_of(process) for process in tenancies.processes]
                after, *_ = ours.asked()
        wall.append(quantile([each for each, _ in took], 0.99) / 1e6)
        clients.append(statistics.mean(cpu for _, cpu in took) / 1e6)
        agents.append((after - before) * 1e3 / count)
    figure("G14", f"cuInit of {count} at once, p99 in all", statistics.median(wall), "ms", 50)
    figure("G14", "CPU time of each process", statistics.median(clients), "ms", 0.2)
    figure("G14", "CPU time of the agent for each", statistics.median(agents), "ms", 0.4)


def _of(process: "subprocess.Popen[str]") -> tuple[float, float]:
    """Nanoseconds of cuInit, and its CPU time; "inf" if the process was refused."""
    assert process.stdout is not None
    return float(process.stdout.readline() or "inf"), float(process.stdout.readline() or "nan")


def agent(place: Place, *, short: bool) -> None:
    """Row G15: CPU time, and memory for each container; first idle, then while all launch."""
    count, rounds, seconds = (8, 1, 1.0) if short else (64, 3, 10.0)
    idle = ["fill", "alloc", str(65 * GIB)]  # the limit refuses it
    work = ["work", "work_1ms", "1000000", "1"]
    for what, words in (("none of", idle), ("all of", work)):
        with ExitStack() as stack:
            tenancies = Tenancies(place, f"g15-{words[0]}", stack)
            with tenancies.agent(tenants=False) as ours:
                ours.scraped(min(SETTLING, seconds))
                empty = ours.asked()[2]
            for _ in range(count):
                tenancies.make(len(EIGHT) / count, words)
            with tenancies.agent() as ours:
                begin(tenancies.processes)
                until(lambda: ours.asked()[3] == count, what="look at all processes")
            found = [_round(tenancies, seconds) for _ in range(rounds)]
        cpu = [each for each, _ in found]
        grown = statistics.median(resident - empty for _, resident in found) / count
        label = f"{what} {count} containers launch"
        figure("G15", f"CPU time, {label}", statistics.median(cpu), "% of a CPU", 2)
        figure(
            "G15", f"CPU time in the worst of {rounds} rounds, {label}", max(cpu), "% of a CPU", 2
        )
        figure("G15", f"resident memory for each container, {label}", grown, "KiB", 200)


def _round(tenancies: Tenancies, seconds: float) -> tuple[float, float]:
    """The percentage of a CPU that an agent uses, and its resident KiB."""
    with tenancies.agent() as ours:
        count = len(tenancies.uids)
        until(lambda: ours.asked()[3] == count, what="look at all processes")
        ours.scraped(min(SETTLING, seconds))
        cpu, clock, *_ = ours.asked()
        ours.scraped(seconds)
        cpu_then, clock_then, resident, _ = ours.asked()
    return 100 * (cpu_then - cpu) / (clock_then - clock), resident
