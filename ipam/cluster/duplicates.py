"""Tells people of addresses that other pods have, or may get: in the log, and by events."""

import logging
from collections.abc import Mapping

from ipam.addresses import text
from ipam.cluster.events import PendingEvents, pod_of
from ipam.store import Reservation

_MOST_NAMED = 8  # addresses of a block

_log = logging.getLogger(__name__)


class Duplicates:
    """Those of the pods of a node."""

    def __init__(self, events: PendingEvents, node: str) -> None:
        self._events = events
        self._node = node

    def lost(self, block: str, why: str, held: Mapping[int, Reservation]) -> None:
        """The block is another node's now, and pods hold addresses of it."""
        addresses = ", ".join(text(address) for address in sorted(held)[:_MOST_NAMED]) or "none"
        message = (
            f"AddressBlock {block} is not this node's any more: {why}. Pods of node "
            f"{self._node} hold {addresses} of it: delete them, since others may get the same ones"
        )
        _log.error("leases: %s", message)
        self._events.of_block("AddressBlockLost", message, block)
        for reservation in held.values():
            self._events.of_pod("AddressConflict", message, pod_of(reservation))
