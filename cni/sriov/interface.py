"""Moves a device into the pod, and in a CHECK compares the device with its record.

An InfiniBand RDMA device moves before its interface, which the kernel creates again at this move.
A RoCE RDMA device moves after its interface, because the GIDs come from the interface.
"""

from functools import partial

import msgspec

from base.interrupts import wait_until
from base.paths import Paths
from cni.attachments import probing, results
from cni.attachments.journal import Journal
from cni.attachments.lifecycle import sandbox_of
from cni.attachments.results import compare, differs, hops
from cni.spec.attachment import Attachment
from cni.spec.request import Request
from cni.spec.result import Interface, Result
from cni.sriov import guids, rdma_devices, vf_settings
from cni.sriov.device_record import DeviceRecord
from cni.sriov.plan import DevicePlan
from host import netdev_move
from host.errors import HostError, LinkMissing
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark
from host.netlink import interface_addresses, links
from host.netlink.interface_addresses import add_routes
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink
from host.sysfs import pci
from ipam.delegation import IpamCall

CARRIER_WAIT = 0.2  # seconds, only for the announcement: a VF's link may stay down
MAC_TIME = 2.0  # seconds until a new address shows, as in sriov-cni (20 attempts)


class Placed(msgspec.Struct, frozen=True):
    """The properties of a device in the pod, for the result."""

    mac: str  # "" if unknown
    mtu: int  # bytes, 0 if unknown
    bdf: str  # "" for an auxiliary device
    answer: Result  # of the IPAM plugin, with the interface's addresses


def place(
    host: Rtnetlink,
    pod: Rtnetlink,
    namespace: NetworkNamespace,
    paths: Paths,
    attachment: Attachment,
    plan: DevicePlan,
    record: DeviceRecord,
    answer: Result,
    ipam: IpamCall | None = None,
    *,
    accept_ra: bool = False,
) -> Placed:
    """Move a device into the pod and configure it. After a failure, the caller undoes all steps."""
    bdf = plan.function.address if ":" in plan.function.address else ""
    unprobed = ipam is not None and bool(ipam.unprobed)
    if plan.link is None:
        if ipam is not None and unprobed:
            ipam.pass_unprobed("the device has no network interface")
        return Placed(*_mac_and_mtu_at_pf(host, paths, record), bdf, answer)
    link = plan.link
    if plan.infiniband and record.rdma:
        rdma_devices.move_in(paths, record, namespace)
        link = guids.await_link(host, plan.function.address, link)
    mark = Mark(attachment.key)
    moved = netdev_move.move_in(host, pod, namespace, link, attachment.ifname, mark, mtu=record.mtu)
    moved = _with_its_address(pod, moved, record)
    cidrs = answer.cidrs
    configure = partial(
        interface_addresses.configure,
        *(pod, namespace, moved),
        modes=record.modes,
        accept_ra=accept_ra,
    )
    if ipam is not None and unprobed:
        up = configure(cidrs, set_addresses=False)
        answer = probing.probed(answer, ipam, pod, namespace, up)
        cidrs = answer.cidrs
    ready = configure(cidrs)
    add_routes(pod, ready, hops(answer))
    if not plan.infiniband:
        rdma_devices.move_in(paths, record, namespace)
    if cidrs:
        ready = links.await_carrier(pod, ready, CARRIER_WAIT)
        probing.announce_addresses(namespace, ready, cidrs)
    return Placed(mac=ready.mac, mtu=ready.mtu, bdf=bdf, answer=answer)


def give_addresses(
    pod: Rtnetlink, namespace: NetworkNamespace, name: str, answer: Result, *, accept_ra: bool
) -> None:
    """Add the addresses and routes of the dhcp plugin, which needs the interface in the pod."""
    cidrs = answer.cidrs
    link = links.require(pod, name)
    ready = interface_addresses.configure(pod, namespace, link, cidrs, accept_ra=accept_ra)
    add_routes(pod, ready, hops(answer))
    ready = links.await_carrier(pod, ready, CARRIER_WAIT)
    probing.announce_addresses(namespace, ready, cidrs)


def _mac_and_mtu_at_pf(host: Rtnetlink, paths: Paths, record: DeviceRecord) -> tuple[str, int]:
    """For a VF with a userspace driver: the VF's address at the PF, and the PF's MTU."""
    if not record.pf or record.applied is None:
        return "", 0
    with vf_settings.pf_of(paths, host, record.pf) as pf:
        mac = "" if record.applied.mac == vf_settings.NO_MAC else record.applied.mac
        ethernet = pf.link_type == links.ARPHRD_ETHER
        return (mac if ethernet else ""), pf.mtu


def _with_its_address(pod: Rtnetlink, moved: Link, record: DeviceRecord) -> Link:
    """Set the configured address. Raises HostError if the interface still shows another address."""
    if record.mac in ("", moved.mac):
        return moved
    netdev_move.set_address(pod, moved, record.mac)
    now = moved

    def has_address() -> bool:
        nonlocal now
        link = links.by_index(pod, moved.index)
        if link is None:
            raise LinkMissing(f'"{moved.name}" has gone from the pod during the configuration')
        now = link
        return now.mac == record.mac

    if not wait_until(has_address, MAC_TIME, longest_pause=0.02):
        raise HostError(
            f'"{moved.name}" still has MAC address {now.mac}, although {record.mac} was set: '
            "check whether the PF lets the VF change the MAC address"
        )
    return now


def check(journal: Journal, paths: Paths, attachment: Attachment, request: Request) -> None:
    """Raise CNIError 102 for the first difference, or CNIError 7 if prevResult is missing."""
    expected = results.expected(request)
    record = results.recorded(journal, attachment, DeviceRecord)
    function = pci.find(paths, record.device)
    if function is None:
        raise differs(f"device {record.device} is gone from this node")
    index = record.applied.index if record.applied is not None else function.index
    compare(
        f"device {record.device}",
        {
            "driver": (function.driver, record.driver),
            "PF": (function.pf, record.pf),
            "VF number": (function.index, index),
        },
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
        # The ADD set no address. A VF may change its own address, which its PF then shows.
        found = msgspec.structs.replace(found, mac=record.applied.mac)
    different = vf_settings.differences(found, record.applied)
    compare(f'VF {record.applied.index} of "{pf.name}"', different)


def _compare_link(
    link: Link, attachment: Attachment, record: DeviceRecord, shown: Interface
) -> None:
    on, mask = record.modes
    compare(
        f'"{link.name}"',
        {
            "device": (link.device, record.device),
            "alias": (link.alias, Mark(attachment.key).alias),
            "mtu": (link.mtu, record.mtu or shown.mtu or link.mtu),
            "mac": (link.mac, shown.mac or link.mac),
            "promisc, allmulti": (link.flags & mask, on),
            "administrative state": (results.up(link.up), "up"),
        },
    )
