"""The plugin `rdma`: ADD moves RDMA devices, and records the move in the journal of `sriov`."""

from collections.abc import Sequence
from typing import Any

import msgspec

from base import interrupts
from base.paths import Paths
from cni.attachments import results
from cni.attachments.journal import Journal, JournalEntry
from cni.attachments.lifecycle import Undo, explained
from cni.spec.attachment import Attachment
from cni.spec.entry import VERSIONS
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from cni.sriov import rdma_devices
from cni.sriov.device_record import DeviceRecord, MovedRdmaDevice
from cni.sriov.options import device_of
from cni.sriov.plan import require_isolation
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import rdma
from host.sysfs import pci

_USER = 'plugin "rdma"'  # in errors


class Rdma:
    versions: Sequence[str] = VERSIONS

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._journal = Journal(paths)

    def add(self, request: Request) -> dict[str, Any]:
        """Move the RDMA devices of the VF that `sriov` has moved. Returns prevResult unchanged."""
        previous = results.previous_document(request)
        if previous is None:
            raise invalid_config(
                'prevResult missing: put "rdma" behind "sriov" in the list of plugins'
            )
        attachment = Attachment.of(request)
        with explained(), self._journal.locked(attachment), _namespace_of(request) as namespace:
            entry = self._entry(request)
            record = entry.undo_as(DeviceRecord)
            if record.rdma:
                if not rdma_devices.missing(namespace, record):
                    return previous
                self._restore(record, namespace)  # an earlier ADD died halfway
            devices = self._devices(record)
            moved = msgspec.structs.replace(
                record, rdma=tuple(MovedRdmaDevice(device.index, device.name) for device in devices)
            )
            with Undo() as undo:
                undo.last(lambda: self._journal.write(entry))
                self._journal.write(entry.with_record(moved))
                undo.register("the RDMA devices", lambda: self._restore(moved, namespace))
                rdma_devices.move_in(self._paths, moved, namespace)
                interrupts.hold()  # from here on the call reports success
        return previous

    def delete(self, request: Request) -> None:
        """Do nothing: the DEL of `sriov` follows and restores the devices."""

    def check(self, request: Request) -> None:
        """Raise CNIError 102 if the devices are not in the pod."""
        with explained(), _namespace_of(request) as namespace:
            record = results.recorded(self._journal, Attachment.of(request), DeviceRecord)
            if not record.rdma:
                raise results.differs(f"no RDMA device of {record.device} was moved into the pod")
            rdma_devices.require_in(namespace, record)

    def gc(self, request: Request) -> None:
        """Do nothing: the attachments belong to `sriov`."""

    def status(self, request: Request) -> None:
        """Raise CNIError 50 if RDMA devices cannot be moved on this node."""
        try:
            require_isolation(_USER)
        except CNIError as error:
            raise CNIError(Code.UNAVAILABLE, error.message) from None

    def _restore(self, record: DeviceRecord, namespace: NetworkNamespace) -> None:
        if not rdma_devices.restore(self._paths, record, (namespace,), rdma_devices.ARRIVAL):
            raise HostError(
                f"the RDMA device of {record.device} did not return to the host within "
                f"{rdma_devices.ARRIVAL:g} s: end the pod's processes that use the device, and see "
                "dmesg"
            )

    def _entry(self, request: Request) -> JournalEntry:
        attachment = Attachment.of(request)
        entry = self._journal.read(attachment)
        if entry is None or entry.plugin != "sriov" or not entry.device:
            raise invalid_config(
                f'plugin "sriov" of podfabric did not make attachment {attachment}: put '
                '"rdma" behind "sriov" in the list of plugins'
            )
        if entry.rail_of:
            raise invalid_config(
                'plugin "rdma" serves one interface, but "rails" of plugin "sriov" makes several: '
                'remove plugin "rdma", and set "rdmaIsolation": true for plugin "sriov"'
            )
        device = device_of(request)
        if device and device != entry.device:
            raise invalid_config(
                f'"deviceID": {device} differs from device {entry.device} of this attachment: '
                'remove "deviceID" from plugin "rdma"'
            )
        return entry

    def _devices(self, record: DeviceRecord) -> list[rdma.NetlinkRdmaDevice]:
        require_isolation(_USER)
        if record.infiniband:
            raise invalid_config(
                f'plugin "rdma" cannot serve InfiniBand device {record.device}: remove plugin '
                '"rdma", and set "rdmaIsolation": true for plugin "sriov"'
            )
        names = pci.rdma_of(self._paths, record.device)
        with rdma.rdma() as host:
            devices = [device for name in names if (device := rdma.find(host, name)) is not None]
        if not devices:
            raise invalid_config(
                f"device {record.device} has no RDMA device: load the driver's RDMA module, or "
                'remove "rdma" from the list of plugins'
            )
        return devices


def _namespace_of(request: Request) -> NetworkNamespace:
    return NetworkNamespace.open(request.netns, request.netns_descriptor)
