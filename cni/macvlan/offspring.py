"""Makes, recognises, compares and removes the interface, and waits for the GIDs of its addresses.

The mark of an interface is the index with which the kernel makes the interface in the pod. A pod
cannot change an index. When a namespace ends, the kernel deletes the interface.
"""

import ipaddress
from collections.abc import Sequence

import msgspec

from base.interrupts import wait_until
from base.paths import Paths
from cni.attachments import results
from cni.attachments.journal import Journal
from cni.attachments.lifecycle import sandbox_of
from cni.attachments.results import differs
from cni.macvlan.masters import MacvlanPlan
from cni.spec.attachment import Attachment
from cni.spec.notes import note
from cni.spec.request import Request
from host.namespaces import NetworkNamespace
from host.netdev_move import ALIAS_PREFIX, Mark, is_unfinished
from host.netlink import link_changes, links
from host.netlink.interface_addresses import Sysctl
from host.netlink.links import IPVLAN_MODES, Link
from host.netlink.sockets import Rtnetlink
from host.sysfs import attribute_files, infiniband

GID_TIME = 2.0  # seconds until a new address must have a GID
# With several interfaces on one subnet, each answers only for its own addresses (ip-sysctl.rst).
OWN_ADDRESSES = (
    Sysctl(4, "arp_ignore", "1"),
    Sysctl(4, "arp_announce", "2"),
    Sysctl(4, "rp_filter", "2"),
)


class MacvlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The journal's record of an interface, to compare the interface."""

    parent: str  # the interface of the HCA under the master, or a master in the pod
    master: str  # interfaces with the same master reach each other
    mode: str
    mtu: int

    @classmethod
    def of(cls, plan: MacvlanPlan) -> "MacvlanRecord":
        master = plan.master.name
        base = plan.base or master
        return cls(parent=base, master=master, mode=plan.options.mode, mtu=plan.mtu)


def make(
    host: Rtnetlink,
    pod: Rtnetlink,
    namespace: NetworkNamespace,
    attachment: Attachment,
    plan: MacvlanPlan,
) -> Link:
    """Make the interface in the pod, with the MTU of the plan. The interface stays down."""
    mark, name, options = Mark(attachment.key), attachment.ifname, plan.options
    # The kernel refuses a name that the host has (rtnl_newlink, net/core/rtnetlink.c).
    first = mark.temporary_name if links.has_name(host, name) else name
    is_ipvlan = options.kind == "ipvlan"
    mode = IPVLAN_MODES.index(options.mode) if is_ipvlan else options.mode
    made = link_changes.make_child(
        *(pod if options.in_container else host, pod, namespace, first, mark.index, plan.master),
        *(options.kind, [(f"IFLA_{options.kind.upper()}_MODE", mode)], options.mac),
    )
    link_changes.finish(pod, made, name, mark.alias, plan.mtu)
    return msgspec.structs.replace(made, name=name, alias=mark.alias, mtu=plan.mtu)


def remove(pod: Rtnetlink, kind: str, attachment: Attachment, *, unrecorded: bool = False) -> None:
    """Delete the interface in the pod, under any name, if it exists.

    If the attachment is `unrecorded`, the reference plugin may have made its interface, which has
    no mark. Then the name identifies the interface.
    """
    mark = Mark(attachment.key)
    for link in links.every(pod, kind):
        marked = link.alias.startswith(ALIAS_PREFIX) or is_unfinished(link)
        named = unrecorded and link.name == attachment.ifname and not marked
        if link.index == mark.index or mark.is_on_new(link) or named:
            link_changes.delete(pod, link)


def await_gids(paths: Paths, plan: MacvlanPlan, cidrs: Sequence[str]) -> None:
    """Wait until a RoCE port of the HCA has a GID of each address. A failure becomes a note."""
    tables = [
        f"{paths.sysfs}/class/infiniband/{rdma}/ports/{port}"
        for rdma in plan.rdma
        for port in attribute_files.names(f"{paths.sysfs}/class/infiniband/{rdma}/ports")
        if infiniband.kinds_of_gids(paths, rdma, int(port))
    ]
    missing = {_gid(cidr): cidr for cidr in cidrs} if tables else {}

    def none_is_missing() -> bool:
        for table in tables:
            for index in attribute_files.names(f"{table}/gids"):
                missing.pop(attribute_files.text(f"{table}/gids/{index}"), None)
        return not missing

    if missing and not wait_until(none_is_missing, GID_TIME, longest_pause=0.05):
        note(
            f"{', '.join(missing.values())}: RDMA device {', '.join(plan.rdma)} has no GID of "
            f"this address after {GID_TIME:g} s: check whether the GID table is full"
        )


def _gid(cidr: str) -> str:
    """The GID of an address, as sysfs has it."""
    address = ipaddress.ip_interface(cidr).ip
    mapped = ipaddress.IPv6Address(f"::ffff:{address}") if address.version == 4 else address
    return mapped.exploded


def check(journal: Journal, attachment: Attachment, request: Request, kind: str) -> None:
    """Raise CNIError 102 for the first difference from prevResult, 7 if prevResult is missing."""
    expected = results.expected(request)
    record = results.recorded(journal, attachment, MacvlanRecord)
    with sandbox_of(request) as sandbox:
        link = links.find(sandbox.pod, request.ifname)
        if link is None:
            raise differs(f'interface "{request.ifname}" is gone from the pod')
        results.compare(
            f'"{link.name}"',
            {
                "kind": (link.kind, kind),
                "alias": (link.alias, Mark(attachment.key).alias),
                "mode": (link.mode, record.mode),
                "mtu": (link.mtu, expected.interface.mtu or record.mtu),
                "mac": (link.mac, expected.interface.mac or link.mac),
                "administrative state": (results.up(link.up), "up"),
            },
        )
        expected.compare_addresses(sandbox.pod, link)
