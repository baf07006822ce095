"""Waits for a condition, in a call that may be interrupted."""

import time
from collections.abc import Callable
from typing import TypeVar

from base import interrupts
from base.backoff import Backoff

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], seconds: float, pause: float = 0.02, longest_pause: float = 0.1
) -> T:
    """Call `condition` until its answer is true, for at most `seconds`. Returns its last answer.

    The first call is at once. Pauses start at `pause` seconds and double up to `longest_pause`.
    Raises what `condition` raises, and Terminated if the call is interrupted.
    """
    deadline = time.monotonic() + seconds
    if answer := condition():
        return answer
    backoff = Backoff(pause, longest_pause)
    with interrupts.waiting():
        while time.monotonic() < deadline:
            interrupts.checkpoint()
            time.sleep(min(backoff.pause(), max(0.0, deadline - time.monotonic())))
            if answer := condition():
                break
    return answer
