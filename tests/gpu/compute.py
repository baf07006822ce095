"""Groups that share a GPU's time on a stand-in node: their processes, and the controller."""

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from gpu.limits.limits_file import LimitsFile
from gpu.limits.region import RegionUse
from gpu.watch import compute_shares
from gpu.watch.compute_shares import GroupShare, GroupUsage
from gpu.watch.sampled_time import UsedTime
from tests import waiting
from tests.gpu import group as groups
from tests.gpu.group import Group, Libraries
from tests.gpu.programs import program
from tests.standin.driver import Driver
from tests.standin.gpus import Behaviour, Gpu, Node, gpus

WINDOW = 3  # seconds of GPU time over which shares are measured
CLOSE = 0.05  # of the GPU's time


class Tenant:
    """A group and its processes."""

    def __init__(self, directory: Path, card: Gpu, share: float) -> None:
        directory.mkdir()
        self.directory = directory
        self.group = Group(directory, card)
        self.state = GroupShare(share=share)
        self.processes: list[subprocess.Popen[bytes]] = []

    def write(self) -> None:
        """Write the current share, kappa and the settled time, which the gates read."""
        with LimitsFile(self.group.limits) as opened:
            limit = opened.limit()
            opened.write(
                msgspec.structs.replace(
                    limit,
                    compute_share=self.state.share,
                    kappa=self.state.kappa,
                    settled_ns=round(self.state.settled * 1e9),
                )
            )

    def use(self) -> RegionUse:
        """The use that the region shows."""
        return self.group.use()


class Shared:
    """A GPU with tenants, whose controller runs while a test waits.

    The GPU's time and what each process had of it are those of the stand-in: a machine that is busy
    makes both slower.
    """

    def __init__(self, directory: Path, libraries: Libraries, stack: ExitStack) -> None:
        self.directory = directory
        self.libraries = libraries
        self.tenants: dict[str, Tenant] = {}
        self.node = stack.enter_context(Node(directory, gpus(1), Behaviour()))
        self._stack = stack
        self._ticked: tuple[int, dict[str, int]] = (0, {})

    def add(self, name: str, share: float) -> Tenant:
        """A group with a share of the GPU."""
        tenant = Tenant(self.directory / name, self.node.gpus[0], share)
        self._stack.enter_context(tenant.group)
        self.tenants[name] = tenant
        tenant.write()
        return tenant

    def start(self, name: str, kernel: str) -> subprocess.Popen[bytes]:
        """Start a process that launches a kernel again and again."""
        tenant = self.tenants[name]
        process = subprocess.Popen(
            [str(program("launches", "-ldl")), kernel],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=tenant.directory,
            env=groups.environment(self.node, self.libraries),
        )
        tenant.processes.append(process)
        self._stack.callback(_end, process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        return process

    def driver(self) -> Driver:
        """A process with a context, in the directory where this one is."""
        driver = self._stack.enter_context(Driver(groups.environment(self.node, self.libraries)))
        driver.start()
        return driver

    def _busy(self) -> tuple[int, dict[str, int]]:
        """The GPU's time, and what each tenant has used of it, ns."""
        accounts = self.node.read()
        by_pid = {process.pid: process.gpus[0].busy_ns for process in accounts.processes}
        used = {
            name: sum(by_pid.get(process.pid, 0) for process in tenant.processes)
            for name, tenant in self.tenants.items()
        }
        return accounts.gpus[0].time_ns, used

    def tick(self) -> None:
        """One tick of the controller, once its time has come."""
        time.sleep(compute_shares.TICK)
        _, used_before = self._ticked
        _, used = self._ticked = self._busy()
        clock = time.monotonic_ns()
        usages: dict[str, GroupUsage] = {}
        for name, tenant in self.tenants.items():
            seconds = (used[name] - used_before.get(name, 0)) / 1e9
            usages[name] = compute_shares.observe(UsedTime(seconds), tenant.use(), clock)
        self._set(
            {
                name: compute_shares.corrected(self.tenants[name].state, usage)
                for name, usage in usages.items()
            }
        )

    def _set(self, states: dict[str, GroupShare]) -> None:
        for name, state in states.items():
            self.tenants[name].state = state
            self.tenants[name].write()

    def measure(self, seconds: float = WINDOW) -> dict[str, float]:
        """Let the controller run; the fraction of the GPU's time that each tenant had."""
        begun, used_before = self._busy()
        now, used = begun, used_before
        while now - begun < seconds * 1e9:
            self.tick()
            now, used = self._ticked
        return {name: (used[name] - used_before[name]) / (now - begun) for name in self.tenants}

    def settle(self, **expected: float) -> None:
        """Wait until each tenant has its share, within 5 points, in two measurements on end."""

        def close() -> bool:
            measured = self.measure()
            return all(abs(measured[name] - share) <= CLOSE for name, share in expected.items())

        waiting.until(lambda: close() and close(), what=f"time like {expected}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def switch(process: subprocess.Popen[bytes]) -> None:
    """Stop a process from launching, or let it go on."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
