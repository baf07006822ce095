"""Pools of nv-ipam that overlap, where podfabric leases the addresses of IPPools (`own`).

Each IPPool has an AddressPool of its own, and so blocks of its own. As in mode follow, the older
pool has the addresses that both could give: the younger one leaves them alone. So an AddressPool
excludes what the other pools may give, and what nodes leased or hold by them, as they may have done
that before the pools overlapped, or were divided in this way. CIDRPools have no AddressPool: what
nodes have of them is in shares.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from ipam.addresses import Interval, parse_interval
from ipam.cluster import geometry
from ipam.cluster.api import ClusterApi, NotFound
from ipam.cluster.nv_ipam.objects import NvCIDRPool, NvIPPool, NvPool
from ipam.cluster.nv_ipam.overlaps import Overlaps
from ipam.cluster.nv_ipam.own_pools import name_of
from ipam.cluster.nv_ipam.prefixes import prefix_of
from ipam.cluster.nv_ipam.shares import common, intervals, without
from ipam.cluster.objects import AddressBlock, AddressPool, AddressShare


def beside_now(api: ClusterApi, namespace: str, pool: NvIPPool) -> Sequence[Interval]:
    """`OwnPools.beside`, as all is now: AddressPools are read before the blocks, since a claim
    reads its AddressPool after its block is there. Raises ApiError, Invalid, CNIError 6."""
    nv_pools = all_pools(api, namespace)
    if not Overlaps(nv_pools).of(pool.key, ()):
        return ()
    pools = {each.metadata.name: each for each in api.list(AddressPool).items}
    blocks = api.list(AddressBlock).items
    return OwnPools.of(nv_pools, api.list(AddressShare).items, pools, blocks).beside(pool)


def all_pools(api: ClusterApi, namespace: str) -> tuple[NvPool, ...]:
    """All pools of nv-ipam, by consistent reads. ApiError."""
    ippools = pools_of(api, NvIPPool, namespace)
    return (*ippools, *pools_of(api, NvCIDRPool, namespace))


def pools_of(
    api: ClusterApi, kind: type[NvIPPool] | type[NvCIDRPool], namespace: str
) -> tuple[NvPool, ...]:
    """All pools of that kind, by a consistent read; none where it is not installed. ApiError."""
    try:
        return api.list(kind, namespace=namespace).items
    except NotFound:
        return ()


class OwnPools(NamedTuple):
    """What is known of all pools of nv-ipam at one time."""

    nv_pools: Mapping[str, NvPool]  # by key
    shares: Mapping[str, Sequence[AddressShare]]  # by the key of their pool
    pools: Mapping[str, AddressPool]  # by name
    blocks: Mapping[str, Sequence[AddressBlock]]  # by their AddressPool
    overlaps: Overlaps

    @classmethod
    def of(
        cls,
        nv_pools: Sequence[NvPool],
        shares: Sequence[AddressShare],
        pools: Mapping[str, AddressPool],
        blocks: Sequence[AddressBlock],
    ) -> Self:
        """The same, sorted."""
        by_pool = defaultdict[str, list[AddressBlock]](list)
        for block in blocks:
            by_pool[block.spec.pool].append(block)
        by_key = defaultdict[str, list[AddressShare]](list)
        for share in shares:
            by_key[share.spec.pool].append(share)
        named = {pool.key: pool for pool in nv_pools}
        return cls(named, by_key, pools, by_pool, Overlaps(nv_pools))

    def beside(self, pool: NvIPPool) -> Sequence[Interval]:
        """What a pool leaves to those that overlap it: what these may give, and what their nodes
        have leased or hold. They get no more of this pool's part as soon as their AddressPool
        excludes it: before that all of the part is left to them. Invalid, CNIError 6.
        """
        runs = list[Interval]()
        for key in self.overlaps.of(pool.key, ()):
            other = self.nv_pools[key]
            runs += self.overlaps.part(key)
            runs += (run for each in self.shares.get(key, ()) for run in intervals(each))
            if isinstance(other, NvCIDRPool):
                runs += self._unjoined(other)
            else:
                runs += self._leased(pool, other)
        return runs

    def _leased(self, pool: NvIPPool, other: NvIPPool) -> Iterator[Interval]:
        there = self.pools.get(name_of(other))
        whole = other.network
        shared = common(self.overlaps.part(pool.key), (Interval(whole.address, whole.last),))
        if there is None or without(shared, map(parse_interval, there.spec.exclude)):
            yield from shared
            return
        yield from map(geometry.interval, self.blocks.get(there.metadata.name, ()))
        yield from (each.interval for each in other.entries())

    def _unjoined(self, other: NvCIDRPool) -> Iterator[Interval]:
        """Entries of nodes that have no share: their pods may have any address of them, also if the
        pool has another range now."""
        joined = {each.spec.node for each in self.shares.get(other.key, ())}
        for entry in other.status.allocations or ():
            if entry.node not in joined:
                network = prefix_of(entry)
                yield Interval(network.address, network.last)
