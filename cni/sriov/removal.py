"""Giving a device back: its RDMA devices, its interface, then what its PF had set for it.

In this order, because a VF that is still in a pod must not lose its VLAN: the pod would be in
another network. A device that has been given back may be another pod's a moment later, so the
journal forgets whose it was before anything else happens, and nobody touches it after that.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec

from cni.attachments.entry import Attachment, Damaged, Entry
from cni.attachments.journal import Journal
from cni.attachments.removal import await_return
from cni.spec import interrupts
from cni.spec.notes import note
from cni.spec.request import Request
from cni.sriov import guids, settings, soft, unrecorded
from cni.sriov.record import Record, Verbs
from host import pci, placement, rdma, vfs
from host.errors import HostError, NamespaceGone
from host.namespaces import NetworkNamespace
from host.netlink import Rtnetlink, netlink
from host.paths import Paths
from host.placement import Mark, Origin

RETURN_TIME = 3.0  # seconds; a namespace is torn down in the background, seen to take up to 2


class Devices:
    """The interfaces of this plugin, as their removal sees them."""

    plugin = "sriov"

    def __init__(self, journal: Journal, paths: Paths) -> None:
        self._journal = journal
        self._paths = paths

    def take_back(self, attachment: Attachment, request: Request, entry: Entry | None) -> None:
        """Make the attachment's device what it was, unless it has been given back already."""
        if entry is None:
            unrecorded.give_back(self._journal, self._paths, attachment, request)
        elif entry.device:
            with self._journal.device_locked(entry.device):
                self.take_back_locked(attachment, request, entry)

    def take_back_locked(self, attachment: Attachment, request: Request, entry: Entry) -> None:
        """As `take_back`, for a caller that has the device's lock."""
        try:
            record = entry.undo_as(Record)
        except Damaged as damage:
            note(f"{damage}: going by what the device itself shows")
            unrecorded.give_back_locked(
                self._journal, self._paths, attachment, request, entry.device
            )
        else:
            self._give_back(attachment, request, entry, record)
        self._journal.write(msgspec.structs.replace(entry, device=""))

    def remove_strays(self) -> list[str]:
        """None: hardware is nobody's to remove, and each that is away from home has an entry."""
        return []

    def _give_back(
        self, attachment: Attachment, request: Request, entry: Entry, record: Record
    ) -> None:
        if pci.find(self._paths, record.device) is None:
            note(f"device {record.device} of {attachment} is not on this node any more")
            return
        with places_of(request, entry) as places, netlink() as host:
            failures = [
                text
                for verbs in record.rdma
                if (text := _returned(self._paths, record, verbs, places))
            ]
            if record.origin is not None:
                # An address that the PF has set allows a VF no other: it goes back before.
                _restore_settings(self._paths, host, record, ("mac",))
                soft.take_off(record)
                self._bring_home(host, places, entry, record, record.origin)
                soft.put_on(record, record.origin.name)
            _restore_driver(self._paths, record)
            _restore_settings(self._paths, host, record)
            guids.give_back(host, self._paths, record, Mark(attachment.key))
        if failures:
            raise HostError("; ".join(failures))

    def _bring_home(
        self,
        host: Rtnetlink,
        places: Sequence[NetworkNamespace],
        entry: Entry,
        record: Record,
        origin: Origin,
    ) -> None:
        """Raises HostError while a dying namespace has the interface, or anything fails."""
        mark = Mark(entry.attachment.key)
        for place in places:
            if _brought(host, place, entry.ifname, origin, mark):
                return
        # With its RDMA device an IPoIB interface is made anew, and a namespace's end takes time.
        patience = RETURN_TIME if record.infiniband or not places else 0.0
        deadline = time.monotonic() + patience
        while not placement.bring_back(host, None, entry.ifname, origin, mark):
            if time.monotonic() >= deadline:
                break
            interrupts.checkpoint()
            time.sleep(0.05)
        else:
            return
        for place in NetworkNamespace.every():
            with place:
                if _brought(host, place, entry.ifname, origin, mark):
                    return
        function = pci.find(self._paths, record.device)
        if function is None:
            return
        if function.driver == record.driver:
            await_return(self._journal, entry)
        # No namespace has it: the driver makes it anew, on the host.
        note(f"device {record.device} has no interface: its driver is bound again")
        pci.unbind(self._paths, function)
        pci.bind(self._paths, msgspec.structs.replace(function, driver=""), record.driver)
        if not placement.bring_back(host, None, entry.ifname, origin, mark):
            raise HostError(f"device {record.device} has no interface, though its driver is bound")


@contextmanager
def places_of(request: Request, entry: Entry) -> Iterator[list[NetworkNamespace]]:
    """The namespaces where an attachment's device may be: its paths', or the one without a path."""
    with ExitStack() as opened:
        places = []
        for path in dict.fromkeys((request.netns, entry.netns)):
            if not path:
                continue
            given = request.netns_descriptor if path == request.netns else None
            try:
                places.append(opened.enter_context(NetworkNamespace.open(path, given)))
            except NamespaceGone:
                continue
        if all(place.identity != entry.netns_identity for place in places):
            nameless = NetworkNamespace.find(entry.netns_identity)
            if nameless is not None:
                places.append(opened.enter_context(nameless))
        yield places


def _brought(
    host: Rtnetlink, place: NetworkNamespace, ifname: str, origin: Origin, mark: Mark
) -> bool:
    with netlink(place) as pod:
        if placement.find(pod, (ifname,), origin, mark) is None:
            return False
        return placement.bring_back(host, pod, ifname, origin, mark)


def _returned(
    paths: Paths, record: Record, verbs: Verbs, places: Sequence[NetworkNamespace]
) -> str:
    """Bring an RDMA device home under its name. Answers what went wrong, "" if nothing."""
    deadline = time.monotonic() + RETURN_TIME
    try:
        while not _is_home(paths, record, verbs):
            for place in places:
                _send_home(verbs, place)
            if time.monotonic() >= deadline:
                note(f"RDMA device {verbs.name} is in no namespace any more")
                break
            time.sleep(0.02)
    except HostError as error:
        return str(error)
    return ""


def _is_home(paths: Paths, record: Record, verbs: Verbs) -> bool:
    """Whether the host has it, under its name from now on: a pod may have given it another."""
    with rdma.rdma() as host:
        if rdma.find(host, verbs.name) is not None:
            return True
        device = rdma.by_index(host, verbs.index)
        function = pci.find(paths, record.device)
        # Once a driver is bound anew, its device's index may be that of another adapter's.
        if device is None or function is None or device.name not in function.rdma:
            return False
        rdma.rename(host, device, verbs.name)
    return True


def _send_home(verbs: Verbs, place: NetworkNamespace) -> None:
    with rdma.rdma(place) as pod:
        device = rdma.by_index(pod, verbs.index)
        if device is not None:
            with NetworkNamespace.open("/proc/thread-self/ns/net") as home:
                rdma.move(pod, device, home)


def _restore_driver(paths: Paths, record: Record) -> None:
    """A runtime binds a device to vfio-pci for a virtual machine, and may die before it undoes."""
    function = pci.find(paths, record.device)
    if function is not None and record.driver and function.driver != record.driver:
        note(f'device {record.device} has driver "{function.driver}": back to {record.driver}')
        pci.unbind(paths, function)
        pci.bind(paths, msgspec.structs.replace(function, driver=""), record.driver)


def _restore_settings(
    paths: Paths, host: Rtnetlink, record: Record, only: Sequence[str] = ()
) -> None:
    """What the PF had set for the VF, as far as it differs."""
    if record.before is None or record.applied is None:
        return
    with settings.pf_of(paths, host, record.pf) as pf:
        now = vfs.read(host, pf, record.before.index)
        target = settings.restored(now, record.before, record.applied)
        if only:
            target = msgspec.structs.replace(now, **{name: getattr(target, name) for name in only})
        settings.apply(host, pf, now, target)
