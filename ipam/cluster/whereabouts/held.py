"""What whereabouts holds of a pool: read consistently, all ranges and slices of its network name.

A LIST of the IPPools, since ranges of one network name may overlap and a slice has a name of its
own, and one of the reservations, which hold what an IPPool has lost. Both only for pools whose
`compat` is not None.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ipam.addresses import Network, parse_interface
from ipam.cluster.api import ClusterApi, NotFound
from ipam.cluster.names import space_name
from ipam.cluster.objects import AddressPool, AnyResource, Meta
from ipam.cluster.whereabouts.objects import (
    IPAllocation,
    IPPool,
    NodeSlicePool,
    OverlappingRangeIPReservation,
    OverlappingReservationSpec,
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


def read(
    api: ClusterApi,
    pool: AddressPool,
    all_pools: Iterable[AddressPool],
    ippools: Sequence[IPPool] | None = None,
) -> Mapping[int, Held]:
    """What whereabouts holds of an AddressPool, by address. No placeholders. ApiError.

    `all_pools` are all AddressPools, `ippools` are its IPPools, if they were read already.
    """
    network = parse_interface(pool.spec.range)[1]
    held: dict[int, Held] = {}
    for found in pools_of(api, pool, all_pools) if ippools is None else ippools:
        for each in entries(found):
            if each.address in network and not each.allocation.is_placeholder:
                place = Place(found.metadata, each.offset)
                held[each.address] = Held(each.address, each.allocation, place)
    for address, spec in reservations(api, pool).items():
        if address not in held:
            allocation = IPAllocation(podref=spec.podref, ifname=spec.ifname)
            held[address] = Held(address, allocation, None)
    return held


def reservations(api: ClusterApi, pool: AddressPool) -> Mapping[int, OverlappingReservationSpec]:
    """The reservations of an AddressPool's addresses: none of a private one. ApiError."""
    if not is_shared(pool):
        return {}
    network = parse_interface(pool.spec.range)[1]
    found = {
        reserved_address(each.metadata.name, pool.spec.network_name): each.spec
        for each in listed(api, OverlappingRangeIPReservation)
    }
    return {each: found[each] for each in found if each is not None and each in network}


def is_shared(pool: AddressPool) -> bool:
    """Whether its addresses are unique among all ranges of its network name. Those of a private
    pool are if a shared one has the same range: then both lease the same blocks."""
    spec = pool.spec
    return spec.shared or pool.status.space == space_name(spec.network_name, spec.range)


def pools_of(
    api: ClusterApi,
    pool: AddressPool,
    all_pools: Iterable[AddressPool],
    ippools: Sequence[IPPool] | None = None,
    slices: Sequence[NodeSlicePool] | None = None,
) -> list[IPPool]:
    """The IPPools that have addresses of an AddressPool: of a private one only its very own, and
    those of slices. They are among `ippools`, if these were read already, as `slices` were.

    The name of an IPPool does not tell the node of a slice from a part of a network name. So one
    that may be a slice counts, also without a NodeSlicePool, which may be gone while pods of its
    slices run. Where an AddressPool has that network name, it counts within a NodeSlicePool only.
    """
    network, name = parse_interface(pool.spec.range)[1], pool.spec.network_name
    names = {each.spec.network_name for each in all_pools}
    sure, doubtful = [], []
    for each in listed(api, IPPool) if ippools is None else ippools:
        node = node_of(each, name)
        if node is None or not meets(each.spec.range, network):
            continue
        if node and (f"{name}-{node}" if name else node) in names:
            doubtful.append(each)
        elif is_shared(pool) or node or parse_interface(each.spec.range)[1] == network:
            sure.append(each)
    if doubtful and slices is None:
        slices = listed(api, NodeSlicePool)
    sliced = [each.spec.range for each in slices or ()]
    within = (each for each in doubtful if any(_is_within(each.spec.range, cut) for cut in sliced))
    return [*sure, *within]


def namespaces(api: ClusterApi) -> list[str]:
    """Where whereabouts keeps its objects: where its IPPools are, or else its default."""
    return namespaces_of(listed(api, IPPool))


def namespaces_of(pools: Sequence[IPPool]) -> list[str]:
    """The same of the IPPools that there are."""
    return sorted({each.metadata.namespace for each in pools}) or [NAMESPACE]


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
