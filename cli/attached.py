"""What the node knows of addresses outside the address store, for a store that has lost them."""

import ipaddress
import sys
from collections.abc import Iterator

from base.paths import Paths
from cni.attachments.entry import JournalDamaged, JournalEntry
from cni.attachments.journal import Journal
from cni.attachments.requests import ipam_at_add
from cni.ipoib import child
from cni.spec.errors import CNIError
from cni.sriov.record import DeviceRecord
from host import addresses
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import netlink
from ipam import options as ipam_options
from ipam.addresses import Network, parse, parse_interface, text
from ipam.delegation import OURS, TAKEN_OVER
from ipam.fsck import LivingAddress, NodeFacts
from ipam.options import IpamOptions
from ipam.store import Reservation


def facts(paths: Paths) -> NodeFacts:
    """What the attachments' journal and the living network namespaces have.

    What cannot be read is named on standard error and left out.
    """
    return NodeFacts(tuple(_journalled(paths)), tuple(living()))


def living() -> Iterator[LivingAddress]:
    """The addresses of all interfaces in network namespaces that can be seen.

    Addresses of a host or a link alone are left out: no pod gets one of them.
    """
    for namespace in NetworkNamespace.every():
        with namespace:
            try:
                with netlink(namespace) as route:
                    shown = list(addresses.of_all(route))
            except HostError as error:
                sys.stderr.write(f"{namespace.path}: {error}\n")
                continue
        for cidr, ifname in shown:
            address = ipaddress.ip_interface(cidr).ip
            if not address.is_loopback and not address.is_link_local:
                yield LivingAddress(text(parse(str(address))), ifname, namespace.path)


def _journalled(paths: Paths) -> list[Reservation]:
    """A reservation for each address of an attachment whose IPAM plugin was ours."""
    reservations: list[Reservation] = []
    for entry in Journal(paths).entries():
        if isinstance(entry, JournalDamaged):
            sys.stderr.write(f"{entry}\n")
            continue
        try:
            reservations += _of(entry)
        except (CNIError, ValueError) as error:
            sys.stderr.write(f"journal of {entry.attachment}: {error}\n")
    return reservations


def _of(entry: JournalEntry) -> Iterator[Reservation]:
    if not entry.addresses or ipam_at_add(entry).type not in (OURS, TAKEN_OVER):
        return
    options = ipam_options.read(entry.config.encode())
    for cidr in entry.addresses:
        address, own = parse_interface(cidr)
        network = _network(options, address, own)
        yield Reservation(
            domain=options.domain(network),
            address=text(address),
            range=str(network),
            network=entry.network,
            container_id=entry.container_id,
            ifname=entry.ifname,
            namespace=entry.pod_namespace,
            pod=entry.pod_name,
            uid=entry.pod_uid,
            boot=entry.boot_id,
            segment=_segment(entry),
        )


def _segment(entry: JournalEntry) -> str:
    """The link of the interface, "" if the journal does not name it."""
    try:
        if entry.plugin == "ipoib":
            return entry.undo_as(child.ChildRecord).segment
        if entry.plugin == "sriov":
            return entry.undo_as(DeviceRecord).segment
    except JournalDamaged as damage:
        sys.stderr.write(f"{damage}: the link of its addresses is unknown\n")
    return ""


def _network(options: IpamOptions, address: int, own: Network) -> Network:
    """The range that the address was taken from; its own network for one that was asked for."""
    for range_set in (*options.sets, *options.static):
        for range_ in range_set.ranges:
            if range_.first <= address <= range_.last:
                return range_.network
    return own
