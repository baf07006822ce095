"""Addresses and routes of an interface, and the switches below /proc/sys/net that go with them."""

import errno
import ipaddress
from pathlib import Path

import msgspec

from host.errors import HostError
from host.links import Link
from host.namespaces import NetworkNamespace
from host.netlink import IPRoute, trying

IFA_F_NODAD = 0x02  # linux/if_addr.h
RT_TABLE_MAIN = 254
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


def add(route: IPRoute, link: Link, cidr: str) -> None:
    """Add an address. IPv6 without duplicate detection: whoever assigned it knows it is unique,
    and detection would cost every pod one to two seconds."""
    interface = ipaddress.ip_interface(cidr)
    flags = {"flags": IFA_F_NODAD} if interface.version == 6 else {}
    with trying(f'adding address {cidr} to "{link.name}"', errno.EEXIST):
        route.addr(
            "add",
            index=link.index,
            address=str(interface.ip),
            prefixlen=interface.network.prefixlen,
            **flags,
        )


def of(route: IPRoute, link: Link) -> set[str]:
    """The addresses of an interface, as canonical CIDRs."""
    with trying(f'listing the addresses of "{link.name}"'):
        messages = list(route.addr("dump", index=link.index))
    found = set()
    for message in messages:
        # On a point-to-point or broadcast interface IFA_LOCAL is the address itself.
        text = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
        found.add(str(ipaddress.ip_interface(f"{text}/{message['prefixlen']}")))
    return found


def add_route(route: IPRoute, link: Link, hop: Hop) -> None:
    """Add a route through `link`; a gateway outside the interface's networks is taken as on it."""
    arguments: dict[str, object] = {"dst": _destination(hop), "oif": link.index}
    if hop.gateway:
        arguments["gateway"] = hop.gateway
        arguments["flags"] = ["onlink"] if not _covered(route, link, hop.gateway) else []
    if hop.table is not None:
        arguments["table"] = hop.table
    if hop.scope is not None:
        arguments["scope"] = hop.scope
    elif not hop.gateway and not _is_v6(hop):
        arguments["scope"] = 253  # link: there is no gateway
    if hop.priority:
        arguments["priority"] = hop.priority
    metrics = {key: value for key, value in (("mtu", hop.mtu), ("advmss", hop.advmss)) if value}
    if metrics:
        arguments["metrics"] = metrics
    via = f" via {hop.gateway}" if hop.gateway else ""
    with trying(f'adding route {hop.destination}{via} on "{link.name}"'):
        # Appended: a pod with a default route of another network gets ours behind it.
        route.route("append", family=AF_INET6 if _is_v6(hop) else AF_INET, **arguments)


def has_route(route: IPRoute, hop: Hop) -> bool:
    """Whether the namespace has that route: destination, gateway, table and priority."""
    wanted = ipaddress.ip_network(hop.destination, strict=False)
    family = AF_INET6 if _is_v6(hop) else AF_INET
    with trying("listing routes"):
        messages = list(route.get_routes(family=family))
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


def set_switch(namespace: NetworkNamespace, family: int, link: Link, name: str, value: str) -> None:
    """Write /proc/sys/net/ipv{4,6}/conf/<interface>/<name> of a namespace.

    /proc/sys/net follows the calling thread. Raises HostError where the switch is missing,
    which for family 6 means that this kernel runs without IPv6.
    """
    switch = _switch(family, link, name)
    with namespace.entered():
        try:
            switch.write_text(value)
        except OSError as error:
            raise HostError(f"setting {switch} to {value}: {error.strerror}") from None


def switch(namespace: NetworkNamespace, family: int, link: Link, name: str) -> str | None:
    """Read such a switch; None where it is missing."""
    with namespace.entered():
        try:
            return _switch(family, link, name).read_text().strip()
        except OSError:
            return None


def _switch(family: int, link: Link, name: str) -> Path:
    return Path(f"/proc/sys/net/ipv{family}/conf/{link.name}/{name}")


def _destination(hop: Hop) -> str:
    return str(ipaddress.ip_network(hop.destination, strict=False))


def _is_v6(hop: Hop) -> bool:
    return ":" in hop.destination


def _covered(route: IPRoute, link: Link, gateway: str) -> bool:
    address = ipaddress.ip_address(gateway)
    if address.version == 6 and address.is_link_local:
        return True
    networks = (ipaddress.ip_interface(cidr).network for cidr in of(route, link))
    return any(address in network for network in networks)
