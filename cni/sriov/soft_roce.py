"""Soft-RoCE on a VF: deleted before the interface moves and created again where it is then.

The kernel destroys such a device when its interface moves to another namespace. In the RDMA
subsystem's shared mode a new one can be created in the pod, under the same name. In exclusive mode
a new one always belongs to the host (Linux 6.1), so the pod gets none, and the host gets its own
again afterwards.

The pod has had the uverbs device since it was admitted, so the new one must get the same number.
The kernel assigns the lowest free number over all RDMA devices, so one is created at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from base import locks
from base.paths import Paths
from base.waiting import wait_until
from cni.spec.errors import CNIError, Code
from cni.sriov.record import DeviceRecord, SoftRdmaDevice
from host import pci, rdma
from host.errors import HostError
from host.namespaces import NetworkNamespace

DELETION = 5.0  # seconds; the kernel deletes in the background and keeps the name until then


@contextmanager
def exclusively(paths: Paths, record: DeviceRecord) -> Iterator[None]:
    """Let no other call delete or create such devices in the block, if the record has any."""
    if not record.soft:
        yield
        return
    with locks.locked(paths.locks / "soft", "a Soft-RoCE device"):
        yield


@contextmanager
def same_numbers(paths: Paths, record: DeviceRecord) -> Iterator[None]:
    """As `exclusively`. Raises CNIError 100 if a device has another number after the block."""
    with exclusively(paths, record):
        before = pci.uverbs_numbers(paths) if record.soft else {}
        yield
        after = pci.uverbs_numbers(paths) if record.soft else {}
    for soft in record.soft:
        old, new = before.get(soft.name), after.get(soft.name)
        if old is not None and new is not None and old != new:
            raise CNIError(
                Code.KERNEL,
                f"RDMA device {soft.name} was {old[0]} ({old[1]}:{old[2]}), which the pod has, and "
                f"is {new[0]} ({new[1]}:{new[2]}) after it was created again in the pod, because "
                "another RDMA device was created at that moment: delete the pod",
            )


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
