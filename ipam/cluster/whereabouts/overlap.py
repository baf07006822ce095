"""What whereabouts' objects mean for pools that overlap.

An address of one network name may be in several pools, and a block that is leased by one of them
is handed out for all. So a pool is used by the strictest `compat` of those that it overlaps. Each
node decides that alone, by what the API server says of the pools: no controller is needed.
"""

from collections.abc import Iterable, Sequence

from ipam.addresses import Network
from ipam.cluster.objects import AddressPool, Compat
from ipam.cluster.rails import Rails

_STRICTER: Sequence[Compat] = ("None", "Read", "Coexist")


def strictest(pool: AddressPool, others: Iterable[AddressPool]) -> Compat:
    """The strictest `compat` of a pool and of those others of its network name that overlap it, on
    any rail."""
    mine = _networks(pool)
    return max(
        (
            each.spec.compat
            for each in (pool, *others)
            if each is pool
            or (
                each.spec.network_name == pool.spec.network_name
                and any(_meet(one, other) for one in mine for other in _networks(each))
            )
        ),
        key=_STRICTER.index,
    )


def has(pool: AddressPool, space: str, first: int) -> bool:
    """Whether the addresses of a block are the pool's: its space, and its first address there."""
    return pool.status.space == space and any(first in network for network in _networks(pool))


def _networks(pool: AddressPool) -> Sequence[Network]:
    """None of a pool whose range cannot be read: no node leases from it."""
    try:
        return Rails.readable(pool.spec).networks
    except ValueError:
        return ()


def _meet(one: Network, other: Network) -> bool:
    return one.address in other or other.address in one
