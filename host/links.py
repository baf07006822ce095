"""Interfaces: look up, create, move, configure, delete.

An interface's index identifies it within one namespace. The kernel may assign another index when
an interface moves, so look it up again after a move.
"""

import errno
import fcntl
import struct
from collections.abc import Sequence

import msgspec

from host.errors import HostError, LinkMissing, explained
from host.namespaces import NetworkNamespace
from host.netlink import (
    HEADER,
    IFINFOMSG,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Change,
    NetlinkError,
    Rtnetlink,
    attributes,
    trying,
)
from host.rtnetlink import (
    RTM_DELLINK,
    RTM_DELLINKPROP,
    RTM_GETLINK,
    RTM_NEWLINK,
    RTM_NEWLINKPROP,
    RTM_SETLINK,
    ifinfmsg,
)

ARPHRD_ETHER = 1  # linux/if_arp.h
ARPHRD_INFINIBAND = 32
IFF_UP, IFF_PROMISC, IFF_ALLMULTI = 0x1, 0x100, 0x200  # linux/if.h
IFF_LOWER_UP = 0x10000
IFNAMSIZ, IFALIASZ = 16, 256
SIOCGIFHWADDR, SIOCGIFINDEX = 0x8927, 0x8933  # linux/sockios.h
_IFREQ = struct.Struct("=16si20x")  # struct ifreq, netdevice(7), with an index
_IFREQ_ADDRESS = struct.Struct("=16sH14s8x")  # the same with a hardware address
IN6_ADDR_GEN_MODE_NONE = 1  # linux/if_link.h
IFLA_PERM_ADDRESS = 54  # linux/if_link.h, Linux 5.6
RTEXT_FILTER_SKIP_STATS = 0x8  # linux/rtnetlink.h
IPOIB_MODES = ("datagram", "connected")  # IPOIB_MODE_*, linux/if_link.h

LINK_TYPES = {ARPHRD_ETHER: "ether", ARPHRD_INFINIBAND: "infiniband", 772: "loopback"}


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """An interface, as the kernel shows it."""

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
    device: str = ""  # the hardware's name on its bus, a BDF on PCI; "" for virtual interfaces
    altnames: tuple[str, ...] = ()
    pkey: int | None = None
    mode: str = ""  # "datagram", "connected", "" if not IPoIB
    umcast: bool = False

    @property
    def up(self) -> bool:
        """Whether it is administratively up. On InfiniBand this does not mean it can be used."""
        return bool(self.flags & IFF_UP)

    @property
    def carrier(self) -> bool:
        """Whether the link can carry frames; on IPoIB this needs the broadcast group."""
        return bool(self.flags & IFF_LOWER_UP)

    @property
    def link_type_name(self) -> str:
        """The link type as `ip link` prints it."""
        return LINK_TYPES.get(self.link_type, str(self.link_type))


def find(route: Rtnetlink, name: str) -> Link | None:
    """The interface with that name or alternative name in the socket's namespace."""
    query = _query()
    short = len(name.encode(errors="surrogateescape")) < IFNAMSIZ
    query["attrs"].append(("IFLA_IFNAME" if short else "IFLA_ALT_IFNAME", name))
    return _get(route, f'looking up interface "{name}"', query)


class LinkIdentity(msgspec.Struct, frozen=True):
    """The part of an interface that can be read without the kernel's RTNL lock.

    Every move holds that lock.
    """

    index: int
    link_type: int
    mac: bytes  # the first 14 of InfiniBand's 20 bytes, which include the queue pair's number

    def is_of(self, link: Link) -> bool:
        """Whether it may be that interface, possibly seen in another namespace."""
        whole = bytes.fromhex(link.mac.replace(":", ""))[: len(self.mac)]
        return self.link_type == link.link_type and self.mac[: len(whole)] == whole


def identify(route: Rtnetlink, name: str) -> LinkIdentity | None:
    """Identify the interface with that name or alternative name, without the RTNL lock."""
    encoded = name.encode(errors="surrogateescape")
    if len(encoded) >= IFNAMSIZ:
        raise HostError(f'looking up interface "{name}": its name is too long')
    if not has_name(route, name):
        return None
    request = encoded.ljust(_IFREQ.size, b"\0")
    try:
        index = _IFREQ.unpack(fcntl.ioctl(route, SIOCGIFINDEX, request))[1]
        _, link_type, mac = _IFREQ_ADDRESS.unpack(fcntl.ioctl(route, SIOCGIFHWADDR, request))
    except OSError as error:
        if error.errno == errno.ENODEV:
            return None
        raise explained(f'looking up interface "{name}"', error.errno or errno.EIO) from None
    return LinkIdentity(index, link_type, mac)


def has_name(route: Rtnetlink, name: str) -> bool:
    """Whether an interface in the socket's namespace has that name or alternative name.

    This binds the socket to the interface for a moment, which needs no RTNL lock. ioctl(2) takes
    an unknown name for a module's and starts modprobe(8) twice (dev_load,
    net/core/dev_ioctl.c), which takes 200 ms on a slow machine.
    """
    encoded = name.encode(errors="surrogateescape")
    if len(encoded) >= IFNAMSIZ:  # too long for the socket option
        return find(route, name) is not None
    try:
        route.bind_to_device(encoded)
    except OSError as error:
        if error.errno == errno.ENODEV:
            return False
        raise explained(f'looking up interface "{name}"', error.errno or errno.EIO) from None
    route.bind_to_device(b"")
    return True


def by_index(route: Rtnetlink, index: int, after: Sequence[Change] = ()) -> Link | None:
    """The interface with that index in the socket's namespace, after these changes."""
    query = _query()
    query["index"] = index
    return _get(route, f"looking up interface {index}", query, after)


def require(route: Rtnetlink, name: str) -> Link:
    """The same as `find`. Raises LinkMissing if the interface does not exist."""
    link = find(route, name)
    if link is None:
        raise LinkMissing(f'there is no interface "{name}"')
    return link


def every(route: Rtnetlink, kind: str = "") -> list[Link]:
    """The interfaces in the socket's namespace: all, or those of one kind."""
    query = _query()
    if kind:
        info = [("IFLA_INFO_KIND", kind)]
        query["attrs"].append(("IFLA_LINKINFO", {"attrs": info}))
    with trying("listing interfaces"):
        links = [_link(message) for message in route.dump(RTM_GETLINK, query)]
    # For an unknown kind the kernel lists all interfaces.
    return [link for link in links if not kind or link.kind == kind]


def make_ipoib_child(
    route: Rtnetlink, name: str, parent: Link, pkey: int, mode: str, umcast: bool
) -> Link:
    """Create a child of an IPoIB parent (drivers/infiniband/ulp/ipoib/ipoib_netlink.c).

    The message has no queue length, so that the driver's own applies (twice its send queue).
    """
    settings = [
        ("IFLA_IPOIB_PKEY", pkey),
        ("IFLA_IPOIB_MODE", IPOIB_MODES.index(mode)),
        ("IFLA_IPOIB_UMCAST", int(umcast)),
    ]
    info = [("IFLA_INFO_KIND", "ipoib"), ("IFLA_INFO_DATA", {"attrs": settings})]
    request = ifinfmsg()
    request["attrs"] = [
        ("IFLA_IFNAME", name),
        ("IFLA_LINK", parent.index),
        ("IFLA_LINKINFO", {"attrs": info}),
    ]
    what = f'making an IPoIB child of "{parent.name}" with P_Key {pkey:#06x}, mode {mode}'
    route.change(Change(what, RTM_NEWLINK, request, NLM_F_CREATE | NLM_F_EXCL))
    child = require(route, name)
    made = (child.pkey, child.mode, child.umcast)
    if made != (pkey, mode, umcast):
        delete(route, child)
        raise HostError(
            f'the kernel made an IPoIB child of "{parent.name}" with P_Key, mode, umcast {made}, '
            f"not {(pkey, mode, umcast)}"
        )
    return child


def set_mtu(route: Rtnetlink, link: Link, mtu: int) -> None:
    """Set the MTU, in bytes."""
    request = _settings(link, ("IFLA_MTU", mtu))
    route.change(Change(f'setting mtu {mtu} on "{link.name}"', RTM_SETLINK, request))


def move(
    route: Rtnetlink,
    link: Link,
    target: NetworkNamespace,
    name: str,
    alias: str,
    *,
    mtu: int = 0,
    mac: str = "",
    up: bool = False,
) -> None:
    """Move an interface, rename it and set its alias in one message.

    A message of its own for each would cost more: every move waits ~16 ms for an RCU barrier. The
    caller must have checked that `name` is free in the target, because the kernel answers EEXIST
    only after the move. do_setlink (net/core/rtnetlink.c) applies the parts in this order: move,
    address, MTU, name, alias, up. So an interface with the alias has been moved.

    Args:
        mtu: in bytes; 0 keeps it.
        mac: 6 bytes as text; "" keeps it.
        up: set the interface up too.
    """
    attributes: list[tuple[str, object]] = [
        ("IFLA_NET_NS_FD", target.descriptor),
        ("IFLA_IFNAME", name),
        ("IFLA_IFALIAS", alias[: IFALIASZ - 1]),
    ]
    if mtu:
        attributes.append(("IFLA_MTU", mtu))
    if mac:
        attributes.append(("IFLA_ADDRESS", mac))
    request = _settings(link, *attributes)
    request["flags"] = request["change"] = IFF_UP if up else 0
    what = f'moving "{link.name}" into netns "{target.path}" as "{name}"'
    route.change(Change(what, RTM_SETLINK, request))


def rename(route: Rtnetlink, link: Link, name: str) -> None:
    """Rename an interface. Before Linux 6.2 it must be down."""
    request = _settings(link, ("IFLA_IFNAME", name))
    route.change(Change(f'renaming "{link.name}" to "{name}"', RTM_SETLINK, request))


def set_alias(route: Rtnetlink, link: Link, alias: str) -> None:
    """Set the alias; "" removes it."""
    request = _settings(link, ("IFLA_IFALIAS", alias[: IFALIASZ - 1]))
    route.change(Change(f'setting the alias of "{link.name}"', RTM_SETLINK, request))


def set_mac(route: Rtnetlink, link: Link, mac: str) -> None:
    """Set the hardware address (6 bytes)."""
    what = f'setting the hardware address of "{link.name}" to {mac}'
    route.change(Change(what, RTM_SETLINK, _settings(link, ("IFLA_ADDRESS", mac))))


def add_altname(route: Rtnetlink, link: Link, altname: str) -> None:
    """Add an alternative name to an interface."""
    what = f'giving "{link.name}" the alternative name "{altname}"'
    flags = NLM_F_CREATE | NLM_F_EXCL
    route.change(Change(what, RTM_NEWLINKPROP, _altname(link, altname), flags))


def drop_altname(route: Rtnetlink, link: Link, altname: str) -> None:
    """Remove an alternative name from an interface."""
    what = f'removing the alternative name "{altname}" of "{link.name}"'
    route.change(Change(what, RTM_DELLINKPROP, _altname(link, altname)))


def no_generated_address(link: Link) -> Change:
    """The change that keeps the kernel from generating an IPv6 link-local address."""
    mode = [("IFLA_INET6_ADDR_GEN_MODE", IN6_ADDR_GEN_MODE_NONE)]
    request = _settings(link, ("IFLA_AF_SPEC", {"attrs": [("AF_INET6", {"attrs": mode})]}))
    what = f'setting the address generation mode of "{link.name}"'
    return Change(what, RTM_SETLINK, request, accepted=(errno.EAFNOSUPPORT,))


def up(link: Link) -> Change:
    """The change that sets an interface up."""
    request = _settings(link)
    request["flags"] = request["change"] = IFF_UP
    return Change(f'setting "{link.name}" up', RTM_SETLINK, request)


def down(link: Link) -> Change:
    """The change that sets an interface down."""
    request = _settings(link)
    request["flags"], request["change"] = 0, IFF_UP
    return Change(f'setting "{link.name}" down', RTM_SETLINK, request)


def flagged(link: Link, flags: int, among: int) -> Change:
    """The change that sets the IFF_* flags in the mask `among` to their values in `flags`."""
    request = _settings(link)
    request["flags"], request["change"] = flags, among
    words = {IFF_PROMISC: "promisc", IFF_ALLMULTI: "allmulti"}
    what = " and ".join(
        f"{word} {'on' if flags & flag else 'off'}" for flag, word in words.items() if among & flag
    )
    return Change(f'setting {what} of "{link.name}"', RTM_SETLINK, request)


def permanent_mac(route: Rtnetlink, link: Link) -> str:
    """The device's permanent hardware address; "" if its driver does not report one."""
    query = _query()
    query["index"] = link.index
    with trying(f'looking up "{link.name}"'):
        _, part = route.ask(RTM_GETLINK, query)
    for kind, start, end in attributes(part, HEADER.size + IFINFOMSG.size, len(part)):
        if kind == IFLA_PERM_ADDRESS:
            return part[start:end].hex(":")
    return ""


def delete(route: Rtnetlink, link: Link) -> None:
    """Delete an interface. It is no error if it has gone already."""
    what = f'deleting "{link.name}"'
    route.change(Change(what, RTM_DELLINK, _settings(link), accepted=(errno.ENODEV,)))


def _query() -> ifinfmsg:
    """A query for interfaces without statistics, which the kernel sums up over all CPUs."""
    query = ifinfmsg()
    query["attrs"] = [("IFLA_EXT_MASK", RTEXT_FILTER_SKIP_STATS)]
    return query


def _settings(link: Link, *attributes: tuple[str, object]) -> ifinfmsg:
    request = ifinfmsg()
    request["index"] = link.index
    request["attrs"] = list(attributes)
    return request


def _altname(link: Link, altname: str) -> ifinfmsg:
    return _settings(link, ("IFLA_PROP_LIST", {"attrs": [("IFLA_ALT_IFNAME", altname)]}))


def _get(route: Rtnetlink, what: str, query: ifinfmsg, after: Sequence[Change] = ()) -> Link | None:
    try:
        return _link(route.get(RTM_GETLINK, query, after))
    except NetlinkError as refused:
        if refused.code == errno.ENODEV:
            return None
        raise explained(what, refused.code, refused.words) from None


def _link(message: ifinfmsg) -> Link:
    attrs = dict(message["attrs"])
    info = attrs.get("IFLA_LINKINFO")
    kind = (info.get_attr("IFLA_INFO_KIND") if info else None) or ""
    details = info.get_attr("IFLA_INFO_DATA") if info and kind == "ipoib" else None
    mode = details.get_attr("IFLA_IPOIB_MODE") if details else ""
    more = attrs.get("IFLA_PROP_LIST")
    return Link(
        index=message["index"],
        name=attrs["IFLA_IFNAME"],
        kind=kind,
        link_type=message["ifi_type"],
        mac=attrs.get("IFLA_ADDRESS") or "",
        broadcast=attrs.get("IFLA_BROADCAST") or "",
        mtu=attrs.get("IFLA_MTU") or 0,
        flags=message["flags"],
        alias=attrs.get("IFLA_IFALIAS") or "",
        parent=attrs.get("IFLA_LINK") or 0,
        device=attrs.get("IFLA_PARENT_DEV_NAME") or "",
        altnames=tuple(more.altnames()) if more else (),
        pkey=details.get_attr("IFLA_IPOIB_PKEY") if details else None,
        mode=mode or "",
        umcast=bool(details.get_attr("IFLA_IPOIB_UMCAST")) if details else False,
    )
