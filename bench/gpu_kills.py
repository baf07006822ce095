"""How soon the memory of a killed process is free again, with the agent's own registrar.

    .venv/bin/python -m bench.gpu_kills [--kills 200]

Eight processes of a made-up pod take and free memory with the library of gpu/shim over the stand-in
for the driver. One after another is killed at any moment, and another one begins. Measured is the
time until `limits` says that it is dead: the next call of any other counts without it. At the end
all are killed, and a last process must get all that the group may have. Then a process is killed
again and again that holds the lock of the count, and measured is how long another one that waits
for it still waits.

A machine that is busy may miss the targets, since processes wait for a CPU there.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.gpu_figures import figure, line, percentile
from bench.gpu_place import Place, finished
from bench.gpu_registration import AGENT, running_agent
from gpu.group_limits import Limit
from gpu.groups import Groups
from gpu.settings import CONTEXT_RESERVE
from tests.gpu.group import DIRECTORY, libraries
from tests.gpu.programs import program
from tests.host.gpu.pods import made_container
from tests.standin.gpus import GIB, MIB
from tests.unit.gpu.groups import PlainRooms
from tools.compiling import CHECKOUT

GROUP = "g0"
LIMIT = 8 * GIB
PIECE = 64 * MIB
AT_ONCE = 8
ROW = "kill"
IN_LOCK = 100  # kills; each leaves a slot until the agent has noticed


class Killing:
    """Processes of a group, in the cgroup of its container."""

    def __init__(self, place: Place, stack: ExitStack) -> None:
        self._place = place
        self._container = stack.enter_context(made_container())
        self._groups = Groups(place.directory / "groups", rooms=PlainRooms())
        self._groups.make(GROUP, Limit(place.gpu.uuid, LIMIT, 1.0))
        (place.directory / DIRECTORY).symlink_to(self._groups.root / GROUP)
        uid = self._container.container.pod_uid
        command = [sys.executable, "-c", AGENT, str(self._groups.root), uid]
        agent = stack.enter_context(running_agent(command, CHECKOUT))
        stack.callback(agent.communicate, "\n")

    def churning(self, seed: int) -> "subprocess.Popen[str]":
        """A process that takes and frees memory."""
        process = self._started("churn", str(seed))
        assert process.stdout is not None
        if process.stdout.readline() != "begins\n":
            raise SystemExit(f"process {seed} did not start")
        return process

    def kill(self, process: "subprocess.Popen[str]") -> float:
        """Milliseconds until the agent has said that the process is dead."""
        process.kill()
        began = time.perf_counter()
        while any(
            each.alive and each.host_pid == process.pid
            for each in self._groups.read(GROUP).processes.values()
        ):
            time.sleep(0.0002)
        took = (time.perf_counter() - began) * 1e3
        process.communicate()
        return took

    def free(self) -> int:
        """Bytes that a new process gets."""
        return int(finished(self._started("fill", "alloc", str(PIECE))).split()[0])

    def waits(self) -> list[float]:
        """Milliseconds from the end of a process with the lock until another one has allocated."""
        shim = {"LD_LIBRARY_PATH": str(libraries(steps=True).shim)}
        process = self._started(str(IN_LOCK), program=program("heir"), **shim)
        return [int(line) / 1e3 for line in finished(process).split()]

    def _started(
        self, *words: str, program: Path | None = None, **variables: str
    ) -> "subprocess.Popen[str]":
        command = [str(program or self._place.program), *words]
        process = subprocess.Popen(
            ["sh", "-c", 'read _ && exec "$@"', "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self._place.environment(shim=True), **variables},
            cwd=self._place.directory,
        )
        self._container.take(process.pid)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return process


def _judged(times: list[float], waits: list[float], free: int) -> bool:
    """Print what was measured; whether the memory of all that were killed is free."""
    expected = (LIMIT - CONTEXT_RESERVE) // PIECE * PIECE
    for percent in (50, 99):
        dead, waited = percentile(times, percent), percentile(waits, percent)
        figure(ROW, f"a process is known to be dead, p{percent}", dead, "ms", 100)
        figure(ROW, f"another one has the dead one's lock, p{percent}", waited, "ms", 10)
    got, wanted = (f"{each / GIB:.3f} GiB" for each in (free, expected))
    line(ROW, "what a process gets after all kills", got, wanted, free == expected)
    return free == expected


def main() -> int:
    """Print how long it took; 0 if all memory is free at the end."""
    parser = argparse.ArgumentParser(description="Kill processes that allocate.")
    parser.add_argument("--kills", type=int, default=200)
    kills = parser.parse_args().kills
    chance = random.Random(1)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        place = Place(directory, None)
        stack.callback(place.close)
        killing = Killing(place, stack)
        running = [killing.churning(number) for number in range(AT_ONCE)]
        times = []
        for number in range(kills):
            times.append(killing.kill(running.pop(chance.randrange(AT_ONCE))))
            running.append(killing.churning(AT_ONCE + number))
        for process in running:
            killing.kill(process)
        free = killing.free()
        waits = killing.waits()
    return 0 if _judged(times, waits, free) else 1


if __name__ == "__main__":
    sys.exit(main())
