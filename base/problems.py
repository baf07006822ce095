"""Logs what is wrong once, while it stays the same."""

import logging


class Problems:
    """What is wrong now, by topic. One thread at a time may use it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._known: dict[str, str] = {}

    def tell(self, topic: str, problem: str | None) -> None:
        """Log the problem of a topic unless it is known; None: there is none any more."""
        if problem is None:
            self._known.pop(topic, None)
        elif problem != self._known.get(topic):
            self._log.warning("%s: %s", topic, problem)
            self._known[topic] = problem
