"""Removes what nv-ipam's pools give to a node that is gone, where they are podfabric's own.

Entries do not tell a node that is gone from one that has not joined yet, whose pods may have any
address of its entry. So only the word of an administrator, who knows that the machine is off, ends
them.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from ipam.cluster.api import ClusterApi, Conflict, NotFound
from ipam.cluster.controller.machines import OUT_OF_SERVICE
from ipam.cluster.nv_ipam.objects import NvCIDRPool, NvIPPool, NvPool
from ipam.cluster.objects import AddressShare

_ATTEMPTS = 5  # for a pool that changes meanwhile


class StillThere(ValueError):
    """The node may not be gone. The text says why."""


def remove(api: ClusterApi, namespace: str, node: str) -> Iterator[str]:
    """Remove the node's entries; the key of each pool that had one, once it has none.

    Nothing is removed while a Node has the name, unless that is tainted out-of-service and not
    ready, or while an AddressShare does: a machine of that name may use its entry. StillThere,
    ApiError.
    """
    for kind in (NvIPPool, NvCIDRPool):
        try:
            names = [pool.metadata.name for pool in _with_entry(api, kind, namespace, node)]
        except NotFound:  # the kind is not installed
            continue
        for name in names:
            _require_gone(api, node)
            yield _removed(api, kind, namespace, name, node)


def _with_entry(
    api: ClusterApi, kind: type[NvIPPool] | type[NvCIDRPool], namespace: str, node: str
) -> list[NvPool]:
    listed = api.list(kind, namespace=namespace).items
    return [
        pool
        for pool in listed
        if any(entry.node == node for entry in pool.status.allocations or ())
    ]


def _require_gone(api: ClusterApi, node: str) -> None:
    # The controller may list the Nodes, and not get one.
    there = next((each for each in api.nodes() if each.name == node), None)
    if there is not None and (there.ready or OUT_OF_SERVICE not in there.taints):
        raise StillThere(
            f"there is a Node {node}, whose machine may use its entries of nv-ipam's pools: delete "
            f"it, or taint it {OUT_OF_SERVICE}, and say it again"
        )
    if shares := api.list(AddressShare, {"spec.node": node}).items:
        raise StillThere(f"AddressShare {shares[0].metadata.name} uses an entry of {node}")


def _removed(
    api: ClusterApi,
    kind: type[NvIPPool] | type[NvCIDRPool],
    namespace: str,
    name: str,
    node: str,
) -> str:
    key = ""
    for _ in range(_ATTEMPTS):
        found = _with_entry(api, kind, namespace, node)
        pool = next((each for each in found if each.metadata.name == name), None)
        if pool is None:
            return key or name
        key = pool.key
        left = tuple(each for each in pool.status.allocations or () if each.node != node)
        try:
            api.update_status(replace(pool, status=replace(pool.status, allocations=left)))
        except (Conflict, NotFound):
            continue
        return key
    raise Conflict(f"update {key}: it changes all the time: say it again")
