"""Measures what CUDA contexts and modules of each process need on its GPU.

That is what the driver says of the process, less what it says it has allocated itself. The two are
not of one moment: what a process allocated between them would count twice, and its group would be
denied memory that is free. So a process counts only while what it has allocated is the same before
and after the driver's answer, and the median of its last measurements is taken.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median_high

from msgspec import structs

from gpu.limits.groups import GroupFiles
from gpu.limits.limits_file import Registered
from gpu.limits.region import SlotUse
from gpu.watch.attribution import PidBytes

LOOKS = 3  # whose median counts
NOISE = 1 << 20  # bytes; a smaller change of the median is not told

Slots = Mapping[str, Mapping[int, SlotUse]]
"""What processes say they have allocated, by group and slot."""

_Key = tuple[str, int, int]  # group, slot, registration


class Overheads:
    """Measures from look to look. One thread may use it."""

    def __init__(self) -> None:
        self._measured: dict[_Key, deque[int]] = {}
        self._told: dict[_Key, int] = {}

    def look(
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
            for pid, slots in by_pid.items():
                device = used.get(of.limit.uuid, {}).get(pid)
                if device is None:
                    continue
                first, *others = slots
                key = group, first, of.processes[first].registration
                seen.add(key)
                had = sum(before[group][slot].data_bytes for slot in slots)
                has = sum(after[group][slot].data_bytes for slot in slots)
                overhead = self.measure(key, had, device, has)
                if overhead is not None:
                    changed[group] |= _changed(of, {first: overhead} | dict.fromkeys(others, 0))
        self._measured = {key: of for key, of in self._measured.items() if key in seen}
        self._told = {key: of for key, of in self._told.items() if key in seen}
        return {group: of for group, of in changed.items() if of}

    def measure(self, key: _Key, before: int, device: int, after: int) -> int | None:
        """Bytes, from one look; None as long as it cannot be told.

        `before` and `after` are what the process has allocated, `device` what the driver said
        between them.
        """
        if before == after:
            measured = self._measured.setdefault(key, deque(maxlen=LOOKS))
            measured.append(max(0, device - after))
            # Of two the larger one: a context counts in full.
            found = median_high(measured)
            if key not in self._told or abs(found - self._told[key]) >= NOISE:
                self._told[key] = found
        return self._told.get(key)


def _changed(files: GroupFiles, overheads: Mapping[int, int]) -> dict[int, Registered]:
    return {
        slot: structs.replace(files.processes[slot], overhead_bytes=overhead)
        for slot, overhead in overheads.items()
        if files.processes[slot].overhead_bytes != overhead
    }
