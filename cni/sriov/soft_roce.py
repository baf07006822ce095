"""Soft-RoCE on a VF: deleted before the interface moves and created again where it is then.

The kernel destroys such a device when its interface moves to another namespace. In the RDMA
subsystem's shared mode a new one can be created in the pod, under the same name. In exclusive mode
a new one always belongs to the host (Linux 6.1), so the pod gets none, and the host gets its own
again afterwards.

The pod has had the uverbs device since it was admitted, so the new one must get the same number
(`numbering`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from base.paths import Paths
from base.waiting import wait_until
from cni.sriov import numbering
from cni.sriov.record import DeviceRecord, SoftRdmaDevice
from host import pci, rdma
from host.errors import HostError
from host.namespaces import NetworkNamespace

DELETION = 5.0  # seconds; the kernel deletes in the background and keeps the name until then


def exclusively(paths: Paths, record: DeviceRecord) -> AbstractContextManager[None]:
    """`numbering.exclusively`, if the record has any such devices."""
    return numbering.exclusively(paths) if record.soft else nullcontext()


def same_numbers(paths: Paths, record: DeviceRecord) -> AbstractContextManager[None]:
    """`numbering.kept` for the devices in the record."""
    return numbering.kept(paths, [soft.name for soft in record.soft])


def delete(paths: Paths, record: DeviceRecord, netdevs: Sequence[str]) -> None:
    """Delete the devices if they are on an interface with one of these names, as a move would."""
    if not record.soft:
        return
    with rdma.rdma() as host:
        for soft in record.soft:
            device = rdma.find(host, soft.name)
            if device is not None and pci.netdev_of_software(paths, soft.name) in netdevs:
                rdma.delete_soft(host, device)


def restore(record: DeviceRecord, netdev: str, namespace: NetworkNamespace | None = None) -> None:
    """Create the devices on an interface of the pod, or of the host without a namespace."""
    for soft in record.soft:
        with rdma.rdma(namespace) as socket, socket.inside():
            if namespace is not None and rdma.mode(socket) == "exclusive":
                return
            _create(socket, soft, netdev)


def _create(socket: rdma.RdmaNetlink, soft: SoftRdmaDevice, netdev: str) -> None:
    if not wait_until(lambda: rdma.find(socket, soft.name) is None, DELETION, longest_pause=0.02):
        raise HostError(f'RDMA device "{soft.name}" exists already, on another interface')
    rdma.add_soft(socket, soft.kind, soft.name, netdev)
