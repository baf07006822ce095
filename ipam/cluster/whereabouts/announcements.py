"""Tells whereabouts of our addresses where its nodes have ranges that overlap (`Coexist`).

A placeholder keeps whereabouts from an address in the IPPool of that range only. Among ranges of
one network name it goes by reservations, of which an address can have one: so each address gets
its own before the ADD is answered.
"""

from contextlib import suppress

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse
from ipam.blocks import LeasedBlock
from ipam.cluster.api import AlreadyExists, ApiError, ClusterApi, NotFound
from ipam.cluster.block_store import BlockStore
from ipam.cluster.objects import Meta
from ipam.cluster.pools import Pools, Unusable
from ipam.cluster.whereabouts.held import namespaces
from ipam.cluster.whereabouts.objects import (
    OverlappingRangeIPReservation,
    OverlappingReservationSpec,
    reservation_name,
)
from ipam.cluster.whereabouts.takeover import departure_of
from ipam.departures import DepartedAttachment, Departures
from ipam.ranges import merged
from ipam.store import Grant, Owner


class Announcements:
    """Makes reservations. Threads may share it."""

    def __init__(
        self, api: ClusterApi, store: BlockStore, pools: Pools, departures: Departures
    ) -> None:
        self._api = api
        self._store = store
        self._pools = pools
        self._departures = departures

    def announce(self, owner: Owner, grant: Grant) -> bool:
        """See Claims.announce. An address that is another's is handed out no more."""
        try:
            blocks = self._coexisting(grant)
        except (ApiError, Unusable) as error:
            raise _cannot(error) from None
        if not blocks:
            return True
        ranges = {(each.reservation.domain, each.range.network) for each in grant.granted}
        departure = departure_of(owner, ranges, tuple(blocks))
        self._departures.hold(departure)
        made: list[OverlappingRangeIPReservation] = []
        try:
            namespace = namespaces(self._api)[0]
            for (network, address), block in blocks.items():
                name = reservation_name(network, parse(address))
                reservation = self._reserved(name, namespace, departure)
                if reservation is None:
                    self._keep_out(block, parse(address))
                    for each in made:
                        with suppress(NotFound):
                            self._api.delete(each)
                    return False
                made.append(reservation)
        except (ApiError, Unusable) as error:
            raise _cannot(error) from None
        return True

    def _coexisting(self, grant: Grant) -> dict[tuple[str, str], LeasedBlock]:
        """The addresses in blocks of shared pools that are used beside whereabouts."""
        found: dict[tuple[str, str], LeasedBlock] = {}
        rows = self._store.blocks().values()
        for each in grant.granted:
            reservation = each.reservation
            address = parse(reservation.address)
            for row in rows:
                if row.first <= address <= row.last and reservation.domain in row.domains:
                    pool = self._pools.known(row.pool) or self._pools.read(row.pool)
                    if pool.spec.compat == "Coexist" and pool.spec.shared:
                        found[reservation.domain, reservation.address] = row
        return found

    def _reserved(
        self, name: str, namespace: str, departure: DepartedAttachment
    ) -> OverlappingRangeIPReservation | None:
        """The reservation of an address for the attachment; None if it is another's."""
        spec = OverlappingReservationSpec(podref=departure.podref, ifname=departure.ifname)
        new = OverlappingRangeIPReservation(
            metadata=Meta(name=name, namespace=namespace), spec=spec
        )
        try:
            return self._api.create(new)
        except AlreadyExists:
            with suppress(NotFound):
                there = self._api.get(OverlappingRangeIPReservation, name, namespace)
                if (there.spec.podref, there.spec.ifname or spec.ifname) == (
                    spec.podref,
                    spec.ifname,
                ):
                    return there
            return None

    def _keep_out(self, block: LeasedBlock, address: int) -> None:
        """Hand out an address no more, until a confirmation has looked again."""

        def revised(row: LeasedBlock) -> LeasedBlock:
            holes = merged((*row.kept_out, Interval(address, address)))
            return replace(row, kept_out=holes)

        self._store.revise({(block.name, block.uid): revised})


def _cannot(error: Exception) -> CNIError:
    return CNIError(
        Code.TRY_AGAIN,
        f"cannot tell whereabouts which addresses are used: {error}: nothing was reserved; the "
        "runtime tries again",
    )
