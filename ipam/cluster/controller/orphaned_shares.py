"""Deletes AddressShares of nodes that are gone for as long as a block of theirs would be kept.

A Node object that comes back in time keeps its shares.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

from ipam.cluster.api import ClusterApi, Conflict, NotFound
from ipam.cluster.controller.machines import Machines
from ipam.cluster.controller.steps import Steps
from ipam.cluster.objects import AddressShare

GONE_FOR = 2700.0  # seconds without Node object and pods: `nodeGoneAfter`, `maxOffline`, 5 minutes

_log = logging.getLogger(__name__)


class OrphanedShares:
    """The memory of one leader: since when a share's node is gone. A new leader waits again."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._gone_since: Mapping[str, float] = {}  # by node

    def collect(
        self,
        shares: Iterable[AddressShare],
        machines: Machines,
        has_pods: Callable[[str], bool],
        read_at: float,
        steps: Steps,
    ) -> None:
        """Delete what is due. The nodes in `machines` were asked for at `read_at`."""
        orphans = [share for share in shares if not machines.has(share.spec.node)]
        gone: dict[str, float] = {}

        def look(node: str) -> None:
            if not has_pods(node):
                gone[node] = self._gone_since.get(node, read_at)

        nodes = sorted({share.spec.node for share in orphans})
        steps.each("nodes of shares", [(node, node) for node in nodes], look)
        self._gone_since = gone

        def delete(share: AddressShare) -> None:
            try:
                self._api.delete(share)
            except (Conflict, NotFound) as error:
                _log.info("share %s: left: %s", share.metadata.name, error)
            else:
                _log.warning(
                    "share %s: deleted: no Node and no pod of %s for %.0f minutes",
                    share.metadata.name,
                    share.spec.node,
                    GONE_FOR / 60,
                )

        due = {node for node, since in gone.items() if read_at - since >= GONE_FOR}
        doomed = [(share.metadata.name, share) for share in orphans if share.spec.node in due]
        steps.each("shares", doomed, delete)
