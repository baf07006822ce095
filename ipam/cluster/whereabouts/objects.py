"""whereabouts' objects, whereabouts.cni.cncf.io/v1alpha1, as far as addresses depend on them.

Several versions of whereabouts have written them: `podref` may be missing or "" (before 0.4.2), and
so may `ifname` (before 0.8.0).
"""

import re
from typing import NamedTuple

import msgspec

from ipam.addresses import parse, parse_interface, text
from ipam.cluster.objects import Resource

API = "whereabouts.cni.cncf.io/v1alpha1"
PLACEHOLDER = "podfabric/"
"""What the id of a placeholder begins with. Its `podref` is "": whereabouts' plugin, reconciler and
control loop all leave such an entry alone."""

_MOST_OFFSET = 20  # digits of one in 64 bits
_V4 = re.compile(r"\d{1,3}(\.\d{1,3}){3}")


class IPAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of an IPPool. `id` is the container's, `podref` is "namespace/pod"."""

    id: str = ""
    podref: str = ""
    ifname: str = ""

    @property
    def is_placeholder(self) -> bool:
        """Whether it is ours, and stands for no pod."""
        return self.podref == "" and self.id.startswith(PLACEHOLDER)


class IPPoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A range, and what is held of it by offset."""

    range: str = ""
    allocations: dict[str, IPAllocation] | None = None


class IPPool(Resource, frozen=True, kw_only=True):
    """What is held of one range, or of one node's slice of it."""

    API = API
    KIND = "IPPool"
    PLURAL = "ippools"

    spec: IPPoolSpec = IPPoolSpec()


class OverlappingReservationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds an address, among all ranges of a network name."""

    podref: str = ""
    ifname: str = ""


class OverlappingRangeIPReservation(Resource, frozen=True, kw_only=True):
    """An address that no range of its network name hands out a second time."""

    API = API
    KIND = "OverlappingRangeIPReservation"
    PLURAL = "overlappingrangeipreservations"

    spec: OverlappingReservationSpec = OverlappingReservationSpec()


class PoolEntry(NamedTuple):
    """An allocation, with its address (as `parse` gives it) and where it is written."""

    address: int
    offset: str
    allocation: IPAllocation


def tests_of(entry: PoolEntry) -> list[dict[str, str]]:
    """The tests of a JSON patch that is about this very entry, and about no other."""
    path, allocation = f"/spec/allocations/{entry.offset}", entry.allocation
    values = {"id": allocation.id, "podref": allocation.podref, "ifname": allocation.ifname}
    return [
        {"op": "test", "path": f"{path}/{key}", "value": value}
        for key, value in values.items()
        if value
    ]


class SliceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The range that is cut into slices."""

    range: str = ""


class Slice(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of the range, and the node that has it; "" if none has."""

    node_name: str = ""
    slice_range: str = ""


class SliceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All slices."""

    allocations: tuple[Slice, ...] = ()


class NodeSlicePool(Resource, frozen=True, kw_only=True):
    """A range of which each node has a slice. Its IPPools are named by their nodes."""

    API = API
    KIND = "NodeSlicePool"
    PLURAL = "nodeslicepools"

    spec: SliceSpec = SliceSpec()
    status: SliceStatus = SliceStatus()


def entries(pool: IPPool) -> list[PoolEntry]:
    """What the pool says; nothing if its range cannot be read. Unreadable offsets are left out, as
    whereabouts itself does."""
    try:
        base, network = parse_interface(pool.spec.range)
    except ValueError:
        return []
    found = []
    for offset, allocation in (pool.spec.allocations or {}).items():
        if offset.isascii() and offset.isdigit() and len(offset) <= _MOST_OFFSET:
            address = base + int(offset)
            if address in network:
                found.append(PoolEntry(address, offset, allocation))
    return found


def node_of(pool: IPPool, network_name: str) -> str | None:
    """The <node> in "[<network_name>-][<node>-]<range>", "" without one; None of another network's.

    A node's name cannot be told from a part of a network's: only a slice has one.
    """
    prefix = pool.metadata.name.removesuffix(_normalised(pool.spec.range))
    network = f"{network_name}-" if network_name else ""
    if prefix == pool.metadata.name or not prefix.startswith(network):
        return None
    return prefix[len(network) :].removesuffix("-")


def ippool_name(network_name: str, range_: str) -> str:
    """The name of the IPPool of a whole range."""
    part = _normalised(range_)
    return f"{network_name}-{part}" if network_name else part


def slice_name(network_name: str, node: str, range_: str) -> str:
    """The name of the IPPool of a node's slice."""
    return ippool_name(network_name, f"{node}-{_normalised(range_)}")


def reservation_name(network_name: str, address: int) -> str:
    """The name of an address' reservation: "[<network_name>-]<address>"."""
    part = text(address).replace(":", "-")
    part = f"{part}0" if part.endswith("-") else part
    return f"{network_name}-{part}" if network_name else part


def reserved_address(name: str, network_name: str) -> int | None:
    """The address that a reservation of that network name is named by; None of another's."""
    if network_name:
        if not name.startswith(f"{network_name}-"):
            return None
        name = name[len(network_name) + 1 :]
    try:
        return parse(name if _V4.fullmatch(name) else name.replace("-", ":"))
    except ValueError:
        return None


def _normalised(range_: str) -> str:
    return range_.replace(":", "-").replace("/", "-")
