"""The row of a block that this node has just leased, as the store keeps it."""

from ipam.addresses import parse
from ipam.blocks import LeasedBlock
from ipam.cluster import geometry
from ipam.cluster.objects import AddressBlock, AddressPool
from ipam.cluster.pools import max_offline
from ipam.cluster.sticky import holes, row_text


def row_of(
    stored: AddressBlock, pool: AddressPool, domain: str, boot: str, at: float
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
        rails=tuple(map(parse, stored.spec.rails)),
        sticky=row_text(stored.spec.sticky),
    )
