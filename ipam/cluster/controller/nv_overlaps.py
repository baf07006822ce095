"""Tells people of pools of nv-ipam that overlap, where podfabric leases their addresses.

By events on the younger pools, a condition of AddressPools, and a metric: before a pod of a tenant
gets no address.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cni.spec.errors import CNIError
from ipam.cluster.controller.reports import Reports
from ipam.cluster.nv_ipam.objects import API, Invalid, NvIPPool, NvPool
from ipam.cluster.nv_ipam.overlaps import PRIVATE, OlderPool, Overlaps
from ipam.cluster.nv_ipam.own_pools import name_of
from ipam.cluster.nv_ipam.shares import size


class Overlap(NamedTuple):
    """How many addresses of a pool an older one has. Both by their keys."""

    pool: str
    older: str
    addresses: int


class Overlapping(NamedTuple):
    """All overlaps, and what the condition of each AddressPool says, a sentence for each overlap,
    by the name of the AddressPool."""

    overlaps: Sequence[Overlap] = ()
    sentences: Mapping[str, Sequence[str]] = {}


def tell_overlaps(pools: Iterable[NvPool], reports: Reports) -> Overlapping:
    """Report each younger pool by an event; what else is to be told."""
    pools = tuple(pools)
    overlaps = Overlaps(pools)
    found = list[Overlap]()
    sentences = defaultdict[str, list[str]](list)  # by the pool's key
    for pool in pools:
        left = [each for each in overlaps.left_to(pool.key) if each.runs]
        if not left:
            continue
        found += (Overlap(pool.key, each.key, size(each.runs)) for each in left)
        said = _said(pool, left)
        sentences[pool.key].append(said)
        for each in left:
            sentences[each.key].append(
                f"{size(each.runs)} of its addresses are also of {pool.key}, which is younger and "
                "leaves them to it"
            )
        reports.resource("AddressesOverlap", said, pool, once=" ".join(each.key for each in left))
    named = {}
    for pool in pools:
        if isinstance(pool, NvIPPool) and pool.key in sentences:
            try:
                named[name_of(pool)] = sentences[pool.key]
            except (Invalid, CNIError):  # it gets no AddressPool
                continue
    return Overlapping(sorted(found), named)


def _said(pool: NvPool, left: Sequence[OlderPool]) -> str:
    meta, kind = pool.metadata, f"{pool.KIND.lower()}.{API.partition('/')[0]}"
    older = ", ".join(each.key for each in left)
    return (
        f"addresses of {pool.key} are also of {older}, which is older: no new pod gets them by "
        f"{pool.key}. Give one pool another range; or, if their networks are apart: kubectl -n "
        f"{meta.namespace} annotate {kind} {meta.name} {PRIVATE}=true"
    )
