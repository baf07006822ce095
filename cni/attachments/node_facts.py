"""Lists the addresses of this node's pods, from the attachments' journal and from the kernel.

A lost or damaged store of addresses is rebuilt from these facts.
"""

from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path

from base import address_text
from base.paths import Paths
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry, Phase
from cni.spec.errors import CNIError
from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import interface_addresses
from host.netlink.sockets import netlink
from ipam import store_choice
from ipam.addresses import Network, parse_interface, text
from ipam.config.options import IpamOptions
from ipam.delegation import OURS, TAKEN_OVER
from ipam.plugin import AddressPlugin
from ipam.store.repair import LivingAddress, NodeFacts
from ipam.store.reservations import Reservation
from ipam.store.store_files import StoreFiles
from ipam.store_choice import Stores
from policy import rules


def store_of(paths: Paths) -> StoreFiles:
    """The address store, for a process that serves one call. A rebuild calls `look`."""
    return StoreFiles(paths.ipam, kept=False, facts=partial(look, paths))


def addresses_of(paths: Paths, policy: rules.Source) -> AddressPlugin:
    """The IPAM plugin, for a process that serves one call."""
    stores = Stores(store_of(paths), lambda: store_choice.settings(paths.config).scope)
    return AddressPlugin(stores, paths.boot_id, policy)


def look(paths: Paths) -> NodeFacts:
    """The facts of the node. `unseen` has a text for each source that cannot be read."""
    boot = paths.boot_id()
    reservations: list[Reservation] = []
    begun: list[float] = []
    unseen: list[str] = []
    for entry in Journal(paths).entries():
        if isinstance(entry, JournalDamaged):
            unseen.append(str(entry))
            continue
        try:
            is_ours = entry.ipam.type in (OURS, *TAKEN_OVER)
            if is_ours and entry.phase is Phase.ADDING and entry.boot_id == boot:
                begun.append(datetime.fromisoformat(entry.since).timestamp())
            elif is_ours:
                reservations += _reservations(entry)
        except (CNIError, ValueError) as error:
            unseen.append(f"journal entry of {entry.attachment}: {error}")
    living = tuple(_living(unseen))
    return NodeFacts(boot, tuple(reservations), living, tuple(begun), tuple(unseen))


def _living(unseen: list[str]) -> Iterator[LivingAddress]:
    """The addresses of all visible interfaces, without loopback and link-local addresses."""
    for namespace in NetworkNamespace.every():
        with namespace:
            inode = namespace.inode
            try:
                with netlink(namespace) as route:
                    shown = list(interface_addresses.of_all(route))
            except HostError as error:
                if Path(namespace.path).exists():
                    unseen.append(f"{namespace.path}: {error}")
                continue
        for cidr, ifname in shown:
            address = address_text.address(cidr.partition("/")[0])
            if not address.is_loopback() and not address.is_link_local():
                yield LivingAddress(str(address), ifname, namespace.path, inode)


def _reservations(entry: JournalEntry) -> Iterator[Reservation]:
    if not entry.addresses:
        return
    options, _ = store_choice.declared(entry.delete_request())
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
            segment=entry.segment,
        )


def _network(options: IpamOptions, address: int, own: Network) -> Network:
    """The range that holds the address, or `own` if no range holds the address."""
    for range_set in (*options.sets, *options.static):
        for range_ in range_set.ranges:
            if range_.first <= address <= range_.last:
                return range_.network
    return own
