"""Writes what this node has handed out to the status of its blocks, for people and for counts."""

from collections.abc import Callable
from datetime import UTC, datetime

from msgspec.structs import replace

from ipam.blocks import LeasedBlock
from ipam.cluster.api import Conflict, NotFound
from ipam.cluster.block_store import BlockStore, Survey
from ipam.cluster.objects import AddressBlock, BlockStatus
from ipam.cluster.rest_api import ClusterApi
from ipam.ranges import size_of

EVERY = 10.0  # seconds between two writes of one node, and more in a large cluster


class StatusReports:
    """Writes one status at a time: that of the block whose use has changed most since its last one.
    That may be one that an earlier agent wrote."""

    def __init__(
        self, api: ClusterApi, store: BlockStore, now: Callable[[], datetime] | None = None
    ) -> None:
        self._api = api
        self._store = store
        self._now = now or (lambda: datetime.now(UTC))

    def tell(self, survey: Survey, objects: dict[str, AddressBlock]) -> bool:
        """Write one status if there is news; whether there was. Raises ApiError.

        `objects` are the blocks as they were last seen, and gets the written ones.
        """
        changes = {
            each.block: abs(each.used - objects[each.block.name].status.used)
            for each in survey.blocks
            if each.block.state in ("usable", "draining") and each.block.name in objects
        }
        block = max(changes, key=lambda block: changes[block], default=None)
        if block is None or not changes[block]:
            return False
        holders = {
            str(address - block.first): f"{held.pod_name or held.container_id} {held.ifname}"
            for address, held in sorted(self._store.holders(block.name).items(), reverse=True)
        }
        status = BlockStatus(
            used=len(holders),
            free=_free(block, len(holders)),
            seq=survey.seq,
            confirmed=self._now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            holders=holders,
        )
        try:
            told = replace(objects[block.name], status=status)
            objects[block.name] = self._api.update_status(told)
        except (Conflict, NotFound):
            objects.pop(block.name)  # until it is confirmed again
        return True


def _free(block: LeasedBlock, used: int) -> int:
    """For how many further pods the block has addresses: a sticky one for none but its own."""
    if block.sticky:
        return 0
    return max(0, size_of(block.parts) - used)
