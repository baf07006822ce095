"""Reports groups that use more GPU memory than their limit, and can kill their processes.

Only figures of the driver and the kernel count, because a tenant cannot change these figures.
"""

import logging
import os
import signal
from collections import Counter
from collections.abc import Callable

import msgspec

from gpu.driver.nvml import Nvml, NvmlError
from gpu.gpu_pool import Action
from gpu.limits import processes
from gpu.limits.tenants import Tenant
from gpu.watch.usage_watch import NodeSample, TenantSample

LOOKS = 2  # samples in a row that must show the over-use

_log = logging.getLogger(__name__)


class OverUse(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant uses more memory of a GPU than its limit."""

    tenant: Tenant
    uuid: str
    device_bytes: int
    limit_bytes: int
    action: Action
    killed: tuple[int, ...] = ()  # pids

    def __str__(self) -> str:
        outcome = {
            "report": "no process is killed (onOveruse: report)",
            "kill": f"killed {', '.join(map(str, self.killed)) or 'no process: all have ended'}",
        }
        return (
            f"uses {self.device_bytes >> 20} MiB of {self.uuid}, but may use only "
            f"{self.limit_bytes >> 20} MiB: {outcome[self.action]}"
        )


class Enforcement:
    """Calls `report` when an over-use begins and after each kill.

    Only one thread may use an object.
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
        self._over: dict[str, int] = {}  # samples in a row with over-use, by group

    def decide(self, sample: NodeSample, nvml: Nvml | None) -> None:
        """Act on each tenant that was above its limit in each of the last `LOOKS` samples."""
        over = [tenant for tenant in sample.tenants if tenant.overuse_bytes]
        self._over = {
            tenant.tenant.group: self._over.get(tenant.tenant.group, 0) + 1 for tenant in over
        }
        for tenant in over:
            count = self._over[tenant.tenant.group]
            if count >= LOOKS:
                self._act(tenant, nvml, first=count == LOOKS)

    def _act(self, sample: TenantSample, nvml: Nvml | None, *, first: bool) -> None:
        killed: tuple[int, ...] = ()
        if self._action == "kill" and nvml is not None:
            group = sample.tenant.group
            killed = _kill(nvml, sample.uuid, lambda pid: self._group_of(pid) == group)
            self.kills[group] += len(killed)
        if first or killed:
            overuse = OverUse(
                tenant=sample.tenant,
                uuid=sample.uuid,
                device_bytes=sample.device_bytes or 0,
                limit_bytes=sample.limit.memory_bytes,
                action=self._action,
                killed=killed,
            )
            tenant = sample.tenant
            _log.warning("GPUs: pod %s, container %s: %s", tenant.pod, tenant.container, overuse)
            self._report(overuse)


def _kill(nvml: Nvml, uuid: str, is_member: Callable[[int], bool]) -> tuple[int, ...]:
    """Kill the members of a group that use a GPU. Returns the pids of killed processes.

    After the report, a reported process may end, and another process may get its pid. So this
    function opens pidfds, queries the driver again, and kills only processes that the driver still
    reports.
    """
    held: dict[int, int] = {}
    killed = []
    try:
        for pid in nvml.processes(uuid):
            pidfd = processes.pidfd_of(pid)
            if pidfd is not None:
                held[pid] = pidfd
        for pid in nvml.processes(uuid):
            if pid not in held or not is_member(pid) or processes.has_ended(held[pid]):
                continue
            try:
                signal.pidfd_send_signal(held[pid], signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:
                _log.error("GPUs: cannot kill process %d: give the agent the capability KILL", pid)
                continue
            killed.append(pid)
    except NvmlError as error:
        _log.warning("GPUs: %s: cannot list the processes to kill: %s", uuid, error)
    finally:
        for pidfd in held.values():
            os.close(pidfd)
    return tuple(killed)
