"""Reads the counters of ports in pods' network namespaces, for Prometheus.

In the RDMA subsystem's exclusive mode only the pod's sysfs shows these ports, so node_exporter
lacks their counters.
"""

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client.metrics_core import Metric

from base.paths import Paths
from base.scrape import counter, gauge
from base.text import printable
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry, Phase
from host import mounts
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import rdma
from host.sysfs import attribute_files, port_counters

MOST = 8192  # series, far more than a node has

PortLabels = tuple[str, str, str, str]  # namespace, pod, device, port
Labels = tuple[str, str, str, str, str]  # with the counter


class _Moved(msgspec.Struct):
    """The RDMA devices of an attachment's record that are in the pod's namespace."""

    rdma: tuple[msgspec.Raw, ...] = ()


def families(paths: Paths) -> Iterable[Metric]:
    """The counters of each port, and the number of ports and pods that cannot be read."""
    found: dict[Labels, int] = {}
    unreadable = 0
    for entry in _isolated(paths):
        try:
            for port, counters in _of(paths, entry):
                unreadable += not counters
                found |= {(*port, name): value for name, value in counters.items()}
        except (HostError, OSError):
            unreadable += 1
    yield counter(
        "podfabric_pod_port_counter",
        "A counter of a port in a pod's network namespace. The label counter has the kernel's "
        "name, such as port_rcv_data. The value has the kernel's unit.",
        ("namespace", "pod", "device", "port", "counter"),
        dict(list(found.items())[:MOST]),
    )
    yield gauge(
        "podfabric_pod_ports_unreadable",
        "Ports in pods' network namespaces that have no readable counter, and such namespaces that "
        "cannot be read.",
        (),
        {(): unreadable},
    )


def _isolated(paths: Paths) -> list[JournalEntry]:
    """The attachments with an RDMA device in the pod's network namespace."""
    try:
        with rdma.rdma() as socket:
            if rdma.mode(socket) == "shared":
                return []
    except HostError:  # a kernel without RDMA
        return []
    entries = (entry for entry in Journal(paths).entries() if isinstance(entry, JournalEntry))
    return [entry for entry in entries if entry.phase == Phase.ATTACHED and _has_rdma(entry)]


def _has_rdma(entry: JournalEntry) -> bool:
    try:
        return bool(entry.undo_as(_Moved).rdma)
    except JournalDamaged:  # the FabricNode has the fault
        return False


def _of(paths: Paths, entry: JournalEntry) -> Iterator[tuple[PortLabels, dict[str, int]]]:
    """The readable counters of each port in the pod. Raises HostError or OSError.

    A pod may rename its devices, so a name may have any bytes.
    """
    pod = printable(entry.pod_namespace), printable(entry.pod_name)
    with NetworkNamespace.open(entry.netns) as namespace, mounts.sysfs_of(namespace) as sysfs:
        if namespace.identity != entry.netns_identity:
            raise HostError(f"netns {entry.netns!r} belongs to another pod")
        inside = msgspec.structs.replace(paths, sys=sysfs)
        for device in attribute_files.names(f"{sysfs}/class/infiniband"):
            for port in attribute_files.names(f"{sysfs}/class/infiniband/{device}/ports"):
                counters = port_counters.every(inside, device, int(port))
                yield (*pod, printable(device), port), counters
