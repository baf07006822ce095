"""A thread that does what is due, and waits until more is."""

import logging
import threading
from abc import abstractmethod

from base import loops

JOIN = 2.0  # seconds; a request to a server that gives no answer may take longer
_AFTER_DEFECT = 5.0  # seconds

_log = logging.getLogger(__name__)


class StepThread:
    """Without `start`, `step` does what is due. `name` is the thread's, and the log's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    @abstractmethod
    def step(self) -> float:
        """Do what is due; for how many seconds nothing is due then."""

    def start(self) -> None:
        """Work in a thread of its own until `close`."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something has changed, or a caller waits."""
        self._wake.set()

    def close(self) -> None:
        """Begin nothing more. Waits for what is under way, but not for an answer that may never
        come: what it changes then is what a crash would leave."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(JOIN)

    def _run(self) -> None:
        while not self._closed:
            try:
                wait = self.step()
            except Exception:  # noqa: BLE001 - a defect in one step must not end the thread
                _log.exception("%s: a step failed", self._name)
                loops.failed(self._name)
                wait = _AFTER_DEFECT
            else:
                loops.worked(self._name)
            self._rest(wait)
        loops.worked(self._name)

    def _rest(self, seconds: float) -> None:
        """Wait for so long, or until `wake` or `close`."""
        self._wake.wait(seconds)
        self._wake.clear()
