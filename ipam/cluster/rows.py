"""The row of a block that this node has just leased, or leased again, as the store keeps it."""

from contextlib import suppress

import msgspec

from ipam.addresses import Interval
from ipam.blocks import LeasedBlock
from ipam.cluster import geometry
from ipam.cluster.objects import AddressBlock, AddressPool
from ipam.cluster.pools import Pools, Unusable, max_offline
from ipam.cluster.probing import to_probe_again
from ipam.cluster.sticky import holes, row_text
from ipam.ranges import merged


def row_of(
    stored: AddressBlock,
    pool: AddressPool,
    domain: str,
    boot: str,
    at: float,
    unprobed: tuple[Interval, ...],
) -> LeasedBlock:
    """The row of a block that is this node's as of `at` (CLOCK_BOOTTIME) in `boot`. Unusable."""
    covered = geometry.interval(stored)
    return LeasedBlock(
        name=stored.metadata.name,
        uid=stored.metadata.uid,
        space=stored.spec.space,
        pool=stored.spec.pool,
        domains=(domain,),
        first=covered.first,
        last=covered.last,
        kept_out=holes(pool, stored.spec, covered),
        max_offline=max_offline(pool),
        boot=boot,
        confirmed=at,
        sticky=row_text(stored.spec.sticky),
        unprobed=unprobed,
    )


def renewed(row: LeasedBlock, uid: str, pools: Pools) -> LeasedBlock:
    """The row of a block that this node had, and has leased again. ApiError.

    Others may have had it meanwhile, and be lost since: the pool, which is read now, says so.
    """
    unprobed = row.unprobed
    with suppress(Unusable):
        unprobed = merged((*unprobed, *to_probe_again(pools.read(row.pool), row)))
    return msgspec.structs.replace(row, uid=uid, unprobed=unprobed)
