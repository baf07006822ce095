"""Giving a device back: its RDMA devices, its interface, then what its PF had set for it.

In this order, because a VF that is still in a pod must not lose its VLAN: the pod would be in
another network. A device that has been given back may be another pod's a moment later, so the
journal forgets whose it was before anything else happens, and nobody touches it after that.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec

from base import interrupts
from base.locks import Busy
from base.paths import Paths
from cni.attachments.entry import JournalDamaged, JournalEntry
from cni.attachments.journal import Journal
from cni.attachments.removal import await_return
from cni.spec.attachment import Attachment
from cni.spec.notes import note
from cni.spec.request import Request
from cni.sriov import guids, rdma_devices, restore_without_journal, settings, soft_roce
from cni.sriov.binding import bind
from cni.sriov.record import DeviceRecord
from host import netdev_move, pci, vfs
from host.errors import HostError, NamespaceGone
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark, Origin
from host.netlink import Rtnetlink, netlink

RETURN_TIME = 3.0  # seconds; a namespace is torn down in the background, seen to take up to 2


class Devices:
    """The interfaces of this plugin, as their removal sees them."""

    plugin = "sriov"

    def __init__(self, journal: Journal, paths: Paths) -> None:
        self._journal = journal
        self._paths = paths

    def take_back(
        self, attachment: Attachment, request: Request, entry: JournalEntry | None
    ) -> None:
        """Make the attachment's device what it was, unless it has been given back already."""
        if entry is None:
            restore_without_journal.give_back(self._journal, self._paths, attachment, request)
        elif entry.device:
            with self._journal.device_locked(entry.device):
                self.take_back_locked(attachment, request, entry)

    def take_back_locked(
        self, attachment: Attachment, request: Request, entry: JournalEntry
    ) -> None:
        """As `take_back`, for a caller that has the device's lock."""
        try:
            record = entry.undo_as(DeviceRecord)
        except JournalDamaged as damage:
            note(f"{damage}: going by what the device itself shows")
            restore_without_journal.give_back_locked(
                self._journal, self._paths, attachment, request, entry.device
            )
        else:
            self._give_back(attachment, request, entry, record)
        self._journal.write(msgspec.structs.replace(entry, device=""))

    def remove_strays(self) -> list[str]:
        """None: hardware is nobody's to remove, and each that is away from home has an entry."""
        return []

    def _give_back(
        self, attachment: Attachment, request: Request, entry: JournalEntry, record: DeviceRecord
    ) -> None:
        """Every step is tried, whatever becomes of the others, with one exception.

        A VF that is still in a pod keeps its settings.
        """
        if pci.find(self._paths, record.device) is None:
            note(f"device {record.device} of {attachment} is not on this node any more")
            return
        failures = Failures()
        with (
            soft_roce.exclusively(self._paths, record),
            places_of(request, entry) as places,
            netlink() as host,
        ):
            if record.rdma:
                failures.of(lambda: self._bring_verbs_home(places, entry, record))
            if record.origin is not None:
                origin = record.origin
                if _address_was_set(record):
                    # One that the PF has set allows a VF no other: it goes back before.
                    failures.of(lambda: _restore_settings(self._paths, host, record, ("mac",)))
                on = (entry.ifname, origin.name)
                failures.of(lambda: soft_roce.delete(self._paths, record, on))
                failures.of(lambda: self._bring_home(host, places, entry, record, origin))
            if failures and _is_away(self._paths, record):
                failures.report()
            failures.of(lambda: _restore_driver(self._paths, record))
            failures.of(lambda: _restore_settings(self._paths, host, record))
            mark = Mark(attachment.key)
            failures.of(lambda: guids.restore(host, self._paths, record, mark))
            if record.origin is not None:
                name = record.origin.name
                failures.of(lambda: soft_roce.restore(record, name))
            failures.report()

    def _bring_verbs_home(
        self, places: Sequence[NetworkNamespace], entry: JournalEntry, record: DeviceRecord
    ) -> None:
        """Raises HostError while a dying namespace has an RDMA device, or anything fails."""
        if rdma_devices.restore(self._paths, record, places, RETURN_TIME):
            return
        for place in NetworkNamespace.every():
            with place:
                rdma_devices.move_out(self._paths, record, place)
        if rdma_devices.restore(self._paths, record, (), 0.0):
            return
        await_return(self._journal, entry, f"RDMA device of {record.device}")
        # No namespace that we see has it: its driver makes it anew, on the host.
        note(f"device {record.device} has no RDMA device: its driver is bound again")
        bind(self._paths, record.device, record.driver)

    def _bring_home(
        self,
        host: Rtnetlink,
        places: Sequence[NetworkNamespace],
        entry: JournalEntry,
        record: DeviceRecord,
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
        while not netdev_move.restore(host, None, entry.ifname, origin, mark):
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
            await_return(self._journal, entry, f'"{entry.ifname}"')
        # No namespace has it: the driver makes it anew, on the host.
        note(f"device {record.device} has no interface: its driver is bound again")
        bind(self._paths, record.device, record.driver)
        if not netdev_move.restore(host, None, entry.ifname, origin, mark):
            raise HostError(f"device {record.device} has no interface, though its driver is bound")


class Failures:
    """What went wrong in steps of which each is tried."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def of(self, step: Callable[[], object]) -> None:
        """Try a step."""
        try:
            step()
        except (HostError, OSError, Busy) as error:
            self._texts.append(str(error))

    def __bool__(self) -> bool:
        return bool(self._texts)

    def report(self) -> None:
        """Raise HostError if anything went wrong."""
        if self._texts:
            raise HostError("; ".join(self._texts))


@contextmanager
def places_of(request: Request, entry: JournalEntry) -> Iterator[list[NetworkNamespace]]:
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
        if netdev_move.find(pod, (ifname,), origin, mark) is None:
            return False
        return netdev_move.restore(host, pod, ifname, origin, mark)


def _is_away(paths: Paths, record: DeviceRecord) -> bool:
    """Whether the interface is in another namespace than the host's."""
    function = pci.find(paths, record.device)
    return record.origin is not None and function is not None and not function.netdevs


def _address_was_set(record: DeviceRecord) -> bool:
    before, applied = record.before, record.applied
    return before is not None and applied is not None and before.mac != applied.mac


def _restore_driver(paths: Paths, record: DeviceRecord) -> None:
    """A runtime binds a device to vfio-pci for a virtual machine, and may die before it undoes."""
    function = pci.find(paths, record.device)
    if function is not None and record.driver and function.driver != record.driver:
        note(f'device {record.device} has driver "{function.driver}": back to {record.driver}')
        bind(paths, record.device, record.driver)


def _restore_settings(
    paths: Paths, host: Rtnetlink, record: DeviceRecord, only: Sequence[str] = ()
) -> None:
    """What the PF had set for the VF, as far as it differs."""
    if record.before is None or record.applied is None:
        return
    function = pci.find(paths, record.device)
    if function is None or function.index is None or function.pf != record.pf:
        note(f"device {record.device} is no VF of {record.pf} any more: its settings went with it")
        return
    # VFs that were made anew meanwhile may be numbered in another way.
    before = msgspec.structs.replace(record.before, index=function.index)
    applied = msgspec.structs.replace(record.applied, index=function.index)
    with settings.pf_of(paths, host, record.pf) as pf:
        now = vfs.read(host, pf, function.index)
        target = settings.restored(now, before, applied)
        if only:
            target = msgspec.structs.replace(now, **{name: getattr(target, name) for name in only})
        settings.apply(host, pf, now, target, all_of_it=True)
