"""The GUIDs of an InfiniBand VF: its driver reads them when it binds, so new ones take a binding.

Binding makes the interface and the RDMA device anew, with another index and maybe another uverbs
number. A number that changes is an error: the container has had the node of the old one since the
kubelet admitted the pod.
"""

import time

import msgspec

from base import interrupts
from base.paths import Paths
from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from cni.sriov.binding import bind
from cni.sriov.plan import DevicePlan, guid_of
from cni.sriov.record import DeviceRecord, MovedRdmaDevice
from host import links, netdev_move, pci, rdma
from host.errors import HostError
from host.links import Link
from host.netdev_move import Mark
from host.netlink import Rtnetlink

APPEARANCE = 5.0  # seconds for an interface that its driver makes anew


def needs_binding(link: Link | None, record: DeviceRecord) -> bool:
    """Whether the interface has another GUID than the PF has set for it now."""
    wanted = record.applied.port_guid if record.applied is not None else None
    return link is not None and record.infiniband and wanted not in (None, guid_of(link))


def rebind(
    host: Rtnetlink, paths: Paths, plan: DevicePlan, record: DeviceRecord
) -> tuple[DevicePlan, DeviceRecord]:
    """Bind a VF's driver anew for its GUID. Answers what there is then.

    CNIError 100 that names both uverbs devices if it got another one.
    """
    link = plan.link
    if link is None:
        return plan, record
    before = [pci.uverbs_of(paths, name) for name in plan.function.rdma]
    bind(paths, plan.function.address, record.driver)
    link = await_link(host, plan.function.address, link, anywhere=True)
    function = pci.find(paths, plan.function.address)
    if function is None:
        raise HostError(f"device {plan.function.address} has gone while its driver was bound")
    after = [pci.uverbs_of(paths, name) for name in function.rdma]
    if before != after:
        raise CNIError(
            Code.KERNEL,
            f"binding the driver of {function.address} anew for its GUID made {_listed(before)} "
            f"{_listed(after)}, but the pod has the former: set the GUID on the host, before the "
            "device plugin offers the VF",
        )
    devices = _devices_of(function.rdma) if record.rdma else ()
    devices_moved = tuple(MovedRdmaDevice(device.index, device.name) for device in devices)
    return (
        msgspec.structs.replace(plan, function=function, link=link, rdma=devices),
        msgspec.structs.replace(record, rdma=devices_moved),
    )


def restore(host: Rtnetlink, paths: Paths, record: DeviceRecord, mark: Mark) -> None:
    """Once the PF has the old GUIDs again, give them to the VF's interface on the host, too.

    Else the next pod would find the last one's on it.
    """
    if record.before is None or record.applied is None or record.origin is None:
        return
    if record.before.port_guid == record.applied.port_guid or not record.infiniband:
        return
    link = netdev_move.find(host, (record.origin.name,), record.origin, mark)
    if link is None or guid_of(link) != record.applied.port_guid:
        return
    before = [pci.uverbs_of(paths, name) for name in pci.rdma_of(paths, record.device)]
    bind(paths, record.device, record.driver)
    await_link(host, record.device, link, anywhere=True)
    after = [pci.uverbs_of(paths, name) for name in pci.rdma_of(paths, record.device)]
    if before != after:
        note(f"uverbs of {record.device}: {_listed(before)} became {_listed(after)}")
    netdev_move.restore(host, None, record.origin.name, record.origin, mark)


def await_link(host: Rtnetlink, address: str, old: Link, *, anywhere: bool = False) -> Link:
    """The interface of a device that replaces `old` on the host, as soon as it is there."""
    deadline = time.monotonic() + APPEARANCE
    while True:
        for link in links.every(host):
            same = link.device == address and link.kind == old.kind and not link.parent
            if same and (anywhere or link.index != old.index):
                return link
        if time.monotonic() >= deadline:
            raise HostError(f'"{old.name}" of device {address} did not come back to the host')
        interrupts.checkpoint()
        time.sleep(0.02)


def _devices_of(names: tuple[str, ...]) -> tuple[rdma.NetlinkRdmaDevice, ...]:
    with rdma.rdma() as socket:
        found = [rdma.find(socket, name) for name in names]
    return tuple(device for device in found if device is not None)


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "no uverbs device"
