"""The metric that joins the counters of an HCA's ports with the pods that hold the HCA.

node_exporter (collectors infiniband and netclass) has the counters, by device and port, or by
netdev. A query multiplies a counter with `podfabric_pod_device`, whose value is always 1.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from base.scrape import gauge
from base.text import printable
from host.sysfs.discovery import HCA
from node.node_hcas import HcaHolder, ListedHCA

MOST = 4096  # series, far more than a node has
LABELS = (
    *("namespace", "pod", "uid", "container", "resource"),
    *("device", "port", "pci_address", "netdev", "link_layer"),
)


def families(hcas: Iterable[ListedHCA]) -> Iterable[Metric]:
    """The metric of all containers that hold HCAs."""
    series = {
        tuple(map(printable, (*_pod(holder), *port))): 1
        for listed in hcas
        for holder in listed.held
        for port in _ports(listed.hca)
    }
    yield gauge(
        "podfabric_pod_device",
        "Always 1: a container holds an HCA with this port. device, port, netdev and link_layer "
        "are empty while the device is in the namespace of a pod.",
        LABELS,
        dict(list(series.items())[:MOST]),
    )


def _pod(holder: HcaHolder) -> tuple[str, ...]:
    of = holder.container
    namespace, _, name = of.pod.rpartition("/")  # without a name, the UID is all that is known
    return (namespace, name if namespace else "", of.uid, of.name, holder.resource)


def _ports(hca: HCA) -> Iterator[tuple[str, ...]]:
    address = hca.address or hca.id
    ports = [(rdma.name, port) for rdma in hca.rdma for port in rdma.ports]
    for device, port in ports:
        netdev = next(iter(port.netdevs), "")
        yield device, str(port.number), address, netdev, port.link_layer
    if not ports:
        yield next(iter(hca.rdma_names), ""), "", address, next(iter(hca.netdevs), ""), ""
