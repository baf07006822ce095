"""The child interface: made on the host, moved into the pod, configured, recognised, removed.

Names prove nothing, so a child is recognised by a mark:
- before the move it has a temporary name made of the attachment's key, on the host;
- the message that moves it also sets an alias made of the same key. So an IPoIB interface *on the
  host* with one of our aliases has come back from a dead namespace.

Deleting a namespace does not delete an IPoIB child in it: some time later the kernel moves it to
the initial namespace, down and under any name (ipoib_link_ops.netns_refund).
"""

import hashlib
import socket

import msgspec

from cni.ipoib.options import IpoibOptions
from cni.ipoib.parents import ChildPlan
from cni.spec.attachment import Attachment
from host import netdev_move
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark
from host.netlink import interface_addresses, link_changes, links
from host.netlink.interface_addresses import Sysctl
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink

ALIAS_PREFIX = netdev_move.ALIAS_PREFIX
TEMPORARY_PREFIX = netdev_move.TEMPORARY_PREFIX
LINK_LOCAL = bytes.fromhex("fe80000000000000")  # fe80::/64
RETURN_TIME = 3.0  # seconds; a namespace is torn down in the background, seen to take up to 2


class ChildRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal keeps of a child, for CHECK and to recognise it."""

    parent: str
    pkey: int
    mode: str
    mtu: int
    umcast: bool
    proxy_arp: bool
    mac: str = ""  # once it is attached; unique, since it contains the queue pair's number

    @property
    def segment(self) -> str:
        """The parent and the P_Key: children with the same segment hear each other."""
        return f"{self.parent} {self.pkey:#06x}"


def record_of(plan: ChildPlan, options: IpoibOptions) -> ChildRecord:
    """The record of a child that is not attached yet."""
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


def make(host: Rtnetlink, attachment: Attachment, plan: ChildPlan) -> Link:
    """Make the child on the host, down, with its MTU."""
    name = Mark(attachment.key).temporary_name
    child = link_changes.make_ipoib_child(
        host, name, plan.parent, plan.pkey, plan.mode, plan.umcast
    )
    # A child starts with the port's maximum, not with its parent's MTU.
    if child.mtu != plan.mtu:
        link_changes.set_mtu(host, child, plan.mtu)
    return child


def configure(
    pod: Rtnetlink,
    namespace: NetworkNamespace,
    child: Link,
    cidrs: list[str],
    options: IpoibOptions,
    *,
    set_addresses: bool = True,
) -> Link:
    """Add the addresses and set the child up. Answers it as it is then.

    Without `set_addresses` it has all but these, so that they can be probed.
    """
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

    The kernel derives one from the port's GUID (addrconf_ifid_infiniband), which all children of
    a port share: only the first would pass duplicate detection. The queue pair number differs, so
    the interface identifier is a hash of the whole 20-byte hardware address, with the bit of a
    universally administered identifier cleared (RFC 7136, RFC 4291 appendix A).
    """
    digest = bytearray(hashlib.sha256(child.mac.encode()).digest()[:8])
    digest[0] &= 0xFD
    return f"{socket.inet_ntop(socket.AF_INET6, LINK_LOCAL + digest)}/64"


def is_ours(link: Link, attachment: Attachment, mac: str = "") -> bool:
    """Whether an interface is this attachment's child, by kind and mark, never by name alone.

    A pod can overwrite the mark. `mac`, the address in the journal, counts too where it is given:
    for the attachment's own namespace, and for interfaces that come back from it.
    """
    marked = link.alias == Mark(attachment.key).alias
    remarked = mac != "" and link.mac == mac and not _has_mark(link)
    return link.kind == "ipoib" and link.parent != 0 and (marked or remarked)


def unmarked(route: Rtnetlink, mac: str, name: str = "") -> Link | None:
    """The child without a mark of ours that has that address, else the one of that name."""
    found = [each for each in links.every(route, "ipoib") if each.parent and not _has_mark(each)]
    by_mac = [each for each in found if each.mac == mac]
    return next(iter(by_mac or [each for each in found if each.name == name]), None)


def _has_mark(link: Link) -> bool:
    return link.alias.startswith(ALIAS_PREFIX) or link.name.startswith(TEMPORARY_PREFIX)


def _is_unmarked(link: Link, attachment: Attachment) -> bool:
    """Whether this is the child without its mark: not moved yet, or moved and not renamed.

    An administrator could use the temporary name, so it must also be a child without an alias.
    """
    name = Mark(attachment.key).temporary_name
    return link.name == name and link.parent != 0 and not link.alias


def remove(
    route: Rtnetlink, attachment: Attachment, mac: str = "", *, on_host: bool = False
) -> bool:
    """Delete the child where `route` leads, also if it was renamed there. Answers whether it was
    there. `mac` as for `is_ours`; on the host only what is down has come back.
    """
    removed = False
    for link in links.every(route, "ipoib"):
        own_mac = "" if on_host and link.up else mac
        if _is_unmarked(link, attachment) or is_ours(link, attachment, own_mac):
            link_changes.delete(route, link)
            removed = True
    return removed


def returned(host: Rtnetlink) -> list[Link]:
    """The marked children that came back to the host."""
    found = links.every(host, "ipoib")
    return [link for link in found if link.alias.startswith(ALIAS_PREFIX) and link.parent]
