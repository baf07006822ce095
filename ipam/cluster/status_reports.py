"""Writes what this node has handed out to the status of its blocks, for people and for counts."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import msgspec

from ipam.blocks import LeasedBlock
from ipam.cluster.api import ClusterApi, Conflict, NotFound
from ipam.cluster.block_store import BlockStore, Survey
from ipam.cluster.objects import AddressBlock, BlockStatus

EVERY = 10.0  # seconds between two writes of one node, and more in a large cluster


class StatusReports:
    """Writes one status at a time: that of the block that has changed most since its last one."""

    def __init__(
        self, api: ClusterApi, store: BlockStore, now: Callable[[], datetime] | None = None
    ) -> None:
        self._api = api
        self._store = store
        self._now = now or (lambda: datetime.now(UTC))
        self._told: dict[str, tuple[str, int]] = {}  # by block: its uid, and how many were used

    def tell(self, survey: Survey, objects: dict[str, AddressBlock]) -> bool:
        """Write one status if there is news; whether there was. Raises ApiError.

        `objects` are the blocks as they were last seen, and gets what was written.
        """
        changes = {
            each.block.name: abs(each.used - self._last(each.block, objects[each.block.name]))
            for each in survey.blocks
            if each.block.state in ("usable", "draining") and each.block.name in objects
        }
        name = max(changes, key=lambda name: changes[name], default=None)
        if name is None or not changes[name]:
            return False
        block = next(each.block for each in survey.blocks if each.block.name == name)
        holders = {
            str(block.index_of(address)): f"{held.pod_name or held.container_id} {held.ifname}"
            for address, held in sorted(self._store.holders(name).items(), reverse=True)
        }
        status = BlockStatus(
            used=len(holders),
            free=block.size - len(holders),
            seq=survey.seq,
            confirmed=self._now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            holders=holders,
        )
        try:
            objects[name] = self._api.update_status(
                msgspec.structs.replace(objects[name], status=status)
            )
        except (Conflict, NotFound):
            objects.pop(name)  # until it is confirmed again
            return True
        self._told[name] = block.uid, len(holders)
        return True

    def forget_all_but(self, present: Mapping[str, object]) -> None:
        """Forget what was told of blocks that are gone."""
        self._told = {name: told for name, told in self._told.items() if name in present}

    def _last(self, block: LeasedBlock, found: AddressBlock) -> int:
        """How many were used by the last status: at first the one that an earlier agent wrote."""
        uid, used = self._told.get(block.name, ("", 0))
        return used if uid == block.uid else found.status.used
