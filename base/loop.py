"""Threads that repeat a step, and their pauses.

An error in one step does not end the thread. The process reports that it is not ready while
MOST_FAILURES steps or more have failed in a row (`failing`).
"""

import logging
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable

MOST_FAILURES = 5  # steps in a row, after which a loop counts as failing
JOIN = 2.0  # seconds; a step that waits for a server may take longer
AFTER_DEFECT = 1.0  # seconds

_log = logging.getLogger(__name__)

_failures: Counter[str] = Counter()


class StepThread:
    """A thread that repeats `step` from `start` to `close`.

    `close` waits at most `join` seconds for a running step, or without a limit if `join` is `None`.
    """

    def __init__(self, name: str, join: float | None = JOIN) -> None:
        self._name = name
        self._join = join
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._defect = ""  # the error of the last step, or ""
        self._thread: threading.Thread | None = None

    @abstractmethod
    def step(self) -> float:
        """Do the pending work. Returns the seconds until the next step."""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Run the next step now. Any thread may call this."""
        self._woken.set()

    def close(self) -> None:
        """Stop the thread after the running step. May be called again."""
        self._ended.set()
        self.wake()
        if self._thread is not None:
            self._thread.join(self._join)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                wait = self.step()
            except Exception as error:  # noqa: BLE001 - a defect in one step must not end the thread
                failed(self._name)
                wait = self._failed(error)
            else:
                worked(self._name)
                self._defect = ""
            if not self._ended.is_set():
                self._rest(wait)
        worked(self._name)

    def _failed(self, error: Exception) -> float:
        """Log the error, unless the last step had the same error. Returns the pause in seconds."""
        defect = f"{type(error).__name__}: {error}"
        if defect != self._defect:
            _log.exception("%s: a step failed (tried again)", self._name)
        self._defect = defect
        return AFTER_DEFECT

    def _rest(self, seconds: float) -> None:
        self._woken.wait(seconds)
        self._woken.clear()


class Loop(StepThread):
    def __init__(self, name: str, step: Callable[[], float], join: float | None = JOIN) -> None:
        super().__init__(name, join)
        self._step = step

    def step(self) -> float:
        return self._step()


def failed(loop: str) -> None:
    """Count a failed step of the loop. The caller logs the reason."""
    _failures[loop] += 1


def worked(loop: str) -> None:
    """Reset the count of failed steps, after a success or at the end of the loop."""
    _failures.pop(loop, None)


def failing() -> str:
    """A text that names the failing loops, or "" if there are none."""
    named = sorted(loop for loop, count in _failures.copy().items() if count >= MOST_FAILURES)
    return f"failed {MOST_FAILURES} times or more in a row: {', '.join(named)}" if named else ""


class Backoff:
    """Pauses that start at `first` seconds and double up to `longest`. `next` is the next pause."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self.next = first

    def pause(self) -> float:
        pause, self.next = self.next, min(2 * self.next, self._longest)
        return pause

    def reset(self) -> None:
        self.next = self._first


def boottime() -> float:
    """Seconds since the boot. They include the time in suspend, unlike `time.monotonic`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
