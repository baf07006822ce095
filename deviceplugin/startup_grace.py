"""Ids that containers hold from before the plugin began, while the hardware is still on its way.

A node that boots takes its pods up again before drivers are loaded, links are trained, subnet
managers have come by and interfaces are up. The kubelet rejects for good a pod one of whose ids is
unhealthy then. So for a minute such an id is listed as healthy, unless it was fit since and is not
any more: until then a port that is DOWN (Polling) may be one that trains or one without a cable,
and no time shorter than that minute tells. Nothing is handed out on the strength of it: the
kubelet calls no Allocate for what a container has, and that goes by the truth.

Sources: kubernetes issues 109595 and 125579.
"""

from collections.abc import Collection, Mapping

from deviceplugin.availability import barred
from deviceplugin.checkpoint import Allocation
from deviceplugin.ledger import Key
from deviceplugin.pools.pool import Pool

GRACE = 60.0  # seconds from the plugin's start


class Grace:
    """From `began`, a monotonic clock's seconds, for the `held` of then. One thread at a time."""

    def __init__(self, held: Collection[Key], began: float) -> None:
        self._waiting = set(held)  # never fit since
        self._end = began + GRACE

    @property
    def pending(self) -> bool:
        """Some listings will change by time alone."""
        return bool(self._waiting)

    def hoped(
        self,
        pool: Pool,
        unfit: Mapping[str, str],
        held: Mapping[str, Allocation],
        elsewhere: Mapping[str, str],
        now: float,
    ) -> frozenset[str]:
        """Those of the `unfit` ids of a pool that are to be listed as healthy nevertheless.

        The arguments are those of `fitness.unfit`, whose answer of now is one of them.
        """
        if now >= self._end:
            self._waiting.clear()
        if not self._waiting:
            return frozenset()
        name = pool.config.resource
        self._waiting -= {(name, slot.id) for slot in pool.slots if slot.id not in unfit}
        waiting = {one for one in held if one in unfit and (name, one) in self._waiting}
        slots = [slot for one in waiting if (slot := pool.slot(one)) is not None]
        return frozenset(waiting.difference(barred(pool, slots, held, elsewhere)))
