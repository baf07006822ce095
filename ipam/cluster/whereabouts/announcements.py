"""Tells whereabouts of our addresses where its nodes have ranges that overlap (`Coexist`).

A placeholder keeps whereabouts from an address in the IPPool of that range only. Among ranges of
one network name it goes by reservations, of which an address can have one: so each address gets
its own before the ADD is answered.
"""

from contextlib import suppress

from msgspec.structs import replace

from base.pod import Pod
from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse, parse_interface
from ipam.blocks import LeasedBlock
from ipam.cluster.api import AlreadyExists, ApiError, ClusterApi, Conflict, NotFound
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
from ipam.departures import DepartedAttachment
from ipam.ranges import is_shared_domain, merged
from ipam.store import Grant, Owner, Reservation

_ATTEMPTS = 10  # of a reservation that others remove or make


class Announcements:
    """Makes reservations. Threads may share it."""

    def __init__(self, api: ClusterApi, store: BlockStore, pools: Pools) -> None:
        self._api = api
        self._store = store
        self._pools = pools
        self._departures = store.departures
        self._found_in = ""

    def announce(self, owner: Owner, grant: Grant) -> bool:
        """See Claims.announce. An address that is another's is handed out no more."""
        try:
            blocks = self._coexisting(grant)
            if not blocks:
                return True
            ranges = {(each.reservation.domain, each.range.network) for each in grant.granted}
            departure = departure_of(owner, ranges, tuple(blocks))
            former = self._departures.reserved_of(owner.attachment)
            self._departures.hold(departure)
            made: list[OverlappingRangeIPReservation] = []
            for key, block in blocks.items():
                reservation = self._reserved(departure, key, is_in_use=key in former)
                if reservation is None:
                    self._keep_out(block, parse(key[1]))
                    for each in made:
                        with suppress(NotFound):
                            self._api.delete(each)
                    return False
                made.append(reservation)
        except (ApiError, Unusable) as error:
            raise CNIError(
                Code.TRY_AGAIN,
                f"cannot tell whereabouts which addresses are used: {error}: nothing was reserved; "
                "the runtime tries again",
            ) from None
        return True

    def restore(self, held: Reservation) -> bool:
        """Make the reservation of an address that a pod of ours holds and that may have lost it, or
        never had one; False if it is another pod's. ApiError, CNIError."""
        key = (held.domain, held.address)
        return self._reserved(self.hold(held, (key,)), key, is_in_use=True) is not None

    def hold(
        self, held: Reservation, reserved: tuple[tuple[str, str], ...] = ()
    ) -> DepartedAttachment:
        """Note that an attachment of ours is to have an entry, or reservations. CNIError."""
        owner = Owner(held.attachment, Pod(held.namespace, held.pod, held.uid))
        ranges = [(held.domain, parse_interface(held.range)[1])]
        departure = departure_of(owner, ranges, reserved)
        self._departures.hold(departure)
        return departure

    def _coexisting(self, grant: Grant) -> dict[tuple[str, str], LeasedBlock]:
        """The addresses in blocks that are used beside whereabouts, but for those of ranges that
        are alone in their domain."""
        found: dict[tuple[str, str], LeasedBlock] = {}
        rows = self._store.blocks().values()
        for each in grant.granted:
            reservation = each.reservation
            address = parse(reservation.address)
            for row in rows:
                if row.first <= address <= row.last and reservation.domain in row.domains:
                    pool = self._pools.of_row(row)
                    coexists = pool is not None and pool.spec.compat == "Coexist"
                    if coexists and is_shared_domain(reservation.domain):
                        found[reservation.domain, reservation.address] = row
        return found

    def _reserved(
        self, departure: DepartedAttachment, key: tuple[str, str], *, is_in_use: bool
    ) -> OverlappingRangeIPReservation | None:
        """The reservation of an address for the attachment; None if it is another's.

        One that an earlier attachment of ours has left is made again, unless the pod uses the
        address already: then what removes the earlier one's, now or soon, does not find this one.
        """
        network, address = key
        namespace = self._namespace()
        name = reservation_name(network, parse(address))
        spec = OverlappingReservationSpec(podref=departure.podref, ifname=departure.ifname)
        new = OverlappingRangeIPReservation(
            metadata=Meta(name=name, namespace=namespace), spec=spec
        )
        for _ in range(_ATTEMPTS):
            with suppress(AlreadyExists):
                return self._api.create(new)
            with suppress(NotFound, Conflict):
                there = self._api.get(OverlappingRangeIPReservation, name, namespace)
                if not self._is_ours(there.spec, key, departure):
                    return None
                if is_in_use:
                    return there
                self._api.delete(there)
        raise Conflict(f"create {new.KIND} {name}: others change it all the time")

    def _is_ours(
        self,
        there: OverlappingReservationSpec,
        key: tuple[str, str],
        departure: DepartedAttachment,
    ) -> bool:
        """Whether a reservation is the pod's, or of an attachment of this node that is gone."""
        if (there.podref, there.ifname or departure.ifname) == (departure.podref, departure.ifname):
            return True
        gone = (each for each in self._departures.held() if not self._store.has(each.attachment))
        return any(
            (each.podref, each.ifname) == (there.podref, there.ifname) and key in each.reserved
            for each in (*self._departures.departed(), *gone)
        )

    def _namespace(self) -> str:
        """Where whereabouts keeps its objects."""
        if not self._found_in:
            self._found_in = namespaces(self._api)[0]
        return self._found_in

    def _keep_out(self, block: LeasedBlock, address: int) -> None:
        """Hand out an address no more, until a confirmation has looked again."""

        def revised(row: LeasedBlock) -> LeasedBlock:
            holes = merged((*row.kept_out, Interval(address, address)))
            return replace(row, kept_out=holes)

        self._store.revise({(block.name, block.uid): revised})
