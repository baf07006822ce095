"""What the attachments' journal knows of addresses: for a store that has lost them."""

import sys
from collections.abc import Iterator

from base.paths import Paths
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry
from cni.ipoib import child
from cni.spec.errors import CNIError
from cni.sriov.record import DeviceRecord
from ipam import options as ipam_options
from ipam.addresses import Network, parse_interface, text
from ipam.delegation import OURS, TAKEN_OVER
from ipam.options import IpamOptions
from ipam.store import Reservation


def reservations(paths: Paths) -> tuple[Reservation, ...]:
    """A reservation for each address of an attachment whose IPAM plugin was ours.

    What cannot be read is named on standard error and left out.
    """
    found: list[Reservation] = []
    for entry in Journal(paths).entries():
        if isinstance(entry, JournalDamaged):
            sys.stderr.write(f"{entry}\n")
            continue
        try:
            found += _of(entry)
        except (CNIError, ValueError) as error:
            sys.stderr.write(f"journal of {entry.attachment}: {error}\n")
    return tuple(found)


def _of(entry: JournalEntry) -> Iterator[Reservation]:
    if not entry.addresses or entry.ipam.type not in (OURS, TAKEN_OVER):
        return
    options = ipam_options.read(entry.delete_request().config)
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
    """The link of the interface, "" where the journal does not tell it."""
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
    for one in (*options.sets, *options.static):
        for range_ in one.ranges:
            if range_.first <= address <= range_.last:
                return range_.network
    return own
