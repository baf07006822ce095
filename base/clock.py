"""The clock by which leases are measured."""

import time


def boottime() -> float:
    """Seconds since the machine booted, suspend included: `time.monotonic` stands still in it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
