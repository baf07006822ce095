"""Claims for the names of pods: finds a pod's AddressReservation and its block, and takes it over.

A pod without a block yet gets one by a claim as any other (`claims`), which says whom it is for.
"""

import math
import re
import uuid

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import parse, text
from ipam.blocks import LeasedBlock
from ipam.cluster.api import Conflict, NotFound, Unavailable
from ipam.cluster.leasing import Leasing
from ipam.cluster.objects import AddressBlock, AddressPool, AddressReservation, StickySpec
from ipam.cluster.pools import Unusable, kept_out, max_offline
from ipam.cluster.rows import row_of
from ipam.cluster.wants import NotReserved, PodInterface, Want
from ipam.ranges import is_within

_ORDINAL = re.compile(r"-[0-9]+")


class StickyClaims:
    """Claims of a holder for the names of pods."""

    def __init__(self, leasing: Leasing) -> None:
        self._api, self._store, _, self._holder, self._clock = leasing

    def reserved(self, pool: AddressPool, want: Want) -> StickySpec | None:
        """What a block for the name of the want's pod says; None if any address will do.

        NotReserved, Unusable, ApiError.
        """
        if want.sticky is None:
            return None
        reservation = self._reservation(pool, want, want.sticky)
        if pool.spec.compat != "None":
            raise Unusable(
                f"AddressPool {pool.metadata.name} is shared with whereabouts: AddressReservation "
                f"{reservation} of it cannot be kept; set its spec.compat to None first"
            )
        if pool.spec.rails:
            raise Unusable(
                f"AddressPool {pool.metadata.name} has rails: AddressReservation {reservation} "
                "of it cannot be kept; reserve addresses of a pool without rails"
            )
        return StickySpec(reservation=reservation, pod=want.sticky.pod, ifname=want.sticky.ifname)

    def _reservation(self, pool: AddressPool, want: Want, pod: PodInterface) -> str:
        """The AddressReservation of a pod.

        One for the pod goes before one for its StatefulSet, and one for the interface before one
        for all.
        """
        listed = self._api.list(AddressReservation, {"spec.pool": pool.metadata.name}).items
        fitting = [each for each in listed if _fits(each, pod)]
        if not fitting:
            raise NotReserved(want)
        found = min(fitting, key=_rank)
        return f"{found.metadata.namespace}/{found.metadata.name}"

    def bound(self, sticky: StickySpec) -> AddressBlock | None:
        """The block of the pod's interface, the oldest if two nodes made one at once. ApiError."""
        return min(self._bound(sticky), key=_age, default=None)

    def is_alone(self, stored: AddressBlock) -> bool:
        """Whether no other block is for the same pod: two nodes may claim one at once. ApiError."""
        names = {block.metadata.name for block in self._bound(stored.spec.sticky)}
        return names <= {stored.metadata.name}

    def _bound(self, sticky: StickySpec) -> list[AddressBlock]:
        """The blocks of the pod's interface: one, but while two nodes try at once."""
        listed = self._api.list(AddressBlock, {"spec.sticky.reservation": sticky.reservation}).items
        return [
            block
            for block in listed
            if (block.spec.sticky.pod, block.spec.sticky.ifname) == (sticky.pod, sticky.ifname)
        ]

    def use(self, found: AddressBlock, pool: AddressPool, want: Want) -> AddressBlock | None:
        """The block of the pod's name as this node's; None if its row is of use already.

        CNIError 11 if another node has not let go of it, 110 if the address is excluded. Unusable,
        ApiError.
        """
        row = self._store.blocks().get(found.metadata.name)
        if row is not None and row.uid == found.metadata.uid:
            if row.is_confirmed(self._holder.boot, self._clock()):
                return None
            if row.state == "lost":
                raise Unusable(f"pods hold addresses of {row.name}, which was another node's")
        address = parse(found.spec.sticky.address)
        if not want.range.allows(address) or is_within(address, kept_out(pool)):
            raise CNIError(
                Code.NO_FREE_ADDRESS,
                f"{want.range.where}: {text(address)} is reserved for the pod, and {want.range} or "
                f"AddressPool {pool.metadata.name} excludes it: nothing was reserved; delete "
                f"AddressReservation {found.spec.sticky.reservation}, or exclude less",
            )
        stored, row = self._taken_over(found, pool, want)
        self._store.put(row)
        return stored

    def _taken_over(
        self, found: AddressBlock, pool: AddressPool, want: Want
    ) -> tuple[AddressBlock, LeasedBlock]:
        """The block as this node's, and its row, which is not written yet.

        It is written in any case: a late request of ours to drain it must not find the version that
        it expects.
        """
        former, spec = found.spec.holder, found.spec
        address, node = spec.sticky.address, former.node
        if former.instance != self._holder.instance and spec.state != "Draining":
            raise CNIError(
                Code.TRY_AGAIN,
                f"{address} is reserved for pod {spec.sticky.pod}, and node {node} still has it "
                f"(AddressBlock {found.metadata.name}): nothing was reserved; the runtime tries "
                "again. It is free when the pod is gone there, or that node is proved dead: if its "
                f"machine is off, `podfabric ipam reclaim --node {node} --powered-off` says so",
            )
        changed = replace(
            spec,
            state="Active",
            holder=self._holder,
            epoch=spec.epoch + (former != self._holder),
            nonce=str(uuid.uuid4()),
            max_offline_seconds=math.ceil(max_offline(pool)),
        )
        at = self._clock()
        try:
            stored = self._api.update(replace(found, spec=changed))
        except (Conflict, NotFound, Unavailable) as error:
            stored = self._api.get(AddressBlock, found.metadata.name)
            if stored.spec.nonce != changed.nonce or stored.spec.holder != self._holder:
                raise CNIError(
                    Code.TRY_AGAIN,
                    f"{address} changes hands: nothing was reserved; the runtime tries again: "
                    f"{error}",
                ) from None
        return stored, row_of(stored, pool, want.range.domain, self._holder.boot, at)


def _age(block: AddressBlock) -> tuple[str, str]:
    return block.metadata.creation_timestamp, block.metadata.name


def _fits(each: AddressReservation, pod: PodInterface) -> bool:
    owner = each.spec.owner
    if each.metadata.namespace != pod.namespace or owner.ifname not in ("", pod.ifname):
        return False
    if owner.kind == "Pod":
        return owner.name == pod.pod
    return pod.pod.startswith(owner.name) and bool(
        _ORDINAL.fullmatch(pod.pod.removeprefix(owner.name))
    )


def _rank(each: AddressReservation) -> tuple[bool, bool, str]:
    owner = each.spec.owner
    return owner.kind != "Pod", owner.ifname == "", each.metadata.name
