"""Soft-RoCE on a VF: made anew where the interface is, because no such device outlives a move.

The kernel destroys it with the interface's move to another namespace. In the RDMA subsystem's
shared mode one can be made in the pod, under the same name. In exclusive mode a new one belongs to
the host whoever makes it (Linux 6.1), so the pod gets none; the host has its own again afterwards.
"""

import time
from collections.abc import Sequence

from cni.spec import interrupts
from cni.sriov.record import Record, Soft
from host import pci, rdma
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.paths import Paths

PATIENCE = 5.0  # seconds: the kernel destroys one in the background, its name is taken until then


def take_off(paths: Paths, record: Record, netdevs: Sequence[str]) -> None:
    """Delete the devices on an interface, which may have one of these names, as its move would."""
    if not record.soft:
        return
    with rdma.rdma() as host:
        for soft in record.soft:
            device = rdma.find(host, soft.name)
            if device is not None and pci.netdev_of_software(paths, soft.name) in netdevs:
                rdma.delete_soft(host, device)


def put_on(record: Record, netdev: str, namespace: NetworkNamespace | None = None) -> None:
    """Make the devices on an interface, of the pod or of the host, unless they are there."""
    for soft in record.soft:
        with rdma.rdma(namespace) as socket, socket.inside():
            if namespace is not None and rdma.mode(socket) == "exclusive":
                return
            _make(socket, soft, netdev)


def _make(socket: rdma.RdmaNetlink, soft: Soft, netdev: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while rdma.find(socket, soft.name) is not None:
        if time.monotonic() >= deadline:
            raise HostError(f'RDMA device "{soft.name}" is there already, on another interface')
        interrupts.checkpoint()
        time.sleep(0.02)
    rdma.add_soft(socket, soft.kind, soft.name, netdev)
