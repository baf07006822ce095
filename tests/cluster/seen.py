"""Observations of a test inside a pod and on the node."""

from tests.cluster.cluster import Cluster, Namespace


def uverbs(namespace: Namespace, name: str) -> set[str]:
    """The uverbs devices in a pod."""
    listed = namespace.run(name, "ls", "/dev/infiniband").split()
    return {device for device in listed if device.startswith("uverbs")}


def pings(namespace: Namespace, name: str, address: str, tries: int = 3) -> bool:
    """Whether a pod reaches an address. The first packet of a new interface may be lost."""
    return any(_answers(namespace, name, address) for _ in range(tries))


def _answers(namespace: Namespace, name: str, address: str) -> bool:
    try:
        namespace.run(name, "ping", "-c", "1", "-W", "5", address)
    except AssertionError:
        return False
    return True


def rdma_of(cluster: Cluster, device: str) -> str:
    """The RDMA device of a uverbs device."""
    return cluster.node.run(f"cat /sys/class/infiniband_verbs/{device}/ibdev").strip()


def guid_of(cluster: Cluster, rdma: str) -> str:
    """The GUID of the only port of an RDMA device, as an IPoIB hardware address ends with it."""
    gid = cluster.node.run(f"cat /sys/class/infiniband/{rdma}/ports/1/gids/0").strip()
    return gid.replace(":", "")[-16:]
