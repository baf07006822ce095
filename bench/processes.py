"""Executables started as a runtime starts them, and their time from fork to exit.

Both sides of a comparison start in the same way, with standard input and output ready before the
clock runs. `subprocess.run` itself would cost as much as the measured call.
"""

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeVar

# Debian has 1.1.1. Later versions go through a third namespace (for 1.7.1: `go install` both from
# github.com/containernetworking/plugins into a separate directory).
GO_PLUGINS = Path(os.environ.get("PODFABRIC_BENCH_GO", "/usr/lib/cni"))
HOST_LOCAL = GO_PLUGINS / "host-local"
HOST_DEVICE = GO_PLUGINS / "host-device"
VERSION = "1.0.0"
T = TypeVar("T")
GIVE_UP = 5.0  # seconds for running processes after an interrupt


@dataclass
class Call:
    """One process: prepared, started and awaited; its answer is checked."""

    executable: Path
    environ: Mapping[str, str]
    config: bytes = b""
    started: float = 0.0
    ended: float = 0.0
    pid: int = 0
    code: int = -1
    _input: int = field(default=-1, repr=False)
    _output: int = field(default=-1, repr=False)
    _text: str = ""

    def prepare(self) -> None:
        """Make standard input and output, as files in memory."""
        self._input = os.memfd_create("input")
        os.write(self._input, self.config)
        os.lseek(self._input, 0, os.SEEK_SET)
        self._output = os.memfd_create("output")

    def start(self) -> None:
        """Start the process and the clock."""
        self.started = time.perf_counter()
        actions = [
            (os.POSIX_SPAWN_DUP2, self._input, 0),
            (os.POSIX_SPAWN_DUP2, self._output, 1),
        ]
        path = str(self.executable)
        self.pid = os.posix_spawn(path, [path], self.environ, file_actions=actions)

    def run(self) -> int:
        """Make the call alone, until its end; returns its exit code."""
        self.prepare()
        self.start()
        try:
            _, status = os.waitpid(self.pid, 0)
        except BaseException:  # also if the measurement is interrupted
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            raise
        self.finish(status, time.perf_counter())
        return self.code

    def finish(self, status: int, ended: float) -> None:
        """Record the process' end: its wait status and the time."""
        self.ended = ended
        self.code = os.waitstatus_to_exitcode(status)
        self._text = os.pread(self._output, os.fstat(self._output).st_size, 0).decode()
        os.close(self._input)
        os.close(self._output)

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    def answer(self) -> dict[str, Any]:
        """The answer of the call. Ends the measurement if the call failed."""
        if self.code != 0:
            command = self.environ.get("CNI_COMMAND")
            sys.exit(f"{self.executable} {command}: {self.code}: {self._text}")
        document = json.loads(self._text) if self._text.strip() else {}
        assert isinstance(document, dict)
        return document


class Side(NamedTuple):
    """One side of a comparison: its executable, its additions to the configuration and to the
    environment."""

    executable: Path
    config: Mapping[str, object] = MappingProxyType({})
    variables: Mapping[str, str] = MappingProxyType({})

    def call(
        self, command: str, container: str, netns: str = "/none", ifname: str = "net1", **more: str
    ) -> Call:
        """A call that is not started yet; `more` is added to the configuration."""
        document = {"cniVersion": VERSION, "name": "n1", "type": self.executable.name}
        environ = {
            "PATH": os.environ["PATH"],
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container,
            "CNI_IFNAME": ifname,
            "CNI_NETNS": netns,
            "CNI_PATH": str(self.executable.parent),
            **self.variables,
        }
        config = json.dumps({**document, **self.config, **more}).encode()
        return Call(self.executable, environ, config)


class Cpu(NamedTuple):
    """CPU seconds of a process, and the part of them outside of the kernel."""

    total: float = 0.0
    user: float = 0.0

    @classmethod
    def of(cls, pid: int) -> Self:
        """The CPU time of all threads of a process until now."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # The clock of a process: clock_getcpuclockid(3), CPUCLOCK_SCHED in linux/posix-timers.h
        total = time.clock_gettime(~pid << 3 | 2)
        return cls(total, int(fields[11]) / os.sysconf("SC_CLK_TCK"))

    def since(self, before: Self) -> "Cpu":
        """The CPU time since `before`."""
        return Cpu(self.total - before.total, self.user - before.user)


def run(call: Call) -> dict[str, Any]:
    """Make one call alone; returns its answer."""
    call.run()
    return call.answer()


def at_once(calls: Sequence[Call]) -> float:
    """Start all calls at once; returns the seconds from the first start to the last end."""
    for call in calls:
        call.prepare()
    by_pid: dict[int, Call] = {}
    reaped: list[tuple[int, int, float]] = []

    def reap() -> None:
        for _ in calls:
            pid, status = os.waitpid(-1, 0)
            reaped.append((pid, status, time.perf_counter()))

    started = time.perf_counter()
    calls[0].start()  # so that there is a child to wait for
    by_pid[calls[0].pid] = calls[0]
    reaper = threading.Thread(target=reap, daemon=True)
    reaper.start()
    try:
        for call in calls[1:]:
            call.start()
            by_pid[call.pid] = call
        reaper.join()
    except BaseException:  # running calls must end before the cleanup
        reaper.join(GIVE_UP)
        raise
    for pid, status, ended in reaped:
        if pid not in by_pid:
            sys.exit("the agent has ended: see its log")
        by_pid[pid].finish(status, ended)
    return max(call.ended for call in calls) - started


def interleaved(rounds: int, *contenders: Callable[[int], T]) -> list[list[T]]:
    """The answers of each contender. Rounds alternate between contenders, after two to warm up."""
    answers: list[list[T]] = [[] for _ in contenders]
    for number in range(-2, rounds):
        for index, contender in enumerate(contenders):
            answer = contender(number + 2)
            if number >= 0:
                answers[index].append(answer)
    return answers


def in_threads(work: Callable[[Any], T], each: Collection[object]) -> list[T]:
    """Run `work` with each of these, all at once; returns the answers."""
    with ThreadPoolExecutor(max(len(each), 1)) as pool:
        return list(pool.map(work, each))


def quantile(values: Sequence[float], part: float) -> float:
    """The value that `part` of them do not exceed."""
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


def row(
    label: str, ours: Sequence[float], theirs: Sequence[float], target: float | None = None
) -> None:
    """Print one row of the table: medians, their ratio, and the target of the ratio."""
    seconds, others = statistics.median(ours), statistics.median(theirs)
    wanted = "" if target is None else f"   <= {target:.2f}"
    missed = "" if target is None or seconds / others <= target else "  MISSED"
    print(
        f"{label:44}{seconds * 1e3:9.2f} ms{others * 1e3:9.2f} ms{seconds / others:8.2f}"
        f"{wanted}{missed}",
        flush=True,
    )
