"""Measures the overhead of each process: the memory of CUDA contexts and modules.

The overhead is the driver's figure minus the allocations that the process reports. A measurement
counts only if these allocations are the same before and after the driver's answer.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median_high

from msgspec import structs

from gpu.limits.groups import GroupFiles
from gpu.limits.limits_file import Registered
from gpu.limits.region import SlotUse
from gpu.watch.attribution import PidBytes

LOOKS = 3  # measurements in the median
NOISE = 1 << 20  # bytes; smaller changes of the median are ignored

Slots = Mapping[str, Mapping[int, SlotUse]]
"""The allocations that processes report, by group and slot."""

_Key = tuple[str, int, int]  # group, slot, registration


class Overheads:
    """Measures overheads. Only one thread may use an object."""

    def __init__(self) -> None:
        self._measured: dict[_Key, deque[int]] = {}
        self._current: dict[_Key, int] = {}

    def look(
        self,
        files: Mapping[str, GroupFiles],
        before: Slots,
        used: Mapping[str, PidBytes],
        after: Slots,
    ) -> dict[str, dict[int, Registered]]:
        """The processes with a changed overhead, by group and slot.

        `used` is the driver's answer by GPU. `before` and `after` were read before and after this
        answer. The first slot of a process gets the whole overhead.
        """
        changed: dict[str, dict[int, Registered]] = defaultdict(dict)
        seen: set[_Key] = set()
        for group, known in files.items():
            by_pid: dict[int, list[int]] = defaultdict(list)
            for slot in sorted(before.get(group, {}).keys() & after.get(group, {}).keys()):
                by_pid[known.processes[slot].host_pid].append(slot)
            for pid, slots in by_pid.items():
                device = used.get(known.limit.uuid, {}).get(pid)
                if device is None:
                    continue
                first, *rest = slots
                key = group, first, known.processes[first].registration
                seen.add(key)
                earlier = sum(before[group][slot].data_bytes for slot in slots)
                later = sum(after[group][slot].data_bytes for slot in slots)
                overhead = self.measure(key, earlier, device, later)
                if overhead is not None:
                    changed[group] |= _changed(known, {first: overhead} | dict.fromkeys(rest, 0))
        self._measured = {key: sizes for key, sizes in self._measured.items() if key in seen}
        self._current = {key: size for key, size in self._current.items() if key in seen}
        return {group: processes for group, processes in changed.items() if processes}

    def measure(self, key: _Key, before: int, device: int, after: int) -> int | None:
        """Add a measurement. Returns the overhead; `None` if no measurement has counted yet."""
        if before == after:
            measured = self._measured.setdefault(key, deque(maxlen=LOOKS))
            measured.append(max(0, device - after))
            median = median_high(measured)  # of two, the larger: a context counts in full
            if key not in self._current or abs(median - self._current[key]) >= NOISE:
                self._current[key] = median
        return self._current.get(key)


def _changed(files: GroupFiles, overheads: Mapping[int, int]) -> dict[int, Registered]:
    return {
        slot: structs.replace(files.processes[slot], overhead_bytes=overhead)
        for slot, overhead in overheads.items()
        if files.processes[slot].overhead_bytes != overhead
    }
