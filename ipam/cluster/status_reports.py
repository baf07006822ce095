"""Writes what this node has handed out to the status of its blocks, for people and for counts."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from ipam.blocks import LeasedBlock
from ipam.cluster.api import ClusterApi, Conflict, NotFound
from ipam.cluster.block_store import BlockStore, Survey, Surveyed
from ipam.cluster.objects import AddressBlock, BlockStatus

EVERY = 10.0  # seconds between two writes of one node, and more in a large cluster


class _Published(NamedTuple):
    """What a status said of the block with this uid."""

    uid: str
    used: int


class StatusReports:
    """Writes one status at a time: that of the block that has changed most since its last one."""

    def __init__(
        self, api: ClusterApi, store: BlockStore, now: Callable[[], datetime] | None = None
    ) -> None:
        self._api = api
        self._store = store
        self._now = now or (lambda: datetime.now(UTC))
        self._told: dict[str, _Published] = {}  # by block

    def tell(self, survey: Survey, objects: dict[str, AddressBlock]) -> bool:
        """Write one status if there is news; whether there was. Raises ApiError.

        `objects` are the blocks as they were last seen, and gets the written ones.
        """
        changes = {
            each.block.name: self._changes(each, objects[each.block.name])
            for each in survey.blocks
            if each.block.state in ("usable", "draining") and each.block.name in objects
        }
        name = max(changes, key=lambda name: changes[name], default=None)
        if name is None or not changes[name]:
            return False
        block = next(each.block for each in survey.blocks if each.block.name == name)
        self._tell(block, survey.seq, objects)
        return True

    def _tell(self, block: LeasedBlock, seq: int, objects: dict[str, AddressBlock]) -> None:
        """Write the status of a block that is among `objects`. Raises ApiError."""
        name = block.name
        holders = {
            str(address - block.first): f"{held.pod_name or held.container_id} {held.ifname}"
            for address, held in sorted(self._store.holders(name).items(), reverse=True)
        }
        status = BlockStatus(
            used=len(holders),
            free=_free(block, len(holders)),
            seq=seq,
            confirmed=self._now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            holders=holders,
        )
        try:
            objects[name] = self._api.update_status(
                msgspec.structs.replace(objects[name], status=status)
            )
        except (Conflict, NotFound):
            objects.pop(name)  # until it is confirmed again
            return
        self._told[name] = _Published(block.uid, status.used)

    def forget_all_but(self, present: Mapping[str, object]) -> None:
        """Forget the reports of blocks that are gone."""
        self._told = {name: told for name, told in self._told.items() if name in present}

    def _changes(self, each: Surveyed, found: AddressBlock) -> int:
        """By how many addresses its use has changed."""
        return abs(each.used - self._last(each.block, found))

    def _last(self, block: LeasedBlock, found: AddressBlock) -> int:
        """How many were used by the last status: at first the one that an earlier agent wrote."""
        told = self._told.get(block.name)
        return told.used if told and told.uid == block.uid else found.status.used


def _free(block: LeasedBlock, used: int) -> int:
    """For how many further pods the block has addresses: a sticky one for none but its own."""
    if block.sticky:
        return 0
    return max(0, sum(part.last - part.first + 1 for part in block.parts) - used)
