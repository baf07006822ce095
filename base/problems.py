"""Logs a problem once while it lasts, and again after AGAIN_AFTER."""

import logging
import re
import threading
import time
from collections.abc import Callable, Hashable

from base.text import printable

AGAIN_AFTER = 300.0  # seconds
MOST_TEXTS = 20  # that `Problems` remembers for a topic
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of an object, in a library's text; it differs each time


class Problems:
    """The current problems, by topic. Only one thread at a time may use a topic."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._said: dict[str, dict[str, float]] = {}  # the time of the log line, by topic and text

    def tell(self, topic: str, problem: str | Exception | None) -> None:
        """Log a problem, unless the same text was logged recently. `None` ends the problem."""
        if problem is None:
            if self._said.pop(topic, None):
                self._log.info("%s: works again", topic)
            return
        said = self._said.setdefault(topic, {})
        text, now = _ADDRESS.sub("0x", str(problem)), self._clock()
        if now - said.get(text, float("-inf")) < AGAIN_AFTER:
            return
        if len(said) >= MOST_TEXTS:
            said.clear()
        said[text] = now
        self._log.warning("%s: %s", topic, printable(str(problem)))


class Seldom:
    """Limits how often the log has a message that a tenant can cause. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: dict[Hashable, float] = {}  # the time of the log line

    def may_say(self, what: Hashable, quiet: float) -> bool:
        """Whether the caller may log `what`. Returns True once in `quiet` seconds."""
        now = time.monotonic()
        with self._lock:
            self._said = {key: at for key, at in self._said.items() if now - at < quiet}
            if what in self._said:
                return False
            self._said[what] = now
            return True
