"""The errors of failed claims."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from cni.spec.errors import CNIError, Code
from ipam.addresses import Interval, family, parse_interval, text
from ipam.leases.block_layout import Geometry
from ipam.leases.claim_request import Want
from ipam.leases.objects import AddressBlock, AddressPool, Holder
from ipam.leases.pool_cache import kept_out
from ipam.ranges import is_within, outside, size_of
from ipam.store.reservations import AddressTaken
from kube.client import ClusterApi
from kube.resources import NotFound

_MOST_NAMED = 3  # nodes in an error


def none_left(
    api: ClusterApi,
    holder: Holder,
    pool: AddressPool,
    blocks: Geometry,
    want: Want,
    holes: Sequence[Interval],
    others: Sequence[AddressBlock],
) -> CNIError:
    """The error if no fitting block is free for the holder. Raises ApiError."""
    if want.fixed:
        if is_within(want.range.first, holes):
            raise is_kept_out(want, pool)
        return _taken(api, holder, pool, blocks, want)
    if not any(list(outside(part, kept_out(pool))) for part in want.range.parts):
        raise CNIError(
            Code.NO_FREE_ADDRESS,
            f"the network and AddressPool {pool.metadata.name} together exclude every address of "
            f"{want.range}: nothing was reserved; exclude fewer addresses, or widen the range",
        )
    used, capacity = pool.status.addresses.used, pool.status.addresses.capacity
    size = "1 address" if blocks.block_size == 1 else f"{blocks.block_size} addresses"
    held = size_of(map(parse_interval, pool.status.held))
    theirs = f", and pods of whereabouts have {held} addresses" if held else ""
    return CNIError(
        Code.NO_FREE_ADDRESS,
        f"AddressPool {pool.metadata.name} has no free address for this node: nodes "
        f"lease every block of {want.range} (IPv{family(want.range.first)}; the pool has "
        f"{blocks.total} blocks of {size}); at the last reports, pods had {used} of {capacity} "
        f"addresses{theirs}{_most_free(holder, others)}: nothing was reserved; delete "
        "pods that need no address any more, or widen the range",
    )


def _most_free(holder: Holder, others: Sequence[AddressBlock]) -> str:
    """An error's text that lists the other nodes with the most free addresses (`status.free`)."""
    free = Counter[str]()
    for block in others:
        if block.spec.holder.instance != holder.instance and block.status.free:
            free[block.spec.holder.node] += block.status.free
    listed = ", ".join(f"{node} ({count})" for node, count in free.most_common(_MOST_NAMED))
    return f"; the nodes with the most free addresses are {listed}" if listed else ""


def _taken(
    api: ClusterApi, holder: Holder, pool: AddressPool, blocks: Geometry, want: Want
) -> CNIError:
    """The error for a fixed address that is not free. Names the node that leases the block."""
    address = want.range.first
    name = blocks.name(pool.status.space, blocks.index(address))
    with suppress(NotFound):
        spec = api.get(AddressBlock, name).spec
        if spec.sticky.reservation:
            return is_reserved(want)
        node = spec.holder.node
        if node != holder.node:
            why = f"is in a block that node {node} leases"
            return _not_given(want, why, f"see AddressBlock {name}")
    return CNIError(
        Code.TRY_AGAIN,
        f"{want.range.where}: this node may not hand out {text(want.range.first)} now: its "
        f"lease of AddressBlock {name} is not confirmed, or is ending; try again",
    )


def is_reserved(want: Want) -> AddressTaken:
    """Does not name the pod, because the pod may belong to another tenant."""
    return _not_given(
        want,
        "is in a block that is reserved for a pod by its name",
        "see AddressReservations (kubectl get ares -A)",
    )


def is_kept_out(want: Want, pool: AddressPool) -> AddressTaken:
    """The address is excluded, not offered, or given to a pod by whereabouts."""
    name = pool.metadata.name
    where = f"see spec.exclude, status.held and status.offered of AddressPool {name}"
    return _not_given(want, f"is kept out of AddressPool {name}", where)


def is_answered(want: Want) -> AddressTaken:
    """Another machine uses the address, although no other node leases the address."""
    return AddressTaken(
        f"{want.range.where}: another machine on the link answers for address "
        f"{text(want.range.first)}: nothing was reserved; ask for another address",
        'see "Addresses that a lost machine may still use" in docs/use/cluster-addresses.md',
    )


def _not_given(want: Want, why: str, where: str) -> AddressTaken:
    return AddressTaken(
        f"{want.range.where}: address {text(want.range.first)} {why}: nothing was reserved; ask "
        "for another address",
        where,
    )
