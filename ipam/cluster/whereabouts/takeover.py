"""A pod of whereabouts that gets a new sandbox from us keeps its address.

The pod's entry in the IPPool stays the lock on the address, whoever's block the address is in: the
entry gets the id of our container, and the address is reserved in the store of this node. The DEL
of that container removes the entry as it removes those that whereabouts wrote.
"""

import random
import time
from collections.abc import Collection, Mapping
from typing import Any

from cni.spec.errors import CNIError, Code
from ipam.cluster.api import ApiError, ClusterApi, Conflict, NotFound
from ipam.cluster.pools import NotReadyYet, Pools, name_of
from ipam.cluster.wants import PoolRange
from ipam.cluster.whereabouts.held import Held, Place
from ipam.cluster.whereabouts.objects import IPAllocation, IPPool, IPPoolSpec, PoolEntry, tests_of
from ipam.departures import DepartedAttachment, Departures
from ipam.store import Owner

_ATTEMPTS = 20  # of a patch that others forestall
_PAUSE = 0.05  # seconds


class Takeover:
    """Lets pods keep their addresses. Threads may share it."""

    def __init__(self, api: ClusterApi, pools: Pools, departures: Departures) -> None:
        self._api = api
        self._pools = pools
        self._departures = departures

    def kept(self, owner: Owner, ranges: Collection[PoolRange]) -> Mapping[PoolRange, int]:
        """The address that the pod has with whereabouts, of each range that it has one of.

        It is the attachment's from here on. CNIError 11 if that cannot be seen or done now.
        """
        if not (owner.pod.namespace and owner.pod.name):
            return {}
        departure = departure_of(owner, ranges)
        kept: dict[PoolRange, int] = {}
        try:
            for each in sorted(ranges):
                address = self._of_range(departure, each)
                if address is not None:
                    kept[each] = address
        except ApiError as error:
            raise CNIError(
                Code.TRY_AGAIN,
                f"cannot see whether pod {departure.podref} has an address with whereabouts: "
                f"{error}: nothing was reserved; the runtime tries again",
            ) from None
        return kept

    def _of_range(self, departure: DepartedAttachment, range_: PoolRange) -> int | None:
        name = name_of(range_)
        try:
            pool = self._pools.known(name) or self._pools.read(name)
        except NotReadyYet:
            return None  # the claim waits for it
        if pool.spec.compat == "None":
            return None
        found = _entry_of(self._pools.known_foreign(pool), departure)
        if found is None or found.place is None:
            return None
        self._departures.hold(departure)
        ours = self._take(departure, found.allocation, found.place)
        self._pools.learn(pool, found.address, found._replace(allocation=ours) if ours else None)
        return found.address if ours else None

    def _take(
        self, departure: DepartedAttachment, there: IPAllocation | None, place: Place
    ) -> IPAllocation | None:
        """Write our container into the entry; None if the pod has the entry no more."""
        ours = IPAllocation(
            id=departure.container_id, podref=departure.podref, ifname=departure.ifname
        )
        pool = IPPool(metadata=place.pool, spec=IPPoolSpec())
        for attempt in range(_ATTEMPTS):
            if there is None or (there.podref, there.ifname or ours.ifname) != (
                ours.podref,
                ours.ifname,
            ):
                return None
            if there == ours and attempt:
                return ours
            value = {"id": ours.id, "podref": ours.podref, "ifname": ours.ifname}
            path = f"/spec/allocations/{place.offset}"
            operations: list[dict[str, Any]] = [
                *tests_of(PoolEntry(0, place.offset, there)),
                {"op": "replace", "path": path, "value": value},
            ]
            try:
                self._api.patch(pool, operations)
            except NotFound:
                return None
            except Conflict:
                time.sleep(random.uniform(0, _PAUSE * (1 + attempt)))
            else:
                return ours
            try:
                pool = self._api.get(IPPool, pool.metadata.name, pool.metadata.namespace)
            except NotFound:
                return None
            there = (pool.spec.allocations or {}).get(place.offset)
        raise Conflict(f"patch IPPool {pool.metadata.name}: others change it all the time")


def departure_of(
    owner: Owner, ranges: Collection[PoolRange], reserved: tuple[tuple[str, str], ...] = ()
) -> DepartedAttachment:
    """What a file says of an attachment."""
    attachment, pod = owner.attachment, owner.pod
    return DepartedAttachment(
        network=attachment.network,
        container_id=attachment.container_id,
        ifname=attachment.ifname,
        namespace=pod.namespace,
        pod=pod.name,
        ranges=tuple((domain, str(network)) for domain, network in sorted(ranges)),
        reserved=reserved,
    )


def _entry_of(foreign: Mapping[int, Held], departure: DepartedAttachment) -> Held | None:
    """The pod's entry for the interface; else its lowest of a version that wrote no interface."""
    theirs = [
        foreign[address]
        for address in sorted(foreign)
        if foreign[address].allocation.podref == departure.podref and foreign[address].place
    ]
    for ifname in (departure.ifname, ""):
        for each in theirs:
            if each.allocation.ifname == ifname:
                return each
    return None
