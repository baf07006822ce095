"""Waiting in tests: for a condition, with a limit that only a hang can reach."""

import threading
from collections.abc import Callable
from typing import TypeVar

from base.interrupts import wait_until

PATIENCE = 120.0  # seconds; a test takes a few, perhaps 30 on a busy machine

T = TypeVar("T")


def until(
    condition: Callable[[], T], seconds: float = PATIENCE, what: str = "", pause: float = 0.02
) -> T:
    """Return the first true answer of `condition`. Raises AssertionError with `what` if none
    comes."""
    answer = wait_until(condition, seconds, pause, pause)
    assert answer, f"after {seconds:g} s: still no {what or condition}"
    return answer


def join(thread: threading.Thread, seconds: float = PATIENCE) -> None:
    """Wait for the end of a thread. Raises AssertionError if it does not end."""
    thread.join(seconds)
    assert not thread.is_alive(), f"{thread.name} still runs after {seconds:g} s"
