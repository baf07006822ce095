"""Pools of nv-ipam that overlap, where podfabric leases the addresses of IPPools (`own`).

Each IPPool has an AddressPool of its own, and so blocks of its own. As in mode follow, the older
pool has the addresses that both could give: the younger one leaves them alone. So an AddressPool
excludes what the other pools may give, and what nodes leased or hold by them, as they may have done
that before the pools overlapped, or were divided in this way. CIDRPools have no AddressPool: what
nodes have of them is in shares.

A pool that is gone, or has another range now, may give nothing more there, and its pods run on. So
an AddressPool also excludes the shares of all other pools, and the blocks of each former
AddressPool: one that was made of an IPPool which does not name it any more.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from cni.spec.errors import CNIError
from ipam.addresses import Interval, parse_interval
from ipam.cluster import geometry
from ipam.cluster.api import ClusterApi, NotFound
from ipam.cluster.geometry import why_wrong
from ipam.cluster.nv_ipam.objects import Invalid, NvCIDRPool, NvIPPool, NvPool
from ipam.cluster.nv_ipam.overlaps import Overlaps
from ipam.cluster.nv_ipam.own_pools import key_of, name_of, whole_of
from ipam.cluster.nv_ipam.prefixes import prefix_of
from ipam.cluster.nv_ipam.shares import common, intervals, without
from ipam.cluster.objects import AddressBlock, AddressPool, AddressShare
from ipam.ranges import merged


def beside_now(
    api: ClusterApi, namespace: str, pool: NvIPPool, holding: Collection[str]
) -> Sequence[Interval]:
    """`OwnPools.beside`, as all is now: AddressPools are read before the blocks, since a claim
    reads its AddressPool after its block is there. `holding` are pools by `OwnPools.holding`: the
    shares of no others are read. Raises ApiError, Invalid, CNIError 6."""
    nv_pools = all_pools(api, namespace)
    overlaps = Overlaps(nv_pools)
    pools = {each.metadata.name: each for each in api.list(AddressPool).items}
    blocks = [
        block
        for each in _meeting(pools.values(), pool)
        for block in api.list(AddressBlock, {"spec.pool": each.metadata.name}).items
        if not why_wrong(block, each)
    ]
    shares = [
        share
        for key in sorted({*overlaps.of(pool.key, ()), *holding} - {pool.key})
        for share in api.list(AddressShare, {"spec.pool": key}).items
    ]
    return OwnPools.of(nv_pools, shares, pools, blocks).beside(pool)


def _meeting(pools: Collection[AddressPool], pool: NvIPPool) -> Iterator[AddressPool]:
    """The AddressPools of other IPPools, those that are gone included, that meet this one."""
    whole = pool.network
    for each in pools:
        if key_of(each) not in ("", pool.key):
            run = whole_of(each)
            if run.first <= whole.last and whole.address <= run.last:
                yield each


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
    former: Sequence[AddressPool]  # of IPPools that do not name them any more
    held: dict[str, Sequence[Interval]]  # the addresses of `shares`, as far as they were needed

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
        former = tuple(each for each in pools.values() if _is_former(each, named))
        return cls(named, by_key, pools, by_pool, Overlaps(nv_pools), former, {})

    def beside(self, pool: NvIPPool) -> Sequence[Interval]:
        """What a pool leaves to the others: what those that overlap it may give, and what nodes
        have leased or hold by any. They get no more of this pool's part as soon as their
        AddressPool excludes it: before that all of the part is left to them. Invalid, CNIError 6.
        """
        if self.overlaps.is_private(pool.key):
            return ()
        runs = list[Interval]()
        for key in self.overlaps.of(pool.key, ()):
            other = self.nv_pools[key]
            runs += self.overlaps.part(key)
            if isinstance(other, NvCIDRPool):
                runs += self._unjoined(other)
            else:
                runs += self._leased(pool, other)
        for key in self.shares:
            if key != pool.key and not self.overlaps.is_private(key):
                runs += self._held_by(key)
        for former in self.former:
            if key_of(former) != pool.key and not self.overlaps.is_private(key_of(former)):
                runs += without((whole_of(former),), map(parse_interval, former.spec.exclude))
                runs += map(geometry.interval, self.blocks.get(former.metadata.name, ()))
        return runs

    def holding(self, pool: NvIPPool) -> Collection[str]:
        """The other pools of which there are shares with addresses of this one, pools that are gone
        included. Invalid, CNIError 6."""
        whole = (Interval(pool.network.address, pool.network.last),)
        others = (key for key in self.shares if key != pool.key)
        return {key for key in others if common(self._held_by(key), whole)}

    def present(self, former: AddressPool) -> AddressPool | None:
        """The AddressPool that the IPPool of a former one has now. Invalid, CNIError 6."""
        pool = self.nv_pools.get(key_of(former))
        return self.pools.get(name_of(pool)) if isinstance(pool, NvIPPool) else None

    def _held_by(self, key: str) -> Sequence[Interval]:
        if key not in self.held:
            self.held[key] = merged(run for each in self.shares[key] for run in intervals(each))
        return self.held[key]

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


def _is_former(there: AddressPool, nv_pools: Mapping[str, NvPool]) -> bool:
    """Whether it was made of an IPPool that does not name it any more. Of one whose range cannot be
    read that is not known."""
    key = key_of(there)
    pool = nv_pools.get(key)
    try:
        is_named = isinstance(pool, NvIPPool) and name_of(pool) == there.metadata.name
    except (Invalid, CNIError):
        return False
    return bool(key) and not is_named
