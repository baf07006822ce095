"""Work of the lessee that may fail, and is tried again later."""

import logging
from collections.abc import Callable

from base.loops import Complaint
from cni.spec.errors import CNIError
from ipam.cluster.api import ApiError
from ipam.cluster.pools import Unusable

_log = logging.getLogger(__name__)


class LoggedFailures:
    """What could not be done, and why. `api_errors` counts what the API server did not do."""

    def __init__(self) -> None:
        self.api_errors = 0
        self._complaints: dict[str, Complaint] = {}
        self._closed = False

    def close(self) -> None:
        """From now on work fails since nothing more is to be done: that is not a failure."""
        self._closed = True

    def guarded(self, what: str, work: Callable[[], object]) -> bool:
        """Do some work; whether it went well."""
        complaint = self._complaints.setdefault(what, Complaint(_log, f"leases: {what}"))
        try:
            work()
        except (ApiError, Unusable, CNIError) as error:
            if not self._closed:
                self.api_errors += isinstance(error, ApiError)
                complaint.fails(error)
            return False
        complaint.works()
        return True
