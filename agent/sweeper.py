"""Sweeps in a thread: when the agent starts, and then each minute.

A kill or a reboot is not all that leaves an attachment behind. Multus forgets what a pod has with
its first DEL, also if that fails (unless `retryDeleteOnError` is set), and if the pod is gone from
the API server by then, it answers the runtime's next DEL itself. So nobody repeats a DEL that
failed, but the agent.
"""

import logging
import time
from collections.abc import Callable, Sequence

from agent.observe.metrics import Metrics
from base.loop import StepThread
from cni.attachments.orphans import Outcome
from cni.spec.errors import CNIError

EVERY = 60.0  # seconds

_log = logging.getLogger(__name__)


class Sweeper(StepThread):
    """Sweeps now and `every` so many seconds, until `close`, which waits for no sweep.

    The log has what a sweep did, and what it could not do unless the sweep before said the same.
    """

    def __init__(
        self, sweep: Callable[[], Sequence[Outcome]], metrics: Metrics, every: float = EVERY
    ) -> None:
        super().__init__("sweep", join=0.0)
        self._sweep = sweep
        self._metrics = metrics
        self._every = every
        self._told: frozenset[str] | None = None  # None before the first sweep
        self.start()

    def step(self) -> float:
        """Sweep once."""
        started = time.monotonic()
        outcomes = self._sweep()
        removed = sum(outcome.removed for outcome in outcomes)
        self._metrics.swept(removed=removed, errors=len(outcomes) - removed)
        is_first = self._told is None
        self._tell([str(outcome) for outcome in outcomes])
        if removed or is_first:
            _log.info("sweep: %d removed in %.1f s", removed, time.monotonic() - started)
        return self._every

    def _failed(self, error: Exception) -> float:
        self._metrics.swept(removed=0, errors=1)
        self._tell([str(error)], trace=not isinstance(error, CNIError))
        return self._every

    def _tell(self, texts: Sequence[str], *, trace: bool = False) -> None:
        for text in texts:
            if text not in (self._told or ()):
                _log.warning("sweep: %s", text, exc_info=trace)
        self._told = frozenset(texts)
