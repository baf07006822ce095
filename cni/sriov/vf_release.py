"""Restores a device in a DEL: its RDMA devices, its interface, then its PF's settings.

The settings are restored last, so that the VF has its VLAN until it leaves the pod. A released
device can go to another pod at once. So the DEL holds the device's lock until the journal entry no
longer names the device. Later calls for this entry do not touch the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from base.interrupts import wait_until
from base.paths import Paths
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry
from cni.attachments.lifecycle import Failures
from cni.attachments.sandbox import OpenNamespace, await_return, namespaces_of
from cni.spec.attachment import Attachment
from cni.spec.notes import note
from cni.spec.request import Request
from cni.sriov import guids, rdma_devices, unrecorded, vf_settings
from cni.sriov.device_record import DeviceRecord
from host import ethtool, netdev_move
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark, Origin
from host.netlink.sockets import Rtnetlink, netlink
from host.sysfs import pci

RETURN_TIME = 3.0  # seconds; the kernel tears namespaces down in the background, within 2 s


def release(
    journal: Journal,
    paths: Paths,
    attachment: Attachment,
    request: Request,
    entry: JournalEntry | None,
) -> None:
    """Restore the device if the attachment still has one. Raises HostError, Busy."""
    device = entry.device if entry else unrecorded.device_of(journal, attachment, request)
    if device:
        with journal.device_locked(device):
            release_locked(journal, paths, attachment, request, entry, device)


def release_locked(
    journal: Journal,
    paths: Paths,
    attachment: Attachment,
    request: Request,
    entry: JournalEntry | None,
    device: str,
) -> None:
    """Restore and release `device`. The caller has the device's lock."""
    record = _recorded(entry) or unrecorded.record_of(journal, paths, attachment, request, device)
    if record is not None and not pci.is_present(paths, device):
        note(f"device {device} of {attachment} has gone from this node")
    elif record is not None:
        shown = entry or unrecorded.entry_of(paths, request, record)
        with namespaces_of(request, shown) as namespaces, netlink() as host:
            _Restoration(journal, paths, host, namespaces, shown, record).run()
    if entry is not None:
        journal.release_device(entry)


def _recorded(entry: JournalEntry | None) -> DeviceRecord | None:
    try:
        return entry.undo_as(DeviceRecord) if entry is not None else None
    except JournalDamaged as damage:
        note(f"{damage}: DEL restores the device from the device's state instead")
        return None


class _Restoration(NamedTuple):
    """A device to restore, and the namespaces that can have the device."""

    journal: Journal
    paths: Paths
    host: Rtnetlink
    namespaces: Sequence[OpenNamespace]
    entry: JournalEntry
    record: DeviceRecord

    def run(self) -> None:
        """Restore the device.

        The first failure ends the run if the interface is not on the host yet.
        """
        paths, host, record, origin = self.paths, self.host, self.record, self.record.origin
        mark = Mark(self.entry.attachment.key)
        before, applied = record.before, record.applied
        failures = Failures()
        if record.rdma:
            failures.of(self._restore_rdma_devices)
        if origin is not None:
            if before is not None and applied is not None and before.mac != applied.mac:
                # While the PF has an address for the VF, the VF can have no other address.
                failures.of(lambda: restore_settings(paths, host, record, ("mac",)))
            failures.of(lambda: self._restore_netdev(origin, mark))
            present = pci.is_present(paths, record.device)
            if failures and present and not pci.netdevs(paths, record.device):
                failures.report()  # the interface is in another namespace than the host's
        failures.of(lambda: _restore_driver(paths, record))
        if origin is not None and not failures:
            _restore_driver_settings(paths, host, record, origin)
        failures.of(lambda: restore_settings(paths, host, record))
        failures.of(lambda: guids.restore(host, paths, record, mark))
        failures.report()

    def _restore_rdma_devices(self) -> None:
        """Move the RDMA devices to the host. Raises HostError while one is in a dying namespace."""
        opened = [namespace for namespace, _ in self.namespaces]
        if rdma_devices.restore(self.paths, self.record, opened, RETURN_TIME):
            return
        for namespace in NetworkNamespace.every():
            with namespace:
                rdma_devices.move_out(self.paths, self.record, namespace)
        if rdma_devices.restore(self.paths, self.record, (), 0.0):
            return
        self._await_or_bind(f"RDMA device of {self.record.device}", "RDMA device")

    def _restore_netdev(self, origin: Origin, mark: Mark) -> None:
        """Move the interface to the host. Raises HostError while it is in a dying namespace."""
        host, ifname, device = self.host, self.entry.ifname, self.record.device
        for _, pod in self.namespaces:
            if _moved_out(host, pod, ifname, origin, mark):
                return
        # The kernel needs time to create an IPoIB interface, and to tear a namespace down.
        seconds = RETURN_TIME if self.record.infiniband or not self.namespaces else 0.0
        if wait_until(lambda: netdev_move.restore(host, None, ifname, origin, mark), seconds, 0.05):
            return
        for namespace in NetworkNamespace.every():
            with namespace, netlink(namespace) as pod:
                if _moved_out(host, pod, ifname, origin, mark):
                    return
        function = pci.find(self.paths, device)
        if function is None:
            return
        awaited = f'"{ifname}"' if function.driver == self.record.driver else ""
        self._await_or_bind(awaited, "interface")
        if not netdev_move.restore(host, None, ifname, origin, mark):
            raise HostError(f"device {device} has a driver but no interface: see dmesg")

    def _await_or_bind(self, awaited: str, missing: str) -> None:
        """Bind the driver again. Raises HostError while the kernel can move `awaited` back."""
        if awaited:
            await_return(self.journal, self.entry, awaited)
        note(f"device {self.record.device} has no {missing}: binding its driver again")
        rdma_devices.bind(self.paths, self.record.device, self.record.driver)


def _moved_out(host: Rtnetlink, pod: Rtnetlink, ifname: str, origin: Origin, mark: Mark) -> bool:
    """Move the interface to the host if the pod has it. Returns whether the interface was moved."""
    link = netdev_move.find(pod, (ifname,), origin, mark)
    return link is not None and netdev_move.restore_from(host, pod, link, origin, mark)


def _restore_driver(paths: Paths, record: DeviceRecord) -> None:
    """Bind the old driver again. A container runtime that was killed can leave vfio-pci bound."""
    driver = pci.driver_of(paths, record.device)
    if record.driver not in ("", driver) and pci.is_present(paths, record.device):
        note(f'device {record.device} has driver "{driver}": binding {record.driver} again')
        rdma_devices.bind(paths, record.device, record.driver)


def _restore_driver_settings(
    paths: Paths, host: Rtnetlink, record: DeviceRecord, origin: Origin
) -> None:
    """Restore the driver's settings.

    If the driver refuses a setting, log the refusal and continue, because the device works anyway.
    """
    if origin.name in pci.netdevs(paths, record.device):
        for refusal in ethtool.restore(host, origin.name, record.ethtool):
            note(f"device {record.device}: {refusal}")


def restore_settings(
    paths: Paths, host: Rtnetlink, record: DeviceRecord, only: Sequence[str] = ()
) -> None:
    """Restore the VF's settings at the PF, or only the fields in `only`."""
    if record.before is None or record.applied is None:
        return
    pf_address, index = pci.place_of_vf(paths, record.device)
    if index is None or pf_address != record.pf:
        note(
            f"device {record.device} is no longer a VF of {record.pf}, so it has no settings to "
            "restore"
        )
        return
    # VFs that were created again may have other numbers.
    before = msgspec.structs.replace(record.before, index=index)
    applied = msgspec.structs.replace(record.applied, index=index)
    with vf_settings.vf_of(paths, host, record.pf, index) as (pf, now):
        target = vf_settings.restored(now, before, applied)
        if only:
            target = msgspec.structs.replace(now, **{name: getattr(target, name) for name in only})
        vf_settings.apply(host, pf, now, target, all_of_it=True)
