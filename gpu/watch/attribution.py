"""Finds the groups of the processes that the driver reports."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping

from gpu.limits import processes
from gpu.limits.living_processes import LivingProcesses
from gpu.limits.tenants import Tenants
from gpu.watch.sampled_time import UsedTime

PidBytes = Mapping[int, int]
"""Bytes on one GPU, by pid."""


class Attribution:
    def __init__(self, tenants: Tenants, living: LivingProcesses) -> None:
        self._tenants = tenants
        self._living = living

    def group_of(self, pid: int) -> str | None:
        """The group of a process; `None` if it has no group or has ended."""
        return self._groups_of((pid,))[pid]

    def memory(
        self, used: Mapping[str, PidBytes]
    ) -> tuple[dict[tuple[str, str], dict[int, int]], dict[str, dict[int, int]]]:
        """Bytes by group, GPU and pid. The second mapping has processes without a group."""
        groups = self._groups_of(pid for of_gpu in used.values() for pid in of_gpu)
        by_group: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        unaccounted: dict[str, dict[int, int]] = {uuid: {} for uuid in used}
        for uuid, of_gpu in used.items():
            for pid, size in of_gpu.items():
                group = groups[pid]
                place = unaccounted[uuid] if group is None else by_group[group, uuid]
                place[pid] = size
        return by_group, unaccounted

    def used_time(
        self, used: Mapping[str, Mapping[int, UsedTime]]
    ) -> dict[tuple[str, str], UsedTime]:
        """Used time by group and GPU. Processes that have just ended count too."""
        pids = {pid for of_gpu in used.values() for pid in of_gpu}
        groups = self._living.last_groups_of(pids) | {
            pid: group for pid, group in self._groups_of(pids).items() if group is not None
        }
        by_group: dict[tuple[str, str], UsedTime] = {}
        for uuid, of_gpu in used.items():
            for pid, time in of_gpu.items():
                if pid in groups:
                    key = groups[pid], uuid
                    by_group[key] = by_group.get(key, UsedTime()) + time
        return by_group

    def _groups_of(self, pids: Iterable[int]) -> dict[int, str | None]:
        distinct = set(pids)
        registered = self._living.groups_of(distinct)
        return {pid: registered.get(pid) or self._by_cgroup(pid) for pid in distinct}

    def _by_cgroup(self, pid: int) -> str | None:
        """The group of an unregistered process."""
        pidfd = processes.pidfd_of(pid)
        if pidfd is None:
            return None
        try:
            tenant = self._tenants.of(pid)
            return tenant.group if tenant and not processes.has_ended(pidfd) else None
        finally:
            os.close(pidfd)
