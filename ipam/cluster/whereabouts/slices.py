"""Slices: whereabouts gives each node a part of a range of its own (`node_slice_size`).

Its nodes take addresses of their slices only, and write them into an IPPool for each node. Beside
them our nodes do so too (`compat: Coexist`): a node leases blocks of its own slice, which no node
of whereabouts uses. If the slice goes to another node all the same, that node finds placeholders.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ipam.addresses import Interval, Network, parse_interface
from ipam.cluster.api import ClusterApi
from ipam.cluster.objects import AddressPool
from ipam.cluster.pools import Unusable
from ipam.cluster.whereabouts.held import listed, meets
from ipam.cluster.whereabouts.objects import NodeSlicePool, slice_name
from ipam.ranges import is_within, merged, outside

READ_OFFSETS = 1 << 63
"""whereabouts reads an offset with a sign: it drops larger ones, and removes them as it writes."""


class GivenSlice(NamedTuple):
    """A slice that a node has. `ippool` is the name of the IPPool that whereabouts has there."""

    node: str
    range: str
    interval: Interval
    ippool: str


class LeftAlone(NamedTuple):
    """What a node leaves alone of a pool beside whereabouts, and the `slices` that are given there,
    of which `fitting` are its own. `cut_by` are the NodeSlicePools."""

    intervals: tuple[Interval, ...]
    slices: Sequence[GivenSlice]
    fitting: Sequence[GivenSlice]
    cut_by: Sequence[str]

    def why(self, address: int) -> str:
        """Why the node may not lease that address; "" if it may."""
        if not is_within(address, self.intervals):
            return ""
        if not self.cut_by:
            return "is so far up in its range that whereabouts takes no notice of it"
        holder = next((each for each in self.slices if is_within(address, (each.interval,))), None)
        place = f"in slice {holder.range} of node {holder.node}" if holder else "in no node's slice"
        own = ", ".join(each.range for each in self.fitting) or "no slice"
        return f"is {place}: NodeSlicePool {' and '.join(self.cut_by)} gives this node {own}"


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


def left_alone(api: ClusterApi, pool: AddressPool, size: int, node: str) -> LeftAlone:
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
    slices = tuple(given(pool, cut))
    own = [each for each in slices if each.node == node]
    fitting = [each for each in own if each.interval.last - each.interval.first + 1 >= size]
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
    ours = merged(each.interval for each in fitting)
    theirs = [left for part in parts for left in outside(part, ours)]
    if whole.last - whole.first >= READ_OFFSETS:
        theirs.append(Interval(whole.first + READ_OFFSETS, whole.last))
    return LeftAlone(merged(theirs), slices, fitting, [each.metadata.name for each in cut])


def _common(one: Interval, other: Interval) -> Interval:
    """What two intervals that meet have in common."""
    return Interval(max(one.first, other.first), min(one.last, other.last))


def _interval(network: Network) -> Interval:
    return Interval(network.address, network.last)
