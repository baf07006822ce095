"""Soft-RoCE on a VF: made anew where the interface is, because no such device outlives a move.

The kernel destroys it with the interface's move to another namespace. In the RDMA subsystem's
shared mode one can be made in the pod, under the same name. In exclusive mode a new one belongs to
the host whoever makes it (Linux 6.1), so the pod gets none; the host has its own again afterwards.

The pod has had the uverbs device since it was admitted, so the new one must get the same number.
Numbers are handed out over all RDMA devices, the lowest that is free: one is made at a time.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from base import interrupts, locks
from base.paths import Paths
from cni.spec.errors import CNIError, Code
from cni.sriov.record import DeviceRecord, SoftRdmaDevice
from host import pci, rdma
from host.errors import HostError
from host.namespaces import NetworkNamespace

PATIENCE = 5.0  # seconds: the kernel destroys one in the background, its name is taken until then


@contextmanager
def exclusively(paths: Paths, record: DeviceRecord) -> Iterator[None]:
    """Nobody else makes a device anew while these are taken off and put on."""
    if not record.soft:
        yield
        return
    with locks.locked(paths.locks / "soft", "a Soft-RoCE device"):
        yield


@contextmanager
def same_numbers(paths: Paths, record: DeviceRecord) -> Iterator[None]:
    """As `exclusively`. CNIError 100 if a device has another number after it."""
    with exclusively(paths, record):
        before = pci.uverbs_numbers(paths) if record.soft else {}
        yield
        after = pci.uverbs_numbers(paths) if record.soft else {}
    for soft in record.soft:
        old, new = before.get(soft.name), after.get(soft.name)
        if old is not None and new is not None and old != new:
            raise CNIError(
                Code.KERNEL,
                f"RDMA device {soft.name} was {old[0]} ({old[1]}:{old[2]}) and is {new[0]} "
                f"({new[1]}:{new[2]}) since it was made anew in the pod, which has the former: "
                "another RDMA device was made at that moment: delete the pod",
            )


def delete(paths: Paths, record: DeviceRecord, netdevs: Sequence[str]) -> None:
    """Delete the devices on an interface, which may have one of these names, as its move would."""
    if not record.soft:
        return
    with rdma.rdma() as host:
        for soft in record.soft:
            device = rdma.find(host, soft.name)
            if device is not None and pci.netdev_of_software(paths, soft.name) in netdevs:
                rdma.delete_soft(host, device)


def restore(record: DeviceRecord, netdev: str, namespace: NetworkNamespace | None = None) -> None:
    """Make the devices on an interface, of the pod or of the host, unless they are there."""
    for soft in record.soft:
        with rdma.rdma(namespace) as socket, socket.inside():
            if namespace is not None and rdma.mode(socket) == "exclusive":
                return
            _make(socket, soft, netdev)


def _make(socket: rdma.RdmaNetlink, soft: SoftRdmaDevice, netdev: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while rdma.find(socket, soft.name) is not None:
        if time.monotonic() >= deadline:
            raise HostError(f'RDMA device "{soft.name}" is there already, on another interface')
        interrupts.checkpoint()
        time.sleep(0.02)
    rdma.add_soft(socket, soft.kind, soft.name, netdev)
