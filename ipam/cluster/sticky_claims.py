"""Claims for the names of pods: finds a pod's AddressReservation and its block, and takes it over.

A pod without a block yet gets one by a claim as any other (`claims`), which says whom it is for.
"""

import math
import uuid
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import parse, text
from ipam.blocks import LeasedBlock
from ipam.cluster.api import ClusterApi, Conflict, NotFound, Unavailable
from ipam.cluster.geometry import why_wrong
from ipam.cluster.leasing import Leasing
from ipam.cluster.objects import (
    AddressBlock,
    AddressPool,
    AddressReservation,
    Holder,
    StickySpec,
)
from ipam.cluster.pools import Unusable, kept_out, max_offline
from ipam.cluster.rows import row_of
from ipam.cluster.sticky import (
    is_let_go,
    is_of,
    limit_reached,
    name_of,
    pod_of,
    preference,
)
from ipam.cluster.wants import NotReserved, PodInterface, ReservationRefused, Want
from ipam.ranges import is_within


class Reserved(NamedTuple):
    """What the block for a pod's name says, and the block if there is one."""

    spec: StickySpec
    block: AddressBlock | None


class StickyClaims:
    """Claims of a holder for the names of pods."""

    def __init__(self, leasing: Leasing) -> None:
        self._api, self._store, _, self._holder, self._clock = leasing

    def reserved(self, pool: AddressPool, want: Want) -> Reserved | None:
        """What is reserved for the name of the want's pod; None if any address will do.

        Of several reservations that of the block counts, so that another one does not change the
        address. For a first address, one for the pod goes before one for its StatefulSet, and one
        for the interface before one for all. NotReserved, ReservationRefused, ApiError.
        """
        pod, name = want.sticky, pool.metadata.name
        if pod is None:
            return None
        listed = self._api.list(AddressReservation, {"spec.pool": name}, pod.namespace).items
        fitting = [name_of(each) for each in sorted(listed, key=_rank) if is_of(each, name, pod)]
        if not fitting:
            raise NotReserved(want)
        found = [block for each in fitting for block in self._of_pod(each, pool, pod)]
        block = min(found, key=preference, default=None)
        if block is not None:
            return Reserved(block.spec.sticky, block)
        spec = StickySpec(reservation=fitting[0], pod=pod.pod, ifname=pod.ifname)
        return Reserved(spec, None)

    def require_room(self, pool: AddressPool, reserved: StickySpec) -> None:
        """ReservationRefused if the pool lets no further address be reserved. ApiError.

        Nodes that ask at the same moment may pass the limit, by an address each.
        """
        most, name = pool.spec.sticky.max_addresses, pool.metadata.name
        if not most:
            return
        listed = self._api.list(AddressBlock, {"spec.pool": name}).items
        reserved_ones = (block for block in listed if block.spec.sticky.reservation)
        count = sum(not why_wrong(block, pool) for block in reserved_ones)
        if count >= most:
            raise ReservationRefused(reserved.reservation, limit_reached(name, count, most))

    def is_alone(self, stored: AddressBlock, pool: AddressPool) -> bool:
        """Whether no other block is for the same pod: two nodes may claim one at once. ApiError."""
        sticky = stored.spec.sticky
        found = self._of_pod(sticky.reservation, pool, pod_of(sticky))
        return {block.metadata.name for block in found} <= {stored.metadata.name}

    def _of_pod(self, reservation: str, pool: AddressPool, pod: PodInterface) -> list[AddressBlock]:
        """The blocks of a pod: one, but while two nodes try at once. A former reservation of the
        same name may have had some of another pool. One that is not cut as the pool is could have
        addresses of another node's block."""
        listed = self._api.list(AddressBlock, {"spec.sticky.reservation": reservation}).items
        return [
            block
            for block in listed
            if block.spec.pool == pool.metadata.name
            and pod_of(block.spec.sticky) == pod
            and not why_wrong(block, pool)
        ]

    def use(self, found: AddressBlock, pool: AddressPool, want: Want) -> AddressBlock | None:
        """The block of the pod's name as this node's; None if its row is of use already.

        CNIError 11 if another node has not let go of it, 110 if the address is excluded. Unusable,
        ApiError.
        """
        row = self._store.blocks().get(found.metadata.name)
        if row is not None and row.uid == found.metadata.uid:
            if row.is_confirmed(self._holder.boot, self._clock()):
                self._require_free(row, found.spec.sticky, want)
                return None
            if row.state == "lost":
                raise Unusable(f"pods hold addresses of {row.name}, which was another node's")
            if row.state == "unconfirmed" and row.boot == self._holder.boot:
                raise Unusable(
                    f"AddressBlock {row.name} shows that this node's store was put back to an "
                    "earlier state: it hands the address out after the next boot"
                )
        address = parse(found.spec.sticky.address)
        if not want.range.allows(address) or is_within(address, kept_out(pool)):
            is_hop = address in (want.range.gateway, *want.range.withheld)
            why = (
                "the definition names it as a gateway or next hop"
                if is_hop
                else f"{want.range} or AddressPool {pool.metadata.name} excludes it"
            )
            raise CNIError(
                Code.NO_FREE_ADDRESS,
                f"{want.range.where}: {text(address)} is reserved for the pod, and {why}: nothing "
                f"was reserved; delete AddressReservation {found.spec.sticky.reservation}, or "
                f"change the {'definition' if is_hop else 'exclusion'}",
            )
        stored, row = self._taken_over(found, pool, want)
        self._store.put(row)
        return stored

    def _require_free(self, row: LeasedBlock, sticky: StickySpec, want: Want) -> None:
        """CNIError 11 if a sandbox of this boot has the address: the runtime deletes it first. Or
        if another machine has it."""
        if row.answered:
            raise CNIError(
                Code.TRY_AGAIN,
                f"{sticky.address} is reserved for pod {sticky.pod}, and another machine on "
                "the link answers for it: nothing was reserved; the runtime tries again; find that "
                "machine, and stop it",
            )
        held = self._store.holders(row.name).values()
        holder = next((each for each in held if each.boot == self._holder.boot), None)
        if holder is not None:
            raise CNIError(
                Code.TRY_AGAIN,
                f"{sticky.address} is reserved for pod {sticky.pod}, and its former sandbox on "
                "this node still has it: nothing was reserved; the runtime tries again, and "
                "succeeds once it has deleted that sandbox",
            )

    def _taken_over(
        self, found: AddressBlock, pool: AddressPool, want: Want
    ) -> tuple[AddressBlock, LeasedBlock]:
        """The block as this node's, and its row, which is not written yet."""
        former, spec = found.spec.holder, found.spec
        address, node = spec.sticky.address, former.node
        if former.instance != self._holder.instance and not is_let_go(found):
            raise CNIError(
                Code.TRY_AGAIN,
                f"{address} is reserved for pod {spec.sticky.pod}, and node {node} still "
                f"has it (AddressBlock {found.metadata.name}): nothing was reserved; the runtime "
                "tries again. It is free when the pod is gone there, or that node is proved dead: "
                f"if its machine is off, `podfabric ipam reclaim --node {node} --powered-off` says "
                "so",
            )
        taken = taken_over(self._api, self._clock, self._holder, found, pool)
        if taken is None:
            raise CNIError(
                Code.TRY_AGAIN,
                f"{address} changes hands: nothing was reserved; the runtime tries again",
            )
        stored, at = taken
        return stored, row_of(stored, pool, want.range.domain, self._holder.boot, at)


def taken_over(
    api: ClusterApi,
    clock: Callable[[], float],
    holder: Holder,
    found: AddressBlock,
    pool: AddressPool,
) -> tuple[AddressBlock, float] | None:
    """A block that its last holder has let go, as this holder's, and a time before that was known;
    None if another node was faster. Unusable, ApiError.

    The block is changed in any case: a late request of ours to drain it must not find the version
    that it expects.
    """
    changed = replace(
        found.spec,
        state="Active",
        holder=holder,
        epoch=found.spec.epoch + (found.spec.holder != holder),
        nonce=str(uuid.uuid4()),
        max_offline_seconds=math.ceil(max_offline(pool)),
    )
    at = clock()
    try:
        return api.update(replace(found, spec=changed)), at
    except (Conflict, NotFound, Unavailable):
        stored = api.get(AddressBlock, found.metadata.name)
        is_ours = (stored.spec.nonce, stored.spec.holder) == (changed.nonce, holder)
        return (stored, at) if is_ours else None


def _rank(each: AddressReservation) -> tuple[bool, bool, str]:
    owner = each.spec.owner
    return owner.kind != "Pod", owner.ifname == "", each.metadata.name
