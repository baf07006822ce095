"""A thread that does what is due, and waits until more is; its pauses and its clock.

One defect must not end such a loop. But a loop that does nothing any more except to fail must show:
the health of the process asks `failing`.
"""

import logging
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable

MOST_FAILURES = 5  # in a row, until a loop counts as failing
JOIN = 2.0  # seconds; a request to a server that gives no answer may take longer
AFTER_DEFECT = 1.0  # seconds

_log = logging.getLogger(__name__)

_failures: Counter[str] = Counter()


class StepThread:
    """Without `start`, `step` does what is due. `name` is the thread's, and the log's.

    `close` waits `join` seconds for what is under way, None: until it ends.
    """

    def __init__(self, name: str, join: float | None = JOIN) -> None:
        self._name = name
        self._join = join
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._defect = ""  # of the last step
        self._thread: threading.Thread | None = None

    @abstractmethod
    def step(self) -> float:
        """Do what is due; for how many seconds nothing is due then."""

    def start(self) -> None:
        """Work in a thread of its own until `close`."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something has changed, or a caller waits. From any thread."""
        self._woken.set()

    def close(self) -> None:
        """Begin nothing more. Waits for what is under way, but not for an answer that may never
        come: what it changes then is what a crash would leave. May be called again."""
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
        """Log why a step failed, unless that has not changed; for how many seconds to rest then."""
        defect = f"{type(error).__name__}: {error}"
        if defect != self._defect:
            _log.exception("%s: a step failed (tried again)", self._name)
        self._defect = defect
        return AFTER_DEFECT

    def _rest(self, seconds: float) -> None:
        """Wait for so long, or until `wake` or `close`."""
        self._woken.wait(seconds)
        self._woken.clear()


class Loop(StepThread):
    """A StepThread whose step is a function."""

    def __init__(self, name: str, step: Callable[[], float], join: float | None = JOIN) -> None:
        super().__init__(name, join)
        self._step = step

    def step(self) -> float:
        """Do what is due."""
        return self._step()


def failed(loop: str) -> None:
    """Count that the loop has failed. Who calls this has logged why."""
    _failures[loop] += 1


def worked(loop: str) -> None:
    """Forget the failures of the loop: it has done its work, or is over."""
    _failures.pop(loop, None)


def failing() -> str:
    """Which loops fail again and again, "" if none does."""
    named = sorted(loop for loop, count in _failures.copy().items() if count >= MOST_FAILURES)
    return f"failed {MOST_FAILURES} times or more in a row: {', '.join(named)}" if named else ""


class Backoff:
    """Pauses of `first` seconds, then twice as many, up to `longest`. `next` is the next one."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self.next = first

    def pause(self) -> float:
        """How many seconds to wait now."""
        pause, self.next = self.next, min(2 * self.next, self._longest)
        return pause

    def reset(self) -> None:
        """An attempt went well."""
        self.next = self._first


def boottime() -> float:
    """Seconds since the machine booted, suspend included: `time.monotonic` stands still in it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
