"""Who this node is as a lessee: its Node object, its boot, and the identity of its store."""

from ipam.cluster.api import ClusterApi, NotFound
from ipam.cluster.block_store import BlockStore
from ipam.cluster.objects import Holder
from ipam.cluster.pools import Unusable


def identified(api: ClusterApi, store: BlockStore, name: str, boot: str) -> Holder:
    """The holder of leases of the node `name` in `boot`. ApiError; Unusable without a Node object.

    The store gets an identity if it has none, or if it was copied from another machine.
    """
    try:
        node = api.node(name)
    except NotFound:
        raise Unusable(f"there is no Node object {name}") from None
    machine = f"{node.machine_id} {node.system_uuid} {node.name}"
    known = store.instance()
    if known and known.machine != machine and not (node.machine_id or node.system_uuid):
        # One that was made again, as long as the kubelet has not written its status.
        raise Unusable(f"Node object {node.name} does not say yet which machine it is")
    return Holder(
        instance=store.identify(machine).id,
        node=node.name,
        node_uid=node.uid,
        machine_id=node.machine_id,
        system_uuid=node.system_uuid,
        boot=boot,
    )


def same_machine_before(mine: Holder, other: Holder) -> bool:
    """Whether `other` is this machine before it booted, with a store that is lost since: its
    sandboxes died with the boot. Both ids must be equal: clones share the first."""
    ids = (mine.machine_id, mine.system_uuid)
    is_dead = other.instance != mine.instance and other.boot != mine.boot
    return all(ids) and ids == (other.machine_id, other.system_uuid) and is_dead
