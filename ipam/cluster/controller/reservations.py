"""AddressReservations: their status, and the end of blocks whose reservation is deleted."""

import logging
from collections import defaultdict
from collections.abc import Iterable

from msgspec.structs import replace

from ipam.addresses import parse
from ipam.cluster.api import ClusterApi, Conflict, NotFound, Refused
from ipam.cluster.controller.steps import Steps
from ipam.cluster.objects import AddressBlock, AddressReservation, ReservationStatus
from ipam.cluster.sticky import is_let_go

_LONGEST = 253  # characters of status.boundTo
_MOST = 64  # of status.addresses

_log = logging.getLogger(__name__)


def reserve(
    api: ClusterApi,
    reservations: Iterable[AddressReservation],
    blocks: Iterable[AddressBlock],
    steps: Steps,
) -> None:
    """Write what reservations have, and free what no reservation names any more."""
    of: defaultdict[str, list[AddressBlock]] = defaultdict(list)
    for block in blocks:
        if block.spec.sticky.reservation:
            of[block.spec.sticky.reservation].append(block)

    def tell(changed: AddressReservation) -> None:
        try:
            api.update_status(changed)
        except (Conflict, NotFound, Refused) as error:
            _log.info("reservation %s: status left: %s", changed.metadata.name, error)

    def free(block: AddressBlock) -> None:
        name = block.spec.sticky.reservation
        try:
            if not _exists(api, name):  # a watch may show it late
                api.delete(block)
                _log.info("%s: freed: reservation %s is gone", block.metadata.name, name)
        except (Conflict, NotFound, Refused) as error:
            _log.info("%s: left for the next round: %s", block.metadata.name, error)

    changed = []
    for reservation in reservations:
        name = f"{reservation.metadata.namespace}/{reservation.metadata.name}"
        wanted = _status(of.pop(name, []))
        if reservation.status != wanted:
            changed.append((name, replace(reservation, status=wanted)))
    orphans = [block for each in of.values() for block in each if is_let_go(block)]
    steps.each("reservations", changed, tell)
    steps.each("sticky blocks", [(block.metadata.name, block) for block in orphans], free)


def _exists(api: ClusterApi, name: str) -> bool:
    namespace, _, name = name.partition("/")
    try:
        api.get(AddressReservation, name, namespace)
    except NotFound:
        return False
    return True


def _status(blocks: Iterable[AddressBlock]) -> ReservationStatus:
    blocks = list(blocks)
    addresses = sorted({block.spec.sticky.address for block in blocks}, key=parse)
    nodes = sorted({block.spec.holder.node for block in blocks if not is_let_go(block)})
    return ReservationStatus(
        addresses=tuple(addresses[:_MOST]), bound_to=", ".join(nodes)[:_LONGEST]
    )
