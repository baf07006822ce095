"""Sticky addresses: an address that stays with the name of a pod, on every node.

An AddressReservation names a pod, or a StatefulSet for its pods. Each interface of such a pod has a
block of its own, of which one address is handed out. The block outlives the pod: the node that
holds it sets it Draining once the pod has let go of the address, and the pod's next node takes it
over with the next epoch. No node takes it from one that has not let go: the controller sets it
Draining when that node is proved dead.
"""

import math
import re
import uuid

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse
from ipam.blocks import LeasedBlock
from ipam.cluster import geometry
from ipam.cluster.api import ClusterApi, Conflict, NotFound, Unavailable
from ipam.cluster.leasing import Leasing
from ipam.cluster.objects import (
    AddressBlock,
    AddressPool,
    AddressReservation,
    BlockSpec,
    BlockStatus,
    StickySpec,
)
from ipam.cluster.pools import kept_out, max_offline
from ipam.cluster.wants import NotReserved, PodInterface, Want
from ipam.ranges import merged, outside

_ORDINAL = re.compile(r"-[0-9]+")


def is_for(block: LeasedBlock, pod: PodInterface | None) -> bool:
    """Whether the block is the pod's own, or if no pod is given, anybody's."""
    if pod is None or not block.sticky:
        return pod is None and not block.sticky
    sticky = of_row(block)
    namespace = sticky.reservation.partition("/")[0]
    return (namespace, sticky.pod, sticky.ifname) == pod


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
    out = kept_out(pool, spec.foreign)
    if not spec.sticky.reservation:
        return out
    address = parse(spec.sticky.address)
    return merged((*out, *outside(covered, [Interval(address, address)])))


class StickyBlocks:
    """Finds the blocks of pods' names, and takes them over for a holder."""

    def __init__(self, leasing: Leasing) -> None:
        self._api, _, _, self._holder, self._clock = leasing

    def reservation(self, pool: AddressPool, want: Want) -> str:
        """The AddressReservation of the pod of a want. NotReserved, ApiError.

        One for the pod goes before one for its StatefulSet, and one for the interface before one
        for all.
        """
        pod = want.sticky
        assert pod is not None
        listed = self._api.list(AddressReservation, {"spec.pool": pool.metadata.name}).items
        fitting = [each for each in listed if _fits(each, pod)]
        if not fitting:
            raise NotReserved(want)
        found = min(fitting, key=_rank)
        return f"{found.metadata.namespace}/{found.metadata.name}"

    def bound(self, reservation: str, pod: PodInterface) -> list[AddressBlock]:
        """The blocks of the pod's interface: one, but while two nodes try at once. ApiError."""
        listed = self._api.list(AddressBlock, {"spec.sticky.reservation": reservation}).items
        mine = [
            block
            for block in listed
            if (block.spec.sticky.pod, block.spec.sticky.ifname) == (pod.pod, pod.ifname)
        ]
        return sorted(mine, key=_age)

    def is_alone(self, stored: AddressBlock) -> bool:
        """Whether no other block is for the same pod: two nodes may claim one at once. ApiError."""
        sticky = stored.spec.sticky
        pod = PodInterface(sticky.reservation.partition("/")[0], sticky.pod, sticky.ifname)
        names = {block.metadata.name for block in self.bound(sticky.reservation, pod)}
        return names <= {stored.metadata.name}

    def take(
        self, found: AddressBlock, pool: AddressPool, want: Want
    ) -> tuple[AddressBlock, LeasedBlock]:
        """The block as this node's, and its row, which is not written yet.

        It is written in any case: a late request of ours to drain it must not find the version that
        it expects. CNIError 11 if another node has not let go of it; ApiError.
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
        return stored, self.row(stored, pool, want.range.domain, at)

    def row(self, stored: AddressBlock, pool: AddressPool, domain: str, at: float) -> LeasedBlock:
        """The row of a block that is this node's as of `at`. Unusable."""
        covered = geometry.interval(stored)
        return LeasedBlock(
            name=stored.metadata.name,
            uid=stored.metadata.uid,
            space=stored.spec.space,
            pool=stored.spec.pool,
            domains=(domain,),
            first=covered.first,
            last=covered.last,
            kept_out=holes(pool, stored.spec, covered),
            max_offline=max_offline(pool),
            boot=self._holder.boot,
            confirmed=at,
            sticky=row_text(stored.spec.sticky),
        )


def is_let_go(found: AddressBlock) -> bool:
    """Whether its last node has let go of the block: the pod's next node may take it."""
    return bool(found.spec.sticky.reservation) and found.spec.state == "Draining"


def drain(api: ClusterApi, found: AddressBlock) -> None:
    """Let go of a block of which nothing is held, for the pod's next node. ApiError.

    The status goes first: it is of this holder's store, and the next one compares it with its own.
    """
    if found.spec.state != "Draining":
        found = api.update_status(replace(found, status=BlockStatus()))
        api.update(replace(found, spec=replace(found.spec, state="Draining")))


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
