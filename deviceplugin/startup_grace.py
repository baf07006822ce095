"""Lists ids that containers already hold as healthy while the node's hardware still starts up.

A node that boots starts its pods again before drivers are loaded, links are trained, subnet
managers have configured ports, and interfaces are up. The kubelet rejects for good a pod with an
unhealthy id. So for the first minute such an id is listed as healthy, unless it was available once
and is not any more. A port that is DOWN (Polling) may be training or may have no cable; only time
tells. Nothing is allocated because of it: the kubelet does not call Allocate for devices that a
container already has, and Allocate checks the real state.

Sources: kubernetes issues 109595 and 125579.
"""

from collections.abc import Collection, Mapping

from deviceplugin.availability import unavailable
from deviceplugin.checkpoint import Allocation, AllocationKey
from deviceplugin.pools.pool import Pool

GRACE = 60.0  # seconds from the plugin's start


class StartupGrace:
    """For the allocations in `held` at the time `began` (time.monotonic()). Not thread-safe."""

    def __init__(self, held: Collection[AllocationKey], began: float) -> None:
        self._waiting = set(held)  # those that were never available since
        self._end = began + GRACE

    @property
    def pending(self) -> bool:
        """Some listings will change by time alone."""
        return bool(self._waiting)

    def expected_at_start(
        self,
        pool: Pool,
        now_unavailable: Mapping[str, str],
        held: Mapping[str, Allocation],
        elsewhere: Mapping[str, str],
        now: float,
    ) -> frozenset[str]:
        """The unavailable ids of a pool that are listed as healthy for now.

        `now_unavailable` is what `unavailable` tells now, with these arguments.
        """
        if now >= self._end:
            self._waiting.clear()
        if not self._waiting:
            return frozenset()
        resource = pool.config.resource
        self._waiting -= {
            (resource, slot.id) for slot in pool.slots if slot.id not in now_unavailable
        }
        waiting = {
            device_id
            for device_id in held
            if device_id in now_unavailable and (resource, device_id) in self._waiting
        }
        return frozenset(waiting.difference(unavailable(pool, None, held, elsewhere)))
