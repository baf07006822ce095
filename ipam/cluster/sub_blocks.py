"""The borrower's side of ceding: it leases one address that the holder of a block has ceded.

The sub-block is POSTed first, as Pending; then the block that covers it is read. Only if that one
lists the address in `ceded`, and is Active, may the sub-block be used. The holder writes first and
looks for sub-blocks then, so one of the two sees the other.
"""

import math
import uuid
from collections.abc import Callable
from contextlib import suppress

import msgspec

from ipam.addresses import text
from ipam.blocks import LeasedBlock
from ipam.cluster.api import ClusterApi, Conflict, NotFound
from ipam.cluster.block_store import BlockStore
from ipam.cluster.claims import post
from ipam.cluster.geometry import Geometry
from ipam.cluster.names import single_prefix, sub_block_name
from ipam.cluster.objects import AddressBlock, AddressPool, BlockSpec, Holder, Meta
from ipam.cluster.pools import kept_out, max_offline
from ipam.cluster.probing import to_probe_below


class SubBlocks:
    """Leases sub-blocks for `holder`. `clock` is CLOCK_BOOTTIME."""

    def __init__(
        self, api: ClusterApi, store: BlockStore, holder: Holder, clock: Callable[[], float]
    ) -> None:
        self._api = api
        self._store = store
        self._holder = holder
        self._clock = clock

    def claim(
        self, pool: AddressPool, blocks: Geometry, address: int, domain: str
    ) -> AddressBlock | None:
        """Lease an address of the pool that is ceded; None if it is another's, or not ceded.

        Raises ApiError, and Unusable.
        """
        space = pool.status.space
        spec = BlockSpec(
            pool=pool.metadata.name,
            space=space,
            first=text(address),
            prefix=single_prefix(address),
            state="Pending",
            holder=self._holder,
            nonce=str(uuid.uuid4()),
            max_offline_seconds=math.ceil(max_offline(pool)),
            cover=blocks.name(space, blocks.index(address)),
        )
        new = AddressBlock(metadata=Meta(name=sub_block_name(space, address)), spec=spec)
        stored, _ = post(self._api, self._clock, new)
        if stored is None:
            return None
        at = self._clock()
        cover = cover_of(self._api, stored)
        if cover is None or not may_begin(stored, cover):
            with suppress(NotFound, Conflict):  # what remains is found by the next confirmation
                self._api.delete(stored)
            return None
        try:
            spec = msgspec.structs.replace(stored.spec, state="Active")
            active = self._api.update(msgspec.structs.replace(stored, spec=spec))
        except (Conflict, NotFound):
            return None  # the controller takes this node for dead: the next confirmation answers
        self._store.put(
            LeasedBlock(
                name=active.metadata.name,
                uid=active.metadata.uid,
                space=space,
                pool=active.spec.pool,
                domains=(domain,),
                first=address,
                last=address,
                kept_out=kept_out(pool),
                cover=active.spec.cover,
                max_offline=max_offline(pool),
                boot=self._holder.boot,
                confirmed=at,
                unprobed=to_probe_below(cover, address),
            )
        )
        return active


def is_ceded(api: ClusterApi, block: AddressBlock) -> bool:
    """Whether a sub-block may be used: its cover has ceded the address. Read it after the POST."""
    cover = cover_of(api, block)
    return cover is not None and may_begin(block, cover)


def cover_of(api: ClusterApi, block: AddressBlock) -> AddressBlock | None:
    """The block that a sub-block's address is in, as it is now; None if there is none."""
    try:
        return api.get(AddressBlock, block.spec.cover)
    except NotFound:
        return None


def may_begin(block: AddressBlock, cover: AddressBlock) -> bool:
    """Whether the holder of a block that was read after its sub-block was POSTed has ceded it."""
    return cover.spec.state == "Active" and block.spec.first in cover.spec.ceded
