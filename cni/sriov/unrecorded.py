"""Makes a device's record from the device's state, if the journal file is lost or damaged.

On the host, the DEL gives the interface a new name and its permanent address. Each VF setting in
the request is reset to the value of a new VF.
"""

from contextlib import suppress

import msgspec

from base.paths import Paths
from cni.attachments import results
from cni.attachments.journal import Journal, JournalEntry
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError
from cni.spec.notes import note
from cni.spec.request import Request
from cni.sriov import options as sriov_options
from cni.sriov import vf_settings
from cni.sriov.device_record import DeviceRecord, MovedRdmaDevice
from host import netdev_move
from host.errors import NamespaceGone
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark, Origin
from host.netlink import links
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink, netlink
from host.netlink.vfs import VF
from host.sysfs import pci
from host.sysfs.pci import Function

_NEW_NAME = "eth%d"  # the kernel fills in the first free number
_UNKNOWN = -1  # index of an RDMA device that keeps its current name


def device_of(journal: Journal, attachment: Attachment, request: Request) -> str:
    """The attachment's device, or "". A device with the attachment's mark is preferred.

    Without a mark, the request's device is returned if the journal file is damaged. It is also
    returned if the pod has it and the request has a result, as with another project's plugin.
    """
    device = sriov_options.device_of(request)
    damaged = journal.path_of(attachment).exists()
    known = damaged or results.previous_interface(request) is not None
    origin = _origin(attachment, request, device if known else "")
    return origin.device if origin is not None else device if damaged else ""


def record_of(
    journal: Journal, paths: Paths, attachment: Attachment, request: Request, device: str
) -> DeviceRecord | None:
    """The record of a locked device; `None` if another attachment has the device."""
    owners = [entry for entry in journal.holders(device) if isinstance(entry, JournalEntry)]
    if any(owner.attachment != attachment for owner in owners):
        return None
    function = pci.find(paths, device)
    origin = _origin(attachment, request, device)
    if origin is not None:
        note(f"the old name of the interface of device {device} is unknown: it gets a new name")
    before, applied = _settings(function, request) if function is not None else (None, None)
    return DeviceRecord(
        device=device,
        driver=function.driver if function is not None else "",
        pf=function.pf if function is not None else "",
        origin=origin,
        before=before,
        applied=applied,
        infiniband=origin is not None and origin.kind == "ipoib",
        rdma=rdma_of(paths, device),
    )


def rdma_of(paths: Paths, device: str) -> tuple[MovedRdmaDevice, ...]:
    """The device's RDMA devices, in the pod or on the host."""
    return tuple(MovedRdmaDevice(_UNKNOWN, name) for name in pci.rdma_of(paths, device))


def entry_of(paths: Paths, request: Request, record: DeviceRecord) -> JournalEntry:
    """A journal entry for an attachment without one. The entry is not written."""
    boot_id = paths.boot_id()
    entry = JournalEntry.begun("sriov", request, None, boot_id, record, device=record.device)
    return entry.attached(record, ())


def fetch_from_dead_pod(host: Rtnetlink, paths: Paths, address: str) -> None:
    """Move the device's interface to the host, out of a namespace without processes."""
    if pci.netdevs(paths, address):  # nearly always the interface is on the host
        return
    function = pci.find(paths, address)
    if function is None or function.userspace or not function.driver:
        return
    for namespace in NetworkNamespace.every():
        with namespace:
            link = device_in(namespace, address)
            if link is None or is_inhabited(namespace):
                continue
            note(f'moving device {address} out of "{namespace.path}", which has no processes')
            mark = Mark("0" * 32)  # of no attachment
            with netlink(namespace) as pod:
                netdev_move.restore_from(host, pod, link, _origin_of(pod, link, _NEW_NAME), mark)
            return


def device_in(namespace: NetworkNamespace, address: str) -> Link | None:
    """The device's interface, if it is in the namespace."""
    with netlink(namespace) as route:
        for link in links.every(route):
            if link.device == address and not link.parent:
                return link
    return None


def is_inhabited(namespace: NetworkNamespace) -> bool:
    """Whether a visible process is in the namespace."""
    inhabited = NetworkNamespace.find(namespace.identity)
    if inhabited is None:
        return False
    with inhabited:
        return True


def _origin(attachment: Attachment, request: Request, device: str) -> Origin | None:
    """The interface's state to restore. Searches for the mark, and in the pod also for `device`."""
    alias = Mark(attachment.key).alias
    with netlink() as host:
        for link in links.every(host):
            if link.alias == alias and link.device:
                return _origin_of(host, link, link.name)
    with (
        suppress(NamespaceGone),
        NetworkNamespace.open(request.netns, request.netns_descriptor) as namespace,
        netlink(namespace) as pod,
    ):
        for link in links.every(pod):
            same = device != "" and link.device == device and not link.parent
            if link.device and (link.alias == alias or same):
                return _origin_of(pod, link, _NEW_NAME)
    return None


def _origin_of(route: Rtnetlink, link: Link, name: str) -> Origin:
    ethernet = link.link_type == links.ARPHRD_ETHER
    return Origin(
        name=name,
        kind=link.kind,
        mac=(links.permanent_mac(route, link) if ethernet else "") or link.mac,
        mtu=link.mtu,
        up=False,
        device=link.device,
    )


def _settings(function: Function, request: Request) -> tuple[VF | None, VF | None]:
    """A new VF's settings without and with the request's options; `None` if unknown."""
    if function.index is None:
        return None, None
    try:
        wanted = sriov_options.read(request)
    except CNIError:
        note(
            f"DEL does not restore the PF's settings for {function.address}, because the "
            "configuration is invalid"
        )
        return None, None
    before = msgspec.structs.replace(vf_settings.NEW, index=function.index)
    return before, vf_settings.wanted(before, wanted)
