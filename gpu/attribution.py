"""Whose use of a GPU it is that the driver reports: pids become groups."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from gpu import processes
from gpu.living_processes import LivingProcess
from gpu.nvml import Utilization
from gpu.tenants import Tenants

PidBytes = Mapping[int, int]
"""Bytes on one GPU, by pid."""


class Attribution:
    """Finds the groups of processes. `living` answers those that are registered, by pid."""

    def __init__(self, tenants: Tenants, living: Callable[[], Mapping[int, LivingProcess]]) -> None:
        self._tenants = tenants
        self._living = living

    def group_of(self, pid: int) -> str | None:
        """The group of a process; None if it has none, or has ended."""
        return self._group_of(pid, self._living())

    def memory(
        self, used: Mapping[str, PidBytes]
    ) -> tuple[dict[tuple[str, str], dict[int, int]], dict[str, dict[int, int]]]:
        """Bytes by pid for each group and GPU; and for each GPU, of processes without a group."""
        groups = self._groups_of(pid for of_gpu in used.values() for pid in of_gpu)
        by_group: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        others: dict[str, dict[int, int]] = {uuid: {} for uuid in used}
        for uuid, of_gpu in used.items():
            for pid, size in of_gpu.items():
                group = groups[pid]
                place = others[uuid] if group is None else by_group[group, uuid]
                place[pid] = size
        return by_group, others

    def utilization(
        self, samples: Mapping[str, Iterable[Utilization]]
    ) -> dict[tuple[str, str], float]:
        """The part of each GPU's time that each group used: the mean of each process' samples."""
        by_process: dict[tuple[str, int], list[float]] = defaultdict(list)
        for uuid, of_gpu in samples.items():
            for sample in of_gpu:
                by_process[uuid, sample.pid].append(sample.sm)
        groups = self._groups_of(pid for _, pid in by_process)
        found: Counter[tuple[str, str]] = Counter()
        for (uuid, pid), values in by_process.items():
            group = groups[pid]
            if group is not None:
                found[group, uuid] += sum(values) / len(values)  # type: ignore[assignment]
        return {key: min(1.0, value) for key, value in found.items()}

    def _groups_of(self, pids: Iterable[int]) -> dict[int, str | None]:
        living = self._living()
        return {pid: self._group_of(pid, living) for pid in set(pids)}

    def _group_of(self, pid: int, living: Mapping[int, LivingProcess]) -> str | None:
        known = living.get(pid)
        if known is not None and processes.start_time(pid) == known.start_time:
            # Another thread may take the last slot away.
            group = next((group for group, _ in tuple(known.slots)), None)
            if group is not None:
                return group
        pidfd = processes.pidfd_of(pid)
        if pidfd is None:
            return None
        try:
            tenant = self._tenants.of(pid)
            return tenant.group if tenant and not processes.has_ended(pidfd) else None
        finally:
            os.close(pidfd)
