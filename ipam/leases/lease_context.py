"""The identity under which this node leases blocks."""

from collections.abc import Callable
from typing import NamedTuple

from ipam.leases.block_store import BlockStore
from ipam.leases.objects import Holder
from ipam.leases.pool_cache import Pools, Unusable
from kube.client import ClusterApi
from kube.resources import Node, NotFound


class Leasing(NamedTuple):
    """The lessee's identity (`holder`) and clients. `clock` is CLOCK_BOOTTIME."""

    api: ClusterApi
    store: BlockStore
    pools: Pools
    holder: Holder
    clock: Callable[[], float]


def identified(api: ClusterApi, store: BlockStore, name: str, boot: str) -> Holder:
    """The holder for the node `name`. A new store, or a copy of another machine's store, gets a new
    identity. Raises ApiError, and Unusable if the Node object is missing or incomplete."""
    try:
        node = api.get(Node, name)
    except NotFound:
        raise Unusable(f"there is no Node object {name}: restart this node's kubelet") from None
    ids = node.machine
    machine = f"{ids.machine_id} {ids.system_uuid} {node.name}"
    known = store.instance()
    if known and known.machine != machine and not (ids.machine_id or ids.system_uuid):
        # A new Node object: the kubelet has not written its status yet.
        raise Unusable(
            f"Node object {name} has no machine id yet: see that this node's kubelet runs"
        )
    return Holder(
        instance=store.identify(machine).id,
        node=node.name,
        node_uid=node.uid,
        machine_id=ids.machine_id,
        system_uuid=ids.system_uuid,
        boot=boot,
    )


def same_machine_before(mine: Holder, other: Holder) -> bool:
    """Whether `other` is this machine in an earlier boot, before its store was lost.

    The pods of `other` ended when the machine rebooted. The machine id and the system UUID must
    match, because clones share the machine id."""
    ids = (mine.machine_id, mine.system_uuid)
    is_dead = other.instance != mine.instance and other.boot != mine.boot
    return all(ids) and ids == (other.machine_id, other.system_uuid) and is_dead
