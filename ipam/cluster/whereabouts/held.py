"""What whereabouts holds of a pool: read consistently, all ranges and slices of its network name.

A LIST of the IPPools, since ranges of one network name may overlap and a slice has a name of its
own, and one of the reservations, which hold what an IPPool has lost. Both only for pools whose
`compat` is not None.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ipam.addresses import Network, parse_interface
from ipam.cluster.api import ClusterApi, NotFound
from ipam.cluster.objects import AddressPool, AnyResource, Meta
from ipam.cluster.whereabouts.objects import (
    IPAllocation,
    IPPool,
    NodeSlicePool,
    OverlappingRangeIPReservation,
    entries,
    node_of,
    reserved_address,
)

NAMESPACE = "kube-system"
"""whereabouts' own default."""


class Place(NamedTuple):
    """Where an address is written: an IPPool, and the offset there."""

    pool: Meta
    offset: str


class Held(NamedTuple):
    """Who has an address with whereabouts. `place` is None if only a reservation says so."""

    address: int
    allocation: IPAllocation
    place: Place | None


def read(api: ClusterApi, pool: AddressPool) -> Mapping[int, Held]:
    """What whereabouts holds of an AddressPool, by address. No placeholders. ApiError."""
    network = parse_interface(pool.spec.range)[1]
    held: dict[int, Held] = {}
    for found in pools_of(api, pool):
        for each in entries(found):
            if each.address in network and not each.allocation.is_placeholder:
                place = Place(found.metadata, each.offset)
                held[each.address] = Held(each.address, each.allocation, place)
    if pool.spec.shared:
        for reservation in listed(api, OverlappingRangeIPReservation):
            address = reserved_address(reservation.metadata.name, pool.spec.network_name)
            if address is not None and address in network and address not in held:
                spec = reservation.spec
                allocation = IPAllocation(podref=spec.podref, ifname=spec.ifname)
                held[address] = Held(address, allocation, None)
    return held


def pools_of(api: ClusterApi, pool: AddressPool) -> list[IPPool]:
    """The IPPools that have addresses of an AddressPool: of a private one only its very own."""
    network = parse_interface(pool.spec.range)[1]
    candidates = [
        (found, node)
        for found in listed(api, IPPool)
        if (node := node_of(found, pool.spec.network_name)) is not None
        and meets(found.spec.range, network)
        and (pool.spec.shared or node or found.spec.range == pool.spec.range)
    ]
    if all(not node for _, node in candidates):
        return [found for found, _ in candidates]
    sliced = [each.spec.range for each in listed(api, NodeSlicePool)]
    return [
        found
        for found, node in candidates
        if not node or any(_is_within(found.spec.range, range_) for range_ in sliced)
    ]


def namespaces(api: ClusterApi) -> list[str]:
    """Where whereabouts keeps its objects: where its IPPools are, or else its default."""
    return sorted({each.metadata.namespace for each in listed(api, IPPool)}) or [NAMESPACE]


def listed(api: ClusterApi, kind: type[AnyResource]) -> Sequence[AnyResource]:
    """All objects of a kind; none if it is not installed (any more)."""
    try:
        return api.list(kind).items
    except NotFound:
        return ()


def meets(written: str, network: Network) -> bool:
    """Whether a range has addresses of the network; not if it cannot be read."""
    try:
        other = parse_interface(written)[1]
    except ValueError:
        return False
    return other.address in network or network.address in other


def _is_within(inner: str, outer: str) -> bool:
    try:
        part, whole = parse_interface(inner)[1], parse_interface(outer)[1]
    except ValueError:
        return False
    return part.address in whole and part.last in whole
