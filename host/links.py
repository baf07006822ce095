"""Interfaces: looked up, made, moved, compared, deleted. Never by name alone where it matters.

An interface is identified by its index within one namespace at one time: the kernel renumbers
on a move, so after a move it is looked up afresh.
"""

import errno

import msgspec

from host.errors import HostError, LinkMissing, explained
from host.namespaces import NetworkNamespace
from host.netlink import IPRoute, trying
from host.rtnetlink import NetlinkError, ifinfmsg

ARPHRD_ETHER = 1  # linux/if_arp.h
ARPHRD_INFINIBAND = 32
IFF_UP = 0x1
IFF_LOWER_UP = 0x10000
IFALIASZ = 256
IN6_ADDR_GEN_MODE_NONE = 1  # linux/if_link.h
IPOIB_MODES = ("datagram", "connected")  # IPOIB_MODE_*, linux/if_link.h

LINK_TYPES = {ARPHRD_ETHER: "ether", ARPHRD_INFINIBAND: "infiniband", 772: "loopback"}


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """An interface as the kernel shows it now."""

    index: int
    name: str
    kind: str  # IFLA_INFO_KIND, "" for hardware
    link_type: int  # ARPHRD_*
    mac: str  # lower case; 20 bytes on InfiniBand
    broadcast: str
    mtu: int
    flags: int
    alias: str = ""
    parent: int = 0  # IFLA_LINK
    pkey: int | None = None
    mode: str = ""  # "datagram", "connected", "" if not IPoIB
    umcast: bool = False

    @property
    def up(self) -> bool:
        """Set up by an administrator, which on InfiniBand proves nothing."""
        return bool(self.flags & IFF_UP)

    @property
    def carrier(self) -> bool:
        """The link can carry frames: on IPoIB, the broadcast group has been joined."""
        return bool(self.flags & IFF_LOWER_UP)

    @property
    def link_type_name(self) -> str:
        """The link type as `ip link` prints it."""
        return LINK_TYPES.get(self.link_type, str(self.link_type))


def find(route: IPRoute, name: str) -> Link | None:
    """The interface of that name, or alternative name, in the socket's namespace."""
    return _get(route, f'looking up interface "{name}"', ifname=name)


def by_index(route: IPRoute, index: int) -> Link | None:
    """The interface of that index in the socket's namespace."""
    return _get(route, f"looking up interface {index}", index=index)


def require(route: IPRoute, name: str) -> Link:
    """As `find`, but LinkMissing where there is none."""
    link = find(route, name)
    if link is None:
        raise LinkMissing(f'there is no interface "{name}"')
    return link


def every(route: IPRoute, kind: str = "") -> list[Link]:
    """All interfaces of the socket's namespace, or those of one kind."""
    with trying("listing interfaces"):
        links = [_link(message) for message in route.link("dump")]
    return [link for link in links if not kind or link.kind == kind]


def make_ipoib_child(
    route: IPRoute, name: str, parent: Link, pkey: int, mode: str, umcast: bool
) -> Link:
    """Make a child of an IPoIB parent (drivers/infiniband/ulp/ipoib/ipoib_netlink.c).

    No queue length is sent: the driver's own must hold (twice its send queue). The attributes
    are spelt out: pyroute2 0.9.7 drops `ipoib_pkey=` and its like in silence.
    """
    settings = [
        ("IFLA_IPOIB_PKEY", pkey),
        ("IFLA_IPOIB_MODE", IPOIB_MODES.index(mode)),
        ("IFLA_IPOIB_UMCAST", int(umcast)),
    ]
    info = [("IFLA_INFO_KIND", "ipoib"), ("IFLA_INFO_DATA", {"attrs": settings})]
    with trying(f'making an IPoIB child of "{parent.name}" with P_Key {pkey:#06x}, mode {mode}'):
        route.link("add", ifname=name, link=parent.index, IFLA_LINKINFO={"attrs": info})
    child = require(route, name)
    made = (child.pkey, child.mode, child.umcast)
    if made != (pkey, mode, umcast):
        delete(route, child)
        raise HostError(
            f'the kernel made an IPoIB child of "{parent.name}" with P_Key, mode, umcast {made}, '
            f"not {(pkey, mode, umcast)}"
        )
    return child


def set_mtu(route: IPRoute, link: Link, mtu: int) -> None:
    """Set the MTU, in bytes."""
    with trying(f'setting mtu {mtu} on "{link.name}"'):
        route.link("set", index=link.index, mtu=mtu)


def move(route: IPRoute, link: Link, target: NetworkNamespace, name: str, alias: str) -> None:
    """Move, rename and mark an interface in one message: each move costs a barrier of ~16 ms.

    The caller has seen that `name` is free over there: the kernel answers EEXIST only after the
    move. The alias is set last, so an interface that bears it has been moved.
    """
    with trying(f'moving "{link.name}" into netns "{target.path}" as "{name}"'):
        route.link(
            "set",
            index=link.index,
            net_ns_fd=target.descriptor,
            ifname=name,
            ifalias=alias[: IFALIASZ - 1],
        )


def no_generated_address(route: IPRoute, link: Link) -> None:
    """Keep the kernel from making an IPv6 link-local address when the interface comes up."""
    af_spec = {
        "attrs": [("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", IN6_ADDR_GEN_MODE_NONE)]})]
    }
    with trying(f'setting the address generation mode of "{link.name}"', errno.EAFNOSUPPORT):
        route.link("set", index=link.index, IFLA_AF_SPEC=af_spec)


def set_up(route: IPRoute, link: Link) -> None:
    """Set an interface up."""
    with trying(f'setting "{link.name}" up'):
        route.link("set", index=link.index, state="up")


def delete(route: IPRoute, link: Link) -> None:
    """Delete an interface; one that is gone already is fine."""
    with trying(f'deleting "{link.name}"', errno.ENODEV):
        route.link("del", index=link.index)


def _get(route: IPRoute, what: str, **key: str | int) -> Link | None:
    try:
        return _link(route.link("get", **key)[0])
    except NetlinkError as error:
        if error.code == errno.ENODEV:
            return None
        raise explained(what, error.code) from None


def _link(message: ifinfmsg) -> Link:
    info = message.get_attr("IFLA_LINKINFO")
    kind = (info.get_attr("IFLA_INFO_KIND") if info else None) or ""
    details = info.get_attr("IFLA_INFO_DATA") if info and kind == "ipoib" else None
    mode = details.get_attr("IFLA_IPOIB_MODE") if details else ""
    return Link(
        index=message["index"],
        name=message.get_attr("IFLA_IFNAME"),
        kind=kind,
        link_type=message["ifi_type"],
        mac=message.get_attr("IFLA_ADDRESS") or "",
        broadcast=message.get_attr("IFLA_BROADCAST") or "",
        mtu=message.get_attr("IFLA_MTU") or 0,
        flags=message["flags"],
        alias=message.get_attr("IFLA_IFALIAS") or "",
        parent=message.get_attr("IFLA_LINK") or 0,
        pkey=details.get_attr("IFLA_IPOIB_PKEY") if details else None,
        mode=mode or "",
        umcast=bool(details.get_attr("IFLA_IPOIB_UMCAST")) if details else False,
    )
