"""Collects AddressRequests that nobody deletes."""

import logging
from collections.abc import Callable, Iterable, Mapping

from ipam.cluster.api import ClusterApi, Conflict, NotFound, Refused
from ipam.cluster.controller.machines import Machines
from ipam.cluster.controller.pool_conditions import is_exhausted
from ipam.cluster.controller.steps import Steps
from ipam.cluster.objects import AddressPool, AddressRequest

KEPT = 3600.0  # seconds: a node that still needs addresses asks again

_log = logging.getLogger(__name__)


class Requests:
    """The memory of one leader: since when it has seen each request."""

    def __init__(self, api: ClusterApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._since: dict[str, float] = {}  # by uid

    def collect(
        self,
        requests: Iterable[AddressRequest],
        pools: Mapping[str, AddressPool],
        machines: Machines,
        steps: Steps,
    ) -> int:
        """Delete the requests that nobody waits for; how many remain."""
        now = self._clock()
        requests = tuple(requests)
        self._since = {
            request.metadata.uid: self._since.get(request.metadata.uid, now) for request in requests
        }
        left = len(requests)

        def delete(doomed: tuple[AddressRequest, str]) -> None:
            nonlocal left
            request, why = doomed
            try:
                self._api.delete(request)
            except NotFound:
                left -= 1
            except (Conflict, Refused) as error:
                _log.info("request %s: left: %s", request.metadata.name, error)
            else:
                left -= 1
                _log.info("request %s: deleted: %s", request.metadata.name, why)

        doomed = [
            (request.metadata.name, (request, why))
            for request in requests
            if (why := _why(request, pools, machines, now - self._since[request.metadata.uid]))
        ]
        steps.each("requests", doomed, delete)
        return left


def _why(
    request: AddressRequest, pools: Mapping[str, AddressPool], machines: Machines, age: float
) -> str | None:
    """Why a request is to be deleted; None if somebody may wait for it."""
    pool = pools.get(request.spec.pool)
    if not machines.has(request.spec.node):
        return f"no node is named {request.spec.node}"
    if pool is None:
        return f"there is no pool {request.spec.pool}"
    if not request.spec.address and pool.status.block_size and not is_exhausted(pool):
        return f"{request.spec.pool} has free blocks"
    return f"it is older than {KEPT:.0f} s" if age >= KEPT else None
