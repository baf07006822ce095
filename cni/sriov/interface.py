"""Puts a device into the pod: RDMA devices, interface, addresses, in the order the kernel needs.

InfiniBand's RDMA device moves first, because the kernel then deletes its IPoIB interface and
creates a new one on the host. RoCE's RDMA device moves last, after the interface that its GIDs
come from.
"""

from functools import partial

import msgspec

from base.interrupts import wait_until
from base.paths import Paths
from cni.attachments import probing
from cni.attachments.results import hops
from cni.spec.attachment import Attachment
from cni.spec.result import Result
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
from ipam.delegation import IpamCall

CARRIER_WAIT = 0.2  # seconds, only for the announcement: a VF's link may stay down
MAC_TIME = 2.0  # seconds until a new address shows, as in sriov-cni (20 attempts)


class Placed(msgspec.Struct, frozen=True):
    """The properties of the device in the pod, for the result."""

    mac: str  # "" if unknown
    mtu: int  # bytes, 0 if unknown
    bdf: str  # "" for an auxiliary device
    answer: Result  # with the addresses that it has


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
    """Move a device into the pod and configure it there. The caller undoes this after a failure.

    The addresses of `answer` are those of `ipam`. `accept_ra` as for `addresses.configure`.
    """
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
    cidrs = [ip.address for ip in answer.ips]
    configure = partial(
        interface_addresses.configure,
        *(pod, namespace, moved),
        modes=record.modes,
        accept_ra=accept_ra,
    )
    if ipam is not None and unprobed:
        up = configure(cidrs, set_addresses=False)
        answer = probing.probed(answer, ipam, pod, namespace, up)
        cidrs = [ip.address for ip in answer.ips]
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
    """Add addresses and routes from an IPAM plugin that needs the interface first (dhcp)."""
    cidrs = [ip.address for ip in answer.ips]
    link = links.require(pod, name)
    ready = interface_addresses.configure(pod, namespace, link, cidrs, accept_ra=accept_ra)
    add_routes(pod, ready, hops(answer))
    ready = links.await_carrier(pod, ready, CARRIER_WAIT)
    probing.announce_addresses(namespace, ready, cidrs)


def _mac_and_mtu_at_pf(host: Rtnetlink, paths: Paths, record: DeviceRecord) -> tuple[str, int]:
    """Address and MTU of a VF with a userspace driver, as its PF reports them."""
    if not record.pf or record.applied is None:
        return "", 0
    with vf_settings.pf_of(paths, host, record.pf) as pf:
        mac = "" if record.applied.mac == vf_settings.NO_MAC else record.applied.mac
        ethernet = pf.link_type == links.ARPHRD_ETHER
        return (mac if ethernet else ""), pf.mtu


def _with_its_address(pod: Rtnetlink, moved: Link, record: DeviceRecord) -> Link:
    """Set the address that was asked for and wait until the interface has it.

    A VF's driver passes the address to its PF, which takes a while and may fail.
    """
    if record.mac in ("", moved.mac):
        return moved
    netdev_move.set_address(pod, moved, record.mac)
    now = moved

    def has_address() -> bool:
        nonlocal now
        link = links.by_index(pod, moved.index)
        if link is None:
            raise LinkMissing(f'"{moved.name}" has gone from the pod while it was configured')
        now = link
        return now.mac == record.mac

    if not wait_until(has_address, MAC_TIME, longest_pause=0.02):
        raise HostError(f'"{moved.name}" still has address {now.mac} after {record.mac} was set')
    return now
