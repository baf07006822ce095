"""An IPPool of nv-ipam as an AddressPool of podfabric, where nv-ipam's controller is gone (`own`).

The AddressPool has the subnet, and excludes what pods of nodes may hold that have not joined, and
what pods of the others hold outside of the blocks that these lease. All else that the IPPool says
is for a node's part of it.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from ipam.addresses import (
    Interval,
    Network,
    family,
    parse,
    parse_interface,
    parse_interval,
    text,
)
from ipam.cluster.names import pool_name
from ipam.cluster.nv_ipam.objects import Invalid, NvIPPool, NvIPPoolStatus, node_pool
from ipam.cluster.nv_ipam.overlaps import Overlaps
from ipam.cluster.nv_ipam.selectors import selects
from ipam.cluster.nv_ipam.shares import JOINED, coarse, common, intervals, without
from ipam.cluster.objects import GROUP, AddressPool, AddressShare, Meta, PoolSpec
from ipam.nv_ipam.pools import NodePool, domain_of, listed
from ipam.ranges import merged

LABEL = f"{GROUP}/nv-ipam"
"""The label of a pool that was made for an IPPool: "ippool"."""

TAKEN_OVER = f"{GROUP}/nv-ipam-allocations"
"""The annotation of such a pool that names the IPPool's `status.allocations` that it excludes."""

HANDED_BACK = f"{GROUP}/nv-ipam-handed-back"
"""The annotation of such a pool that names nodes, with commas between them, which nv-ipam's own
daemon serves again (`hand_back`): their entries stay, whatever their shares say."""

PENDING = "?"
"""Behind the name of a node there: its entry is not sure to be free yet. No node's name has it."""

MOST_EXCLUDED = 64  # of an AddressPool
LARGEST_BLOCK = 256  # the same
MOST_NODE_RUNS = 16_384  # in which `perNodeExclusions` are worked out

# --- the AddressPool -------------------------------------------------------------------------


def name_of(pool: NvIPPool) -> str:
    """The AddressPool's name. Invalid."""
    return pool_name(domain_of(pool.key), str(pool.network))


def key_of(there: AddressPool) -> str:
    """The key of the IPPool that an AddressPool is made of, "" if it is made of none."""
    name, prefix = there.spec.network_name, domain_of("")
    return name.removeprefix(prefix) if name.startswith(f"{prefix}ippool/") else ""


def whole_of(there: AddressPool) -> Interval:
    """All addresses of an AddressPool. ValueError."""
    network = parse_interface(there.spec.range)[1]
    return Interval(network.address, network.last)


def address_pool(
    pool: NvIPPool, shares: Iterable[AddressShare], overlap: Iterable[Interval] = ()
) -> AddressPool:
    """The AddressPool of an IPPool, with the nodes' shares of it. It keeps out what pools that
    overlap it have or hold. Invalid, CNIError 6.

    Its network name has slashes, which no definition's has: so no other pool has its addresses. A
    node has a whole block of nv-ipam's size only if that is a power of two: else it leases several.
    """
    network = pool.network
    size = min(pool.spec.per_node_block_size, LARGEST_BLOCK, network.last - network.address + 1)
    return AddressPool(
        metadata=Meta(
            name=name_of(pool),
            labels={LABEL: "ippool"},
            annotations={TAKEN_OVER: allocations_of(pool)},
        ),
        spec=PoolSpec(
            range=str(network),
            network_name=domain_of(pool.key),
            exclude=foreign(pool, shares, overlap),
            block_size=1 << (size.bit_length() - 1) if size > 0 else 0,
        ),
    )


def closed(pool: NvIPPool) -> AddressPool:
    """The AddressPool as it is made: nothing of it may be leased. Invalid, CNIError 6."""
    made, whole = address_pool(pool, ()), pool.network
    return replace(
        made,
        metadata=replace(made.metadata, annotations={}),
        spec=replace(made.spec, exclude=listed((Interval(whole.address, whole.last),))),
    )


def shut(there: AddressPool, present: AddressPool | None) -> AddressPool:
    """The AddressPool of an IPPool that is gone (`present` is None), or has another range now, that
    of `present`: nodes give no more of it than of that. ValueError."""
    whole = whole_of(there)
    excluded: tuple[Interval, ...] = (whole,)
    if present is not None:
        inside = common((whole,), tuple(map(parse_interval, present.spec.exclude)))
        excluded = merged((*without((whole,), (whole_of(present),)), *inside))
    exclude = listed(coarse(excluded, MOST_EXCLUDED))
    return replace(there, spec=replace(there.spec, exclude=exclude))


def changed(there: AddressPool, wanted: AddressPool) -> AddressPool:
    """The AddressPool that is there, with what follows the IPPool. All else is the
    administrator's."""
    notes = {**there.metadata.annotations, **wanted.metadata.annotations}
    spec = replace(there.spec, exclude=wanted.spec.exclude, block_size=wanted.spec.block_size)
    return replace(there, metadata=replace(there.metadata, annotations=notes), spec=spec)


def foreign(
    pool: NvIPPool, shares: Iterable[AddressShare], overlap: Iterable[Interval] = ()
) -> tuple[str, ...]:
    """What no node may hand out: entries of nodes that have not joined (`waiting`), shares, and
    what is another pool's. Invalid, CNIError 6. Gaps may be closed: then some that is free is
    excluded too."""
    whole = pool.network
    runs = [run for each in shares if each.spec.pool == pool.key for run in intervals(each)]
    runs += (entry.interval for entry in pool.entries())
    runs += overlap
    clamped = (Interval(max(run.first, whole.address), min(run.last, whole.last)) for run in runs)
    found = merged(run for run in clamped if run.first <= run.last)
    return listed(coarse(found, MOST_EXCLUDED))


def handed_back(there: AddressPool | None) -> frozenset[str]:
    """The nodes that nv-ipam's own daemon serves again, by what the AddressPool says."""
    written = there.metadata.annotations.get(HANDED_BACK, "") if there is not None else ""
    return frozenset(each.removesuffix(PENDING) for each in written.split(",") if each)


def waiting(
    pool: NvIPPool, shares: Iterable[AddressShare], there: AddressPool | None = None
) -> NvIPPool:
    """The IPPool without the entries of nodes that have joined: their shares stand for these, and
    when such a node is gone, so is its entry. `there` is its AddressPool, which names the nodes
    that were handed back."""
    joined = {
        each.spec.node
        for each in shares
        if each.spec.pool == pool.key and JOINED in each.metadata.annotations
    } - handed_back(there)
    former = pool.status.allocations or ()
    left = tuple(each for each in former if each.node not in joined)
    return pool if left == former else replace(pool, status=NvIPPoolStatus(allocations=left))


def allocations_of(pool: NvIPPool) -> str:
    """What tells one content of `status.allocations` from another."""
    entries = sorted((each.node, each.start, each.end) for each in pool.status.allocations or ())
    return hashlib.sha256(repr(entries).encode()).hexdigest()[:16]


# --- a node's part ---------------------------------------------------------------------------


def own_node_pool(
    pool: NvIPPool, node: str, labels: Mapping[str, str], overlaps: Overlaps | None = None
) -> NodePool:
    """What the node may have of the pool: all that no older pool has, or nothing if it is not
    selected. Invalid."""
    network = pool.network
    view = node_pool(replace(pool, status=type(pool.status)()), node)
    if not selects(pool.spec.node_selector, node, labels):
        return view
    hosts = hosts_of(network)
    overlaps = overlaps or Overlaps()
    given = overlaps.given(pool.key, (hosts,))
    return replace(
        view,
        first=text(hosts.first),
        last=text(hosts.last),
        usable=listed(overlaps.left_by(pool.key, given)),
        older=overlaps.older(pool.key, given),
        excluded=listed(excluded(pool)),
    )


def excluded(pool: NvIPPool) -> tuple[Interval, ...]:
    """What no pod gets by `exclusions` and `perNodeExclusions`, unless it asks for it by its index.
    The AddressPool does not exclude it: such runs may be many. Invalid."""
    return merged(_excluded(pool, hosts_of(pool.network)))


def hosts_of(network: Network) -> Interval:
    """Which addresses of the subnet hosts have: not the network's, and in IPv4 no broadcast."""
    if network.prefix >= 127:
        return Interval(network.address, network.last)
    return Interval(network.address + 1, network.last - (family(network.address) == 4))


def _excluded(pool: NvIPPool, hosts: Interval) -> Iterator[Interval]:
    """The exclusions, and those of each run into which nv-ipam's controller would cut the subnet:
    what it gave to no pod is given to none."""
    for each in pool.spec.exclusions or ():
        run = _run(each.start, each.end)
        if run.first <= hosts.last and run.last >= hosts.first:
            yield Interval(max(run.first, hosts.first), min(run.last, hosts.last))
    indexes = pool.spec.per_node_exclusions or ()
    if not indexes:
        return
    size = pool.spec.per_node_block_size
    if size < 1:
        raise Invalid('"spec.perNodeBlockSize" must be 1 or more')
    runs = (hosts.last - hosts.first + 1) // size + 1
    if runs * len(indexes) > MOST_NODE_RUNS:
        raise Invalid(
            f'"spec.perNodeExclusions": the subnet has {runs} blocks of {size} addresses, and at '
            f"most {MOST_NODE_RUNS} exclusions can be worked out: write spec.exclusions instead"
        )
    for number in range(runs):
        first = hosts.first + number * size
        for index in indexes:
            start, end = first + index.start_index, min(first + index.end_index, hosts.last)
            if start <= end:
                yield Interval(start, end)


def _run(first: str, last: str) -> Interval:
    try:
        run = Interval(parse(first), parse(last))
    except ValueError as error:
        raise Invalid(f'"spec.exclusions": {error}') from None
    if run.first > run.last or family(run.first) != family(run.last):
        raise Invalid(f'"spec.exclusions": {first} to {last} is not a run of addresses')
    return run
