"""CHECK: everything that ADD set, compared with what the kernel shows now."""

import msgspec

from base.paths import Paths
from cni.attachments import results
from cni.attachments.journal import Journal
from cni.attachments.lifecycle import sandbox_of
from cni.attachments.results import compare, differs
from cni.spec.attachment import Attachment
from cni.spec.request import Request
from cni.spec.result import Interface
from cni.sriov import rdma_devices, vf_settings
from cni.sriov.device_record import DeviceRecord
from host.netdev_move import Mark
from host.netlink import links
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink
from host.sysfs import pci


def check(journal: Journal, paths: Paths, attachment: Attachment, request: Request) -> None:
    """Raise CNIError 102 for the first thing that differs; 7 where prevResult is missing."""
    expected = results.expected(request)
    record = results.recorded(journal, attachment, DeviceRecord)
    function = pci.find(paths, record.device)
    if function is None:
        raise differs(f"device {record.device} is gone from this node")
    where = (function.pf, function.index if record.applied is not None else None)
    wanted = (record.pf, record.applied.index if record.applied is not None else None)
    compare(
        f"device {record.device}",
        {"driver": (function.driver, record.driver), "PF and number": (where, wanted)},
    )
    with sandbox_of(request) as sandbox:
        _compare_settings(paths, sandbox.host, record)
        rdma_devices.require_in(sandbox.namespace, record)
        if record.origin is None:
            return
        link = links.find(sandbox.pod, request.ifname)
        if link is None:
            raise differs(f'interface "{request.ifname}" is gone from the pod')
        _compare_link(link, attachment, record, expected.interface)
        expected.compare_addresses(sandbox.pod, link)


def _compare_settings(paths: Paths, host: Rtnetlink, record: DeviceRecord) -> None:
    if record.applied is None:
        return
    with vf_settings.vf_of(paths, host, record.pf, record.applied.index) as (pf, found):
        pass
    if record.before is not None and record.applied.mac == record.before.mac:
        # The ADD set no address: a VF may change its own, and its PF then shows that.
        found = msgspec.structs.replace(found, mac=record.applied.mac)
    different = vf_settings.differences(found, record.applied)
    compare(f'VF {record.applied.index} of "{pf.name}"', different)


def _compare_link(
    link: Link, attachment: Attachment, record: DeviceRecord, interface: Interface
) -> None:
    on, among = record.modes
    compare(
        f'"{link.name}"',
        {
            "device": (link.device, record.device),
            "alias": (link.alias, Mark(attachment.key).alias),
            "mtu": (link.mtu, record.mtu or interface.mtu or link.mtu),
            "mac": (link.mac, interface.mac or link.mac),
            "promisc, allmulti": (link.flags & among, on),
            "administrative state": (results.up(link.up), "up"),
        },
    )
