"""Hands a node back to nv-ipam's own daemon, where podfabric leases the addresses of its IPPools.

No pod has to end. The node gets an entry in each IPPool's `status.allocations` of which no node has
leased or holds anything. Beyond what its old store says, the daemon gives addresses of its entry
only. So it gives none that podfabric gave: blocks and shares, this node's too, stay as they are.

The order is that of all that nodes lease: write first, read then. The AddressPool names the node,
so that its entry stays although its share says that it has joined. The IPPool gets the entry, which
ends new claims of nodes that see it, and the AddressPool excludes it, which claims look at after
their POST. Then the blocks are listed: one that reaches into the entry was leased meanwhile, and
another entry is tried. A kill at any point leaves the node's name with PENDING: to say it again
goes on from there.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from ipam.addresses import Interval, parse, text
from ipam.cluster import geometry
from ipam.cluster.api import ClusterApi, Conflict, Node, NotFound
from ipam.cluster.nv_ipam.objects import NvIPPool, NvIPPoolEntry, NvIPPoolStatus, excluded_runs
from ipam.cluster.nv_ipam.overlaps import Overlaps
from ipam.cluster.nv_ipam.own_overlaps import OwnPools, all_pools, beside_now
from ipam.cluster.nv_ipam.own_pools import (
    HANDED_BACK,
    PENDING,
    address_pool,
    changed,
    hosts_of,
    name_of,
)
from ipam.cluster.nv_ipam.selectors import selects
from ipam.cluster.nv_ipam.shares import HANDED_OVER, JOINED, intervals, without
from ipam.cluster.objects import AddressBlock, AddressPool, AddressShare
from ipam.nv_ipam.importing import STORE
from ipam.nv_ipam.pools import ROUTED

_ATTEMPTS = 8  # for a pool that changes meanwhile


class NotPossible(ValueError):
    """The node cannot be handed back without a drain. The text says why, and what to do."""


def hand_back(
    api: ClusterApi, namespace: str, node: str, *, leave_cidrpools: bool = False
) -> Iterator[str]:
    """Give the node an entry in each IPPool of the namespace that selects it; a line for each.

    Of a CIDRPool it has a prefix, and podfabric gave addresses of just that: so it is refused until
    the daemon's store has these (`ipam.nv_ipam.exporting`), but with `leave_cidrpools`, the word of
    an administrator that no pod has one. NotPossible, Invalid, ApiError.
    """
    machine = next((each for each in api.nodes(labels=True) if each.name == node), None)
    if machine is None:
        raise NotPossible(f"there is no Node {node}: say the name of its Node object")
    shares = api.list(AddressShare, {"spec.node": node}).items
    routed = [each for each in shares if each.spec.pool.startswith(ROUTED)]
    unknown = {each.spec.pool for each in routed if HANDED_OVER not in each.metadata.annotations}
    if unknown and not leave_cidrpools:
        raise NotPossible(
            f"podfabric gave addresses of {node}'s prefix of {', '.join(sorted(unknown))}, and "
            "nv-ipam's daemon would give the same: with the daemon stopped run `podfabric ipam "
            f"export {STORE}` on the node, and say it again when its agent has told of that, "
            "after a minute at most; or end the pods there that have some, and add "
            "--leave-cidrpools"
        )
    for key in sorted({each.spec.pool for each in routed} - unknown):
        yield f"{key}: {node} keeps its prefix: the daemon's store has what podfabric gave of it"
    for name in [pool.metadata.name for pool in api.list(NvIPPool, namespace=namespace).items]:
        yield _of_pool(api, namespace, name, machine)


def revoke(api: ClusterApi, namespace: str, node: str) -> Iterator[str]:
    """Let the node join again, when its store has what nv-ipam's daemon gave; a line for each
    IPPool. ApiError, Invalid, NotPossible."""
    for pool in api.list(NvIPPool, namespace=namespace).items:
        for _ in range(_ATTEMPTS):
            there = _address_pool(api, pool)
            if not {node, node + PENDING} & _named(there):
                break
            try:
                # Its share says that it has joined, which was before.
                for share in _joined(api, pool.key, node):
                    notes = {**share.metadata.annotations}
                    del notes[JOINED]
                    meta = replace(share.metadata, annotations=notes)
                    api.update(replace(share, metadata=meta))
                _name(api, there, _named(there) - {node, node + PENDING})
            except (Conflict, NotFound):
                continue
            yield f"{pool.key}: {node} joins when its store has what nv-ipam's daemon gave"
            break
        else:
            raise Conflict(f"update {pool.key}: it changes all the time: say it again")


def _of_pool(api: ClusterApi, namespace: str, name: str, node: Node) -> str:
    """Hand the node back for one pool; what was done."""
    tried: list[Interval] = []
    for _ in range(_ATTEMPTS):
        pools = all_pools(api, namespace)
        pool = next((each for each in pools if each.key == f"ippool/{name}"), None)
        if not isinstance(pool, NvIPPool):
            return f"ippool/{name} is gone"
        if not Overlaps(pools).left_by(pool.key, (hosts_of(pool.network),)):
            return f"{pool.key}: all of its addresses are also of older pools, which have them"
        if not selects(pool.spec.node_selector, node.name, node.labels):
            return f"{pool.key}: its nodeSelector does not select {node.name}"
        try:
            there = _address_pool(api, pool)
            own = _entry_of(pool, node.name)
            if node.name in _named(there) and own is not None:
                return _said(pool, node.name, own)
            if node.name + PENDING not in _named(there):
                if own is not None:
                    return _not_joined(api, pool, node.name, own)
                _name(api, there, _named(there) - {node.name} | {node.name + PENDING})
                continue
            if own is None:
                own = _free_run(api, pool, tried)
                pool = api.update_status(_with_entry(pool, node.name, own))
            if _is_free(api, pool, own):
                there = _address_pool(api, pool)
                _name(api, there, _named(there) - {node.name + PENDING} | {node.name})
                return _said(pool, node.name, own)
            tried.append(own)
            api.update_status(_with_entry(pool, node.name, None))
        except (Conflict, NotFound):
            continue
    raise Conflict(f"update ippool/{name}: it changes all the time: say it again")


def _said(pool: NvIPPool, node: str, own: Interval) -> str:
    return f"{pool.key}: {node} has {text(own.first)} to {text(own.last)}, for nv-ipam's daemon"


def _not_joined(api: ClusterApi, pool: NvIPPool, node: str, own: Interval) -> str:
    """A node with an entry, which was not handed back. NotPossible if that is about to go."""
    if _joined(api, pool.key, node):
        raise NotPossible(
            f"{node} has just joined, and its entry of {pool.key} is about to go: say it again "
            "when it has gone (kubectl get ippool -o yaml)"
        )
    return (
        f"{pool.key}: {node} has not joined: its entry {text(own.first)} to {text(own.last)} is as "
        "nv-ipam's controller left it"
    )


# --- the entry -------------------------------------------------------------------------------


def _is_free(api: ClusterApi, pool: NvIPPool, run: Interval) -> bool:
    """Whether no node leases of the run, once no node can begin to. Conflict, NotFound."""
    there = _address_pool(api, pool)
    shares = api.list(AddressShare, {"spec.pool": pool.key}).items
    beside = _beside(api, pool)
    wanted = changed(there, address_pool(pool, shares, beside))
    if wanted != there:
        api.update(wanted)
    return not without((run,), without((run,), _leased(api, pool))) and not any(
        without((run,), without((run,), intervals(each))) for each in shares
    )


def _free_run(api: ClusterApi, pool: NvIPPool, tried: Collection[Interval]) -> Interval:
    """The first run, of those into which nv-ipam's controller cuts the subnet, of which no node
    has anything: else that controller would take it away. NotPossible."""
    hosts, size = hosts_of(pool.network), pool.spec.per_node_block_size
    if size < 1:
        raise NotPossible(f'{pool.key}: "spec.perNodeBlockSize" must be 1 or more')
    taken = [*_leased(api, pool), *tried, *(each.interval for each in pool.entries())]
    taken += _beside(api, pool)
    for share in api.list(AddressShare, {"spec.pool": pool.key}).items:
        taken += intervals(share)
    if size == 1 and pool.spec.gateway:
        taken.append(Interval(parse(pool.spec.gateway), parse(pool.spec.gateway)))
    excluded = excluded_runs(pool)
    free = without((hosts,), taken)
    runs = (
        *_on_grid(without(free, excluded), hosts, size),
        *(run for run in _on_grid(free, hosts, size) if without((run,), excluded)),
    )
    if runs:
        return runs[0]
    raise NotPossible(
        f"{pool.key}: no run of {size} addresses ({pool.spec.subnet}, spec.perNodeBlockSize) is "
        "without blocks, shares and entries of nodes: drain nodes until blocks of AddressPool "
        f"{name_of(pool)} are given back (kubectl get ablock)"
    )


def _on_grid(gaps: Iterable[Interval], hosts: Interval, size: int) -> Iterator[Interval]:
    """The first run of each gap that begins at a multiple of `size` from the first host."""
    for gap in gaps:
        first = hosts.first + -(-(gap.first - hosts.first) // size) * size
        if first + size - 1 <= gap.last:
            yield Interval(first, first + size - 1)


def _leased(api: ClusterApi, pool: NvIPPool) -> Sequence[Interval]:
    blocks = api.list(AddressBlock, {"spec.pool": name_of(pool)}).items
    return [geometry.interval(each) for each in blocks]


def _beside(api: ClusterApi, pool: NvIPPool) -> Sequence[Interval]:
    """What the pool leaves to others."""
    seen = OwnPools.of((), api.list(AddressShare).items, {}, ())
    return beside_now(api, pool.metadata.namespace, pool, seen.holding(pool))


def _entry_of(pool: NvIPPool, node: str) -> Interval | None:
    return next((each.interval for each in pool.entries(node)), None)


def _with_entry(pool: NvIPPool, node: str, run: Interval | None) -> NvIPPool:
    """The pool with that entry of the node, and no other."""
    entries = [each for each in pool.status.allocations or () if each.node != node]
    if run is not None:
        entries.append(NvIPPoolEntry(node=node, start=text(run.first), end=text(run.last)))
    entries.sort(key=lambda each: each.node)
    return replace(pool, status=NvIPPoolStatus(allocations=tuple(entries)))


# --- objects ---------------------------------------------------------------------------------


def _address_pool(api: ClusterApi, pool: NvIPPool) -> AddressPool:
    """NotPossible without one."""
    try:
        return api.get(AddressPool, name_of(pool))
    except NotFound:
        raise NotPossible(
            f"there is no AddressPool {name_of(pool)} of {pool.key}: nodes are handed back from "
            '"ipam.nv_ipam": own only'
        ) from None


def _named(there: AddressPool) -> set[str]:
    written = there.metadata.annotations.get(HANDED_BACK, "")
    return set(filter(None, written.split(",")))


def _name(api: ClusterApi, there: AddressPool, names: Iterable[str]) -> None:
    """Write which nodes were handed back. Conflict, NotFound."""
    notes = {**there.metadata.annotations, HANDED_BACK: ",".join(sorted(names))}
    api.update(replace(there, metadata=replace(there.metadata, annotations=notes)))


def _joined(api: ClusterApi, key: str, node: str) -> list[AddressShare]:
    shares = api.list(AddressShare, {"spec.node": node}).items
    return [
        each for each in shares if each.spec.pool == key and JOINED in each.metadata.annotations
    ]
