"""The metrics of HCAs: their faults, and the pods that hold them.

node_exporter (collectors infiniband and netclass) has the counters, by device and port, or by
netdev. A query multiplies a counter with `podfabric_pod_device`, whose value is always 1.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from base.scrape import gauge
from base.text import printable
from host.netlink.rdma_objects import KINDS
from host.sysfs.discovery import HCA
from node.fabric_node import HcaStatus
from node.node_hcas import HcaHolder, ListedHCA
from node.usage import RdmaObjects

MOST = 4096  # series, far more than a node has
LABELS = (
    *("namespace", "pod", "uid", "container", "resource"),
    *("device", "port", "pci_address", "netdev", "link_layer"),
)


def families(listed: Iterable[ListedHCA], hcas: Iterable[HcaStatus]) -> Iterable[Metric]:
    """The metrics. `hcas` has the HCAs of the status, also HCAs that are gone."""
    of_pools = [hca for hca in hcas if hca.pools or hca.pods]
    yield gauge(
        "podfabric_hca_faulty",
        "1 if an HCA of a pool has a fault now, else 0. The FabricNode has the reason.",
        ("hca",),
        {(hca.id,): int(bool(hca.fault)) for hca in of_pools},
    )
    yield gauge(
        "podfabric_hca_faults",
        "Faults of an HCA of a pool in the last 24 hours, since the agent's start.",
        ("hca",),
        {(hca.id,): hca.flaps for hca in of_pools},
    )
    series = {
        tuple(map(printable, (*_pod(holder), *port))): 1
        for one in listed
        for holder in one.held
        for port in _ports(one.hca)
    }
    yield gauge(
        "podfabric_pod_device",
        "Always 1: a container holds an HCA with this port. device, port, netdev and link_layer "
        "are empty while the device is in the namespace of a pod.",
        LABELS,
        dict(list(series.items())[:MOST]),
    )


def objects(counts: Iterable[RdmaObjects]) -> Metric:
    """The RDMA objects of each pod."""
    return gauge(
        "podfabric_pod_rdma_objects",
        "RDMA objects of a pod on a device that is not in the pod's namespace: qp (queue pairs), "
        "mr (memory regions), cq (completion queues), cm_id (connection ids).",
        ("namespace", "pod", "device", "type"),
        {
            (*map(printable, _named(one.pod)), one.device, kind): getattr(one, kind)
            for one in counts
            for kind in KINDS
        },
    )


def _named(pod: str) -> tuple[str, str]:
    """The namespace and the name of a pod. Without a known name: "" and the pod's UID."""
    namespace, _, name = pod.rpartition("/")
    return namespace, name


def _pod(holder: HcaHolder) -> tuple[str, ...]:
    of = holder.container
    namespace, name = _named(of.pod)
    return (namespace, name if namespace else "", of.uid, of.name, holder.resource)


def _ports(hca: HCA) -> Iterator[tuple[str, ...]]:
    address = hca.address or hca.id
    ports = [(rdma.name, port) for rdma in hca.rdma for port in rdma.ports]
    for device, port in ports:
        netdev = next(iter(port.netdevs), "")
        yield device, str(port.number), address, netdev, port.link_layer
    if not ports:
        yield next(iter(hca.rdma_names), ""), "", address, next(iter(hca.netdevs), ""), ""
