"""What is done about processes that use more memory of a GPU than their group may.

Over-use counts once it was seen at two looks in a row. Nothing that a tenant wrote decides here:
the driver tells who uses how much, and the kernel who that is.
"""

import logging
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec

from gpu.driver.nvml import Nvml, NvmlError
from gpu.limit_settings import Action
from gpu.limits import processes
from gpu.limits.tenants import Tenant
from gpu.watch.usage_watch import NodeSample, TenantSample

LOOKS = 2  # in a row

_log = logging.getLogger(__name__)


class OverUse(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant uses more memory of a GPU than it may, for people to know."""

    tenant: Tenant
    uuid: str
    device_bytes: int
    limit_bytes: int
    action: Action
    killed: tuple[int, ...] = ()  # pids

    def __str__(self) -> str:
        did = {
            "report": "nothing is done (onOveruse: report)",
            "kill": f"killed {', '.join(map(str, self.killed)) or 'nothing, it has ended'}",
        }
        return (
            f"uses {self.device_bytes >> 20} MiB of {self.uuid}, and may use "
            f"{self.limit_bytes >> 20} MiB: {did[self.action]}"
        )


class Enforcement:
    """Decides after each look. One thread may use it.

    Args:
        group_of: the group of a process of the host, told by the kernel.
        report: gets each over-use once, when it counts; and each that is killed.
        action: what is done beside that.
    """

    def __init__(
        self,
        group_of: Callable[[int], str | None],
        report: Callable[[OverUse], object] = lambda overuse: None,
        *,
        action: Action = "report",
    ) -> None:
        self._group_of = group_of
        self._report = report
        self._action: Action = action
        self.kills: Counter[str] = Counter()  # by group
        self._over: dict[str, int] = {}  # looks in a row, by group

    def decide(self, sample: NodeSample, nvml: Nvml | None) -> None:
        """Act on a look. A GPU that the driver did not tell about begins from the start."""
        self._over = {
            each.tenant.group: self._over.get(each.tenant.group, 0) + 1
            for each in sample.tenants
            if each.overuse_bytes
        }
        for each in sample.tenants:
            count = self._over.get(each.tenant.group, 0)
            if count >= LOOKS:
                self._act(each, nvml, first=count == LOOKS)

    def _act(self, sample: TenantSample, nvml: Nvml | None, *, first: bool) -> None:
        killed: tuple[int, ...] = ()
        if self._action == "kill" and nvml is not None:
            group = sample.tenant.group
            killed = _kill(nvml, sample.uuid, partial(self._is_of, group))
            self.kills[group] += len(killed)
        if first or killed:
            overuse = OverUse(
                tenant=sample.tenant,
                uuid=sample.uuid,
                device_bytes=sample.device_bytes or 0,
                limit_bytes=sample.in_force.memory_bytes,
                action=self._action,
                killed=killed,
            )
            tenant = sample.tenant
            _log.warning("GPUs: pod %s, container %s: %s", tenant.pod, tenant.container, overuse)
            self._report(overuse)

    def _is_of(self, group: str, pid: int) -> bool:
        return self._group_of(pid) == group


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
