"""Writes the status of AddressReservations, and frees blocks whose reservation is deleted."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ipam.addresses import parse
from ipam.controller.steps import Steps, unless_changed
from ipam.leases.claim_request import PodInterface
from ipam.leases.objects import AddressBlock, AddressReservation
from ipam.leases.sticky import is_let_go, is_of, name_of, pod_of, preference
from kube.client import ClusterApi
from kube.resources import NotFound

_LONGEST = 253  # characters of status.boundTo
_MOST = 64  # of status.addresses

_log = logging.getLogger(__name__)


def reserve(
    api: ClusterApi,
    reservations: Iterable[AddressReservation],
    blocks: Iterable[AddressBlock],
    steps: Steps,
) -> None:
    """Write the statuses, and delete released sticky blocks that no pod needs. A pod does not need
    a block without a reservation, or a second block."""
    reservations = tuple(reservations)
    named = {name_of(each): each for each in reservations}
    of: defaultdict[str, list[AddressBlock]] = defaultdict(list)
    first: dict[tuple[str, PodInterface], AddressBlock] = {}
    surplus: list[AddressBlock] = []
    for block in sorted((each for each in blocks if each.spec.sticky.reservation), key=preference):
        reservation = block.spec.sticky.reservation
        if _is_kept(named.get(reservation), block):
            of[reservation].append(block)
            if first.setdefault((block.spec.pool, pod_of(block.spec.sticky)), block) is block:
                continue
        if is_let_go(block):
            surplus.append(block)

    def tell(changed: AddressReservation) -> None:
        with unless_changed(_log, f"reservation {changed.metadata.name}"):
            api.update_status(changed)

    def free(block: AddressBlock) -> None:
        with unless_changed(_log, block.metadata.name):
            if not _is_needed(api, block, first):
                api.delete(block)
                _log.info("%s: freed: %s", block.metadata.name, block.spec.sticky.reservation)

    changed = []
    for each in reservations:
        name = name_of(each)
        addresses = sorted({block.spec.sticky.address for block in of[name]}, key=parse)[:_MOST]
        nodes = sorted({block.spec.holder.node for block in of[name] if not is_let_go(block)})
        bound_to = ", ".join(nodes)[:_LONGEST]
        wanted = replace(each.status, addresses=tuple(addresses), bound_to=bound_to)
        if each.status != wanted:
            changed.append((name, replace(each, status=wanted)))
    steps.each("reservations", changed, tell)
    steps.each("sticky blocks", [(block.metadata.name, block) for block in surplus], free)


def _is_kept(reservation: AddressReservation | None, block: AddressBlock) -> bool:
    """Whether the reservation is for the block's pod.

    A new reservation may have the name of a deleted one.
    """
    return reservation is not None and is_of(
        reservation, block.spec.pool, pod_of(block.spec.sticky)
    )


def _is_needed(
    api: ClusterApi, block: AddressBlock, first: Mapping[tuple[str, PodInterface], AddressBlock]
) -> bool:
    """Whether the pod needs the block. Reads the API server, because a watch may show a reservation
    late. Raises ApiError."""
    namespace, _, name = block.spec.sticky.reservation.partition("/")
    try:
        if not _is_kept(api.get(AddressReservation, name, namespace), block):
            return False
    except NotFound:
        return False
    other = first.get((block.spec.pool, pod_of(block.spec.sticky)))
    if other is None:
        return True
    try:
        return api.get(AddressBlock, other.metadata.name).metadata.uid != other.metadata.uid
    except NotFound:
        return True
