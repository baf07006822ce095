"""Processes are killed at each step of counting memory; the count is exact soon afterwards."""

import itertools
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpu.limits.limits_file import Limit
from gpu.limits.region import Region
from tests.gpu import group as groups
from tests.gpu.programs import program
from tests.host.gpu.driver_root import installed
from tests.host.gpu.pods import GroupsNode
from tests.standin.driver import Driver, Out
from tests.standin.gpus import GIB, MIB, Behaviour, Failure, described, gpus
from tests.waiting import until

LIMIT, RESERVE = 4 * GIB, 400 * MIB
SOON = 0.1  # seconds
KILLS = 50  # of each kind of memory: 200 together
ONE = gpus(1, bytes=16 * GIB, context_bytes=300 * MIB)
BEHAVIOUR = Behaviour(pool_chunk=2 * MIB)

# For each kind of memory: the driver's functions during which a process is also killed, and the
# number of their calls.
KINDS = {
    "linear": {"cuMemAlloc_v2": 8, "cuMemFree_v2": 8},
    "pool": {
        "cuMemPoolCreate": 1,
        "cuMemAllocFromPoolAsync": 4,
        "cuMemAllocAsync": 4,
        "cuMemFreeAsync": 8,
        "cuMemPoolTrimTo": 1,
        "cuMemPoolDestroy": 1,
    },
    "physical": {"cuMemCreate": 8, "cuMemMap": 8, "cuMemRelease": 8, "cuMemUnmap": 8},
    "array": {"cuArrayCreate_v2": 8, "cuArrayDestroy": 8},
}


class Death(msgspec.Struct, frozen=True):
    """The end of a process: its step ("" for none), and the step's time in CLOCK_MONOTONIC ns."""

    pid: int
    status: int
    time: int
    step: str

    @property
    def killed(self) -> bool:
        return self.status == signal.SIGKILL


class Killing:
    """A group with an agent, a process in it that lives, and further processes that are killed."""

    def __init__(self, node: GroupsNode, directory: Path) -> None:
        self._node = node
        self._directory = directory
        container = node.container("a", limit=Limit(ONE[0].uuid, LIMIT, 1.0))
        (directory / groups.DIRECTORY).symlink_to(node.groups.root / "a")
        driver = node.stack.enter_context(installed(directory / "driver", ONE, BEHAVIOUR))
        self._file = driver.file
        environment = groups.environment(driver, groups.libraries(steps=True))
        self.survivor = node.stack.enter_context(Driver(environment))
        container.take(self.survivor.pid)
        self._mortals = subprocess.Popen(
            [str(program("killed"))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        node.stack.callback(self._mortals.communicate)
        container.take(self._mortals.pid)
        self.survivor.start()
        self.survivor.do("cuMemAlloc_v2", Out(8), GIB)

    def death(
        self, kind: str, nth: int, step: str = "*", within: tuple[str, int] = ("", 0)
    ) -> Death:
        """The end of a process that is killed at a step, or during that call of the driver."""
        file = self._file
        if within[1]:
            behaviour = msgspec.structs.replace(BEHAVIOUR, failures=(Failure(*within, "kill"),))
            file = self._directory / "kills.json"
            file.write_bytes(described(self._file.parent, ONE, behaviour))
        assert self._mortals.stdin is not None and self._mortals.stdout is not None
        self._mortals.stdin.write(f"{kind}\t{nth}\t{step}\t{file}\n")
        self._mortals.stdin.flush()
        pid, status, at, name = self._mortals.stdout.readline().removesuffix("\n").split("\t")
        return Death(int(pid), int(status), int(at), name)

    def noticed(self, death: Death) -> float | None:
        """Wait until the agent notices; returns seconds since the step, `None` if it never
        registered."""
        processes = self._node.groups.read("a").processes.values()
        if death.pid not in {each.host_pid for each in processes}:
            return None
        until(lambda: death.pid not in self._node.alive("a").values(), what="end", pause=0.0005)
        return (time.monotonic_ns() - death.time) / 1e9

    @property
    def is_exact(self) -> bool:
        """Whether the count is exactly the living process' context and its GiB."""
        answer = self.survivor.do("cuMemGetInfo_v2", Out(8), Out(8))
        return answer == [LIMIT - RESERVE - GIB, LIMIT]

    @property
    def recoveries(self) -> int:
        path = self._node.groups.root / "a/region"
        with Region(path, self._node.groups.read("a").allocation) as region:
            return region.use().lock_recoveries


@pytest.fixture
def killing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Killing]:
    monkeypatch.chdir(tmp_path)
    with GroupsNode(tmp_path / "gpu") as node:
        yield Killing(node, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_step_leaves_the_count_exact_within_100_ms(
    killing: Killing, kind: str
) -> None:
    """The median of all kills: on a busy machine, processes sometimes wait for a CPU.

    The time is from the step, at which the process kills itself, to the agent's entry in `limits`.
    After that entry, the next call of another process must have the exact number.
    """
    steps, times = set(), []
    for nth in itertools.count(1):
        death = killing.death(kind, nth)
        if not death.killed:
            break
        steps.add(death.step)
        took = killing.noticed(death)
        assert killing.is_exact, death
        times += [] if took is None else [took]
    assert death.status == 0
    assert len(times) > KILLS
    assert statistics.median(times) <= SOON
    assert steps >= {"slot filled", "slot taken", "locked", "slot charged", "charged"}
    assert steps >= {"slot released", "used recomputed", "before unlock"}
    assert killing.recoveries >= nth // 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_within_the_driver_leaves_the_count_exact(killing: Killing, kind: str) -> None:
    for symbol, calls in KINDS[kind].items():
        for nth in {1, calls}:
            death = killing.death(kind, 0, within=(symbol, nth))
            assert death.killed, (symbol, nth)
            killing.noticed(death)
            assert killing.is_exact, (symbol, nth)


def test_a_kill_while_the_lock_of_a_dead_process_is_recovered_is_recovered_from_as_well(
    killing: Killing,
) -> None:
    """One process dies in the lock with memory counted; the next two die during the recovery."""
    steps = []
    for nth in itertools.count(1):
        before = killing.recoveries
        first = killing.death("linear", 3, "charged")
        killing.noticed(first)  # so that the next one frees its slot
        second = killing.death("linear", nth)
        third = killing.death("linear", 1)
        for death in (second, third):
            assert death.killed
            killing.noticed(death)
        assert killing.is_exact, (second, third)
        assert third.step == "lock recovered"
        steps.append(second.step)
        if second.step == "locked":  # it has recovered the lock
            break
        # Neither of them has recovered it: only the living process has.
        assert killing.recoveries == before + 1
    assert steps == ["lock recovered", "slot freed", "used recomputed", "locked"]
