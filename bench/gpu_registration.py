"""How long cuInit takes in many processes of a container at once: they register with the agent.

    .venv/bin/python -m bench.gpu_registration [--against CHECKOUT] [--count 250] [--rounds 5]

The agent's registrar is a process of its own, the clients are processes of a made-up pod's cgroup
with the library of gpu/shim over the stand-in for the driver. With `--against`, rounds with the
registrar of another checkout alternate with ours. "without" is cuInit of the stand-in alone. "inf"
are processes that were refused, since the agent did not answer in time.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.gpu_place import Place
from gpu.group_limits import Limit
from gpu.groups import Groups
from tests.gpu.group import DIRECTORY
from tests.host.gpu.pods import MadeContainer, made_container
from tests.unit.gpu.groups import PlainRooms
from tools.compiling import CHECKOUT

GROUP = "a"
AGENT = """
import sys, time
from pathlib import Path
from base.pod import Pod
from gpu.groups import Groups
from gpu.registration import Registrar
from gpu.tenants import Tenant, Tenants
root, uid = Path(sys.argv[1]), sys.argv[2]
tenants = [Tenant(group="a", pod=Pod("default", "pod", uid), container="main")]
tenants += [
    Tenant(group=f"other-{n}", pod=Pod("default", f"pod-{n}", f"{n:08}"), container="main")
    for n in range(63)
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


class Registering:
    """A container, and the stand-in's GPU, in a directory of its own."""

    def __init__(self, place: Place, container: MadeContainer) -> None:
        self._place = place
        self._container = container

    def with_agent(self, checkout: Path, count: int) -> tuple[list[float], float]:
        """Milliseconds of cuInit in so many processes, which an agent of that checkout registers.

        Beside them, the microseconds of CPU time that the agent needs for each.
        """
        root = self._place.directory / "groups"
        shutil.rmtree(root, ignore_errors=True)
        Groups(root, rooms=PlainRooms()).make(GROUP, [Limit(self._place.gpu.uuid, 2**64 - 1, 1.0)])
        uid = self._container.container.pod_uid
        command = [sys.executable, "-c", AGENT, str(root), uid]
        with _running(command, checkout) as agent:
            times = self._starts(count, shim=True)
            assert agent.stdin is not None and agent.stdout is not None
            agent.stdin.write("\n")
            agent.stdin.flush()
            registered, spent = map(float, agent.stdout.readline().split())
        if registered < count:
            print(f"{checkout}: {registered:.0f} of {count} processes were registered in time")
        return times, spent / max(registered, 1) * 1e6

    def without(self, count: int) -> list[float]:
        """The same without the shim."""
        return self._starts(count, shim=False)

    def _starts(self, count: int, *, shim: bool) -> list[float]:
        running = [
            subprocess.Popen(
                [str(self._place.program), "init"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._place.environment(shim=shim),
            )
            for _ in range(count)
        ]
        for process in running:
            self._container.take(process.pid)
        for process in running:
            assert process.stdin is not None
            process.stdin.close()
        times = []
        for process in running:
            assert process.stdout is not None
            times.append(float(process.stdout.read() or "inf") / 1e6)  # "inf": it was refused
            process.wait()
        return times


@contextmanager
def _running(command: list[str], checkout: Path) -> "Iterator[subprocess.Popen[str]]":
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
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure how long processes take to register.")
    parser.add_argument("--against", type=Path, help="another checkout, whose registrar alternates")
    parser.add_argument("--count", type=int, default=250, help="processes; a group has 256 slots")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    kinds: dict[str, Path | None] = {"without": None, "this checkout": CHECKOUT}
    if arguments.against is not None:
        kinds[str(arguments.against)] = arguments.against.resolve()
    rounds: dict[str, list[list[float]]] = {name: [] for name in kinds}
    cpu: dict[str, list[float]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        place = Place(directory, None)
        stack.callback(place.close)
        (directory / DIRECTORY).symlink_to(directory / "groups" / GROUP)
        measured = Registering(place, stack.enter_context(made_container()))
        for _ in range(arguments.rounds):
            for name, checkout in kinds.items():
                if checkout is None:
                    rounds[name].append(measured.without(arguments.count))
                    continue
                times, spent = measured.with_agent(checkout, arguments.count)
                rounds[name].append(times)
                cpu[name].append(spent)
    headers = f"{'p50':>10}{'p99':>10}{'CPU of the agent (us)':>24}"
    print(f"{f'cuInit of {arguments.count} at once (ms)':40}{headers}")
    for name, of in rounds.items():
        of_agent = f"{statistics.median(cpu[name]):24.0f}" if cpu[name] else ""
        print(f"{name:40}{_median(of, 50):10.1f}{_median(of, 99):10.1f}{of_agent}")


def _median(rounds: list[list[float]], percent: int) -> float:
    """The median of a percentile over the rounds."""
    return statistics.median(
        sorted(times)[min(len(times) - 1, len(times) * percent // 100)] for times in rounds
    )


if __name__ == "__main__":
    main()
