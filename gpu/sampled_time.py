"""How much GPU time processes used, from the samples that the driver tells.

A sample says which part of a period a process used the GPU, in hundredths. NVML documents periods
of 1/6 to 1 s, and one sample of each process that used the GPU in the last period. A driver may
tell of all periods since the last question, or of the newest one alone, which then stands for the
others.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import msgspec

from gpu.nvml import Utilization

ROUNDING = 0.01  # of a period

_FIRST_PERIOD = 1.0  # seconds, until periods were seen
_SHORTEST_PERIOD, _LONGEST_PERIOD = 0.1, 2.0
_PERIODS = 16  # that are remembered
_SAME_US = 50_000  # samples of one period have times that differ less
_US = 1e-6


class UsedTime(msgspec.Struct, frozen=True):
    """GPU time."""

    seconds: float = 0.0
    rounding: float = 0.0  # seconds that it may be more or less

    def __add__(self, other: "UsedTime") -> "UsedTime":
        return UsedTime(self.seconds + other.seconds, self.rounding + other.rounding)

    def at_least(self, rounding: float) -> "UsedTime":
        """The same with at least this rounding."""
        return self if self.rounding >= rounding else UsedTime(self.seconds, rounding)


class SampledTime:
    """The samples of one GPU, added up."""

    def __init__(self) -> None:
        self.since_us = 0  # the newest sample, by the driver's clock
        self._asked = False
        self._tells_all = False  # periods, and not the newest one alone
        self._periods: deque[float] = deque(maxlen=_PERIODS)
        self._period = _FIRST_PERIOD
        self._came = float("-inf")  # when the last samples came
        self._idle = True  # nothing was used in the last period before

    def add(self, samples: Iterable[Utilization], now: float) -> dict[int, UsedTime]:
        """What processes used since the last call, by pid. `samples` are those after `since_us`.

        `now` is any clock, in seconds. What was used before the first call is not known.
        """
        answer = sorted(samples, key=lambda sample: sample.at_us)
        first, self._asked = not self._asked, True
        passed = now - self._came
        if not answer:
            self._idle = self._idle or passed >= 0.9 * self._period
            return {}
        self._tells_all = self._tells_all or len({of.pid for of in answer}) < len(answer)
        used: dict[int, UsedTime] = defaultdict(UsedTime)
        if not first:
            for length, sample in self._lengths(answer, passed):
                used[sample.pid] += UsedTime(sample.sm * length, ROUNDING * length)
        self.since_us, self._came, self._idle = answer[-1].at_us, now, first
        return used

    def _lengths(
        self, answer: Sequence[Utilization], passed: float
    ) -> Iterator[tuple[float, Utilization]]:
        """The seconds that each sample is about."""
        before, begin, idle = self.since_us, answer[0].at_us, self._idle
        if not self._tells_all:
            self._learn((answer[-1].at_us - before) * _US, idle=idle)
        for sample in answer:
            if self._tells_all and sample.at_us - begin > _SAME_US:
                before, begin, idle = begin, sample.at_us, False
                self._learn((begin - before) * _US, idle=idle)
            most = self._period if idle else passed + self._period
            yield min((sample.at_us - before) * _US, most), sample

    def _learn(self, gap: float, *, idle: bool) -> None:
        if not idle and _SHORTEST_PERIOD <= gap <= _LONGEST_PERIOD:
            self._periods.append(gap)
            self._period = median(self._periods)
