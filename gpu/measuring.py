"""What the agent tells shims of their processes: what contexts need, and programs that are over."""

from collections import defaultdict
from collections.abc import Mapping

from msgspec import structs

from gpu import processes
from gpu.attribution import PidBytes
from gpu.groups import GroupFiles
from gpu.limits_file import Registered
from gpu.living_processes import LivingProcess
from gpu.overhead import Overheads
from gpu.region import SlotUse

STALE = 2.0  # seconds without memory on any GPU, after which another program has none

Slots = Mapping[str, Mapping[int, SlotUse]]
"""What processes say they have allocated, by group and slot."""

_Key = tuple[str, int, int]  # group, slot, registration


class Measuring:
    """Measures from look to look. One thread may use it."""

    def __init__(self) -> None:
        self._overheads: Overheads[_Key] = Overheads()
        self._absent: dict[_Key, float] = {}  # since when

    def overheads(
        self,
        files: Mapping[str, GroupFiles],
        before: Slots,
        used: Mapping[str, PidBytes],
        after: Slots,
    ) -> dict[str, dict[int, Registered]]:
        """Processes whose overhead has changed, with the new one, by group and slot.

        `before` and `after` are of before and after `used`, the driver's answer by GPU. A process
        with several slots has its overhead in the first one.
        """
        changed: dict[str, dict[int, Registered]] = defaultdict(dict)
        seen: set[_Key] = set()
        for group, of in files.items():
            by_pid: dict[int, list[int]] = defaultdict(list)
            for slot in sorted(before.get(group, {}).keys() & after.get(group, {}).keys()):
                by_pid[of.processes[slot].host_pid].append(slot)
            for pid, (first, *others) in by_pid.items():
                process = of.processes[first]
                device = used.get(of.limit.uuid, {}).get(pid)
                if device is None:
                    continue
                key = group, first, process.registration
                seen.add(key)
                had, has = (
                    sum(slots[group][slot].data_bytes for slot in (first, *others))
                    for slots in (before, after)
                )
                overhead = self._overheads.measure(key, had, device, has)
                if overhead is not None:
                    told = {first: overhead} | dict.fromkeys(others, 0)
                    changed[group] |= _changed(of, told)
        self._overheads.keep(seen)
        return {group: of for group, of in changed.items() if of}

    def former_programs(
        self,
        files: Mapping[str, GroupFiles],
        slots: Slots,
        used: Mapping[str, PidBytes],
        living: Mapping[int, LivingProcess],
        now: float,
    ) -> dict[str, dict[int, int]]:
        """Registrations by group and slot of programs whose processes execute another one now.

        Such a process holds nothing on a GPU, but its slot says so still, until the new program
        uses CUDA. Call this only after looks at which the driver told about every GPU.
        """
        on_gpus = {pid for of_gpu in used.values() for pid in of_gpu}
        absent, over = {}, defaultdict[str, dict[int, int]](dict)
        for group, of_group in slots.items():
            for slot, use in of_group.items():
                process = living.get(files[group].processes[slot].host_pid)
                charged = use.data_bytes or use.context_bytes
                if process is None or not charged or process.pid in on_gpus:
                    continue
                key = group, slot, use.registration
                absent[key] = self._absent.get(key, now)
                if now - absent[key] >= STALE and _executed(process):
                    over[group][slot] = use.registration
        self._absent = absent
        return dict(over)


def _changed(files: GroupFiles, overheads: Mapping[int, int]) -> dict[int, Registered]:
    return {
        slot: structs.replace(files.processes[slot], overhead_bytes=overhead)
        for slot, overhead in overheads.items()
        if files.processes[slot].overhead_bytes != overhead
    }


def _executed(process: LivingProcess) -> bool:
    """Whether the process executed another program since it was registered."""
    image = processes.image_of(process.pid)
    return bool(image and process.image and image != process.image)
