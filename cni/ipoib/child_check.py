"""CHECK: everything that ADD set, compared with what the kernel shows now."""

from cni.attachments import results
from cni.attachments.journal import Journal
from cni.attachments.lifecycle import sandbox_of
from cni.attachments.results import compare, differs
from cni.ipoib import child
from cni.spec.attachment import Attachment
from cni.spec.request import Request
from cni.spec.result import Interface
from host.netdev_move import Mark
from host.netlink import links
from host.netlink.links import Link


def check(journal: Journal, attachment: Attachment, request: Request) -> None:
    """Raise CNIError 102 for the first thing that differs; 7 where prevResult is missing."""
    expected = results.expected(request)
    record = results.recorded(journal, attachment, child.ChildRecord)
    with sandbox_of(request) as sandbox:
        link = links.find(sandbox.pod, request.ifname)
        if link is None:
            raise differs(f'interface "{request.ifname}" is gone from the pod')
        parent = links.find(sandbox.host, record.parent)
        if parent is None:
            raise differs(f'parent "{record.parent}" is gone from the host')
        _compare_link(link, attachment, parent, record, expected.interface)
        expected.compare_addresses(sandbox.pod, link)


def _compare_link(
    link: Link,
    attachment: Attachment,
    parent: Link,
    record: child.ChildRecord,
    interface: Interface,
) -> None:
    compare(
        f'"{link.name}"',
        {
            "kind": (link.kind, "ipoib"),
            "alias": (link.alias, Mark(attachment.key).alias),
            "parent": (link.parent, parent.index),
            "P_Key": (f"{link.pkey or 0:#06x}", f"{record.pkey:#06x}"),
            "mode": (link.mode, record.mode),
            "umcast": (link.umcast, record.umcast),
            "mtu": (link.mtu, interface.mtu or record.mtu),
            "mac": (link.mac, interface.mac or link.mac),
            "administrative state": (results.up(link.up), "up"),
            "carrier": (results.up(link.carrier), "up"),
        },
    )
