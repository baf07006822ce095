"""For how long it counts that the API server has confirmed what this node may hand out."""

import time


def boottime() -> float:
    """Seconds since the machine booted, suspend included: `time.monotonic` stands still in it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def spoken(seconds: float) -> str:
    """A time for people."""
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def is_recent(confirmed: tuple[str, float], limit: float, boot: str, now: float) -> bool:
    """Whether it was `confirmed` (boot, time of CLOCK_BOOTTIME) in this boot, less than `limit`
    seconds ago. A confirmation of another boot counts for nothing."""
    in_boot, at = confirmed
    return in_boot == boot and 0 <= now - at < limit
