"""Restores a device whose journal file is lost or damaged, from what the device shows.

Its name on the host and the former settings of its PF are unknown then. The interface gets a name
from the kernel and the permanent address of the hardware. The PF's settings that the request's
configuration sets become those of a new VF.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from base.paths import Paths
from cni.attachments import results
from cni.attachments.journal import Journal, JournalEntry
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError
from cni.spec.notes import note
from cni.spec.request import Request
from cni.sriov import options as sriov_options
from cni.sriov import rdma_devices, settings
from cni.sriov.binding import bind
from cni.sriov.options import SriovOptions
from cni.sriov.record import DeviceRecord
from host import links, netdev_move, pci
from host.errors import NamespaceGone
from host.links import Link
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark, Origin
from host.netlink import Rtnetlink, netlink
from host.vfs import VF

_NAME = "eth%d"  # the kernel fills in the first free number


def restore(journal: Journal, paths: Paths, attachment: Attachment, request: Request) -> None:
    """Restore the device with the attachment's mark, or else the one that the request names.

    A device that another attachment has by now is left alone. A device without the mark is
    restored only if there is a damaged file of this attachment, or if the runtime has a result of
    it: then another project's plugin made it, and has lost its file.
    """
    device = sriov_options.device_of(request)
    damaged = journal.path_of(attachment).exists()
    known = damaged or results.previous_interface(request) is not None
    with netlink() as host:
        link = _find(host, attachment, request, device if known else "")
    address = link.device if link is not None else device if damaged else ""
    if address:
        with journal.device_locked(address):
            restore_locked(journal, paths, attachment, request, address)


def restore_locked(
    journal: Journal, paths: Paths, attachment: Attachment, request: Request, address: str
) -> None:
    """As `restore`, of that device, for a caller that has its lock."""
    owners = [entry for entry in journal.holders(address) if isinstance(entry, JournalEntry)]
    if any(owner.attachment != attachment for owner in owners):
        return
    with netlink() as host:
        _restore_rdma_devices(paths, request, address)
        link = _find(host, attachment, request, address)
        if link is not None:
            _restore_netdev(host, request, attachment, link)
        _reset(host, paths, address, request)


def _find(host: Rtnetlink, attachment: Attachment, request: Request, device: str) -> Link | None:
    mark = Mark(attachment.key)
    return _marked(host, mark) or _in_the_pod(request, mark, device)


def _restore_rdma_devices(paths: Paths, request: Request, address: str) -> None:
    if not pci.rdma_of(paths, address):
        return
    record = DeviceRecord(device=address, driver="")
    try:
        with NetworkNamespace.open(request.netns, request.netns_descriptor) as namespace:
            rdma_devices.restore(paths, record, (namespace,), rdma_devices.ARRIVAL)
    except NamespaceGone:
        rdma_devices.restore(paths, record, (), rdma_devices.ARRIVAL)


def fetch_from_dead_pod(host: Rtnetlink, paths: Paths, address: str) -> None:
    """Move an interface without an attachment out of a dead pod, where an earlier plugin left it.

    It stays in a namespace that has processes: the pod may live, and the caller misses the device.
    """
    if pci.netdevs(paths, address):  # nearly always
        return
    function = pci.find(paths, address)
    if function is None or function.userspace or not function.driver:
        return
    for namespace in NetworkNamespace.every():
        with namespace:
            link = device_in(namespace, address)
            if link is None or is_inhabited(namespace):
                continue
            with netlink(namespace) as pod:
                mark = Mark("0" * 32)  # of no attachment
                note(f'device {address} is moved out of "{namespace.path}", a dead namespace')
                _move_out(host, pod, link, mark)
            return


def device_in(namespace: NetworkNamespace, address: str) -> Link | None:
    """The interface of a device, if the namespace has it."""
    with netlink(namespace) as route:
        for link in links.every(route):
            if link.device == address and not link.parent:
                return link
    return None


def is_inhabited(namespace: NetworkNamespace) -> bool:
    """Whether a process that we can see is in the namespace."""
    inhabited = NetworkNamespace.find(namespace.identity)
    if inhabited is None:
        return False
    with inhabited:
        return True


@contextmanager
def _pod_of(request: Request) -> Iterator[Rtnetlink]:
    with (
        NetworkNamespace.open(request.netns, request.netns_descriptor) as namespace,
        netlink(namespace) as pod,
    ):
        yield pod


def _marked(host: Rtnetlink, mark: Mark) -> Link | None:
    """The interface with the attachment's mark that came back to the host from a dead namespace."""
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


def _restore_netdev(host: Rtnetlink, request: Request, attachment: Attachment, link: Link) -> None:
    mark = Mark(attachment.key)
    try:
        with _pod_of(request) as pod:
            _move_out(host, pod, link, mark)
    except NamespaceGone:
        _move_out(host, None, link, mark)


def _move_out(host: Rtnetlink, pod: Rtnetlink | None, link: Link, mark: Mark) -> None:
    """Move an interface to the host, from the pod unless that is None: then it is there already."""
    route = pod if pod is not None else host
    present = netdev_move.find(route, (link.name,), _origin(link, link.mac), mark)
    mac = links.permanent_mac(route, present) if present is not None else ""
    ethernet = link.link_type == links.ARPHRD_ETHER
    origin = _origin(link, mac if mac and ethernet else link.mac)
    if pod is None and present is not None:
        origin = msgspec.structs.replace(origin, name=present.name)
    netdev_move.restore(host, pod, link.name, origin, mark)
    note(f"the interface of device {link.device} is on the host again, its old name is not known")


def _origin(link: Link, mac: str) -> Origin:
    mtu = link.mtu
    return Origin(name=_NAME, kind=link.kind, mac=mac, mtu=mtu, up=False, device=link.device)


def _reset(host: Rtnetlink, paths: Paths, address: str, request: Request) -> None:
    """Reset the PF's settings that the configuration sets to those of a new VF."""
    function = pci.find(paths, address)
    if function is None or function.index is None:
        return
    try:
        wanted = sriov_options.read(request)
    except CNIError:
        note(f"the PF's settings for {address} stay: the configuration cannot be read")
        return
    with settings.vf_of(paths, host, function.pf, function.index) as (pf, now):
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
