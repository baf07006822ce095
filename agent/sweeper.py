"""Sweeps in a thread: when the agent starts, and then each minute.

A kill or a reboot is not all that leaves an attachment behind. Multus forgets what a pod has with
its first DEL, also if that fails (unless `retryDeleteOnError` is set), and if the pod is gone from
the API server by then, it answers the runtime's next DEL itself. So nobody repeats a DEL that
failed, but the agent.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from agent.metrics import Metrics
from base import loops
from cni.attachments.sweep import Outcome
from cni.spec.errors import CNIError

EVERY = 60.0  # seconds

_log = logging.getLogger(__name__)


class Sweeper:
    """Calls `sweep` now, and again `every` so many seconds, until `close`.

    The log has what a sweep did, and what it could not do unless the sweep before said the same.
    """

    def __init__(
        self, sweep: Callable[[], Sequence[Outcome]], metrics: Metrics, every: float = EVERY
    ) -> None:
        self._sweep = sweep
        self._metrics = metrics
        self._every = every
        self._told: frozenset[str] | None = None  # None before the first sweep
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="sweep", daemon=True).start()

    def close(self) -> None:
        """Begin no other sweep. One that is under way goes on: it may wait for the kernel."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._once()
            self._ended.wait(self._every)

    def _once(self) -> None:
        started = time.monotonic()
        try:
            outcomes = self._sweep()
        except Exception as error:  # noqa: BLE001 - the agent serves, swept or not
            self._metrics.swept(removed=0, errors=1)
            self._tell([str(error)], trace=not isinstance(error, CNIError))
            loops.failed("sweep")
            return
        loops.worked("sweep")
        removed = sum(outcome.removed for outcome in outcomes)
        self._metrics.swept(removed=removed, errors=len(outcomes) - removed)
        is_first = self._told is None
        self._tell([str(outcome) for outcome in outcomes])
        if removed or is_first:
            _log.info("sweep: %d removed in %.1f s", removed, time.monotonic() - started)

    def _tell(self, texts: Sequence[str], *, trace: bool = False) -> None:
        for text in texts:
            if text not in (self._told or ()):
                _log.warning("sweep: %s", text, exc_info=trace)
        self._told = frozenset(texts)
