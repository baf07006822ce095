"""The objects of whereabouts. Versions before 0.4.2 wrote no `podref`."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from base import decoding
from ipam.addresses import Interval, Network, parse, parse_interface
from ipam.leases.objects import AddressPool
from kube.resources import Meta, Resource

API = "whereabouts.cni.cncf.io/v1alpha1"
NAMESPACE = "kube-system"
"""The default namespace of whereabouts' objects."""

PLACEHOLDER = "podfabric/"
"""The start of a placeholder's id. whereabouts' plugin, reconciler and control loop ignore an entry
with `podref` ""."""

_MOST_OFFSET = 20  # digits of an offset in 64 bits
_PLACEHOLDER = {"id": f"{PLACEHOLDER}block", "podref": ""}
_STATUS = "k8s.v1.cni.cncf.io/network-status"

Operation = Mapping[str, object]
"""An operation of a JSON patch."""


class IPAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of an IPPool. `id` is the container id, `podref` is "namespace/pod"."""

    id: str = ""
    podref: str = ""

    @property
    def is_placeholder(self) -> bool:
        return self.podref == "" and self.id.startswith(PLACEHOLDER)


class IPPoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    range: str = ""
    allocations: dict[str, IPAllocation] | None = None


class IPPool(Resource, frozen=True, kw_only=True):
    """The entries of one range, or of one node's slice of a range."""

    API = API
    KIND = "IPPool"
    PLURAL = "ippools"

    spec: IPPoolSpec = IPPoolSpec()


class SliceSpec(msgspec.Struct, frozen=True, kw_only=True):
    range: str = ""


class NodeSlicePool(Resource, frozen=True, kw_only=True):
    """A range that whereabouts splits into a slice for each node (`node_slice_size`)."""

    API = API
    KIND = "NodeSlicePool"
    PLURAL = "nodeslicepools"

    spec: SliceSpec = SliceSpec()


class AnnotatedPod(Resource, frozen=True, kw_only=True):
    API = "v1"
    KIND = "Pod"
    PLURAL = "pods"

    metadata: Meta


class _NetworkStatus(msgspec.Struct):
    """One network of a pod, as Multus writes it."""

    ips: list[str] | None = None


class PoolEntry(NamedTuple):
    """`address` is a result of `parse`."""

    address: int
    offset: str
    allocation: IPAllocation


def entries(pool: IPPool) -> Iterator[PoolEntry]:
    """The pool's entries that whereabouts can read. Empty if the pool's range is unreadable."""
    try:
        base, network = parse_interface(pool.spec.range)
    except ValueError:
        return
    for offset, allocation in (pool.spec.allocations or {}).items():
        if offset.isascii() and offset.isdigit() and len(offset) <= _MOST_OFFSET:
            address = base + int(offset)
            if address in network:
                yield PoolEntry(address, offset, allocation)


def placeholders(
    pool: IPPool, offered: Iterable[Interval], held: Collection[int]
) -> Iterator[Sequence[Operation]]:
    """The patches that add missing placeholders. A patch fails if its entry exists."""
    base, network = parse_interface(pool.spec.range)
    known = {each.address for each in entries(pool)}
    for each in offered:
        for address in range(max(each.first, base), min(each.last, network.last) + 1):
            if address not in known and address not in held:
                path = f"/spec/allocations/{address - base}"
                yield (
                    {"op": "test", "path": path, "value": None},
                    {"op": "add", "path": path, "value": _PLACEHOLDER},
                )


def removals(pool: IPPool) -> Iterator[Sequence[Operation]]:
    for each in entries(pool):
        if each.allocation.is_placeholder:
            path = f"/spec/allocations/{each.offset}"
            yield (
                {"op": "test", "path": f"{path}/id", "value": each.allocation.id},
                {"op": "remove", "path": path},
            )


def may_be_theirs(pool: AddressPool) -> bool:
    """Whether whereabouts may have an IPPool of the range. An IPPool's name has no "/"."""
    return "/" not in pool.spec.network_name


def ippool_name(pool: AddressPool) -> str:
    network_name, part = pool.spec.network_name, _normalised(pool.spec.range)
    return f"{network_name}-{part}" if network_name else part


def pools_of(
    pool: AddressPool, network_names: Iterable[str], ippools: Iterable[IPPool]
) -> list[IPPool]:
    """The IPPools with addresses of an AddressPool. `network_names` are all pools' network names.

    An IPPool is named "[<network name>-][<node>-]<range>". In the network "net", "net-a-<range>" is
    the slice of the node "a", unless an AddressPool has the network name "net-a".
    """
    own, network = pool.spec.network_name, parse_interface(pool.spec.range)[1]
    known, found = set(network_names), []
    for each in ippools:
        prefix = each.metadata.name.removesuffix(_normalised(each.spec.range))
        start = f"{own}-" if own else ""
        if prefix == each.metadata.name or not prefix.startswith(start):
            continue
        other = _network(each.spec.range)
        if other is None or not _meet(other, network):
            continue
        is_slice = prefix != start
        if is_slice and prefix.removesuffix("-") in known:
            continue
        if pool.spec.shared or is_slice or other == network:
            found.append(each)
    return found


def slicing(pool: AddressPool, slices: Iterable[NodeSlicePool]) -> str:
    """The name of a NodeSlicePool that splits the pool's range, or "". A NodeSlicePool is named
    after the network name. Without a network name, the NodeSlicePool may have any name."""
    network = parse_interface(pool.spec.range)[1]
    for each in slices:
        cut = _network(each.spec.range)
        is_named = pool.spec.network_name in ("", each.metadata.name)
        if is_named and cut is not None and _meet(cut, network):
            return each.metadata.name
    return ""


def _network(written: str) -> Network | None:
    try:
        return parse_interface(written)[1]
    except ValueError:
        return None


def _meet(one: Network, other: Network) -> bool:
    return one.address in other or other.address in one


def _normalised(range_: str) -> str:
    return range_.replace(":", "-").replace("/", "-")


def has_address(pod: AnnotatedPod | None, address: int) -> bool:
    """Whether the pod may have the address. Returns True for an unreadable annotation."""
    if pod is None:
        return False
    written = pod.metadata.annotations.get(_STATUS, "")
    try:
        networks = decoding.decode(written.encode(), list[_NetworkStatus])
    except msgspec.MsgspecError:
        return True
    return any(_may_be(each, address) for network in networks for each in network.ips or ())


def _may_be(written: str, address: int) -> bool:
    """Whether a text names the address, or is unreadable."""
    try:
        return parse(written) == address
    except ValueError:
        return True
