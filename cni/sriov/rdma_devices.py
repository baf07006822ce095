"""Moves an interface's RDMA devices into the pod, and restores them on the host.

RDMA devices are found by their uverbs devices, which are visible in every namespace. An index is
not reliable: after a bind, another HCA's RDMA device can have the old index.

A container's uverbs numbers are fixed when the kubelet admits the pod. A bind or a move gives an
RDMA device the node's lowest free uverbs number. Two calls at once could swap two devices' numbers,
so only one call at a time binds or moves RDMA devices.
"""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from base import locks
from base.interrupts import wait_until
from base.paths import Paths
from cni.attachments.results import differs
from cni.spec.errors import CNIError, Code
from cni.sriov.device_record import DeviceRecord, MovedRdmaDevice
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import rdma
from host.sysfs import pci

ARRIVAL = 5.0  # seconds; a moving device is in no namespace
_own = threading.local()  # `held`: this thread has the lock


def move_in(paths: Paths, record: DeviceRecord, namespace: NetworkNamespace) -> None:
    """Move the RDMA devices into the pod. Raises CNIError 100 if a uverbs number changes."""
    with numbers_kept(paths, [moved.name for moved in record.rdma]):
        for moved in record.rdma:
            with rdma.rdma() as host:
                device = rdma.by_index(host, moved.index)
                if device is None or device.name != moved.name:
                    raise HostError(f"RDMA device {moved.name} has gone from the host")
                rdma.move(host, device, namespace)
            _await(moved, namespace)


def _await(moved: MovedRdmaDevice, namespace: NetworkNamespace) -> None:
    with rdma.rdma(namespace) as pod:
        if not wait_until(lambda: rdma.by_index(pod, moved.index), ARRIVAL, 0.005, 0.01):
            raise HostError(
                f"RDMA device {moved.name} did not arrive in the pod within {ARRIVAL:g} s: see "
                "dmesg"
            )


def require_in(namespace: NetworkNamespace, record: DeviceRecord) -> None:
    """Raise CNIError 102 if one of the record's devices is not in the pod."""
    for name in missing(namespace, record):
        raise differs(f"RDMA device {name} is gone from the pod")


def missing(namespace: NetworkNamespace, record: DeviceRecord) -> list[str]:
    """The names of the recorded RDMA devices that the pod does not have."""
    if not record.rdma:
        return []
    with rdma.rdma(namespace) as pod:
        return [moved.name for moved in record.rdma if rdma.by_index(pod, moved.index) is None]


def restore(
    paths: Paths, record: DeviceRecord, namespaces: Sequence[NetworkNamespace], seconds: float
) -> bool:
    """Move the function's RDMA devices from these namespaces to the host, under their old names.

    Without namespaces, only wait for the kernel to move the devices. Returns False if devices are
    still missing after `seconds`.
    """

    def is_restored() -> bool:
        if _are_on_host(paths, record):
            return True
        for namespace in namespaces:
            move_out(paths, record, namespace)
        return bool(namespaces) and _are_on_host(paths, record)

    if wait_until(is_restored, seconds, longest_pause=0.02):
        return True
    # A function without RDMA devices has lost its driver or RDMA module: any move has ended by now.
    return not pci.rdma_of(paths, record.device)


def move_out(paths: Paths, record: DeviceRecord, namespace: NetworkNamespace) -> None:
    """Move the function's RDMA devices from the namespace to the host."""
    names = pci.rdma_of(paths, record.device)
    with rdma.rdma(namespace) as pod:
        for device in rdma.devices(pod):
            if device.name in names:
                with NetworkNamespace.own() as home, numbering_alone(paths):
                    if home.identity != namespace.identity:
                        rdma.move(pod, device, home)


def _are_on_host(paths: Paths, record: DeviceRecord) -> bool:
    """If the host has all RDMA devices of the function, restore their names and return True."""
    names = pci.rdma_of(paths, record.device)
    if record.rdma and not names:  # a moving device has no uverbs device
        return False
    with rdma.rdma() as host:
        on_host = {device.name: device for device in rdma.devices(host)}
        if not on_host.keys() >= set(names):
            return False
        for moved in record.rdma:
            renamed = [name for name in names if on_host[name].index == moved.index]
            if moved.name not in names and renamed:
                rdma.rename(host, on_host[renamed[0]], moved.name)
    return True


@contextmanager
def numbering_alone(paths: Paths) -> Iterator[None]:
    """Let no other call bind or move devices during the block. Blocks can be nested."""
    if getattr(_own, "held", False):
        yield
        return
    with locks.locked(paths.locks / "uverbs", "numbering RDMA devices"):
        _own.held = True
        try:
            yield
        finally:
            _own.held = False


@contextmanager
def numbers_kept(paths: Paths, names: Collection[str]) -> Iterator[None]:
    """Like `numbering_alone`. Raises CNIError 100 if a device in `names` gets another number."""
    if not names:
        yield
        return
    with numbering_alone(paths):
        before = pci.uverbs_numbers(paths)
        yield
        after = pci.uverbs_numbers(paths)
    for name in names:
        old, new = before.get(name), after.get(name)
        if old is not None and new is not None and old != new:
            raise CNIError(
                Code.KERNEL,
                f"RDMA device {name} has {new[0]} ({new[1]}:{new[2]}) in the pod, but the "
                f"container got {old[0]} ({old[1]}:{old[2]}): delete the pod, so that a new "
                "pod gets the right device file",
            )


def bind(paths: Paths, address: str, driver: str) -> None:
    """Unbind any driver of the device, and bind `driver`. Raises HostError, Busy."""
    with numbering_alone(paths):
        function = pci.find(paths, address)
        if function is None:
            raise HostError(f"device {address} has gone from this node")
        pci.unbind(paths, function)
        pci.bind(paths, msgspec.structs.replace(function, driver=""), driver)
