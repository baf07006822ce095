"""From mode follow to mode own: what a node that still follows may take of an IPPool.

Nodes in mode own lease addresses of the IPPool as soon as its AddressPool says what to leave alone.
So both sides write first and read then. The controller makes the AddressPool with nothing to lease,
and lists the shares after that. A node that follows writes its share, and lists the AddressPools
after that. If it finds none, the controller will see the share. If it finds one, it takes nothing
more: what it took before is in its share.
"""

from msgspec.structs import replace

from ipam.addresses import parse_interval
from ipam.cluster.api import ClusterApi
from ipam.cluster.nv_ipam.shares import common
from ipam.cluster.objects import AddressPool
from ipam.nv_ipam.pools import ROUTED, NodePool, domain_of, listed


def address_pool_of(api: ClusterApi, key: str) -> str:
    """The name of the AddressPool of that pool of nv-ipam, "" if there is none. A CIDRPool has
    none: in mode own, too, its nodes go by shares. Raises ApiError."""
    if key.startswith(ROUTED):
        return ""
    network = domain_of(key)
    found = (each for each in api.list(AddressPool).items if each.spec.network_name == network)
    return next((each.metadata.name for each in found), "")


def used_before(last: NodePool, new: NodePool) -> NodePool:
    """What of `new` this node used already by the share that `last` names."""
    if not last.share:
        return replace(new, usable=(), beside=())
    former = tuple(map(parse_interval, last.usable))
    usable = common(map(parse_interval, new.usable), former)
    beside = tuple(each for each in new.beside if each in last.beside)
    return replace(new, usable=listed(usable), beside=beside)


def why_no_more(name: str) -> str:
    """Why a node takes nothing more of a pool that has that AddressPool."""
    return (
        f'AddressPool {name} is there, so nodes with "ipam.nv_ipam": own lease these addresses, '
        "and this node still follows nv-ipam: restart its agent with own. If no node is to lease "
        f"them: drain the nodes that did, and `kubectl delete apool {name}`"
    )
