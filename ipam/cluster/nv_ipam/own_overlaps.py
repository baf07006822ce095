"""IPPools of nv-ipam that overlap, where podfabric leases their addresses (`own`).

Each has an AddressPool of its own, and so blocks of its own. As in mode follow, the older pool has
the addresses that both could give: the younger AddressPool excludes them. What nodes leased or held
by the younger one before that, the older AddressPool excludes until they are gone.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from ipam.addresses import Interval, parse_interval
from ipam.cluster import geometry
from ipam.cluster.api import ClusterApi
from ipam.cluster.nv_ipam.objects import NvIPPool
from ipam.cluster.nv_ipam.overlaps import Overlaps
from ipam.cluster.nv_ipam.own_pools import name_of
from ipam.cluster.nv_ipam.shares import intervals, without
from ipam.cluster.objects import AddressBlock, AddressPool, AddressShare


def beside_now(api: ClusterApi, namespace: str, pool: NvIPPool) -> Sequence[Interval]:
    """`OwnPools.beside`, as all is now: AddressPools are read before the blocks, since a claim
    reads its AddressPool after its block is there. Raises ApiError, Invalid, CNIError 6."""
    ippools = api.list(NvIPPool, namespace=namespace).items
    if not Overlaps(ippools).of(pool.key, ()):
        return ()
    pools = {each.metadata.name: each for each in api.list(AddressPool).items}
    blocks = api.list(AddressBlock).items
    return OwnPools.of(ippools, api.list(AddressShare).items, pools, blocks).beside(pool)


class OwnPools(NamedTuple):
    """What is known of all IPPools at one time."""

    ippools: Mapping[str, NvIPPool]  # by key
    shares: Sequence[AddressShare]
    pools: Mapping[str, AddressPool]  # by name
    blocks: Mapping[str, Sequence[AddressBlock]]  # by their AddressPool
    overlaps: Overlaps

    @classmethod
    def of(
        cls,
        ippools: Sequence[NvIPPool],
        shares: Sequence[AddressShare],
        pools: Mapping[str, AddressPool],
        blocks: Sequence[AddressBlock],
    ) -> Self:
        """The same, sorted."""
        by_pool = defaultdict[str, list[AddressBlock]](list)
        for block in blocks:
            by_pool[block.spec.pool].append(block)
        by_key = {pool.key: pool for pool in ippools}
        return cls(by_key, shares, pools, by_pool, Overlaps(ippools))

    def beside(self, pool: NvIPPool) -> Sequence[Interval]:
        """What a pool leaves to others that overlap it: to older ones what these could give, and
        to younger ones what their nodes have leased or hold. Those get no more of it, as soon as
        their AddressPool excludes it; before that all of it is left to them. Invalid, CNIError 6.
        """
        runs = list(self.overlaps.of_older(pool.key))
        for key in self.overlaps.younger(pool.key):
            young = self.ippools[key]
            there = self.pools.get(name_of(young))
            theirs = self.overlaps.of_older(key)
            if there is None or without(theirs, map(parse_interval, there.spec.exclude)):
                runs += theirs
                continue
            runs += map(geometry.interval, self.blocks[there.metadata.name])
            runs += (each.interval for each in young.entries())
            runs += (
                run for each in self.shares if each.spec.pool == key for run in intervals(each)
            )
        return runs
