"""What whereabouts' objects mean for pools that overlap.

An address of one network name may be in several pools, and a block that is leased by one of them
is handed out for all. So a pool is used by the strictest `compat` of those that it overlaps. Each
node decides that alone, by what the API server says of the pools: no controller is needed.
"""

from collections.abc import Iterable, Sequence

from ipam.addresses import Network, parse_interface
from ipam.cluster.objects import AddressPool, Compat

_STRICTER: Sequence[Compat] = ("None", "Read", "Coexist")


def strictest(pool: AddressPool, others: Iterable[AddressPool]) -> Compat:
    """The strictest `compat` of a pool and of those others of its network name that overlap it."""
    mine = _network(pool)
    return max(
        (
            each.spec.compat
            for each in (pool, *others)
            if each is pool
            or (each.spec.network_name == pool.spec.network_name and _meet(mine, _network(each)))
        ),
        key=_STRICTER.index,
    )


def has(pool: AddressPool, space: str, first: int) -> bool:
    """Whether the addresses of a block are the pool's: its space, and its first address there."""
    network = _network(pool)
    return pool.status.space == space and network is not None and first in network


def _network(pool: AddressPool) -> Network | None:
    """None if the range of the pool cannot be read: no node leases from it."""
    try:
        return parse_interface(pool.spec.range)[1]
    except ValueError:
        return None


def _meet(one: Network | None, other: Network | None) -> bool:
    if one is None or other is None:
        return False
    return one.address in other or other.address in one
