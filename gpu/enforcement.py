"""What is done about processes that use more memory of a GPU than their group may.

Over-use counts once it was seen at two looks in a row. Nothing that a tenant wrote decides here:
the driver tells who uses how much, and the kernel who that is.
"""

import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial

import msgspec

from gpu import processes
from gpu.group_limits import GroupError
from gpu.groups import Groups
from gpu.nvml import Nvml, NvmlError
from gpu.samples import GpuSample, NodeSample, TenantSample
from gpu.settings import Action
from gpu.tenants import Tenant

LOOKS = 2  # in a row
THROTTLED = 0.01  # of the GPU's time

_log = logging.getLogger(__name__)


class OverUse(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant uses more memory of a GPU than it may, for people to know."""

    tenant: Tenant
    uuid: str
    device_bytes: int
    limit_bytes: int
    action: Action
    killed: tuple[int, ...] = ()  # pids
    hindrance: str = ""  # why its launches could not be slowed down

    def __str__(self) -> str:
        did = {
            "report": "nothing is done (onOveruse: report)",
            "throttle": (
                f"its launches could not be slowed down, which is tried each second: "
                f"{self.hindrance}"
                if self.hindrance
                else "its launches are slowed down"
            ),
            "kill": f"killed {', '.join(map(str, self.killed)) or 'nothing, it has ended'}",
        }
        return (
            f"uses {self.device_bytes >> 20} MiB of {self.uuid}, and may use "
            f"{self.limit_bytes >> 20} MiB: {did[self.action]}"
        )


class Enforcement:
    """Decides after each look. One thread may use it.

    Args:
        groups: whose launches are slowed down, with `action` throttle.
        group_of: the group of a process of the host, told by the kernel.
        report: gets each over-use once, when it counts; and each that is killed.
        action: what is done beside that.
        kill_unaccounted: kill processes on the node's GPUs that hold no part of them.
    """

    def __init__(
        self,
        groups: Groups,
        group_of: Callable[[int], str | None],
        report: Callable[[OverUse], object] = lambda overuse: None,
        *,
        action: Action = "report",
        kill_unaccounted: bool = False,
    ) -> None:
        self._groups = groups
        self._group_of = group_of
        self._report = report
        self._action: Action = action
        self._kill_unaccounted = kill_unaccounted
        self.kills: Counter[tuple[str, str]] = Counter()  # by group and GPU
        self.unaccounted_kills = 0
        self._over: dict[tuple[str, str], int] = {}  # looks in a row, by group and GPU
        self._others: Counter[tuple[str, int, int]] = Counter()  # by GPU, pid and start time
        self._throttled: set[tuple[str, str]] = set()

    def decide(self, sample: NodeSample, nvml: Nvml | None) -> None:
        """Act on a look. A GPU that the driver did not tell about begins from the start."""
        over = {
            each.key: self._over.get(each.key, 0) + 1
            for each in sample.tenants
            if each.overuse_bytes
        }
        self._over = over
        for each in sample.tenants:
            count = over.get(each.key, 0)
            if count >= LOOKS:
                self._act(each, nvml, first=count == LOOKS)
            elif each.key in self._throttled and each.overuse_bytes == 0:
                self._throttle(each, None)
        self._throttled &= {each.key for each in sample.tenants}
        if self._kill_unaccounted and nvml is not None:
            self._others = self._kill_others(sample.gpus, nvml)

    def _act(self, sample: TenantSample, nvml: Nvml | None, *, first: bool) -> None:
        killed: tuple[int, ...] = ()
        hindrance = ""
        if self._action == "throttle" and sample.key not in self._throttled:
            hindrance = self._throttle(sample, THROTTLED)
        elif self._action == "kill" and nvml is not None:
            group = sample.tenant.group
            killed = _kill(nvml, sample.uuid, partial(self._is_of, group))
            self.kills[sample.key] += len(killed)
        if first or killed:
            overuse = OverUse(
                tenant=sample.tenant,
                uuid=sample.uuid,
                device_bytes=sample.device_bytes or 0,
                limit_bytes=sample.in_force.memory_bytes,
                action=self._action,
                killed=killed,
                hindrance=hindrance,
            )
            tenant = sample.tenant
            _log.warning("GPUs: pod %s, container %s: %s", tenant.pod, tenant.container, overuse)
            self._report(overuse)

    def _throttle(self, sample: TenantSample, share: float | None) -> str:
        """Why it was not done, "" if it was: the next look tries again. A process of the container
        may hold a lease of the file."""
        try:
            self._groups.throttle(sample.tenant.group, sample.uuid, share)
        except GroupError as error:
            return str(error)
        if share is None:
            self._throttled.discard(sample.key)
        else:
            self._throttled.add(sample.key)
        return ""

    def _kill_others(
        self, gpus: Collection[GpuSample], nvml: Nvml
    ) -> "Counter[tuple[str, int, int]]":
        """Kill what was unaccounted at two looks in a row; how often the others were."""
        seen: Counter[tuple[str, int, int]] = Counter()
        for gpu in gpus:
            for pid in gpu.unaccounted:
                began = processes.start_time(pid)
                if began is not None:
                    key = gpu.uuid, pid, began
                    seen[key] = self._others[key] + 1
            due = {
                pid: began
                for (uuid, pid, began), n in seen.items()
                if uuid == gpu.uuid and n >= LOOKS
            }
            if due:
                killed = _kill(nvml, gpu.uuid, partial(self._is_other, due))
                self.unaccounted_kills += len(killed)
                if killed:
                    _log.warning(
                        "GPUs: killed %s, which used %s and hold no part of it (killUnaccounted)",
                        ", ".join(map(str, killed)),
                        gpu.uuid,
                    )
        return seen

    def _is_of(self, group: str, pid: int) -> bool:
        return self._group_of(pid) == group

    def _is_other(self, due: Mapping[int, int], pid: int) -> bool:
        return due.get(pid) == processes.start_time(pid) and self._group_of(pid) is None


def _kill(nvml: Nvml, uuid: str, is_meant: Callable[[int], bool]) -> tuple[int, ...]:
    """Kill the processes on a GPU that are meant, and no others.

    A pid that the driver told may be another process' by now. So each is held by a pidfd first, and
    is killed only if the driver still tells its pid after that, and it lives.
    """
    held: dict[int, int] = {}
    killed = []
    try:
        for pid in nvml.processes(uuid):
            pidfd = processes.pidfd_of(pid)
            if pidfd is not None:
                held[pid] = pidfd
        for pid in nvml.processes(uuid):
            if pid not in held or not is_meant(pid) or processes.has_ended(held[pid]):
                continue
            try:
                signal.pidfd_send_signal(held[pid], signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:
                _log.error("GPUs: cannot kill %d: the agent needs the capability KILL", pid)
                continue
            killed.append(pid)
    except NvmlError as error:
        _log.warning("GPUs: %s: cannot tell whom to kill: %s", uuid, error)
    finally:
        for pidfd in held.values():
            os.close(pidfd)
    return tuple(killed)
