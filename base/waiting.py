"""Waiting for a condition, in a call that may be ended meanwhile."""

import time
from collections.abc import Callable
from typing import TypeVar

from base import interrupts

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], seconds: float, pause: float = 0.02, longest_pause: float = 0.1
) -> T:
    """What `condition` answers once it is true, or its last answer when `seconds` are over.

    It is asked at once and then after each pause; pauses double up to `longest_pause` (seconds).
    Raises what `condition` raises, and Terminated if the call is to end.
    """
    deadline = time.monotonic() + seconds
    while not (answer := condition()) and time.monotonic() < deadline:
        interrupts.checkpoint()
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, longest_pause)
    return answer
