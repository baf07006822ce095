"""Slices: whereabouts gives each node a part of a range of its own (`node_slice_size`).

Its nodes take addresses of their slices only, and write them into an IPPool for each node. Beside
them our nodes do so too (`compat: Coexist`): a node leases blocks of its own slice, which no node
of whereabouts uses. If the slice goes to another node all the same, that node finds placeholders.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ipam.addresses import Interval, Network, parse_interface
from ipam.cluster.api import ClusterApi
from ipam.cluster.objects import AddressPool
from ipam.cluster.pools import Unusable
from ipam.cluster.whereabouts.held import listed, meets
from ipam.cluster.whereabouts.objects import NodeSlicePool, slice_name
from ipam.ranges import merged, outside

READ_OFFSETS = 1 << 63
"""whereabouts reads an offset with a sign: it drops larger ones, and removes them as it writes."""


class GivenSlice(NamedTuple):
    """A slice that a node has. `ippool` is the name of the IPPool that whereabouts has there."""

    node: str
    range: str
    interval: Interval
    ippool: str


def cutting(pool: AddressPool, slices: Iterable[NodeSlicePool]) -> list[NodeSlicePool]:
    """The NodeSlicePools that cut addresses of a pool into slices.

    One is named by the network name; without a network name by the `name` of a definition's
    configuration, which no AddressPool tells: then each may be one.
    """
    network = parse_interface(pool.spec.range)[1]
    return [
        each
        for each in slices
        if pool.spec.network_name in ("", each.metadata.name) and meets(each.spec.range, network)
    ]


def given(pool: AddressPool, slices: Iterable[NodeSlicePool]) -> Iterator[GivenSlice]:
    """The slices of a pool's addresses that nodes have. What cannot be read is left out."""
    for found in cutting(pool, slices):
        for each in found.status.allocations:
            try:
                network = parse_interface(each.slice_range)[1]
            except ValueError:
                continue
            if each.node_name:
                name = slice_name(pool.spec.network_name, each.node_name, each.slice_range)
                yield GivenSlice(each.node_name, each.slice_range, _interval(network), name)


def left_alone(api: ClusterApi, pool: AddressPool, size: int, node: str) -> tuple[Interval, ...]:
    """What a node leaves alone of a pool beside whereabouts: of a range that is cut into slices all
    but its own, and what whereabouts takes no notice of, as it reads no offset from 2^63 on.

    `size` is that of the pool's blocks. Raises ApiError, and Unusable if no slice is left for it.
    """
    cut = cutting(pool, listed(api, NodeSlicePool))
    if cut and not pool.spec.shared:
        raise Unusable(
            f"AddressPool {pool.metadata.name}: NodeSlicePool {cut[0].metadata.name} gives slices "
            "of its range to nodes, and enable_overlapping_ranges is false: nothing keeps "
            "whereabouts from our addresses when a slice goes to another node: run whereabouts on "
            "no node, set spec.compat to Read"
        )
    whole = _interval(parse_interface(pool.spec.range)[1])
    own = [each.interval for each in given(pool, cut) if each.node == node]
    fitting = merged(each for each in own if each.last - each.first + 1 >= size)
    parts = [_common(whole, _interval(parse_interface(each.spec.range)[1])) for each in cut]
    if whole in parts and not fitting:
        why = (
            f"a slice that is smaller than a block of {size} addresses: set spec.blockSize of the "
            "pool to the size of a slice"
            if own
            else "no slice: see that whereabouts' slice controller runs, and that there are as "
            "many slices as nodes"
        )
        raise Unusable(
            f"AddressPool {pool.metadata.name}: NodeSlicePool {cut[0].metadata.name} gives node "
            f"{node} {why}; or run whereabouts on no node, and set spec.compat to Read"
        )
    theirs = [left for part in parts for left in outside(part, fitting)]
    if whole.last - whole.first >= READ_OFFSETS:
        theirs.append(Interval(whole.first + READ_OFFSETS, whole.last))
    return merged(theirs)


def _common(one: Interval, other: Interval) -> Interval:
    """What two intervals that meet have in common."""
    return Interval(max(one.first, other.first), min(one.last, other.last))


def _interval(network: Network) -> Interval:
    return Interval(network.address, network.last)
