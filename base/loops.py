"""The loops of this process that go on after an unexpected error.

One defect must not end a loop. But a loop that does nothing any more except to fail must show: the
health of the process asks `failing`.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable

from base.text import printable

AGAIN_AFTER = 300.0  # seconds
MOST_TEXTS = 20
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of an object, in a library's text: another one each time
MOST_FAILURES = 5  # in a row, until a loop counts as failing

_failures: Counter[str] = Counter()


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


class Complaint:
    """Says on a log once that `what` does not work, and again now and then; and that it works
    again."""

    def __init__(
        self, log: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._what = what
        self._clock = clock
        self._said: dict[str, float] = {}

    def fails(self, error: Exception) -> None:
        """Say the error, unless it was said in the last minutes."""
        text, now = _ADDRESS.sub("0x", str(error)), self._clock()
        last = self._said.get(text)
        if last is not None and now - last < AGAIN_AFTER:
            return
        if len(self._said) >= MOST_TEXTS:
            self._said.clear()
        self._said[text] = now
        self._log.warning("%s: %s", self._what, printable(str(error)))

    def works(self) -> None:
        """Say so, if it did not before."""
        if self._said:
            self._said.clear()
            self._log.info("%s: works again", self._what)
