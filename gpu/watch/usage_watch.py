"""Samples the use of each GPU by groups and by other processes.

The driver counts all memory of a process, even allocations that the shims do not see.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from base.problems import Problems
from gpu.driver.nvml import Nvml, NvmlError
from gpu.limits.groups import GroupFiles, Groups
from gpu.limits.limits_file import GroupError, Limit
from gpu.limits.living_processes import LivingProcesses
from gpu.limits.region import Region, RegionInvalid, RegionUse, SlotUse
from gpu.limits.tenants import Tenant, Tenants
from gpu.watch.attribution import Attribution, PidBytes
from gpu.watch.context_overhead import Overheads
from gpu.watch.sampled_time import SampledTime, UsedTime

TOLERANCE_BYTES, TOLERANCE = 64 << 20, 0.01  # above the limit: bytes, and a fraction of the limit
_AHEAD_US = 1_000_000  # microseconds that a sample may be ahead of the wall clock

_log = logging.getLogger(__name__)


class TenantSample(msgspec.Struct, frozen=True, kw_only=True):
    """The use of a GPU by one tenant. `None`: unknown."""

    tenant: Tenant
    uuid: str  # of the GPU
    minor: int | None  # N of /dev/nvidiaN
    limit: Limit
    use: RegionUse | None  # `None`: the tenant has damaged its region
    processes: int  # number of registered, living processes
    overhead_bytes: int  # measured contexts and modules
    device_bytes: int | None = None  # use of the tenant's processes, as the driver reports it
    overuse_bytes: int | None = None  # use above the limit and the tolerance
    utilization: float | None = None  # the used fraction of the GPU's time, 0 to 1


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that the driver reported."""

    uuid: str
    minor: int | None  # N of /dev/nvidiaN
    capacity_bytes: int  # without the driver's reserve
    unaccounted: Mapping[int, int]  # bytes by pid, of processes without a share of the GPU


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    at: float = 0.0  # time.monotonic()
    nvml_up: bool = False  # the driver reported every GPU
    problem: str = ""  # the reason if `nvml_up` is false
    tenants: tuple[TenantSample, ...] = ()
    gpus: tuple[GpuSample, ...] = ()


class Watch:
    """Samples all groups that have a tenant. Only one thread may use it.

    `owned` returns GPUs that are sampled even without groups: minor numbers by UUID.
    """

    def __init__(
        self,
        groups: Groups,
        tenants: Tenants,
        living: LivingProcesses,
        owned: Callable[[], Mapping[str, int | None]],
    ) -> None:
        self._groups = groups
        self._tenants = tenants
        self._owned = owned
        self.attribution = Attribution(tenants, living)
        self._overheads = Overheads()
        # Variance of used times in seconds², by GPU that the driver reported in the last tick.
        self.measured: dict[str, float] = {}
        self._sampled: dict[str, SampledTime] = {}  # by GPU
        self._used_since_look: dict[tuple[str, str], float] = defaultdict(float)  # seconds
        self._looked = time.monotonic()
        self._problems = Problems(_log)  # of groups and GPUs
        self._capacities: dict[str, int] = {}  # bytes, by GPU

    def look(self, nvml: Nvml | None, problem: str = "") -> NodeSample:
        """Without `nvml`, the sample has only `problem` and the figures in the groups' files."""
        tenants = {tenant.group: tenant for tenant in self._tenants.listed()}
        files = self._read(tenants)
        before = {group: region.slots for group, region in self._regions(files).items()}
        minors = self._owned()
        uuids = dict.fromkeys([*minors, *(known.limit.uuid for known in files.values())])
        used, problems = self._used(nvml, uuids) if nvml is not None else ({}, [problem])
        regions = self._regions(files)
        after = {group: region.slots for group, region in regions.items()}
        by_group, unaccounted = self.attribution.memory(used)
        utilization = self._utilization()
        for group, changed in self._overheads.look(files, before, used, after).items():
            try:
                self._groups.set_overheads(group, changed)
            except (GroupError, OSError) as error:  # the group is being removed
                self._complain(group, str(error))
        return NodeSample(
            at=time.monotonic(),
            nvml_up=not problems,
            problem="; ".join(problems),
            tenants=tuple(
                self._compared(tenants, files, regions, minors, used, by_group, utilization)
            ),
            gpus=tuple(
                GpuSample(
                    uuid=uuid,
                    minor=minors.get(uuid),
                    capacity_bytes=self._capacities[uuid],
                    unaccounted=unaccounted[uuid],
                )
                for uuid in used
            ),
        )

    def tick(self, nvml: Nvml) -> dict[tuple[str, str], UsedTime]:
        """Used time by group and GPU since the last tick. Leaves out idle groups."""
        reported: dict[str, dict[int, UsedTime]] = {}
        for uuid in list(self._capacities):
            sampled = self._sampled.setdefault(uuid, SampledTime())
            if sampled.since_us > time.time_ns() // 1000 + _AHEAD_US:
                # The wall clock was set back: the driver has no samples newer than `since_us`.
                del self._sampled[uuid]
                continue
            try:
                samples = nvml.utilization(uuid, sampled.since_us)
            except NvmlError as error:
                self._complain(uuid, str(error))
                continue
            reported[uuid] = sampled.add(samples, time.monotonic())
        self.measured = {uuid: self._sampled[uuid].variance for uuid in reported}
        used = self.attribution.used_time(reported)
        for key, used_time in used.items():
            self._used_since_look[key] += used_time.seconds
        return used

    def _utilization(self) -> dict[tuple[str, str], float]:
        """The used fraction of a GPU's time since the last sample, by group and GPU."""
        used, self._used_since_look = self._used_since_look, defaultdict(float)
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        return {key: min(1.0, seconds / passed) for key, seconds in used.items()}

    def new_driver(self) -> None:
        """Drop the figures of the previous driver."""
        self._sampled, self._capacities = {}, {}
        self._used_since_look.clear()

    def _used(self, nvml: Nvml, uuids: Iterable[str]) -> tuple[dict[str, PidBytes], list[str]]:
        """Bytes by GPU and pid, and the errors of GPUs that the driver did not report."""
        used: dict[str, PidBytes] = {}
        problems = []
        for uuid in uuids:
            try:
                if uuid not in self._capacities:
                    self._capacities[uuid] = nvml.memory(uuid).usable
                used[uuid] = nvml.processes(uuid)
            except NvmlError as error:
                problems.append(f"{uuid}: {error}")
        return used, problems

    def _read(self, groups: Iterable[str]) -> dict[str, GroupFiles]:
        files = {}
        for group in groups:
            try:
                files[group] = self._groups.read(group)
            except (GroupError, OSError) as error:
                self._complain(group, str(error))
        return files

    def _regions(self, files: Mapping[str, GroupFiles]) -> "dict[str, _RegionContent]":
        """The content of each group's region; empty if the region is damaged."""
        contents = {}
        for group, known in files.items():
            contents[group] = _RegionContent({}, None)
            try:
                with self._groups.region(group, known) as region:
                    contents[group] = _RegionContent(_slots(known, region), region.use())
            except (RegionInvalid, OSError) as error:
                self._complain(group, str(error))
        return contents

    def _compared(
        self,
        tenants: Mapping[str, Tenant],
        files: Mapping[str, GroupFiles],
        regions: "Mapping[str, _RegionContent]",
        minors: Mapping[str, int | None],
        used: Mapping[str, PidBytes],
        by_group: Mapping[tuple[str, str], PidBytes],
        utilization: Mapping[tuple[str, str], float],
    ) -> Iterator[TenantSample]:
        for group, known in files.items():
            alive = [process for process in known.processes.values() if process.alive]
            uuid = known.limit.uuid
            reported = uuid in used
            device = sum(by_group.get((group, uuid), {}).values())
            yield TenantSample(
                tenant=tenants[group],
                uuid=uuid,
                minor=minors.get(uuid),
                limit=known.limit,
                use=regions[group].use,
                processes=len({process.host_pid for process in alive}),
                overhead_bytes=sum(process.overhead_bytes or 0 for process in alive),
                device_bytes=device if reported else None,
                overuse_bytes=overuse(device, known.limit.memory_bytes) if reported else None,
                utilization=utilization.get((group, uuid), 0.0) if reported else None,
            )

    def _complain(self, subject: str, text: str) -> None:
        self._problems.tell(f"GPUs: {subject}", text)


def overuse(device_bytes: int, limit_bytes: int) -> int:
    """Bytes above the limit plus the tolerance; 0 if there are none."""
    return max(0, device_bytes - limit_bytes - TOLERANCE_BYTES - int(limit_bytes * TOLERANCE))


class _RegionContent(NamedTuple):
    slots: Mapping[int, SlotUse]  # of living processes
    use: RegionUse | None  # `None`: the tenant has damaged its region


def _slots(files: GroupFiles, region: Region) -> dict[int, SlotUse]:
    alive = [slot for slot, process in files.processes.items() if process.alive]
    return {
        slot: use
        for slot, use in region.slots(alive).items()
        if use.registration == files.processes[slot].registration
    }
