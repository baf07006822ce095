"""Interfaces: look up, create, move, configure, delete.

An interface's index identifies it within one namespace. The kernel may assign another index when
an interface moves, so look it up again after a move.
"""

import errno
import fcntl
import socket
import struct
from collections.abc import Sequence

import msgspec

from host.errors import HostError, LinkMissing, explained
from host.namespaces import NetworkNamespace
from host.netlink import (
    HEADER,
    NLA_F_NESTED,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Change,
    NetlinkError,
    Rtnetlink,
    attribute,
    attributes,
    fields,
    number,
    string,
    text,
    trying,
    value,
)
from host.rtnetlink import (
    IFINFOMSG,
    IFLA_ADDRESS,
    IFLA_AF_SPEC,
    IFLA_ALT_IFNAME,
    IFLA_BROADCAST,
    IFLA_EXT_MASK,
    IFLA_IFALIAS,
    IFLA_IFNAME,
    IFLA_INET6_ADDR_GEN_MODE,
    IFLA_INFO_DATA,
    IFLA_INFO_KIND,
    IFLA_IPOIB_MODE,
    IFLA_IPOIB_PKEY,
    IFLA_IPOIB_UMCAST,
    IFLA_LINK,
    IFLA_LINKINFO,
    IFLA_MTU,
    IFLA_NET_NS_FD,
    IFLA_PARENT_DEV_NAME,
    IFLA_PERM_ADDRESS,
    IFLA_PROP_LIST,
    RTEXT_FILTER_SKIP_STATS,
    RTM_DELLINK,
    RTM_DELLINKPROP,
    RTM_GETLINK,
    RTM_NEWLINK,
    RTM_NEWLINKPROP,
    RTM_SETLINK,
)

ARPHRD_ETHER = 1  # linux/if_arp.h
ARPHRD_INFINIBAND = 32
IFF_UP, IFF_PROMISC, IFF_ALLMULTI = 0x1, 0x100, 0x200  # linux/if.h
IFF_LOWER_UP = 0x10000
IFNAMSIZ, IFALIASZ = 16, 256
SIOCGIFHWADDR, SIOCGIFINDEX = 0x8927, 0x8933  # linux/sockios.h
_U16 = struct.Struct("=H")
_IFREQ = struct.Struct("=16si20x")  # struct ifreq, netdevice(7): with an index,
_IFREQ_ADDRESS = struct.Struct("=16sH14s8x")  # with a hardware address
IN6_ADDR_GEN_MODE_NONE = 1  # linux/if_link.h
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
    """The interface of that name, or alternative name, in the socket's namespace."""
    short = len(name.encode(errors="surrogateescape")) < IFNAMSIZ
    question = _question(attributes=string(IFLA_IFNAME if short else IFLA_ALT_IFNAME, name))
    return _get(route, f'looking up interface "{name}"', question)


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
    """The interface of that index in the socket's namespace, after these changes."""
    return _get(route, f"looking up interface {index}", _question(index), after)


def require(route: Rtnetlink, name: str) -> Link:
    """The same as `find`. Raises LinkMissing if the interface does not exist."""
    link = find(route, name)
    if link is None:
        raise LinkMissing(f'there is no interface "{name}"')
    return link


def every(route: Rtnetlink, kind: str = "") -> list[Link]:
    """All interfaces of the socket's namespace, or those of one kind."""
    info = attribute(IFLA_LINKINFO, string(IFLA_INFO_KIND, kind)) if kind else b""
    with trying("listing interfaces"):
        links = [_link(part) for _, part in route.table(RTM_GETLINK, _question(attributes=info))]
    # The kernel shows all of them where it does not know the kind.
    return [link for link in links if not kind or link.kind == kind]


def make_ipoib_child(
    route: Rtnetlink, name: str, parent: Link, pkey: int, mode: str, umcast: bool
) -> Link:
    """Create a child of an IPoIB parent (drivers/infiniband/ulp/ipoib/ipoib_netlink.c).

    The message has no queue length, so that the driver's own applies (twice its send queue).
    """
    settings = attribute(IFLA_IPOIB_PKEY, _U16.pack(pkey))
    settings += attribute(IFLA_IPOIB_MODE, _U16.pack(IPOIB_MODES.index(mode)))
    settings += attribute(IFLA_IPOIB_UMCAST, _U16.pack(umcast))
    info = string(IFLA_INFO_KIND, "ipoib") + attribute(IFLA_INFO_DATA, settings)
    request = IFINFOMSG.pack(0, 0, 0, 0, 0) + string(IFLA_IFNAME, name)
    request += number(IFLA_LINK, parent.index) + attribute(IFLA_LINKINFO, info)
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
    request = _settings(link, number(IFLA_MTU, mtu))
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
    request = _settings(
        link,
        number(IFLA_NET_NS_FD, target.descriptor)
        + string(IFLA_IFNAME, name)
        + string(IFLA_IFALIAS, alias[: IFALIASZ - 1])
        + (number(IFLA_MTU, mtu) if mtu else b"")
        + (attribute(IFLA_ADDRESS, _packed(mac)) if mac else b""),
        flags=IFF_UP if up else 0,
        change=IFF_UP if up else 0,
    )
    what = f'moving "{link.name}" into netns "{target.path}" as "{name}"'
    route.change(Change(what, RTM_SETLINK, request))


def rename(route: Rtnetlink, link: Link, name: str) -> None:
    """Give an interface another name. Before Linux 6.2 it must be down."""
    request = _settings(link, string(IFLA_IFNAME, name))
    route.change(Change(f'renaming "{link.name}" to "{name}"', RTM_SETLINK, request))


def set_alias(route: Rtnetlink, link: Link, alias: str) -> None:
    """Set the alias; an empty one is none."""
    request = _settings(link, string(IFLA_IFALIAS, alias[: IFALIASZ - 1]))
    route.change(Change(f'setting the alias of "{link.name}"', RTM_SETLINK, request))


def set_mac(route: Rtnetlink, link: Link, mac: str) -> None:
    """Set the hardware address (6 bytes)."""
    what = f'setting the hardware address of "{link.name}" to {mac}'
    route.change(Change(what, RTM_SETLINK, _settings(link, attribute(IFLA_ADDRESS, _packed(mac)))))


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
    """Keep the kernel from making an IPv6 link-local address when the interface comes up."""
    mode = attribute(IFLA_INET6_ADDR_GEN_MODE, bytes((IN6_ADDR_GEN_MODE_NONE,)))
    request = _settings(link, attribute(IFLA_AF_SPEC, attribute(socket.AF_INET6, mode)))
    what = f'setting the address generation mode of "{link.name}"'
    return Change(what, RTM_SETLINK, request, accepted=(errno.EAFNOSUPPORT,))


def up(link: Link) -> Change:
    """Set an interface up."""
    request = _settings(link, flags=IFF_UP, change=IFF_UP)
    return Change(f'setting "{link.name}" up', RTM_SETLINK, request)


def down(link: Link) -> Change:
    """Set an interface down."""
    request = _settings(link, change=IFF_UP)
    return Change(f'setting "{link.name}" down', RTM_SETLINK, request)


def flagged(link: Link, flags: int, among: int) -> Change:
    """Set those of the IFF_* in `among` that are in `flags`, and clear the others of them."""
    request = _settings(link, flags=flags, change=among)
    words = {IFF_PROMISC: "promisc", IFF_ALLMULTI: "allmulti"}
    what = " and ".join(
        f"{word} {'on' if flags & flag else 'off'}" for flag, word in words.items() if among & flag
    )
    return Change(f'setting {what} of "{link.name}"', RTM_SETLINK, request)


def permanent_mac(route: Rtnetlink, link: Link) -> str:
    """The hardware address that the device has of its own; "" where its driver does not tell."""
    with trying(f'looking up "{link.name}"'):
        _, part = route.ask(RTM_GETLINK, _question(link.index))
    return fields(part, HEADER.size + IFINFOMSG.size).get(IFLA_PERM_ADDRESS, b"").hex(":")


def delete(route: Rtnetlink, link: Link) -> None:
    """Delete an interface. It is no error if it has gone already."""
    what = f'deleting "{link.name}"'
    route.change(Change(what, RTM_DELLINK, _settings(link), accepted=(errno.ENODEV,)))


def _question(index: int = 0, attributes: bytes = b"") -> bytes:
    """A question about interfaces, without statistics: some are summed up over all CPUs."""
    mask = number(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS)
    return IFINFOMSG.pack(0, 0, index, 0, 0) + mask + attributes


def _settings(link: Link, attributes: bytes = b"", *, flags: int = 0, change: int = 0) -> bytes:
    return IFINFOMSG.pack(0, 0, link.index, flags, change) + attributes


def _altname(link: Link, altname: str) -> bytes:
    listed = attribute(IFLA_PROP_LIST | NLA_F_NESTED, string(IFLA_ALT_IFNAME, altname))
    return _settings(link, listed)


def _packed(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def _get(route: Rtnetlink, what: str, question: bytes, after: Sequence[Change] = ()) -> Link | None:
    try:
        return _link(route.ask(RTM_GETLINK, question, after=after)[1])
    except NetlinkError as refused:
        if refused.code == errno.ENODEV:
            return None
        raise explained(what, refused.code, refused.words) from None


def _link(part: bytes) -> Link:
    """An interface from the kernel's RTM_NEWLINK, with the netlink header in front."""
    _, link_type, index, flags, _ = IFINFOMSG.unpack_from(part, HEADER.size)
    shown = fields(part, HEADER.size + IFINFOMSG.size)
    info = fields(shown.get(IFLA_LINKINFO, b""))
    kind = text(info.get(IFLA_INFO_KIND, b""))
    ipoib = fields(info.get(IFLA_INFO_DATA, b"")) if kind == "ipoib" else {}
    pkey, mode, umcast = (
        _U16.unpack(ipoib[key])[0] if key in ipoib else None
        for key in (IFLA_IPOIB_PKEY, IFLA_IPOIB_MODE, IFLA_IPOIB_UMCAST)
    )
    listed = shown.get(IFLA_PROP_LIST, b"")
    return Link(
        index=index,
        name=text(shown[IFLA_IFNAME]),
        kind=kind,
        link_type=link_type,
        mac=shown.get(IFLA_ADDRESS, b"").hex(":"),
        broadcast=shown.get(IFLA_BROADCAST, b"").hex(":"),
        mtu=value(shown.get(IFLA_MTU)),
        flags=flags,
        alias=text(shown.get(IFLA_IFALIAS, b"")),
        parent=value(shown.get(IFLA_LINK)),
        device=text(shown.get(IFLA_PARENT_DEV_NAME, b"")),
        altnames=tuple(
            text(listed[start:end])
            for name, start, end in attributes(listed, 0, len(listed))
            if name == IFLA_ALT_IFNAME
        ),
        pkey=pkey,
        mode=IPOIB_MODES[mode] if mode is not None and mode < len(IPOIB_MODES) else "",
        umcast=bool(umcast),
    )
