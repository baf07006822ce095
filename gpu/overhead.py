"""Measures what CUDA contexts and modules of each process need on each GPU.

That is what the driver says of the process, less what it says it has allocated itself. The two are
not of one moment: what a process allocated between them would count twice, and its group would be
denied memory that is free. So a process counts only while what it has allocated is the same before
and after the driver's answer, and the median of its last measurements is taken.
"""

from collections import deque
from collections.abc import Hashable
from statistics import median_high
from typing import Generic, TypeVar

LOOKS = 3  # whose median counts
NOISE = 1 << 20  # bytes; a smaller change of the median is not told

K = TypeVar("K", bound=Hashable)


class Overheads(Generic[K]):
    """The overheads of processes on GPUs, by any key that a later process does not have."""

    def __init__(self) -> None:
        self._measured: dict[K, deque[int]] = {}
        self._told: dict[K, int] = {}

    def measure(self, key: K, before: int, device: int, after: int) -> int | None:
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

    def keep(self, keys: "set[K]") -> None:
        """Forget all others."""
        for key in self._measured.keys() - keys:
            del self._measured[key]
            self._told.pop(key, None)
