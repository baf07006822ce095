"""Rebinds the driver of an InfiniBand VF, because a driver reads new GUIDs only at a bind.

A rebind creates a new interface and a new RDMA device. The ADD fails if the uverbs number changes,
because the container already has the device file with the old number.
"""

import msgspec

from base.interrupts import wait_until
from base.paths import Paths
from cni.spec.errors import CNIError, Code
from cni.spec.notes import note
from cni.sriov import rdma_devices
from cni.sriov.device_record import DeviceRecord, MovedRdmaDevice
from cni.sriov.plan import DevicePlan, guid_of
from host import netdev_move
from host.errors import HostError
from host.netdev_move import Mark
from host.netlink import links, rdma
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink
from host.sysfs import pci

APPEARANCE = 5.0  # seconds for the interface that a driver creates


def needs_binding(link: Link | None, record: DeviceRecord) -> bool:
    """Whether the interface's GUID differs from the GUID in the record's `applied`."""
    wanted = record.applied.port_guid if record.applied is not None else None
    return link is not None and record.infiniband and wanted not in (None, guid_of(link))


def rebind(
    host: Rtnetlink, paths: Paths, plan: DevicePlan, record: DeviceRecord
) -> tuple[DevicePlan, DeviceRecord]:
    """Rebind the driver, so that the driver reads the new GUID.

    Raises CNIError 100 if a uverbs device changes.
    """
    link = plan.link
    if link is None:
        return plan, record
    before = [pci.uverbs_of(paths, name) for name in plan.function.rdma]
    rdma_devices.bind(paths, plan.function.address, record.driver)
    link = await_link(host, plan.function.address, link, same_index=True)
    function = pci.find(paths, plan.function.address)
    if function is None:
        raise HostError(
            f"device {plan.function.address} disappeared when podfabric bound its driver"
        )
    after = [pci.uverbs_of(paths, name) for name in function.rdma]
    if before != after:
        raise CNIError(
            Code.KERNEL,
            f"a new GUID changed the uverbs devices of the pod's VF {function.address} (before: "
            f"{_listed(before)}, now: {_listed(after)}): set the GUID on the host before the "
            "device plugin offers the VF",
        )
    devices = _devices_of(function.rdma) if record.rdma else ()
    moved = tuple(MovedRdmaDevice(device.index, device.name) for device in devices)
    return (
        msgspec.structs.replace(plan, function=function, link=link, rdma=devices),
        msgspec.structs.replace(record, rdma=moved, pkey=link.pkey),
    )


def note_other_partition(plan: DevicePlan, pkey: int | None) -> None:
    """Write a note if the interface is in another partition than `pkey`."""
    own = plan.link.pkey if plan.link is not None else None
    if pkey is not None and own is not None and (pkey ^ own) & 0x7FFF:
        note(
            f'device {plan.function.address} has P_Key {own:#06x}, but "pkey" is {pkey:#06x}: '
            "have the subnet manager put the VF into that partition"
        )


def restore(host: Rtnetlink, paths: Paths, record: DeviceRecord, mark: Mark) -> None:
    """Rebind the VF's driver on the host, so that the VF gets its old GUID again."""
    if record.before is None or record.applied is None or record.origin is None:
        return
    if record.before.port_guid == record.applied.port_guid or not record.infiniband:
        return
    link = netdev_move.find(host, (record.origin.name,), record.origin, mark)
    if link is None or guid_of(link) != record.applied.port_guid:
        return
    before = [pci.uverbs_of(paths, name) for name in pci.rdma_of(paths, record.device)]
    rdma_devices.bind(paths, record.device, record.driver)
    await_link(host, record.device, link, same_index=True)
    after = [pci.uverbs_of(paths, name) for name in pci.rdma_of(paths, record.device)]
    if before != after:
        note(f"uverbs devices of {record.device}: {_listed(before)} became {_listed(after)}")
    netdev_move.restore(host, None, record.origin.name, record.origin, mark)


def await_link(host: Rtnetlink, address: str, old: Link, *, same_index: bool = False) -> Link:
    """Wait for the device's new interface, which replaces `old` on the host. Raises HostError."""

    def appeared() -> Link | None:
        for link in links.every(host):
            matches = link.device == address and link.kind == old.kind and not link.parent
            if matches and (same_index or link.index != old.index):
                return link
        return None

    link = wait_until(appeared, APPEARANCE, longest_pause=0.02)
    if link is None:
        raise HostError(f'interface "{old.name}" of device {address} did not return to the host')
    return link


def _devices_of(names: tuple[str, ...]) -> tuple[rdma.NetlinkRdmaDevice, ...]:
    with rdma.rdma() as socket:
        devices = [rdma.find(socket, name) for name in names]
    return tuple(device for device in devices if device is not None)


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "no uverbs device"
