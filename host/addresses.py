"""Addresses and routes of an interface, and the switches below /proc/sys/net that go with them."""

import errno
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from host import links
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
    nlmsg,
    rtmsg,
)

IFA_F_NODAD = 0x02  # linux/if_addr.h
RT_TABLE_MAIN, RT_SCOPE_LINK = 254, 253  # linux/rtnetlink.h
RTPROT_STATIC, RTN_UNICAST, RTNH_F_ONLINK = 4, 1, 4
AF_INET, AF_INET6 = 2, 10

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """A route through one interface; None and 0 leave the choice to the kernel."""

    destination: str  # CIDR
    gateway: str | None = None
    table: int | None = None
    scope: int | None = None
    priority: int = 0
    mtu: int = 0
    advmss: int = 0


def addition(link: Link, cidr: str) -> Change:
    """Add an address. IPv6 without duplicate detection: whoever assigned it knows it is unique,
    and detection would cost every pod one to two seconds."""
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
    question = ifaddrmsg()
    question["index"] = link.index
    with trying(f'listing the addresses of "{link.name}"'):
        messages = route.dump(RTM_GETADDR, question)
    return set(map(_cidr, messages))


def of_all(route: Rtnetlink) -> list[tuple[str, str]]:
    """Each address of a namespace as a canonical CIDR, with the name of its interface."""
    with trying("listing the addresses of all interfaces"):
        messages = route.dump(RTM_GETADDR, ifaddrmsg())
    names = {link.index: link.name for link in links.every(route)}
    return [(_cidr(message), names.get(message["index"], "?")) for message in messages]


def _cidr(message: nlmsg) -> str:
    # On a point-to-point or broadcast interface IFA_LOCAL is the address itself.
    address = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
    return str(ipaddress.ip_interface(f"{address}/{message['prefixlen']}"))


def add_routes(route: Rtnetlink, link: Link, hops: Sequence[Hop]) -> None:
    """Add routes through `link`; a gateway outside the interface's networks is taken as on it."""
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
        request["scope"] = RT_SCOPE_LINK  # there is no gateway
    if hop.priority:
        attributes.append(("RTA_PRIORITY", hop.priority))
    metrics = [("RTAX_MTU", hop.mtu), ("RTAX_ADVMSS", hop.advmss)]
    given = [(name, value) for name, value in metrics if value]
    if given:
        attributes.append(("RTA_METRICS", {"attrs": given}))
    request["attrs"] = attributes
    via = f" via {hop.gateway}" if hop.gateway else ""
    what = f'adding route {hop.destination}{via} on "{link.name}"'
    # Appended: a pod with a default route of another network gets ours behind it.
    return Change(what, RTM_NEWROUTE, request, NLM_F_CREATE | NLM_F_APPEND)


class Routes:
    """The routes of a namespace as they were when they were read."""

    def __init__(self, route: Rtnetlink) -> None:
        self._seen: set[tuple[object, ...]] = set()
        for family, default in ((AF_INET, "0.0.0.0"), (AF_INET6, "::")):
            question = rtmsg()
            question["family"] = family
            with trying("listing routes"):
                messages = route.dump(RTM_GETROUTE, question)
            for message in messages:
                text = f"{message.get_attr('RTA_DST') or default}/{message['dst_len']}"
                self._keep(
                    ipaddress.ip_network(text),
                    message.get_attr("RTA_TABLE") or message["table"],
                    message.get_attr("RTA_GATEWAY"),
                    message.get_attr("RTA_PRIORITY"),
                )

    def _keep(self, network: Network, table: int, gateway: str | None, priority: int) -> None:
        """By every question that the route answers: gateway and priority may be left out."""
        for via in {gateway, None}:
            self._seen |= {(network, table, via, 0), (network, table, via, priority or 0)}

    def has(self, hop: Hop) -> bool:
        """Whether one has this destination and table, and gateway and priority where given."""
        network = ipaddress.ip_network(hop.destination, strict=False)
        table = hop.table or RT_TABLE_MAIN
        return (network, table, hop.gateway or None, hop.priority) in self._seen


class Switch(NamedTuple):
    """/proc/sys/net/ipv<family>/conf/<interface>/<name> of a namespace, and what it is to be."""

    family: int
    name: str
    value: str


def set_switches(namespace: NetworkNamespace, link: Link, switches: Sequence[Switch]) -> None:
    """Write switches of an interface, those that are not right already.

    /proc/sys/net follows the calling thread. A write that waits for the kernel's RTNL lock (of
    disable_ipv6, say) does so by trying again and again, on a CPU that the lock's holder may
    need. Raises HostError where a switch is missing, which for family 6 means that this kernel
    runs without IPv6.
    """
    with namespace.entered():
        for family, name, value in switches:
            path = _switch(family, link, name)
            try:
                if path.read_text().strip() != value:
                    path.write_text(value)
            except OSError as error:
                raise HostError(f"setting {path} to {value}: {error.strerror}") from None


def switch(namespace: NetworkNamespace, family: int, link: Link, name: str) -> str | None:
    """Read such a switch; None where it is missing."""
    with namespace.entered():
        try:
            return _switch(family, link, name).read_text().strip()
        except OSError:
            return None


def _switch(family: int, link: Link, name: str) -> Path:
    return Path(f"/proc/sys/net/ipv{family}/conf/{link.name}/{name}")


def _covered(networks: Sequence[Network], gateway: str) -> bool:
    address = ipaddress.ip_address(gateway)
    if address.version == 6 and address.is_link_local:
        return True
    return any(address in network for network in networks)
