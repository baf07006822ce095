"""Who leases for this node: its Node object, its boot, its store's identity, and its client."""

from collections.abc import Callable
from typing import NamedTuple

from ipam.leases.block_store import BlockStore
from ipam.leases.objects import Holder
from ipam.leases.pool_cache import Pools, Unusable
from kube.client import ClusterApi
from kube.resources import Node, NotFound


class Leasing(NamedTuple):
    """A node as the lessee `holder`. `clock` is CLOCK_BOOTTIME."""

    api: ClusterApi
    store: BlockStore
    pools: Pools
    holder: Holder
    clock: Callable[[], float]


def identified(api: ClusterApi, store: BlockStore, name: str, boot: str) -> Holder:
    """The holder of leases of the node `name` in `boot`. ApiError; Unusable without a Node object.

    The store gets an identity if it has none, or if it was copied from another machine.
    """
    try:
        node = api.get(Node, name)
    except NotFound:
        raise Unusable(f"there is no Node object {name}") from None
    ids = node.machine
    machine = f"{ids.machine_id} {ids.system_uuid} {node.name}"
    known = store.instance()
    if known and known.machine != machine and not (ids.machine_id or ids.system_uuid):
        # One that was made again, as long as the kubelet has not written its status.
        raise Unusable(f"Node object {node.name} does not say yet which machine it is")
    return Holder(
        instance=store.identify(machine).id,
        node=node.name,
        node_uid=node.uid,
        machine_id=ids.machine_id,
        system_uuid=ids.system_uuid,
        boot=boot,
    )


def same_machine_before(mine: Holder, other: Holder) -> bool:
    """Whether `other` is this machine before it booted, with a store that is lost since: its
    sandboxes died with the boot. Both ids must be equal: clones share the first."""
    ids = (mine.machine_id, mine.system_uuid)
    is_dead = other.instance != mine.instance and other.boot != mine.boot
    return all(ids) and ids == (other.machine_id, other.system_uuid) and is_dead
