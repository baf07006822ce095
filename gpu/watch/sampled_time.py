"""Computes the GPU time of processes from the driver's samples.

The driver looks at a GPU once per window of 1/6 to 1 s (NVML's documentation). The whole window
counts for one process. So the time of processes that share a GPU is correct only on average.
docs/developers/gpu-library.md has measurements.
"""

from collections.abc import Collection

import msgspec

from gpu.driver.nvml import Utilization

ROUNDING = 0.01  # the driver rounds to hundredths of a period

_SHORTEST_WINDOW, _LONGEST_WINDOW = 0.1, 1.0  # seconds
_US = 1e-6


class UsedTime(msgspec.Struct, frozen=True):
    """GPU time with its uncertainty."""

    seconds: float = 0.0
    rounding: float = 0.0  # seconds: the largest error of rounding
    variance: float = 0.0  # seconds², of the driver's sampling

    def __add__(self, other: "UsedTime") -> "UsedTime":
        return UsedTime(
            self.seconds + other.seconds,
            self.rounding + other.rounding,
            self.variance + other.variance,
        )


class SampledTime:
    def __init__(self) -> None:
        self.since_us = 0  # the newest sample by the driver's clock
        self.variance = 0.0  # of the last answer, for any set of processes, in seconds²
        self._asked = 0.0  # the time of the last call
        self._idle = True  # the last answer had no process
        self._window = _LONGEST_WINDOW

    def add(self, samples: Collection[Utilization], now: float) -> dict[int, UsedTime]:
        """Used time by pid since the last call. `now` is in seconds of a monotonic clock.

        `samples` are newer than `since_us`. The use before the first sample does not count.
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
        # The largest possible variance: that of a process in half of the windows.
        self.variance = length * self._window / 4
        return {
            sample.pid: UsedTime(sample.sm * length, ROUNDING * length)
            for sample in samples
            if length > 0
        }
