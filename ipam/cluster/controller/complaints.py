"""Says once what does not work, and again now and then; and once that it works again."""

import logging
import re
import time
from collections.abc import Callable

AGAIN_AFTER = 300.0  # seconds
MOST_TEXTS = 20
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of an object, in a library's text: another one each time


class Complaint:
    """About one thing, `what`, on one log."""

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
        self._log.warning("%s: %s", self._what, error)

    def works(self) -> None:
        """Say so, if it did not before."""
        if self._said:
            self._said.clear()
            self._log.info("%s: works again", self._what)
