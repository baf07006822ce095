"""Compares what processes use of each GPU, as the driver says, with the limits of their groups.

The driver counts all memory, by whatever library it was allocated, so this sees what shims do not.
What is done about it is decided elsewhere (`enforcement`).
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from base.problems import Problems
from gpu.driver.nvml import Nvml, NvmlError
from gpu.limits.groups import GroupFiles, Groups
from gpu.limits.limits_file import GpuEntry, GroupError
from gpu.limits.living_processes import LivingProcesses
from gpu.limits.region import Region, RegionInvalid, RegionUse, SlotUse
from gpu.limits.tenants import Tenant, Tenants
from gpu.watch.attribution import Attribution, PidBytes
from gpu.watch.context_overhead import Overheads
from gpu.watch.sampled_time import SampledTime, UsedTime

TOLERANCE_BYTES, TOLERANCE = 64 << 20, 0.01  # above the limit: bytes, and a part of the limit
_AHEAD_US = 1_000_000  # how far a sample's time may be ahead of the clock of the day

T = TypeVar("T")

_log = logging.getLogger(__name__)


class TenantSample(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant on its GPU. Bytes; what is not known now is None."""

    tenant: Tenant
    uuid: str  # of the GPU
    minor: int | None  # N of /dev/nvidiaN
    in_force: GpuEntry
    use: RegionUse | None  # None: the tenant has damaged its region
    processes: int  # registered ones that have not ended
    overhead_bytes: int  # contexts and modules, as far as they are measured
    device_bytes: int | None = None  # what the driver says that its processes use
    overuse_bytes: int | None = None  # above its limit and what is tolerated
    utilization: float | None = None  # of the GPU's time, 0 to 1


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that the driver told about."""

    uuid: str
    minor: int | None  # N of /dev/nvidiaN
    capacity_bytes: int  # what programs can use: without what the driver reserves
    unaccounted: Mapping[int, int]  # bytes by pid, of processes that hold no part of the GPU


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """The whole node."""

    at: float = 0.0  # time.monotonic()
    nvml_up: bool = False  # whether every GPU was told about
    problem: str = ""  # why NVML is not up
    tenants: tuple[TenantSample, ...] = ()
    gpus: tuple[GpuSample, ...] = ()


class Watch:
    """Looks at all groups and GPUs. One thread may use it.

    Args:
        groups: the groups.
        tenants: who holds them; a group that it does not list is not looked at.
        living: the registered processes.
        owned: the GPUs whose use is compared, beside those of groups: minor numbers by UUID.
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
        # GPUs that the driver told of in the last tick, and the variance of that in seconds².
        self.measured: dict[str, float] = {}
        self._sampled: dict[str, SampledTime] = {}  # by GPU
        self._used_since_look: dict[tuple[str, str], float] = defaultdict(float)  # seconds
        self._looked = time.monotonic()
        self._problems = Problems(_log)  # of groups and GPUs
        self._capacities: dict[str, int] = {}  # bytes, by GPU

    def look(self, nvml: Nvml | None, problem: str = "") -> NodeSample:
        """Look once. Without NVML only at the groups' own files; `problem` says why."""
        tenants = {tenant.group: tenant for tenant in self._tenants.listed()}
        files = self._read(tenants)
        before = {group: of.slots for group, of in self._said(files).items()}
        minors = self._owned()
        uuids = dict.fromkeys([*minors, *_uuids(files)])
        used, problems = self._used(nvml, uuids) if nvml is not None else ({}, [problem])
        said = self._said(files)
        after = {group: of.slots for group, of in said.items()}
        by_group, others = self.attribution.memory(used)
        utilization = self._utilization()
        for group, changed in self._overheads.look(files, before, used, after).items():
            self._try(group, partial(self._groups.measured, group, changed))
        return NodeSample(
            at=time.monotonic(),
            nvml_up=not problems,
            problem="; ".join(problems),
            tenants=tuple(
                self._compared(tenants, files, said, minors, used, by_group, utilization)
            ),
            gpus=tuple(
                GpuSample(
                    uuid=uuid,
                    minor=minors.get(uuid),
                    capacity_bytes=self._capacities[uuid],
                    unaccounted=others[uuid],
                )
                for uuid in used
            ),
        )

    def tick(self, nvml: Nvml) -> dict[tuple[str, str], UsedTime]:
        """What each group used of each GPU since the last tick; one that is not in it: nothing.

        Ticks come several times a look.
        """
        told: dict[str, dict[int, UsedTime]] = {}
        for uuid in list(self._capacities):
            sampled = self._sampled.setdefault(uuid, SampledTime())
            if sampled.since_us > time.time_ns() // 1000 + _AHEAD_US:
                # The clock of the day was set back: the driver has nothing that is newer than that.
                del self._sampled[uuid]
                continue
            try:
                samples = nvml.utilization(uuid, sampled.since_us)
            except NvmlError as error:
                self._complain(uuid, str(error))
                continue
            told[uuid] = sampled.add(samples, time.monotonic())
        self.measured = {uuid: self._sampled[uuid].variance for uuid in told}
        used = self.attribution.used_time(told)
        for key, of in used.items():
            self._used_since_look[key] += of.seconds
        return used

    def _utilization(self) -> dict[tuple[str, str], float]:
        """The part of the time since the last look."""
        used, self._used_since_look = self._used_since_look, defaultdict(float)
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        return {key: min(1.0, seconds / passed) for key, seconds in used.items()}

    def new_driver(self) -> None:
        """Forget what the former driver told."""
        self._sampled, self._capacities = {}, {}
        self._used_since_look.clear()

    def _used(self, nvml: Nvml, uuids: Iterable[str]) -> tuple[dict[str, PidBytes], list[str]]:
        """Bytes by GPU and pid, of the GPUs that the driver tells about; and why not the others."""
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

    def _said(self, files: Mapping[str, GroupFiles]) -> "dict[str, _Said]":
        """What groups say of themselves; nothing of a damaged region."""
        return {
            group: self._from_region(group, of, partial(_said, of)) or _Said({}, None)
            for group, of in files.items()
        }

    def _from_region(self, group: str, files: GroupFiles, read: Callable[[Region], T]) -> T | None:
        """What `read` finds in the group's region; None if the tenant has damaged it."""
        try:
            with self._groups.region(group, files) as region:
                return read(region)
        except (RegionInvalid, OSError) as error:
            self._complain(group, str(error))
            return None

    def _compared(
        self,
        tenants: Mapping[str, Tenant],
        files: Mapping[str, GroupFiles],
        said: "Mapping[str, _Said]",
        minors: Mapping[str, int | None],
        used: Mapping[str, PidBytes],
        by_group: Mapping[tuple[str, str], PidBytes],
        utilization: Mapping[tuple[str, str], float],
    ) -> Iterator[TenantSample]:
        for group, of in files.items():
            alive = [of.processes[slot] for slot in _alive(of)]
            uuid = of.limit.uuid
            told = uuid in used
            device = sum(by_group.get((group, uuid), {}).values())
            yield TenantSample(
                tenant=tenants[group],
                uuid=uuid,
                minor=minors.get(uuid),
                in_force=of.in_force,
                use=said[group].use,
                processes=len({process.host_pid for process in alive}),
                overhead_bytes=sum(process.overhead_bytes or 0 for process in alive),
                device_bytes=device if told else None,
                overuse_bytes=overuse(device, of.in_force.memory_bytes) if told else None,
                utilization=utilization.get((group, uuid), 0.0) if told else None,
            )

    def _try(self, group: str, act: Callable[[], object]) -> None:
        try:
            act()
        except (GroupError, OSError) as error:  # it is being removed
            self._complain(group, str(error))

    def _complain(self, of: str, text: str) -> None:
        self._problems.tell(f"GPUs: {of}", text)


def overuse(device_bytes: int, limit_bytes: int) -> int:
    """Bytes above the limit and what is tolerated; 0 for none."""
    return max(0, device_bytes - limit_bytes - TOLERANCE_BYTES - int(limit_bytes * TOLERANCE))


class _Said(NamedTuple):
    """What a group says of itself."""

    slots: Mapping[int, SlotUse]  # of living processes
    use: RegionUse | None  # None: the tenant has damaged its region


def _said(files: GroupFiles, region: Region) -> _Said:
    return _Said(_slots(files, region), region.use())


def _slots(files: GroupFiles, region: Region) -> dict[int, SlotUse]:
    return {
        slot: use
        for slot, use in region.slots(_alive(files)).items()
        if use.registration == files.processes[slot].registration
    }


def _alive(files: GroupFiles) -> list[int]:
    """The slots of living processes."""
    return [slot for slot, process in files.processes.items() if process.alive]


def _uuids(files: Mapping[str, GroupFiles]) -> Iterator[str]:
    return (of.limit.uuid for of in files.values())
