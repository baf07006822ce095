"""Sticky addresses: an address that stays with the name of a pod, on every node.

An AddressReservation names a pod, or a StatefulSet for its pods. Each interface of such a pod has a
block of its own, of which one address is handed out. The block outlives the pod: the node that
holds it sets it Draining once the pod has let go of the address, and the pod's next node takes it
over with the next epoch. No node takes it from one that has not let go: the controller sets it
Draining when that node is proved dead.
"""

import re

from msgspec.structs import replace

from ipam.addresses import Interval, parse
from ipam.blocks import LeasedBlock
from ipam.cluster.api import ClusterApi
from ipam.cluster.objects import (
    AddressBlock,
    AddressPool,
    AddressReservation,
    BlockSpec,
    BlockStatus,
    StickySpec,
)
from ipam.cluster.pools import kept_out
from ipam.cluster.wants import PodInterface
from ipam.ranges import merged, outside

_ORDINAL = re.compile(r"-[0-9]+")


def limit_reached(pool: str, count: int, most: int) -> str:
    """Why a pool reserves no further address, and what to do."""
    return (
        f"AddressPool {pool} has {count} reserved addresses, and its spec.sticky.maxAddresses is "
        f"{most}: raise that, or delete reservations that no pod needs"
    )


def name_of(reservation: AddressReservation) -> str:
    """How a block names its reservation."""
    return f"{reservation.metadata.namespace}/{reservation.metadata.name}"


def is_of(reservation: AddressReservation, pool: str, pod: PodInterface) -> bool:
    """Whether the reservation is for addresses that the pod has of the pool."""
    spec, owner = reservation.spec, reservation.spec.owner
    if (spec.pool, reservation.metadata.namespace) != (pool, pod.namespace):
        return False
    if owner.ifname not in ("", pod.ifname):
        return False
    if owner.kind == "Pod":
        return owner.name == pod.pod
    return pod.pod.startswith(owner.name) and bool(
        _ORDINAL.fullmatch(pod.pod.removeprefix(owner.name))
    )


def pod_of(sticky: StickySpec) -> PodInterface:
    """The interface that a sticky block is for."""
    return PodInterface(sticky.reservation.partition("/")[0], sticky.pod, sticky.ifname)


def is_for(block: LeasedBlock, pod: PodInterface | None) -> bool:
    """Whether the block is the pod's own, or if no pod is given, anybody's."""
    if pod is None or not block.sticky:
        return pod is None and not block.sticky
    return pod_of(of_row(block)) == pod


def row_text(sticky: StickySpec) -> str:
    """What the store keeps of it: no part has a slash but the reservation's name."""
    if not sticky.reservation:
        return ""
    return "/".join((sticky.reservation, sticky.pod, sticky.ifname, sticky.address))


def of_row(block: LeasedBlock) -> StickySpec:
    """The same from the store."""
    if not block.sticky:
        return StickySpec()
    reservation, pod, ifname, address = block.sticky.rsplit("/", 3)
    return StickySpec(reservation=reservation, pod=pod, ifname=ifname, address=address)


def holes(pool: AddressPool, spec: BlockSpec, covered: Interval) -> tuple[Interval, ...]:
    """What of a block no node may hand out: all but one address, if it is sticky. Unusable."""
    out = kept_out(pool)
    if not spec.sticky.reservation:
        return out
    address = parse(spec.sticky.address)
    return merged((*out, *outside(covered, [Interval(address, address)])))


def preference(found: AddressBlock) -> tuple[bool, str, str]:
    """Which of several blocks of one pod counts: one that a node has, else the oldest."""
    return is_let_go(found), found.metadata.creation_timestamp, found.metadata.name


def is_let_go(found: AddressBlock) -> bool:
    """Whether its last node has let go of the block: another one may take it over, of a sticky
    block the pod's next node."""
    return found.spec.state == "Draining"


def drain(api: ClusterApi, found: AddressBlock, *, probe: bool) -> None:
    """Let go of a block of which nothing is held, for the next node, which is to probe its
    addresses if `probe` says so. ApiError.

    The status goes first: it is of this holder's store, and the next one compares it with its own.
    """
    if found.spec.state != "Draining":
        found = api.update_status(replace(found, status=BlockStatus()))
        api.update(replace(found, spec=replace(found.spec, state="Draining", probe=probe)))
