"""Gives blocks back: marks the row first, and deletes the AddressBlock then.

A row that is `returning` never becomes usable: to hand out its addresses again, the node leases a
new block. A sticky block is not deleted, but let go for the next node of its pod. So is a block of
which a lost machine may still use addresses, for any node.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby, islice

from ipam.leases.block_store import BlockStore, Survey
from ipam.leases.objects import AddressBlock
from ipam.leases.sticky import drain
from ipam.store.block_rows import LeasedBlock
from kube.client import ClusterApi
from kube.resources import Conflict, NotFound

HOLD = 600.0  # seconds that one empty block is kept beside those in use
SMALL = 2  # addresses; a block of that size is of a pool that has none to spare
_GRACE = 2.0  # seconds: a block that was just claimed is empty until the ADD takes its address


def give_back(api: ClusterApi, store: BlockStore, instance: str, block: LeasedBlock) -> None:
    """Return a block of `instance` if nothing of it is held. Raises ApiError.

    Without an answer to the first request nothing is marked: the block may still be needed.
    """
    found = None
    with suppress(NotFound):
        found = api.get(AddressBlock, block.name)
    if block.state != "returning" and not store.begin_return(block.name, block.uid):
        return
    holder = "" if found is None else found.spec.holder.instance
    if found is not None and (found.metadata.uid, holder) == (block.uid, instance):
        is_suspect = bool(block.unprobed or block.answered)
        row = store.blocks().get(block.name)
        try:
            if not (block.sticky or is_suspect):
                api.delete(found)
            elif row is not None and (row.uid, row.state) == (block.uid, "returning"):
                drain(api, found, probe=is_suspect)
            else:
                return  # the pod came back, and the block was taken again
        except Conflict:
            return  # the controller wrote to it: later again
        except NotFound:
            pass
    store.forget(block.name, block.uid)


class Empties:
    """Which empty blocks this node does not need, by how long they have been empty.

    A block that was not confirmed in this `boot` stays: the store may lack what is held of it.
    """

    def __init__(self, boot: str) -> None:
        self._boot = boot
        self._since: dict[tuple[str, str], float] = {}

    def surplus(
        self,
        survey: Survey,
        now: float,
        spare: Callable[[str, float], bool],
    ) -> Iterator[LeasedBlock]:
        """Blocks to give back. `spare` says whether a pool has room for a block that is empty since
        then.

        One empty block of a pool is kept for a while, and for good if it is the only one.
        """
        keys = {(each.block.name, each.block.uid) for each in survey.blocks if not each.used}
        self._since = {key: self._since.get(key, now) for key in keys}
        for pool, grouped in groupby(
            sorted(survey.blocks, key=lambda each: (each.block.pool, each.block.first)),
            key=lambda each: each.block.pool,
        ):
            present = [
                each
                for each in grouped
                if each.block.state in ("usable", "draining") and each.block.boot == self._boot
            ]
            empty = [each.block for each in present if not each.used]
            usable = (block for block in empty if block.state == "usable" and not _is_small(block))
            kept = list(islice(usable, 1))
            for block in kept[:]:  # one that was just claimed stays in any case
                since = self._since[block.name, block.uid]
                if self._age(block, now) >= _GRACE and not spare(pool, since):
                    kept.remove(block)
            if len(present) > 1:
                kept = [block for block in kept if self._age(block, now) < HOLD]
            for block in empty:
                if block not in kept and self._age(block, now) >= _GRACE:
                    yield block

    def _age(self, block: LeasedBlock, now: float) -> float:
        since = self._since[block.name, block.uid]
        # One that was let go and taken again is a block that was just claimed.
        return now - (max(since, block.confirmed) if block.sticky else since)


def _is_small(block: LeasedBlock) -> bool:
    """Whether it has nothing to spare: it goes back as soon as it is empty."""
    return block.size <= SMALL or bool(block.sticky) or not block.parts


def returning(survey: Survey) -> Iterable[LeasedBlock]:
    """Blocks whose return was begun."""
    return [each.block for each in survey.blocks if each.block.state == "returning"]


def over(survey: Survey) -> Mapping[str, str]:
    """Name and uid of blocks that are another's, and of which nothing is held any more."""
    return {
        each.block.name: each.block.uid
        for each in survey.blocks
        if each.block.state == "lost" and not each.used
    }
