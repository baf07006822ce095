"""`podfabric ipam`: the store's commands, with what else the node knows of addresses."""

import argparse
import ipaddress
import os
import sys
from collections.abc import Callable, Iterator

from base.paths import Paths
from cli import cluster_addresses
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry
from cni.ipoib import child
from cni.spec.errors import CNIError
from cni.sriov.record import DeviceRecord
from host import addresses
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import netlink
from ipam import commands, scope
from ipam.addresses import Network, parse, parse_interface, text
from ipam.delegation import OURS, TAKEN_OVER
from ipam.fsck import LivingAddress, NodeFacts
from ipam.options import IpamOptions
from ipam.store import Reservation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands with their options."""
    subcommands = commands.add_commands(parser)
    cluster_addresses.add_options(subcommands)
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Run a subcommand; the exit code."""
    if getattr(arguments, "cluster", False):
        return cluster_addresses.run(arguments)
    paths = Paths.from_environ(os.environ)
    return commands.run(arguments, lambda: facts(paths))


def facts(paths: Paths) -> NodeFacts:
    """What the attachments' journal and the living network namespaces have.

    Entries that cannot be read are left out and named on standard error.
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
            reservations += _of(entry, paths)
        except (CNIError, ValueError) as error:
            sys.stderr.write(f"journal of {entry.attachment}: {error}\n")
    return reservations


def _of(entry: JournalEntry, paths: Paths) -> Iterator[Reservation]:
    if not entry.addresses or entry.ipam.type not in (OURS, *TAKEN_OVER):
        return
    home = _home_of(entry, paths)
    for cidr in entry.addresses:
        address, own = parse_interface(cidr)
        domain, network = home(address, own)
        yield Reservation(
            domain=domain,
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


def _home_of(entry: JournalEntry, paths: Paths) -> Callable[[int, Network], tuple[str, Network]]:
    """What answers domain and range of an address of the entry; its second argument is the
    address's own network."""
    request = entry.delete_request()
    options, _ = scope.declared(request)

    def home(address: int, own: Network) -> tuple[str, Network]:
        network = _network(options, address, own)
        return options.domain(network), network

    return home


def _segment(entry: JournalEntry) -> str:
    """The link of the interface; "" if the journal does not say."""
    try:
        if entry.plugin == "ipoib":
            return entry.undo_as(child.ChildRecord).segment
        if entry.plugin == "sriov":
            return entry.undo_as(DeviceRecord).segment
    except JournalDamaged as damage:
        sys.stderr.write(f"{damage}: the link of its addresses is unknown\n")
    return ""


def _network(options: IpamOptions, address: int, own: Network) -> Network:
    """The range that holds the address; the address's own network if it was requested."""
    for range_set in (*options.sets, *options.static):
        for range_ in range_set.ranges:
            if range_.first <= address <= range_.last:
                return range_.network
    return own
