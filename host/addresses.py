"""Addresses and routes of an interface, and its sysctls below /proc/sys/net."""

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from host import links, procfs, sysfs
from host.errors import HostError
from host.links import Link
from host.namespaces import NetworkNamespace
from host.netlink import (
    HEADER,
    NLM_F_APPEND,
    NLM_F_CREATE,
    NLM_F_EXCL,
    ChangeRequest,
    Rtnetlink,
    attribute,
    fields,
    number,
    trying,
    value,
)
from host.rtnetlink import (
    IFA_ADDRESS,
    IFA_LOCAL,
    IFA_PROTO,
    IFADDRMSG,
    RTA_DST,
    RTA_GATEWAY,
    RTA_METRICS,
    RTA_MULTIPATH,
    RTA_OIF,
    RTA_PRIORITY,
    RTA_TABLE,
    RTAX_ADVMSS,
    RTAX_MTU,
    RTM_GETADDR,
    RTM_GETROUTE,
    RTM_NEWADDR,
    RTM_NEWROUTE,
    RTMSG,
    RTNEXTHOP,
)

IFA_F_NODAD = 0x02  # linux/if_addr.h
IFAPROT_KERNEL_RA = 2  # since Linux 5.18
RT_TABLE_MAIN, RT_SCOPE_LINK = 254, 253  # linux/rtnetlink.h
RTPROT_KERNEL, RTPROT_RA = 2, 9
RTPROT_STATIC, RTN_UNICAST, RTNH_F_ONLINK = 4, 1, 4
_LAST_PRIORITY = 0xFFFFFFFF
IP6_RT_PRIO_USER = 1024  # linux/ipv6_route.h: of an IPv6 route that is added without a priority
AF_INET, AF_INET6 = socket.AF_INET, socket.AF_INET6

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


# Disabled by a sysctl (addrconf_add_dev), not in the kernel, or for an MTU below 1280
# (ipv6_add_dev).
_WITHOUT_FAMILY = (
    errno.EACCES,
    errno.EAFNOSUPPORT,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.ENOBUFS,
)


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """A route through an interface. None and 0 leave a value to the kernel."""

    destination: str  # CIDR
    gateway: str | None = None
    table: int | None = None
    scope: int | None = None
    priority: int = 0
    mtu: int = 0
    advmss: int = 0


def addition(link: Link, cidr: str, *, if_possible: bool = False) -> ChangeRequest:
    """Add an address; with `if_possible` only if the interface has the address' family.

    IPv6 without duplicate detection: whoever assigned it knows it is unique, and detection would
    cost every pod one to two seconds.
    """
    address, _, prefix = cidr.partition("/")
    family, flags = (AF_INET6, IFA_F_NODAD) if ":" in address else (AF_INET, 0)
    packed = socket.inet_pton(family, address)
    request = IFADDRMSG.pack(family, int(prefix), flags, 0, link.index)
    if family == AF_INET:
        request += attribute(IFA_LOCAL, packed)
    request += attribute(IFA_ADDRESS, packed)
    what = f'adding address {cidr} to "{link.name}"'
    flags = NLM_F_CREATE | NLM_F_EXCL
    accepted = (errno.EEXIST, *(_WITHOUT_FAMILY if if_possible else ()))
    return ChangeRequest(what, RTM_NEWADDR, request, flags, accepted)


def of(route: Rtnetlink, link: Link) -> set[str]:
    """The addresses of an interface, as canonical CIDRs."""
    with trying(f'listing the addresses of "{link.name}"'):
        parts = route.table(RTM_GETADDR, IFADDRMSG.pack(0, 0, 0, 0, link.index))
    return {cidr for _, cidr in map(_index_and_cidr, parts)}


def of_users(route: Rtnetlink, link: Link) -> list[str]:
    """The addresses (CIDR) and the routes' destinations that users or services gave an interface.

    Without the kernel's own: IPv6 link-local ones, and those of router advertisements.
    """
    found = []
    with trying(f'listing addresses and routes of "{link.name}"'):
        for entry in route.table(RTM_GETADDR, IFADDRMSG.pack(0, 0, 0, 0, link.index)):
            _, cidr = _index_and_cidr(entry)
            proto = fields(entry[1], HEADER.size + IFADDRMSG.size).get(IFA_PROTO, b"\0")[0]
            if proto != IFAPROT_KERNEL_RA and not cidr.startswith("fe80:"):
                found.append(cidr)
        for family, size in ((AF_INET, 4), (AF_INET6, 16)):
            request = RTMSG.pack(family, *[0] * 8) + number(RTA_OIF, link.index)
            for _, part in route.table(RTM_GETROUTE, request):
                _, length, _, _, _, protocol, *_ = RTMSG.unpack_from(part, HEADER.size)
                shown = fields(part, HEADER.size + RTMSG.size)
                if protocol not in (RTPROT_KERNEL, RTPROT_RA):
                    destination = socket.inet_ntop(family, shown.get(RTA_DST, bytes(size)))
                    found.append(f"{destination}/{length}")
    return found


def of_all(route: Rtnetlink) -> list[tuple[str, str]]:
    """Each address of a namespace as a canonical CIDR, with the name of its interface."""
    with trying("listing the addresses of all interfaces"):
        parts = route.table(RTM_GETADDR, IFADDRMSG.pack(0, 0, 0, 0, 0))
    names = {link.index: link.name for link in links.every(route)}
    return [(cidr, names.get(index, "?")) for index, cidr in map(_index_and_cidr, parts)]


def _index_and_cidr(entry: tuple[int, bytes]) -> tuple[int, str]:
    _, part = entry
    _, prefix, _, _, index = IFADDRMSG.unpack_from(part, HEADER.size)
    shown = fields(part, HEADER.size + IFADDRMSG.size)
    # On a point-to-point or broadcast interface IFA_LOCAL is the address itself.
    ip = shown.get(IFA_LOCAL) or shown[IFA_ADDRESS]
    return index, f"{ipaddress.ip_address(ip)}/{prefix}"


def add_routes(route: Rtnetlink, link: Link, hops: Sequence[Hop]) -> None:
    """Add routes through `link`, each behind the namespace's other routes to its destination.

    A gateway outside the interface's networks counts as on-link.
    """
    if not hops:
        return
    networks = [ipaddress.ip_interface(cidr).network for cidr in of(route, link)]
    present = Routes(route)
    route.change(*(_route(link, present.behind(hop), networks) for hop in hops))


def _route(link: Link, hop: Hop, networks: Sequence[Network]) -> ChangeRequest:
    destination = ipaddress.ip_network(hop.destination, strict=False)
    table = RT_TABLE_MAIN if hop.table is None else hop.table
    request = number(RTA_OIF, link.index) + number(RTA_TABLE, table)
    flags = scope = 0
    if destination.prefixlen:
        request += attribute(RTA_DST, destination.network_address.packed)
    if hop.gateway:
        request += attribute(RTA_GATEWAY, ipaddress.ip_address(hop.gateway).packed)
        flags = 0 if _covered(networks, hop.gateway) else RTNH_F_ONLINK
    if hop.scope is not None:
        scope = hop.scope
    elif not hop.gateway and destination.version == 4:
        scope = RT_SCOPE_LINK  # there is no gateway
    if hop.priority:
        request += number(RTA_PRIORITY, hop.priority)
    metrics = ((RTAX_MTU, hop.mtu), (RTAX_ADVMSS, hop.advmss))
    if any(size for _, size in metrics):
        listed = (number(metric, size) for metric, size in metrics if size)
        request += attribute(RTA_METRICS, b"".join(listed))
    head = RTMSG.pack(
        AF_INET6 if destination.version == 6 else AF_INET,
        destination.prefixlen,
        0,
        0,
        hop.table if hop.table is not None and hop.table < 256 else 0,
        RTPROT_STATIC,
        scope,
        RTN_UNICAST,
        flags,
    )
    via = f" via {hop.gateway}" if hop.gateway else ""
    what = f'adding route {hop.destination}{via} on "{link.name}"'
    # Appended: behind the IPv4 routes of the same priority.
    return ChangeRequest(what, RTM_NEWROUTE, head + request, NLM_F_CREATE | NLM_F_APPEND)


class Routes:
    """A snapshot of a namespace's routes to other machines."""

    def __init__(self, route: Rtnetlink) -> None:
        # By family, destination, its length, table, and gateway (None stands for any).
        self._priorities: dict[tuple[int, bytes, int, int, bytes | None], set[int]] = {}
        for family, size in ((AF_INET, 4), (AF_INET6, 16)):
            with trying("listing routes"):
                parts = route.table(RTM_GETROUTE, RTMSG.pack(family, *[0] * 8))
            for _, part in parts:
                _, length, _, _, table, _, _, kind, _ = RTMSG.unpack_from(part, HEADER.size)
                if kind != RTN_UNICAST:
                    continue
                shown = fields(part, HEADER.size + RTMSG.size)
                table = value(shown.get(RTA_TABLE)) or table
                for via in (None, *_gateways(shown)):
                    key = (family, shown.get(RTA_DST, bytes(size)), length, table, via)
                    self._priorities.setdefault(key, set()).add(value(shown.get(RTA_PRIORITY)))

    def has(self, hop: Hop) -> bool:
        """Whether a route has this destination and table, and the gateway and priority if set.

        The priority of an IPv6 route may be higher: see `behind`.
        """
        family, found = self._of(hop, hop.gateway)
        if not hop.priority or hop.priority in found:
            return bool(found)
        return family == AF_INET6 and max(found, default=0) > hop.priority

    def behind(self, hop: Hop) -> Hop:
        """The route with a priority that puts it behind those to its destination that are here.

        A priority that is set changes only where an IPv6 route has it: the kernel would make one
        multipath route of both (net/ipv6/ip6_fib.c, fib6_add_rt2node). IPv4 routes of one priority
        are used in their order.
        """
        family, taken = self._of(hop, None)
        priority = hop.priority or max(taken, default=0)
        while family == AF_INET6 and priority in taken and priority < _LAST_PRIORITY:
            priority += 1
        taken.add(priority or (IP6_RT_PRIO_USER if family == AF_INET6 else 0))
        return msgspec.structs.replace(hop, priority=priority)

    def _of(self, hop: Hop, gateway: str | None) -> tuple[int, set[int]]:
        """The family of a route, and the priorities of those to its destination in its table."""
        network = ipaddress.ip_network(hop.destination, strict=False)
        family = AF_INET6 if network.version == 6 else AF_INET
        via = ipaddress.ip_address(gateway).packed if gateway else None
        where = (family, network.network_address.packed, network.prefixlen)
        return family, self._priorities.setdefault((*where, hop.table or RT_TABLE_MAIN, via), set())


def _gateways(shown: dict[int, bytes]) -> set[bytes]:
    """The gateways of a route, also of each part of a multipath route."""
    found = {shown[RTA_GATEWAY]} if RTA_GATEWAY in shown else set()
    parts = shown.get(RTA_MULTIPATH, b"")
    while len(parts) >= RTNEXTHOP.size:
        length, *_ = RTNEXTHOP.unpack_from(parts)
        part = fields(parts[:length], RTNEXTHOP.size)
        if RTA_GATEWAY in part:
            found.add(part[RTA_GATEWAY])
        parts = parts[max(length, RTNEXTHOP.size) + 3 & ~3 :]
    return found


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
                if sysfs.text(path) != value:
                    _write(path, value)
            except OSError as error:
                raise HostError(f"setting {path} to {value}: {error.strerror}") from None


def _write(path: str, value: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def _sysctl_path(family: int, link: Link, name: str) -> str:
    return f"{procfs.path()}/sys/net/ipv{family}/conf/{link.name}/{name}"


def _covered(networks: Sequence[Network], gateway: str) -> bool:
    address = ipaddress.ip_address(gateway)
    if address.version == 6 and address.is_link_local:
        return True
    return any(address in network for network in networks)
