"""Addresses and routes of an interface, and its sysctls below /proc/sys/net."""

import errno
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from host.errors import HostError
from host.links import Link
from host.namespaces import NetworkNamespace
from host.netlink import NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, Change, Rtnetlink, trying
from host.rtnetlink import (
    RTM_GETADDR,
    RTM_GETROUTE,
    RTM_NEWADDR,
    RTM_NEWROUTE,
    ifaddrmsg,
    rtmsg,
)

IFA_F_NODAD = 0x02  # linux/if_addr.h
RT_TABLE_MAIN, RT_SCOPE_LINK = 254, 253  # linux/rtnetlink.h
RTPROT_STATIC, RTN_UNICAST, RTNH_F_ONLINK = 4, 1, 4
AF_INET, AF_INET6 = 2, 10

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """A route through an interface. None and 0 leave a value to the kernel."""

    destination: str  # CIDR
    gateway: str | None = None
    table: int | None = None
    scope: int | None = None
    priority: int = 0
    mtu: int = 0
    advmss: int = 0


def addition(link: Link, cidr: str) -> Change:
    """The change that adds an address.

    IPv6 addresses are added without duplicate detection: the IPAM knows that they are unique, and
    detection would delay every pod by one to two seconds.
    """
    interface = ipaddress.ip_interface(cidr)
    address = str(interface.ip)
    request = ifaddrmsg()
    request["index"] = link.index
    request["prefixlen"] = interface.network.prefixlen
    if interface.version == 6:
        request["family"] = AF_INET6
        request["flags"] = IFA_F_NODAD
        request["attrs"] = [("IFA_ADDRESS", address)]
    else:
        request["family"] = AF_INET
        request["attrs"] = [("IFA_ADDRESS", address), ("IFA_LOCAL", address)]
    what = f'adding address {cidr} to "{link.name}"'
    flags = NLM_F_CREATE | NLM_F_EXCL
    return Change(what, RTM_NEWADDR, request, flags, accepted=(errno.EEXIST,))


def of(route: Rtnetlink, link: Link) -> set[str]:
    """The addresses of an interface, as canonical CIDRs."""
    request = ifaddrmsg()
    request["index"] = link.index
    with trying(f'listing the addresses of "{link.name}"'):
        messages = route.dump(RTM_GETADDR, request)
    cidrs = set()
    for message in messages:
        # On point-to-point and broadcast interfaces IFA_LOCAL is the interface's own address.
        text = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
        cidrs.add(str(ipaddress.ip_interface(f"{text}/{message['prefixlen']}")))
    return cidrs


def add_routes(route: Rtnetlink, link: Link, hops: Sequence[Hop]) -> None:
    """Add routes through `link`. A gateway outside the interface's networks counts as on-link."""
    if not hops:
        return
    networks = [ipaddress.ip_interface(cidr).network for cidr in of(route, link)]
    route.change(*(_route(link, hop, networks) for hop in hops))


def _route(link: Link, hop: Hop, networks: Sequence[Network]) -> Change:
    destination = ipaddress.ip_network(hop.destination, strict=False)
    request = rtmsg()
    request["family"] = AF_INET6 if destination.version == 6 else AF_INET
    request["dst_len"] = destination.prefixlen
    request["proto"] = RTPROT_STATIC
    request["type"] = RTN_UNICAST
    request["table"] = hop.table if hop.table is not None and hop.table < 256 else 0
    attributes: list[tuple[str, object]] = [("RTA_OIF", link.index)]
    attributes.append(("RTA_TABLE", RT_TABLE_MAIN if hop.table is None else hop.table))
    if destination.prefixlen:
        attributes.append(("RTA_DST", str(destination.network_address)))
    if hop.gateway:
        attributes.append(("RTA_GATEWAY", hop.gateway))
        request["flags"] = 0 if _covered(networks, hop.gateway) else RTNH_F_ONLINK
    if hop.scope is not None:
        request["scope"] = hop.scope
    elif not hop.gateway and destination.version == 4:
        request["scope"] = RT_SCOPE_LINK
    if hop.priority:
        attributes.append(("RTA_PRIORITY", hop.priority))
    metrics = [("RTAX_MTU", hop.mtu), ("RTAX_ADVMSS", hop.advmss)]
    set_metrics = [(name, value) for name, value in metrics if value]
    if set_metrics:
        attributes.append(("RTA_METRICS", {"attrs": set_metrics}))
    request["attrs"] = attributes
    via = f" via {hop.gateway}" if hop.gateway else ""
    what = f'adding route {hop.destination}{via} on "{link.name}"'
    # Appended: if the pod has a default route of another network, ours comes after it.
    return Change(what, RTM_NEWROUTE, request, NLM_F_CREATE | NLM_F_APPEND)


class Routes:
    """A snapshot of a namespace's routes."""

    def __init__(self, route: Rtnetlink) -> None:
        self._seen: set[tuple[object, ...]] = set()
        for family, default in ((AF_INET, "0.0.0.0"), (AF_INET6, "::")):
            request = rtmsg()
            request["family"] = family
            with trying("listing routes"):
                messages = route.dump(RTM_GETROUTE, request)
            for message in messages:
                text = f"{message.get_attr('RTA_DST') or default}/{message['dst_len']}"
                self._keep(
                    ipaddress.ip_network(text),
                    message.get_attr("RTA_TABLE") or message["table"],
                    message.get_attr("RTA_GATEWAY"),
                    message.get_attr("RTA_PRIORITY"),
                )

    def _keep(self, network: Network, table: int, gateway: str | None, priority: int) -> None:
        """Store a route under every key that `has` may look up: without gateway or priority too."""
        for via in {gateway, None}:
            self._seen |= {(network, table, via, 0), (network, table, via, priority or 0)}

    def has(self, hop: Hop) -> bool:
        """Whether a route has this destination and table, and the gateway and priority if set."""
        network = ipaddress.ip_network(hop.destination, strict=False)
        table = hop.table or RT_TABLE_MAIN
        return (network, table, hop.gateway or None, hop.priority) in self._seen


class Sysctl(NamedTuple):
    """A value for /proc/sys/net/ipv<family>/conf/<interface>/<name>."""

    family: int
    name: str
    value: str


def set_sysctls(namespace: NetworkNamespace, link: Link, sysctls: Sequence[Sysctl]) -> None:
    """Set sysctls of an interface in a namespace.

    A sysctl that has its value is not written: a write that needs the kernel's RTNL lock (such as
    disable_ipv6) spins until it has the lock, on a CPU that the lock's holder may need. Raises
    HostError if a sysctl does not exist; for family 6 this means a kernel without IPv6.
    """
    with namespace.entered():
        for family, name, value in sysctls:
            path = _sysctl_path(family, link, name)
            try:
                if path.read_text().strip() != value:
                    path.write_text(value)
            except OSError as error:
                raise HostError(f"setting {path} to {value}: {error.strerror}") from None


def sysctl(namespace: NetworkNamespace, family: int, link: Link, name: str) -> str | None:
    """The value of an interface's sysctl in a namespace; None if it does not exist."""
    with namespace.entered():
        try:
            return _sysctl_path(family, link, name).read_text().strip()
        except OSError:
            return None


def _sysctl_path(family: int, link: Link, name: str) -> Path:
    return Path(f"/proc/sys/net/ipv{family}/conf/{link.name}/{name}")


def _covered(networks: Sequence[Network], gateway: str) -> bool:
    address = ipaddress.ip_address(gateway)
    if address.version == 6 and address.is_link_local:
        return True
    return any(address in network for network in networks)
