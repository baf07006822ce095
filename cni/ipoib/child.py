"""Makes, configures, recognises, compares and removes the child interface.

A name does not identify a child, so each child has a mark. The kernel makes a child with an index,
but not with an alias. So the mark of a new child is its index, and later an alias. Both marks are
made of the attachment's key.

When a namespace ends, the kernel does not delete an IPoIB child in it. Later the kernel moves the
child to the initial namespace (ipoib_link_ops.netns_refund). There the child is down and may have
any name.
"""

import hashlib
import socket

import msgspec

from cni.attachments import results
from cni.attachments.journal import Journal
from cni.attachments.lifecycle import sandbox_of
from cni.attachments.results import differs
from cni.ipoib.options import IpoibOptions
from cni.ipoib.parents import ChildPlan
from cni.spec.attachment import Attachment
from cni.spec.request import Request
from cni.spec.result import Interface
from host import netdev_move
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark
from host.netlink import interface_addresses, link_changes, links
from host.netlink.interface_addresses import Sysctl
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink

ALIAS_PREFIX = netdev_move.ALIAS_PREFIX
LINK_LOCAL = bytes.fromhex("fe80000000000000")  # fe80::/64
RETURN_TIME = 3.0  # seconds; the kernel tears namespaces down in the background, within 2 s


class ChildRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The journal's record of a child, to compare and recognise the child."""

    parent: str
    pkey: int
    mode: str
    mtu: int
    umcast: bool
    proxy_arp: bool
    mac: str = ""  # set once attached; unique, because it contains the queue pair's number

    @property
    def segment(self) -> str:
        """The parent and the P_Key. Children with the same segment reach each other."""
        return f"{self.parent} {self.pkey:#06x}"


def record_of(plan: ChildPlan, options: IpoibOptions) -> ChildRecord:
    return ChildRecord(
        parent=plan.parent.name,
        pkey=plan.pkey,
        mode=plan.mode,
        mtu=plan.mtu,
        umcast=plan.umcast,
        proxy_arp=options.proxy_arp,
    )


def record_of_adopted(link: Link) -> ChildRecord:
    """The record of a child that another project's plugin made."""
    return ChildRecord(
        parent="",
        pkey=link.pkey or 0,
        mode=link.mode,
        mtu=link.mtu,
        umcast=link.umcast,
        proxy_arp=False,
        mac=link.mac,
    )


def make(
    host: Rtnetlink,
    pod: Rtnetlink,
    namespace: NetworkNamespace,
    attachment: Attachment,
    plan: ChildPlan,
) -> Link:
    """Make the child in the pod, with the MTU of the plan. The child stays down."""
    mark, name = Mark(attachment.key), attachment.ifname
    # The kernel refuses a name that the host has (rtnl_newlink, net/core/rtnetlink.c).
    first = mark.temporary_name if links.has_name(host, name) else name
    settings = [
        ("IFLA_IPOIB_PKEY", plan.pkey),
        ("IFLA_IPOIB_MODE", plan.mode),
        ("IFLA_IPOIB_UMCAST", int(plan.umcast)),
    ]
    child = link_changes.make_child(
        host, pod, namespace, first, mark.index, plan.parent, "ipoib", settings
    )
    _require_as_planned(pod, child, plan)
    # A child starts with the port's maximum, not with its parent's MTU.
    link_changes.finish(pod, child, name, mark.alias, plan.mtu)
    return msgspec.structs.replace(child, name=name, alias=mark.alias, mtu=plan.mtu)


def _require_as_planned(pod: Rtnetlink, child: Link, plan: ChildPlan) -> None:
    """Delete the child and raise HostError if the kernel changed its settings."""
    if (child.pkey, child.mode, child.umcast) == (plan.pkey, plan.mode, plan.umcast):
        return
    link_changes.delete(pod, child)
    raise HostError(
        f'the kernel made the IPoIB child of "{plan.parent.name}" with P_Key {child.pkey or 0:#06x}'
        f", mode {child.mode} and umcast {child.umcast}, but P_Key {plan.pkey:#06x}, mode "
        f"{plan.mode} and umcast {plan.umcast} were requested: request values that "
        f'"{plan.parent.name}" supports'
    )


def configure(
    pod: Rtnetlink,
    namespace: NetworkNamespace,
    child: Link,
    cidrs: list[str],
    options: IpoibOptions,
    *,
    set_addresses: bool = True,
) -> Link:
    """Configure the child, then set the child up. Adds the addresses only with `set_addresses`."""
    sysctls = [Sysctl(4, "proxy_arp", "1")] if options.proxy_arp else []
    return interface_addresses.configure(
        pod,
        namespace,
        child,
        cidrs,
        sysctls,
        link_local(child),
        set_addresses=set_addresses,
        accept_ra=options.accept_ra,
    )


def link_local(child: Link) -> str:
    """An IPv6 link-local address (CIDR) that no other child has.

    The kernel's own address comes from the port's GUID (addrconf_ifid_infiniband). All children of
    a port share the GUID, so only the first child would pass duplicate address detection. The
    address here comes from a hash of the child's unique hardware address. The bit for a universally
    administered identifier is cleared (RFC 7136, RFC 4291 appendix A).
    """
    digest = bytearray(hashlib.sha256(child.mac.encode()).digest()[:8])
    digest[0] &= 0xFD
    return f"{socket.inet_ntop(socket.AF_INET6, LINK_LOCAL + digest)}/64"


def is_ours(link: Link, attachment: Attachment, mac: str = "") -> bool:
    """Whether an IPoIB child has the attachment's mark, or without a mark the address `mac`.

    A pod can overwrite the mark. Pass `mac` only for an interface that was in the attachment's
    namespace.
    """
    mark = Mark(attachment.key)
    marked = link.alias == mark.alias or mark.is_on_new(link)
    remarked = mac != "" and link.mac == mac and not _has_mark(link)
    return link.kind == "ipoib" and link.parent != 0 and (marked or remarked)


def unmarked(route: Rtnetlink, mac: str, name: str = "") -> Link | None:
    """An unmarked child with the hardware address `mac`, or else with the name `name`."""
    found = [link for link in links.every(route, "ipoib") if link.parent and not _has_mark(link)]
    by_mac = [link for link in found if link.mac == mac]
    return next(iter(by_mac or [link for link in found if link.name == name]), None)


def _has_mark(link: Link) -> bool:
    return link.alias.startswith(ALIAS_PREFIX) or netdev_move.is_unfinished(link)


def remove(
    route: Rtnetlink, attachment: Attachment, mac: str = "", *, on_host: bool = False
) -> bool:
    """Delete the child in the socket's namespace, under any name. Returns whether it existed.

    On the host, `mac` (see `is_ours`) identifies only an interface that is down.
    """
    removed = False
    for link in links.every(route, "ipoib"):
        own_mac = "" if on_host and link.up else mac
        if is_ours(link, attachment, own_mac):
            link_changes.delete(route, link)
            removed = True
    return removed


def returned(host: Rtnetlink) -> list[Link]:
    """The marked children that came back to the host."""
    return [link for link in links.every(host, "ipoib") if link.parent and _has_mark(link)]


def check(journal: Journal, attachment: Attachment, request: Request) -> None:
    """Raise CNIError 102 for the first difference from prevResult, 7 if prevResult is missing."""
    expected = results.expected(request)
    record = results.recorded(journal, attachment, ChildRecord)
    with sandbox_of(request) as sandbox:
        link = links.find(sandbox.pod, request.ifname)
        if link is None:
            raise differs(f'interface "{request.ifname}" is gone from the pod')
        parent = links.find(sandbox.host, record.parent)
        if parent is None:
            raise differs(f'parent "{record.parent}" is gone from the host')
        _compare(link, attachment, parent, record, expected.interface)
        expected.compare_addresses(sandbox.pod, link)


def _compare(
    link: Link, attachment: Attachment, parent: Link, record: ChildRecord, interface: Interface
) -> None:
    results.compare(
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
