"""Addresses and routes of an interface, and the switches below /proc/sys/net that go with them."""

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
    found = set()
    for message in messages:
        # On a point-to-point or broadcast interface IFA_LOCAL is the address itself.
        text = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
        found.add(str(ipaddress.ip_interface(f"{text}/{message['prefixlen']}")))
    return found


def add_route(route: Rtnetlink, link: Link, hop: Hop) -> None:
    """Add a route through `link`; a gateway outside the interface's networks is taken as on it."""
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
        request["flags"] = 0 if _covered(route, link, hop.gateway) else RTNH_F_ONLINK
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
    route.change(Change(what, RTM_NEWROUTE, request, NLM_F_CREATE | NLM_F_APPEND))


def has_route(route: Rtnetlink, hop: Hop) -> bool:
    """Whether the namespace has that route: destination, gateway, table and priority."""
    wanted = ipaddress.ip_network(hop.destination, strict=False)
    family = AF_INET6 if wanted.version == 6 else AF_INET
    question = rtmsg()
    question["family"] = family
    with trying("listing routes"):
        messages = route.dump(RTM_GETROUTE, question)
    for message in messages:
        default = "::" if family == AF_INET6 else "0.0.0.0"
        text = message.get_attr("RTA_DST") or default
        if (
            ipaddress.ip_network(f"{text}/{message['dst_len']}") == wanted
            and (message.get_attr("RTA_TABLE") or message["table"]) == (hop.table or RT_TABLE_MAIN)
            and (not hop.gateway or message.get_attr("RTA_GATEWAY") == hop.gateway)
            and (not hop.priority or message.get_attr("RTA_PRIORITY") == hop.priority)
        ):
            return True
    return False


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


def _covered(route: Rtnetlink, link: Link, gateway: str) -> bool:
    address = ipaddress.ip_address(gateway)
    if address.version == 6 and address.is_link_local:
        return True
    networks = (ipaddress.ip_interface(cidr).network for cidr in of(route, link))
    return any(address in network for network in networks)
