"""Configures an interface's addresses, routes, and sysctls below /proc/sys/net."""

import errno
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from netaddr.ip import IPAddress, IPNetwork
from pyroute2.netlink import NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL
from pyroute2.netlink.rtnl import (
    RTM_GETADDR,
    RTM_GETROUTE,
    RTM_NEWADDR,
    RTM_NEWROUTE,
    rt_proto,
    rt_type,
)
from pyroute2.netlink.rtnl.ifaddrmsg import IFA_F_NODAD
from pyroute2.netlink.rtnl.rtmsg import IP6_RT_PRIO_USER, RT_SCOPE_LINK, RTNH_F_ONLINK

from base import address_text
from host import procfs
from host.errors import HostError, LinkMissing
from host.namespaces import NetworkNamespace
from host.netlink import link_changes, links
from host.netlink.links import Link
from host.netlink.messages import AddressMessage, RouteMessage, attributes, message
from host.netlink.sockets import ChangeRequest, Rtnetlink, trying
from host.sysfs import attribute_files

IFAPROT_KERNEL_RA = 2  # linux/if_addr.h, since Linux 5.18
RT_TABLE_MAIN = 254  # linux/rtnetlink.h
_KERNELS = rt_proto["kernel"], rt_proto["ra"]
_LAST_PRIORITY = 0xFFFFFFFF
AF_INET, AF_INET6 = socket.AF_INET, socket.AF_INET6
_ANY = {AF_INET: "0.0.0.0", AF_INET6: "::"}


# The errnos for IPv6 that a sysctl disables (addrconf_add_dev), that the kernel does not have, or
# that an MTU below 1280 rules out (ipv6_add_dev).
_WITHOUT_FAMILY = (
    errno.EACCES,
    errno.EAFNOSUPPORT,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.ENOBUFS,
)


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """A route through an interface. With `None` or 0, the kernel chooses the value."""

    destination: str  # CIDR
    gateway: str | None = None
    table: int | None = None
    scope: int | None = None
    priority: int = 0
    mtu: int = 0
    advmss: int = 0


def addition(link: Link, cidr: str, *, if_possible: bool = False) -> ChangeRequest:
    """The request for an address. With `if_possible`, IPv6 may be missing.

    An IPv6 address gets no duplicate address detection, which would take one to two seconds.
    """
    address, _, prefix = cidr.partition("/")
    family, flags = (AF_INET6, IFA_F_NODAD) if ":" in address else (AF_INET, 0)
    request = message(
        AddressMessage,
        [*([("IFA_LOCAL", address)] if family == AF_INET else []), ("IFA_ADDRESS", address)],
        family=family,
        prefixlen=int(prefix),
        flags=flags,
        index=link.index,
    )
    what = f'adding address {cidr} to "{link.name}"'
    flags = NLM_F_CREATE | NLM_F_EXCL
    accepted = (errno.EEXIST, *(_WITHOUT_FAMILY if if_possible else ()))
    return ChangeRequest(what, RTM_NEWADDR, request, flags, accepted)


def of(route: Rtnetlink, link: Link) -> set[str]:
    """The addresses of an interface, as canonical CIDRs."""
    with trying(f'listing the addresses of "{link.name}"'):
        listed = route.table(RTM_GETADDR, message(AddressMessage, index=link.index))
    return {_cidr(address) for address in listed}


def of_users(route: Rtnetlink, link: Link) -> list[str]:
    """An interface's addresses (CIDR) and route destinations, unless the kernel made them."""
    found = []
    with trying(f'listing addresses and routes of "{link.name}"'):
        for address in route.table(RTM_GETADDR, message(AddressMessage, index=link.index)):
            cidr = _cidr(address)
            by_kernel = address.get_attr("IFA_PROTO") == IFAPROT_KERNEL_RA
            if not by_kernel and not cidr.startswith("fe80:"):
                found.append(cidr)
        for family, unspecified in _ANY.items():
            request = message(RouteMessage, [("RTA_OIF", link.index)], family=family)
            for listed in route.table(RTM_GETROUTE, request):
                if listed["proto"] not in _KERNELS:
                    destination = listed.get_attr("RTA_DST", unspecified)
                    found.append(f"{destination}/{listed['dst_len']}")
    return found


def of_all(route: Rtnetlink) -> list[tuple[str, str]]:
    """Each address of a namespace as a canonical CIDR, with the name of its interface."""
    with trying("listing the addresses of all interfaces"):
        listed = route.table(RTM_GETADDR, message(AddressMessage))
    names = {link.index: link.name for link in links.every(route)}
    return [(_cidr(address), names.get(address["index"], "?")) for address in listed]


def _cidr(address: AddressMessage) -> str:
    # On a point-to-point or broadcast interface, IFA_LOCAL is the interface's own address.
    ip = address.get_attr("IFA_LOCAL") or address.get_attr("IFA_ADDRESS")
    return f"{ip}/{address['prefixlen']}"


def add_routes(route: Rtnetlink, link: Link, hops: Sequence[Hop]) -> None:
    """Add routes behind existing routes. A gateway outside the link's networks is on-link."""
    if not hops:
        return
    networks = [address_text.network(cidr) for cidr in of(route, link)]
    present = Routes(route)
    route.change(*(_route(link, present.behind(hop), networks) for hop in hops))


def _route(link: Link, hop: Hop, networks: Sequence[IPNetwork]) -> ChangeRequest:
    destination = address_text.network(hop.destination)
    table = RT_TABLE_MAIN if hop.table is None else hop.table
    request: list[tuple[str, object]] = [("RTA_OIF", link.index), ("RTA_TABLE", table)]
    flags = scope = 0
    if destination.prefixlen:
        request.append(("RTA_DST", str(destination.network)))
    if hop.gateway:
        request.append(("RTA_GATEWAY", hop.gateway))
        flags = 0 if _covered(networks, hop.gateway) else RTNH_F_ONLINK
    if hop.scope is not None:
        scope = hop.scope
    elif not hop.gateway and destination.version == 4:
        scope = RT_SCOPE_LINK
    if hop.priority:
        request.append(("RTA_PRIORITY", hop.priority))
    metrics = [
        (name, size) for name, size in (("RTAX_MTU", hop.mtu), ("RTAX_ADVMSS", hop.advmss)) if size
    ]
    if metrics:
        request.append(("RTA_METRICS", {"attrs": metrics}))
    added = message(
        RouteMessage,
        request,
        family=AF_INET6 if destination.version == 6 else AF_INET,
        dst_len=destination.prefixlen,
        table=hop.table if hop.table is not None and hop.table < 256 else 0,
        proto=rt_proto["static"],
        scope=scope,
        type=rt_type["unicast"],
        flags=flags,
    )
    via = f" via {hop.gateway}" if hop.gateway else ""
    what = f'adding route {hop.destination}{via} on "{link.name}"'
    # NLM_F_APPEND puts an IPv4 route behind the routes of the same priority.
    return ChangeRequest(what, RTM_NEWROUTE, added, NLM_F_CREATE | NLM_F_APPEND)


class Routes:
    """A snapshot of a namespace's routes to other machines."""

    def __init__(self, route: Rtnetlink) -> None:
        # By destination, prefix length, table, and gateway (None stands for any gateway).
        self._priorities: dict[tuple[IPAddress, int, int, IPAddress | None], set[int]] = {}
        for family, unspecified in _ANY.items():
            request = message(RouteMessage, family=family, type=rt_type["unicast"])
            with trying("listing routes"):
                listed = route.table(RTM_GETROUTE, request)
            for present in listed:
                if present["type"] != rt_type["unicast"]:
                    continue  # before Linux 4.20 the kernel lists routes of all types
                shown = attributes(present)
                destination = address_text.address(shown.get("RTA_DST", unspecified))
                for via in (None, *_gateways(shown)):
                    key = (destination, present["dst_len"], shown["RTA_TABLE"], via)
                    self._priorities.setdefault(key, set()).add(shown.get("RTA_PRIORITY", 0))

    def has(self, hop: Hop) -> bool:
        """Whether a route matches the hop. An unset gateway or priority matches any value."""
        family, found = self._of(hop, hop.gateway)
        if not hop.priority or hop.priority in found:
            return bool(found)
        return family == AF_INET6 and max(found, default=0) > hop.priority  # moved by `behind`

    def behind(self, hop: Hop) -> Hop:
        """The route, with a priority that puts it behind existing routes to its destination.

        The hop's own priority stays, unless another IPv6 route has the same priority. The kernel
        would merge the two routes into one multipath route (fib6_add_rt2node). IPv4 routes of the
        same priority keep their order.
        """
        family, taken = self._of(hop, None)
        priority = hop.priority or max(taken, default=0)
        while family == AF_INET6 and priority in taken and priority < _LAST_PRIORITY:
            priority += 1
        taken.add(priority or (IP6_RT_PRIO_USER if family == AF_INET6 else 0))
        return msgspec.structs.replace(hop, priority=priority)

    def _of(self, hop: Hop, gateway: str | None) -> tuple[int, set[int]]:
        """The hop's family, and the priorities of routes with its destination and table."""
        destination = address_text.network(hop.destination)
        family = AF_INET6 if destination.version == 6 else AF_INET
        via = address_text.address(gateway) if gateway else None
        where = (destination.network, destination.prefixlen, hop.table or RT_TABLE_MAIN, via)
        return family, self._priorities.setdefault(where, set())


def _gateways(shown: dict[str, Any]) -> set[IPAddress]:
    """The gateways of a route. A multipath route may have several."""
    parts = (attributes(part) for part in shown.get("RTA_MULTIPATH", ()))
    return {
        address_text.address(part["RTA_GATEWAY"])
        for part in (shown, *parts)
        if "RTA_GATEWAY" in part
    }


def default_route(route: Rtnetlink) -> int:
    """The index of the interface of the first default route, of IPv4 before IPv6. 0 without one."""
    for family in _ANY:
        request = message(RouteMessage, family=family)
        with trying("listing routes"):
            listed = route.table(RTM_GETROUTE, request)
        for present in listed:
            index = int(present.get_attr("RTA_OIF", 0))
            in_main = present.get_attr("RTA_TABLE") == RT_TABLE_MAIN
            if (
                present["dst_len"] == 0
                and in_main
                and index
                and present["type"] == rt_type["unicast"]
            ):
                return index
    return 0


class Sysctl(NamedTuple):
    """A value for /proc/sys/net/ipv<family>/conf/<interface>/<name>."""

    family: int
    name: str
    value: str


IPV6_SYSCTLS = (Sysctl(6, "disable_ipv6", "0"), Sysctl(6, "keep_addr_on_down", "1"))
# Router advertisements would let any machine on the link set an address and a default route.
NO_ADVERTISEMENTS = (Sysctl(6, "accept_ra", "0"), Sysctl(6, "autoconf", "0"))


def configure(
    pod: Rtnetlink,
    namespace: NetworkNamespace,
    link: Link,
    cidrs: Sequence[str],
    sysctls: Sequence[Sysctl] = (),
    link_local: str = "",
    modes: tuple[int, int] = (0, 0),
    *,
    set_addresses: bool = True,
    accept_ra: bool = False,
) -> Link:
    """Set sysctls, modes and addresses, then set the interface up. Returns its new state.

    The interface comes up last, because the kernel announces only addresses that exist by then.
    `link_local` replaces the kernel's link-local address, if the interface has IPv6. `modes` has
    the new flags (`links.FLAGS`), and the mask of the flags to change. Without `set_addresses`,
    `cidrs` are not set: the caller probes `cidrs` and calls again. An interface with IPv6 addresses
    accepts router advertisements only with `accept_ra`.

    Raises HostError, and LinkMissing if the interface has gone or has lost its mark.
    """
    if any(":" in cidr for cidr in cidrs):
        sysctls = (*sysctls, *(() if accept_ra else NO_ADVERTISEMENTS), *IPV6_SYSCTLS)
    if sysctls:
        set_sysctls(namespace, link, sysctls)
    changes = []
    if link_local:
        changes.append(link_changes.no_generated_address(link))
    if modes[1]:
        changes.append(link_changes.flagged(link, *modes))
    if set_addresses:
        changes += [addition(link, cidr) for cidr in cidrs]
    if link_local:
        changes.append(addition(link, link_local, if_possible=True))
    ready = links.by_index(pod, link.index, after=[*changes, link_changes.up(link)])
    if ready is None or ready.alias != link.alias:
        raise LinkMissing(f'interface "{link.name}" has gone from the pod during its setup')
    return ready


def set_sysctls(namespace: NetworkNamespace, link: Link, sysctls: Sequence[Sysctl]) -> None:
    """Set an interface's sysctls. Raises HostError if a sysctl does not exist.

    A sysctl that already has its value is not written. Some writes (disable_ipv6) spin until they
    get the kernel's RTNL lock. Without IPv6 there are no sysctls of family 6.
    """
    with namespace.entered():
        for family, name, value in sysctls:
            path = procfs.name(f"sys/net/ipv{family}/conf/{link.name}/{name}")
            try:
                if attribute_files.text(path) != value:
                    attribute_files.write(path, value)
            except OSError as error:
                raise HostError(f"setting {path} to {value}: {error.strerror}") from None


def _covered(networks: Sequence[IPNetwork], gateway: str) -> bool:
    via = address_text.address(gateway)
    if via.version == 6 and via.is_link_local():
        return True
    return any(via in network for network in networks)
