"""Work that may fail: it is tried again later, and the log says each failure once."""

import logging
from collections.abc import Callable

from base.text import printable
from cni.spec.errors import CNIError
from ipam.cluster.api import ApiError
from ipam.cluster.pools import Unusable

_log = logging.getLogger(__name__)


class LoggedFailures:
    """What could not be done, and why. `api_errors` counts what the API server did not do. `name`
    begins each line of the log."""

    def __init__(self, name: str = "leases") -> None:
        self.api_errors = 0
        self._name = name
        self._told: dict[str, str] = {}
        self._closed = False

    def close(self) -> None:
        """From now on work fails since nothing more is to be done: that is not a failure."""
        self._closed = True

    def guarded(self, what: str, work: Callable[[], object]) -> bool:
        """Do some work; whether it went well."""
        try:
            work()
        except (ApiError, Unusable, CNIError, OSError) as error:
            if self._closed:
                return False
            self.api_errors += isinstance(error, ApiError)
            text = printable(str(error))
            level = logging.DEBUG if self._told.get(what) == text else logging.WARNING
            _log.log(level, "%s: cannot %s: %s", self._name, what, text)
            self._told[what] = text
            return False
        if self._told.pop(what, None):
            _log.info("%s: can %s again", self._name, what)
        return True

    def why(self, what: str) -> str:
        """Why some work could not be done the last time; "" if it was."""
        return f"cannot {what}: {self._told[what]}" if what in self._told else ""
