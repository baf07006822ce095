"""The row of a block that this node has just leased, or leased again, as the store keeps it."""

from ipam.addresses import Interval, parse
from ipam.blocks import LeasedBlock
from ipam.cluster import geometry
from ipam.cluster.objects import AddressBlock, AddressPool, BlockSpec
from ipam.cluster.pools import max_offline
from ipam.cluster.sticky import holes, row_text


def row_of(
    stored: AddressBlock,
    pool: AddressPool,
    domain: str,
    boot: str,
    at: float,
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
        unprobed=to_probe(stored.spec, covered),
    )


def to_probe(spec: BlockSpec, covered: Interval) -> tuple[Interval, ...]:
    """What of a block its holder must probe before the first use: a lost machine may have it."""
    if not spec.probe:
        return ()
    if not spec.sticky.reservation:
        return (covered,)
    address = parse(spec.sticky.address)
    return (Interval(address, address),)
