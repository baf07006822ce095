"""Giving a device back whose journal file is lost or damaged: what the device shows must do.

Its name on the host, and what its PF had set before, are not known then. The interface gets a
name of the kernel's and the address that the hardware has of its own; of the PF's settings those
that the request's configuration sets go to what a new VF has.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from base.paths import Paths
from cni.attachments.entry import JournalEntry
from cni.attachments.journal import Journal
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError
from cni.spec.notes import note
from cni.spec.request import Request
from cni.sriov import options as sriov_options
from cni.sriov import rdma_devices, settings
from cni.sriov.binding import bind
from cni.sriov.options import SriovOptions
from cni.sriov.record import DeviceRecord
from host import links, netdev_move, pci, vfs
from host.errors import NamespaceGone
from host.links import Link
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark, Origin
from host.netlink import Rtnetlink, netlink
from host.vfs import VF

_NAME = "eth%d"  # the kernel fills in the first free number


def give_back(journal: Journal, paths: Paths, attachment: Attachment, request: Request) -> None:
    """Bring home what bears the attachment's mark, or is the device that the request names.

    Nothing is done to a device that another attachment has by now, and nothing without a mark
    unless a damaged file of this attachment is there.
    """
    device = sriov_options.device_of(request)
    damaged = journal.path_of(attachment).exists()
    with netlink() as host:
        found = _found(host, attachment, request, device if damaged else "")
    address = found.device if found is not None else device if damaged else ""
    if address:
        with journal.device_locked(address):
            give_back_locked(journal, paths, attachment, request, address)


def give_back_locked(
    journal: Journal, paths: Paths, attachment: Attachment, request: Request, address: str
) -> None:
    """As `give_back`, of that device, whose lock the caller has."""
    owners = [one for one in journal.holders(address) if isinstance(one, JournalEntry)]
    if any(owner.attachment != attachment for owner in owners):
        return
    with netlink() as host:
        _bring_verbs_home(paths, request, address)
        found = _found(host, attachment, request, address)
        if found is not None:
            _bring_home(host, request, attachment, found)
        _reset(host, paths, address, request)


def _found(host: Rtnetlink, attachment: Attachment, request: Request, device: str) -> Link | None:
    mark = Mark(attachment.key)
    return _marked(host, mark) or _in_the_pod(request, mark, device)


def _bring_verbs_home(paths: Paths, request: Request, address: str) -> None:
    if not pci.rdma_of(paths, address):
        return
    record = DeviceRecord(device=address, driver="")
    try:
        with NetworkNamespace.open(request.netns, request.netns_descriptor) as place:
            rdma_devices.restore(paths, record, (place,), rdma_devices.ARRIVAL)
    except NamespaceGone:
        rdma_devices.restore(paths, record, (), rdma_devices.ARRIVAL)


def bring_home(host: Rtnetlink, paths: Paths, address: str) -> None:
    """Bring home an interface of no attachment's, which an earlier plugin left in a dead pod.

    A namespace in which processes live is no dead pod: then it is left there, for the caller to
    miss it.
    """
    function = pci.find(paths, address)
    if function is None or function.netdevs or function.userspace or not function.driver:
        return
    for place in NetworkNamespace.every():
        with place:
            found = _device_in(place, address)
            if found is None or _is_inhabited(place):
                continue
            with netlink(place) as pod:
                mark = Mark("0" * 32)  # of no attachment
                note(f'device {address} is brought home from "{place.path}", a dead namespace')
                _bring(host, pod, found, mark)
            return


def _device_in(place: NetworkNamespace, address: str) -> Link | None:
    with netlink(place) as route:
        for link in links.every(route):
            if link.device == address and not link.parent:
                return link
    return None


def _is_inhabited(place: NetworkNamespace) -> bool:
    inside = NetworkNamespace.find(place.identity)
    if inside is None:
        return False
    with inside:
        return True


@contextmanager
def _pod_of(request: Request) -> Iterator[Rtnetlink]:
    with (
        NetworkNamespace.open(request.netns, request.netns_descriptor) as place,
        netlink(place) as pod,
    ):
        yield pod


def _marked(host: Rtnetlink, mark: Mark) -> Link | None:
    """The interface on the host that a dead namespace gave back with the attachment's mark."""
    for link in links.every(host):
        if link.alias == mark.alias and link.device:
            return link
    return None


def _in_the_pod(request: Request, mark: Mark, device: str) -> Link | None:
    try:
        with _pod_of(request) as pod:
            for link in links.every(pod):
                same = device != "" and link.device == device and not link.parent
                if link.device and (link.alias == mark.alias or same):
                    return link
    except NamespaceGone:
        pass
    return None


def _bring_home(host: Rtnetlink, request: Request, attachment: Attachment, found: Link) -> None:
    mark = Mark(attachment.key)
    try:
        with _pod_of(request) as pod:
            _bring(host, pod, found, mark)
    except NamespaceGone:
        _bring(host, None, found, mark)


def _bring(host: Rtnetlink, pod: Rtnetlink | None, found: Link, mark: Mark) -> None:
    here = pod if pod is not None else host
    there = netdev_move.find(here, (found.name,), _origin(found, found.mac), mark)
    mac = links.permanent_mac(here, there) if there is not None else ""
    ethernet = found.link_type == links.ARPHRD_ETHER
    origin = _origin(found, mac if mac and ethernet else found.mac)
    if pod is None and there is not None:
        origin = msgspec.structs.replace(origin, name=there.name)
    netdev_move.restore(host, pod, found.name, origin, mark)
    note(f"the interface of device {found.device} is on the host again, its old name is not known")


def _origin(found: Link, mac: str) -> Origin:
    mtu = found.mtu
    return Origin(name=_NAME, kind=found.kind, mac=mac, mtu=mtu, up=False, device=found.device)


def _reset(host: Rtnetlink, paths: Paths, address: str, request: Request) -> None:
    """The settings that the configuration names, to those of a VF that nobody has configured."""
    function = pci.find(paths, address)
    if function is None or function.index is None:
        return
    try:
        wanted = sriov_options.read(request)
    except CNIError:
        note(f"what the PF had set for {address} stays: the configuration cannot be read")
        return
    with settings.pf_of(paths, host, function.pf) as pf:
        now = vfs.read(host, pf, function.index)
        fresh = _fresh(now, wanted)
        target = settings.restored(now, fresh, settings.wanted(fresh, wanted))
        settings.apply(host, pf, now, target, all_of_it=True)
    if now.port_guid != target.port_guid and function.driver and not function.userspace:
        bind(paths, address, function.driver)  # or the interface keeps the old one


def _fresh(now: VF, wanted: SriovOptions) -> VF:
    """A VF as its driver makes it: no VLAN, no limits, not trusted, checked for spoofing."""
    return msgspec.structs.replace(
        now,
        mac=settings.NO_MAC if wanted.mac else now.mac,
        vlan=0,
        qos=0,
        proto="802.1q",
        min_tx_rate=0,
        max_tx_rate=0,
        spoofchk=None if now.spoofchk is None else True,
        trust=None if now.trust is None else False,
        link_state=None if now.link_state is None else "auto",
        node_guid=None,
        port_guid=None,
    )
