"""Runs work that may fail. The caller tries again later. The log shows each failure once."""

import logging
from collections.abc import Callable

from base.problems import Problems
from base.text import printable
from cni.spec.errors import CNIError
from ipam.leases.pool_cache import Unusable
from kube.resources import ApiError

_log = logging.getLogger(__name__)


class LoggedFailures:
    """`name` begins each log line."""

    def __init__(self, name: str = "leases") -> None:
        self.api_errors = 0
        self._name = name
        self._problems = Problems(_log)
        self._why: dict[str, str] = {}
        self._closed = False

    def close(self) -> None:
        """Log no more failures, because work fails when the process ends."""
        self._closed = True

    def guarded(self, what: str, work: Callable[[], object]) -> bool:
        """Returns whether the work succeeded."""
        topic = f"{self._name}: {what}"
        try:
            work()
        except (ApiError, Unusable, CNIError, OSError) as error:
            if not self._closed:
                self.api_errors += isinstance(error, ApiError)
                self._why[what] = f"cannot {what}: {printable(str(error))}"
                self._problems.tell(topic, error)
            return False
        self._why.pop(what, None)
        self._problems.tell(topic, None)
        return True

    def why(self, what: str) -> str:
        """The reason why this work failed last time, or ""."""
        return self._why.get(what, "")
