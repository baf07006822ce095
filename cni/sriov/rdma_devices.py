"""RDMA devices that go with an interface: into the pod, and home again under their names.

Which devices are a function's, sysfs tells by their uverbs devices, in whichever namespace they
are and whatever a pod has called them. An index may be another HCA's by now: a driver that is
bound anew makes a new device.
"""

import time
from collections.abc import Sequence

from base import interrupts
from base.paths import Paths
from cni.attachments.results import differs
from cni.sriov.record import DeviceRecord, MovedRdmaDevice
from host import pci, rdma
from host.errors import HostError
from host.namespaces import NetworkNamespace

ARRIVAL = 5.0  # seconds: while it is moved, a device is in no namespace


def move_in(record: DeviceRecord, namespace: NetworkNamespace) -> None:
    """Move the devices from the host into the pod, and wait for them there."""
    for verbs in record.rdma:
        with rdma.rdma() as host:
            device = rdma.by_index(host, verbs.index)
            if device is None or device.name != verbs.name:
                raise HostError(f"RDMA device {verbs.name} has gone from the host")
            rdma.move(host, device, namespace)
        _await(verbs, namespace)


def are_in(namespace: NetworkNamespace, record: DeviceRecord) -> bool:
    """Whether all devices of the record are in the pod."""
    return not _missing(namespace, record)


def require_in(namespace: NetworkNamespace, record: DeviceRecord) -> None:
    """Raise CNIError 102 for a device that is not in the pod."""
    for name in _missing(namespace, record):
        raise differs(f"RDMA device {name} is gone from the pod")


def _missing(namespace: NetworkNamespace, record: DeviceRecord) -> list[str]:
    if not record.rdma:
        return []
    with rdma.rdma(namespace) as pod:
        return [one.name for one in record.rdma if rdma.by_index(pod, one.index) is None]


def brought_home(
    paths: Paths, record: DeviceRecord, places: Sequence[NetworkNamespace], seconds: float
) -> bool:
    """Bring the devices from these namespaces to the host, or wait for a dying one to do it."""
    deadline = time.monotonic() + seconds
    while not _are_home(paths, record):
        for place in places:
            send_home(paths, record, place)
        if time.monotonic() >= deadline:
            return _are_home(paths, record)
        interrupts.checkpoint()
        time.sleep(0.02)
    return True


def send_home(paths: Paths, record: DeviceRecord, place: NetworkNamespace) -> None:
    """Move the function's devices out of a namespace, if it has any."""
    names = pci.verbs_of(paths, record.device)
    with rdma.rdma(place) as pod:
        for device in rdma.devices(pod):
            if device.name in names:
                with NetworkNamespace.own() as home:
                    if home.identity != place.identity:
                        rdma.move(pod, device, home)


def _are_home(paths: Paths, record: DeviceRecord) -> bool:
    """Whether the host has all devices of the function, from now on under their old names."""
    names = pci.verbs_of(paths, record.device)
    with rdma.rdma() as host:
        here = {device.name: device for device in rdma.devices(host)}
        if not here.keys() >= set(names):
            return False
        for verbs in record.rdma:
            renamed = [one for one in names if here[one].index == verbs.index]
            if verbs.name not in names and renamed:
                rdma.rename(host, here[renamed[0]], verbs.name)
    # None at all: the driver or its RDMA module has gone, and the devices with it.
    return True


def _await(verbs: MovedRdmaDevice, namespace: NetworkNamespace) -> None:
    deadline = time.monotonic() + ARRIVAL
    with rdma.rdma(namespace) as pod:
        while rdma.by_index(pod, verbs.index) is None:
            if time.monotonic() >= deadline:
                raise HostError(f"RDMA device {verbs.name} did not arrive in the pod")
            interrupts.checkpoint()
            time.sleep(0.005)
