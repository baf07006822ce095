"""How much GPU time processes used, from the samples that the driver tells.

A sample says which part of a period, in hundredths, a process used the GPU: since the sample before
it. NVML documents periods of 1/6 to 1 s, and one sample of each process that used the GPU in the
last period. A driver may tell of all periods since the last question, or of the newest one alone,
which then stands for all of them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from gpu.nvml import Utilization

ROUNDING = 0.005  # of a period
LONGEST_PERIOD = 1.0  # seconds

_SHORTEST_PERIOD = 0.1
_ASK_ANEW = 5.0  # seconds without samples: the driver's clock, that of the day, may have been set
_US = 1e-6


class UsedTime(msgspec.Struct, frozen=True):
    """GPU time."""

    seconds: float = 0.0
    rounding: float = 0.0  # seconds that it may be more or less

    def __add__(self, other: "UsedTime") -> "UsedTime":
        return UsedTime(self.seconds + other.seconds, self.rounding + other.rounding)


class SampledTime:
    """The samples of one GPU, added up."""

    def __init__(self) -> None:
        self.since_us = 0  # the newest sample, by the driver's clock
        self._period = LONGEST_PERIOD  # the shortest one that was seen
        self._came = float("-inf")  # when the last samples came
        self._idle = True  # the GPU was not used just before these

    def add(self, samples: Iterable[Utilization], now: float) -> dict[int, UsedTime]:
        """What processes used since the last call, by pid. `samples` are those after `since_us`.

        `now` is any clock, in seconds. What was used before the first call is not known.
        """
        by_pid: dict[int, list[Utilization]] = defaultdict(list)
        for sample in samples:
            by_pid[sample.pid].append(sample)
        passed = now - self._came
        if not by_pid:
            self._idle = self._idle or passed > 1.2 * self._period
            if passed > _ASK_ANEW:
                self.since_us, self._came = 0, now
            return {}
        began = self.since_us == 0
        used = {} if began else {pid: self._used(of, passed) for pid, of in by_pid.items()}
        self.since_us = max(sample.at_us for of in by_pid.values() for sample in of)
        self._came, self._idle = now, began
        return used

    def _used(self, samples: Sequence[Utilization], passed: float) -> UsedTime:
        """What one process used, of which samples came so long after the ones before."""
        used = UsedTime()
        before, follows = self.since_us, not self._idle
        for sample in sorted(samples, key=lambda of: of.at_us):
            gap = (sample.at_us - before) * _US
            if follows and gap >= _SHORTEST_PERIOD:
                self._period = min(self._period, gap)
            # Between two samples of one answer the process was idle, if that is long.
            joined = follows and (before == self.since_us or gap <= 1.5 * self._period)
            length = min(gap, passed + self._period if joined else self._period)
            used += UsedTime(sample.sm * length, ROUNDING * length)
            before, follows = sample.at_us, True
        return used
