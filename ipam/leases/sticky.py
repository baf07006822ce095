"""Sticky addresses stay with a pod's name, on every node.

An AddressReservation is for a pod, or for the pods of a StatefulSet. Each interface of the pod has
a block, and gets one address of the block. The block outlives the pod. When the pod has released
the address, the block's holder sets the state Draining. Then the pod's next node takes the block
over, and `epoch` grows by 1. Other nodes take over only a block that is Draining. If the holder is
proved dead, the controller sets the state Draining.
"""

import math
import re
import uuid
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, parse, text
from ipam.leases import block_layout
from ipam.leases.block_layout import why_wrong
from ipam.leases.claim_request import NotReserved, PodInterface, Want
from ipam.leases.lease_context import Leasing
from ipam.leases.objects import (
    AddressBlock,
    AddressPool,
    AddressReservation,
    BlockSpec,
    BlockStatus,
    Holder,
    StickySpec,
)
from ipam.leases.pool_cache import Unusable, kept_out, max_offline
from ipam.ranges import is_within, merged, outside
from ipam.store.block_rows import LeasedBlock
from kube.client import ClusterApi
from kube.resources import Conflict, NotFound, Unavailable

_ORDINAL = re.compile(r"-[0-9]+")


def name_of(reservation: AddressReservation) -> str:
    return f"{reservation.metadata.namespace}/{reservation.metadata.name}"


def is_of(reservation: AddressReservation, pool: str, pod: PodInterface) -> bool:
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
    return PodInterface(sticky.reservation.partition("/")[0], sticky.pod, sticky.ifname)


def is_for(block: LeasedBlock, pod: PodInterface | None) -> bool:
    """Whether the block is for this pod. If `pod` is `None`, whether the block is for any pod."""
    if pod is None or not block.sticky:
        return pod is None and not block.sticky
    return pod_of(of_row(block)) == pod


def row_text(sticky: StickySpec) -> str:
    """The four parts, joined with slashes. Only the reservation has a slash itself."""
    if not sticky.reservation:
        return ""
    return "/".join((sticky.reservation, sticky.pod, sticky.ifname, sticky.address))


def of_row(block: LeasedBlock) -> StickySpec:
    if not block.sticky:
        return StickySpec()
    reservation, pod, ifname, address = block.sticky.rsplit("/", 3)
    return StickySpec(reservation=reservation, pod=pod, ifname=ifname, address=address)


def handed_out(spec: BlockSpec, covered: Interval) -> Interval:
    """The block's addresses that pods may get. In a sticky block, this is one address."""
    if not spec.sticky.reservation:
        return covered
    address = parse(spec.sticky.address)
    return Interval(address, address)


def holes(pool: AddressPool, spec: BlockSpec, covered: Interval) -> tuple[Interval, ...]:
    """The block's addresses that no node may hand out. Raises Unusable."""
    return merged((*kept_out(pool), *outside(covered, [handed_out(spec, covered)])))


def preference(found: AddressBlock) -> tuple[bool, str, str]:
    """Sorts a pod's blocks: unreleased blocks before released blocks, older before newer blocks."""
    return is_let_go(found), found.metadata.creation_timestamp, found.metadata.name


def is_let_go(found: AddressBlock) -> bool:
    """Whether the block is released: another node may take it over."""
    return found.spec.state == "Draining"


def drain(api: ClusterApi, found: AddressBlock, *, probe: bool) -> None:
    """Release an unused block. With `probe`, the next holder probes each address. Resets the status
    first, because the next holder compares `status.seq` with its own store. Raises ApiError."""
    if found.spec.state != "Draining":
        found = api.update_status(replace(found, status=BlockStatus()))
        api.update(replace(found, spec=replace(found.spec, state="Draining", probe=probe)))


def row_of(
    stored: AddressBlock, pool: AddressPool, domain: str, boot: str, at: float
) -> LeasedBlock:
    """The row of a block that this node has held since `at` (CLOCK_BOOTTIME). Raises Unusable."""
    covered = block_layout.interval(stored)
    return LeasedBlock(
        name=stored.metadata.name,
        uid=stored.metadata.uid,
        space=stored.space,
        pool=stored.spec.pool,
        domains=(domain,),
        first=covered.first,
        last=covered.last,
        kept_out=holes(pool, stored.spec, covered),
        max_offline=max_offline(pool),
        boot=boot,
        confirmed=at,
        sticky=row_text(stored.spec.sticky),
        unprobed=(handed_out(stored.spec, covered),) if stored.spec.probe else (),
    )


class Reserved(NamedTuple):
    """The reservation for a pod's name, and the pod's block or `None`."""

    spec: StickySpec
    block: AddressBlock | None


class StickyClaims:
    def __init__(self, leasing: Leasing) -> None:
        self._api, self._store, _, self._holder, self._clock = leasing

    def reserved(self, pool: AddressPool, want: Want) -> Reserved | None:
        """The reservation for the want's pod, or `None` if the want is not sticky.

        The reservation of an existing block wins, so that the address does not change. Otherwise a
        reservation for the pod precedes one for the StatefulSet. A reservation for one interface
        precedes one for all interfaces. Raises NotReserved, ApiError.
        """
        pod, name = want.sticky, pool.metadata.name
        if pod is None:
            return None
        listed = self._api.list(AddressReservation, {"spec.pool": name}, pod.namespace).items
        owners = sorted(
            (each.spec.owner.kind != "Pod", each.spec.owner.ifname == "", name_of(each))
            for each in listed
            if is_of(each, name, pod)
        )
        fitting = [each for *_, each in owners]
        if not fitting:
            raise NotReserved(want)
        found = [block for each in fitting for block in self._of_pod(each, pool, pod)]
        block = min(found, key=preference, default=None)
        if block is not None:
            return Reserved(block.spec.sticky, block)
        spec = StickySpec(reservation=fitting[0], pod=pod.pod, ifname=pod.ifname)
        return Reserved(spec, None)

    def is_alone(self, stored: AddressBlock, pool: AddressPool) -> bool:
        """Whether the pod interface has no other block. Raises ApiError."""
        sticky = stored.spec.sticky
        found = self._of_pod(sticky.reservation, pool, pod_of(sticky))
        return {block.metadata.name for block in found} <= {stored.metadata.name}

    def _of_pod(self, reservation: str, pool: AddressPool, pod: PodInterface) -> list[AddressBlock]:
        """The pod's blocks in a pool. There is one block, except while two nodes claim at the same
        time. Skips blocks of another pool: a deleted reservation may have had the same name. Skips
        blocks of another size, because they could overlap another node's block."""
        listed = self._api.list(AddressBlock, {"spec.sticky.reservation": reservation}).items
        return [
            block
            for block in listed
            if block.spec.pool == pool.metadata.name
            and pod_of(block.spec.sticky) == pod
            and not why_wrong(block, pool)
        ]

    def use(self, found: AddressBlock, pool: AddressPool, want: Want) -> AddressBlock | None:
        """Take over the pod's block. Returns `None` if this node can use the block already. Raises
        Unusable, ApiError. Raises CNIError 11 if another node still has the block. Raises CNIError
        110 if the address is excluded."""
        row = self._store.blocks().get(found.metadata.name)
        if row is not None and row.uid == found.metadata.uid:
            if row.is_confirmed(self._holder.boot, self._clock()):
                self._require_free(row, found.spec.sticky, want)
                return None
            if row.state == "lost":
                raise Unusable(
                    f"pods on this node still hold addresses of AddressBlock {row.name} from an "
                    "earlier lease: delete these pods (`podfabric ipam list` has their names)"
                )
            if row.state == "unconfirmed" and row.boot == self._holder.boot:
                raise Unusable(
                    "the address store of this node is an old copy, which lacks changes of "
                    f"AddressBlock {row.name}: reboot the node, then the pod gets the address"
                )
        address = parse(found.spec.sticky.address)
        if not want.range.allows(address) or is_within(address, kept_out(pool)):
            excluded = (*want.range.excluded, *kept_out(pool))
            is_hop = not is_within(address, excluded)
            why = (
                "the definition has this address as a gateway or next hop"
                if is_hop
                else f"the network or AddressPool {pool.metadata.name} excludes this address"
            )
            raise CNIError(
                Code.NO_FREE_ADDRESS,
                f"{want.range.where}: {text(address)} is reserved for the pod, but {why}: the pod "
                f"got no address; delete AddressReservation {found.spec.sticky.reservation}, or "
                f"change the {'definition' if is_hop else 'exclusion'}",
            )
        stored, row = self._taken_over(found, pool, want)
        self._store.put(row)
        return stored

    def _require_free(self, row: LeasedBlock, sticky: StickySpec, want: Want) -> None:
        """Raise CNIError 11 if a sandbox of this boot, or another machine, has the address."""
        if row.answered:
            raise CNIError(
                Code.TRY_AGAIN,
                f"{sticky.address} is reserved for pod {sticky.pod}, but another machine on "
                "the link uses this address: the pod got no address, and the runtime tries again; "
                "find and stop that machine",
            )
        held = self._store.holders(row.name).values()
        holder = next((each for each in held if each.boot == self._holder.boot), None)
        if holder is not None:
            raise CNIError(
                Code.TRY_AGAIN,
                f"{sticky.address} is reserved for pod {sticky.pod}, but an earlier sandbox of "
                "the pod still has this address: the new sandbox got no address; the runtime "
                "deletes the earlier sandbox and tries again",
            )

    def _taken_over(
        self, found: AddressBlock, pool: AddressPool, want: Want
    ) -> tuple[AddressBlock, LeasedBlock]:
        """Returns the block and its row. The caller writes the row."""
        former, spec = found.spec.holder, found.spec
        address, node = spec.sticky.address, former.node
        if former.instance != self._holder.instance and not is_let_go(found):
            raise CNIError(
                Code.TRY_AGAIN,
                f"{address} is reserved for pod {spec.sticky.pod}, but node {node} still "
                f"has this address (AddressBlock {found.metadata.name}): the pod got no address; "
                "the runtime tries again. The address becomes free when the earlier pod on node "
                f"{node} is deleted, or when node {node} is known to be dead. If the machine of "
                f"node {node} is off, run `podfabric ipam reclaim --node {node} --powered-off`",
            )
        taken = taken_over(self._api, self._clock, self._holder, found, pool)
        if taken is None:
            raise CNIError(
                Code.TRY_AGAIN,
                f"another node is taking over {address}: the pod got no address; the runtime tries "
                "again",
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
    """Take over a released block. Returns the block and the time before the update, or `None` if
    another node was faster. Raises Unusable, ApiError. The update always changes the block. So a
    delayed drain by this node fails."""
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
