"""How much GPU time processes used, from the samples that the driver tells.

The driver looks at a GPU once in a window, which NVML documents as 1/6 to 1 s, and counts the whole
use of the window to one process. An answer has the processes with a context: the mean use of each
since the last question, in hundredths, and the end of the last window that was counted to the
process. So the use of processes that share a GPU is right only on average. Seen on an H200 with
driver 580.159.04, whose windows are 200 ms (docs/gpu-compute.md).
"""

from collections.abc import Collection

import msgspec

from gpu.driver.nvml import Utilization

ROUNDING = 0.01  # of a period

_SHORTEST_WINDOW, _LONGEST_WINDOW = 0.1, 1.0  # seconds
_US = 1e-6


class UsedTime(msgspec.Struct, frozen=True):
    """GPU time."""

    seconds: float = 0.0
    rounding: float = 0.0  # seconds that it may be more or less
    variance: float = 0.0  # seconds², by the driver's sampling

    def __add__(self, other: "UsedTime") -> "UsedTime":
        return UsedTime(
            self.seconds + other.seconds,
            self.rounding + other.rounding,
            self.variance + other.variance,
        )


class SampledTime:
    """The samples of one GPU, added up."""

    def __init__(self) -> None:
        self.since_us = 0  # the newest sample, by the driver's clock
        self.variance = 0.0  # of the last answer: seconds², of any processes together
        self._asked = 0.0
        self._idle = True  # the last answer had no process
        self._window = _LONGEST_WINDOW

    def add(self, samples: Collection[Utilization], now: float) -> dict[int, UsedTime]:
        """What processes used since the last call, by pid. `samples` are those after `since_us`.

        `now` is any clock, in seconds. What was used before the first sample is not known. After a
        pause no more counts than the time since the last question, and a window.
        """
        passed, self._asked = now - self._asked, now
        idle, self._idle = self._idle, not samples
        length, since = passed, self.since_us
        if samples:
            self.since_us = max(sample.at_us for sample in samples)
            period = (self.since_us - since) * _US
            self._window = min(self._window, max(period, _SHORTEST_WINDOW))
            length = min(period, passed + self._window)
        if since == 0 or (idle and not samples):
            length = 0.0
        # At most: that of a process which is found in half of the windows.
        self.variance = length * self._window / 4
        return {
            sample.pid: UsedTime(sample.sm * length, ROUNDING * length)
            for sample in samples
            if length > 0
        }
