"""Work of the lessee that may fail: it is tried again later, and the log says each failure once."""

import logging
from collections.abc import Callable

from base.text import printable
from cni.spec.errors import CNIError
from ipam.cluster.api import ApiError
from ipam.cluster.pools import Unusable

_log = logging.getLogger(__name__)


class LoggedFailures:
    """What could not be done, and why. `api_errors` counts what the API server did not do."""

    def __init__(self) -> None:
        self.api_errors = 0
        self._told: dict[str, str] = {}
        self._closed = False

    def close(self) -> None:
        """From now on work fails since nothing more is to be done: that is not a failure."""
        self._closed = True

    def guarded(self, what: str, work: Callable[[], object]) -> bool:
        """Do some work; whether it went well."""
        try:
            work()
        except (ApiError, Unusable, CNIError) as error:
            if self._closed:
                return False
            self.api_errors += isinstance(error, ApiError)
            text = printable(str(error))
            level = logging.DEBUG if self._told.get(what) == text else logging.WARNING
            _log.log(level, "leases: cannot %s: %s", what, text)
            self._told[what] = text
            return False
        if self._told.pop(what, None):
            _log.info("leases: can %s again", what)
        return True
