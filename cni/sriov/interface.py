"""The device in the pod: GUID, RDMA devices, interface, addresses. In the order the kernel needs.

InfiniBand's RDMA device goes first, because with it the kernel makes the IPoIB interface anew, in
the host's namespace. RoCE's goes last, when the interface that its GIDs are of is there.
"""

import time

import msgspec

from base import interrupts
from base.paths import Paths
from cni.attachments.results import hops
from cni.spec.attachment import Attachment
from cni.spec.result import Result
from cni.sriov import guids, rdma_devices, settings, soft_roce
from cni.sriov.plan import DevicePlan
from cni.sriov.record import DeviceRecord
from host import announce, links, netdev_move
from host.addresses import add_routes
from host.errors import HostError, LinkMissing
from host.links import Link
from host.namespaces import NetworkNamespace
from host.netdev_move import Mark
from host.netlink import Rtnetlink

CARRIER_WAIT = 0.2  # seconds, for the announcement only: a VF's link may be down for good
PATIENCE = 2.0  # seconds, as others have it (20 tries in sriov-cni)


class Placed(msgspec.Struct, frozen=True):
    """What the pod got, for the result."""

    mac: str  # "" where there is none to tell
    mtu: int  # bytes, 0 as above
    bdf: str  # "" for an auxiliary device


def place(
    host: Rtnetlink,
    pod: Rtnetlink,
    namespace: NetworkNamespace,
    paths: Paths,
    attachment: Attachment,
    plan: DevicePlan,
    record: DeviceRecord,
    answer: Result,
) -> Placed:
    """Move a device into the pod and make it work there. What fails is for the caller to undo."""
    bdf = plan.function.address if ":" in plan.function.address else ""
    if plan.link is None:
        return Placed(*_of_the_pf(host, paths, record), bdf)
    link = plan.link
    if plan.infiniband and record.rdma:
        rdma_devices.move_in(record, namespace)
        link = guids.await_link(host, plan.function.address, link)
    with soft_roce.same_numbers(paths, record):
        soft_roce.delete(paths, record, (link.name,))
        mark = Mark(attachment.key)
        moved = netdev_move.move_in(
            host, pod, namespace, link, attachment.ifname, mark, mtu=record.mtu
        )
        moved = _with_its_address(pod, moved, record)
        cidrs = [ip.address for ip in answer.ips]
        ready, given = netdev_move.configure(pod, namespace, moved, cidrs, modes=record.modes)
        add_routes(pod, ready, hops(answer))
        if not plan.infiniband:
            rdma_devices.move_in(record, namespace)
        soft_roce.restore(record, ready.name, namespace)
    if given:
        ready = announce.await_carrier(pod, ready, CARRIER_WAIT)
        if ready.carrier:
            announce.announce(namespace, ready, given)
    return Placed(mac=ready.mac, mtu=ready.mtu, bdf=bdf)


def give_addresses(pod: Rtnetlink, namespace: NetworkNamespace, name: str, answer: Result) -> None:
    """Addresses and routes of an IPAM plugin that needed the interface to get them (dhcp)."""
    cidrs = [ip.address for ip in answer.ips]
    ready, given = netdev_move.configure(pod, namespace, links.require(pod, name), cidrs)
    add_routes(pod, ready, hops(answer))
    if ready.carrier:
        announce.announce(namespace, ready, given)


def _of_the_pf(host: Rtnetlink, paths: Paths, record: DeviceRecord) -> tuple[str, int]:
    """Address and MTU of a VF that a program's own driver has: what its PF says."""
    if not record.pf or record.applied is None:
        return "", 0
    with settings.pf_of(paths, host, record.pf) as pf:
        mac = "" if record.applied.mac == settings.NO_MAC else record.applied.mac
        ethernet = pf.link_type == links.ARPHRD_ETHER
        return (mac if ethernet else ""), pf.mtu


def _with_its_address(pod: Rtnetlink, moved: Link, record: DeviceRecord) -> Link:
    """Drivers pass an address on to their PF: it may show only after a while, or never."""
    if record.mac in ("", moved.mac):
        return moved
    netdev_move.set_address(pod, moved, record.mac)
    deadline = time.monotonic() + PATIENCE
    while True:
        now = links.by_index(pod, moved.index)
        if now is None:
            raise LinkMissing(f'"{moved.name}" has gone from the pod while it was configured')
        if now.mac == record.mac:
            return now
        if time.monotonic() >= deadline:
            raise HostError(
                f'"{moved.name}" still has address {now.mac} after {record.mac} was set'
            )
        interrupts.checkpoint()
        time.sleep(0.02)
