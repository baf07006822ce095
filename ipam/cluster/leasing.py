"""What claims and confirmations of a node's leases have in common."""

from collections.abc import Callable
from typing import NamedTuple

from ipam.cluster.api import ClusterApi
from ipam.cluster.block_store import BlockStore
from ipam.cluster.objects import Holder
from ipam.cluster.pools import Pools


class Leasing(NamedTuple):
    """A node as the lessee `holder`. `clock` is CLOCK_BOOTTIME."""

    api: ClusterApi
    store: BlockStore
    pools: Pools
    holder: Holder
    clock: Callable[[], float]
