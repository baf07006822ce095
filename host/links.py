"""Interfaces: looked up, made, moved, compared, deleted. Never by name alone where it matters.

An interface is identified by its index within one namespace at one time: the kernel renumbers
on a move, so after a move it is looked up afresh.
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
_IFREQ = struct.Struct("=16si20x")  # struct ifreq, netdevice(7): with an index,
_IFREQ_ADDRESS = struct.Struct("=16sH14s8x")  # with a hardware address
IN6_ADDR_GEN_MODE_NONE = 1  # linux/if_link.h
IFLA_PERM_ADDRESS = 54  # linux/if_link.h, Linux 5.6
RTEXT_FILTER_SKIP_STATS = 0x8  # linux/rtnetlink.h
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
    device: str = ""  # what the hardware's bus calls it, a BDF on PCI; "" for virtual ones
    altnames: tuple[str, ...] = ()
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


def find(route: Rtnetlink, name: str) -> Link | None:
    """The interface of that name, or alternative name, in the socket's namespace."""
    question = _question()
    short = len(name.encode(errors="surrogateescape")) < IFNAMSIZ
    question["attrs"].append(("IFLA_IFNAME" if short else "IFLA_ALT_IFNAME", name))
    return _get(route, f'looking up interface "{name}"', question)


class Glance(msgspec.Struct, frozen=True):
    """What can be seen of an interface without the kernel's RTNL lock, which every move holds."""

    index: int
    link_type: int
    mac: bytes  # of InfiniBand's 20 bytes the first 14, with the queue pair's number in them

    def is_of(self, link: Link) -> bool:
        """Whether it may be that interface, seen in any namespace."""
        whole = bytes.fromhex(link.mac.replace(":", ""))[: len(self.mac)]
        return self.link_type == link.link_type and self.mac[: len(whole)] == whole


def glance(route: Rtnetlink, name: str) -> Glance | None:
    """The interface of that name, or alternative name, in the socket's namespace."""
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
    return Glance(index, link_type, mac)


def has_name(route: Rtnetlink, name: str) -> bool:
    """Whether an interface of the socket's namespace has that name, or alternative name.

    Asked by binding the socket to it, for a moment. That takes no lock, while of a name that
    nothing has ioctl(2) thinks it is a module's, and starts modprobe(8) twice (dev_load,
    net/core/dev_ioctl.c): 200 ms on a slow machine.
    """
    encoded = name.encode(errors="surrogateescape")
    if len(encoded) >= IFNAMSIZ:  # one that the socket option cannot take
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
    question = _question()
    question["index"] = index
    return _get(route, f"looking up interface {index}", question, after)


def require(route: Rtnetlink, name: str) -> Link:
    """As `find`, but LinkMissing where there is none."""
    link = find(route, name)
    if link is None:
        raise LinkMissing(f'there is no interface "{name}"')
    return link


def every(route: Rtnetlink, kind: str = "") -> list[Link]:
    """All interfaces of the socket's namespace, or those of one kind."""
    question = _question()
    if kind:
        info = [("IFLA_INFO_KIND", kind)]
        question["attrs"].append(("IFLA_LINKINFO", {"attrs": info}))
    with trying("listing interfaces"):
        links = [_link(message) for message in route.dump(RTM_GETLINK, question)]
    # The kernel shows all of them where it does not know the kind.
    return [link for link in links if not kind or link.kind == kind]


def make_ipoib_child(
    route: Rtnetlink, name: str, parent: Link, pkey: int, mode: str, umcast: bool
) -> Link:
    """Make a child of an IPoIB parent (drivers/infiniband/ulp/ipoib/ipoib_netlink.c).

    No queue length is sent: the driver's own must hold (twice its send queue).
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
    """Move, rename and mark an interface in one message: each move costs a barrier of ~16 ms.

    The caller has seen that `name` is free over there: the kernel answers EEXIST only after the
    move. The MTU and the hardware address (6 bytes) are set if they are given. In do_setlink
    (net/core/rtnetlink.c) the order is: move, address, MTU, name, alias, up. So an interface
    that bears the alias has been moved.
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
    """Give an interface another name. Before Linux 6.2 it must be down."""
    request = _settings(link, ("IFLA_IFNAME", name))
    route.change(Change(f'renaming "{link.name}" to "{name}"', RTM_SETLINK, request))


def set_alias(route: Rtnetlink, link: Link, alias: str) -> None:
    """Set the alias; an empty one is none."""
    request = _settings(link, ("IFLA_IFALIAS", alias[: IFALIASZ - 1]))
    route.change(Change(f'setting the alias of "{link.name}"', RTM_SETLINK, request))


def set_mac(route: Rtnetlink, link: Link, mac: str) -> None:
    """Set the hardware address, of 6 bytes."""
    what = f'setting the hardware address of "{link.name}" to {mac}'
    route.change(Change(what, RTM_SETLINK, _settings(link, ("IFLA_ADDRESS", mac))))


def add_altname(route: Rtnetlink, link: Link, altname: str) -> None:
    """Give an interface one more name."""
    what = f'giving "{link.name}" the alternative name "{altname}"'
    flags = NLM_F_CREATE | NLM_F_EXCL
    route.change(Change(what, RTM_NEWLINKPROP, _altname(link, altname), flags))


def drop_altname(route: Rtnetlink, link: Link, altname: str) -> None:
    """Take an alternative name from an interface."""
    what = f'taking the alternative name "{altname}" from "{link.name}"'
    route.change(Change(what, RTM_DELLINKPROP, _altname(link, altname)))


def no_generated_address(link: Link) -> Change:
    """Keep the kernel from making an IPv6 link-local address when the interface comes up."""
    mode = [("IFLA_INET6_ADDR_GEN_MODE", IN6_ADDR_GEN_MODE_NONE)]
    request = _settings(link, ("IFLA_AF_SPEC", {"attrs": [("AF_INET6", {"attrs": mode})]}))
    what = f'setting the address generation mode of "{link.name}"'
    return Change(what, RTM_SETLINK, request, accepted=(errno.EAFNOSUPPORT,))


def up(link: Link) -> Change:
    """Set an interface up."""
    request = _settings(link)
    request["flags"] = request["change"] = IFF_UP
    return Change(f'setting "{link.name}" up', RTM_SETLINK, request)


def down(link: Link) -> Change:
    """Set an interface down."""
    request = _settings(link)
    request["flags"], request["change"] = 0, IFF_UP
    return Change(f'setting "{link.name}" down', RTM_SETLINK, request)


def flagged(link: Link, flags: int, among: int) -> Change:
    """Set those of the IFF_* in `among` that are in `flags`, and clear the others of them."""
    request = _settings(link)
    request["flags"], request["change"] = flags, among
    words = {IFF_PROMISC: "promisc", IFF_ALLMULTI: "allmulti"}
    what = " and ".join(
        f"{word} {'on' if flags & flag else 'off'}" for flag, word in words.items() if among & flag
    )
    return Change(f'setting {what} of "{link.name}"', RTM_SETLINK, request)


def permanent_mac(route: Rtnetlink, link: Link) -> str:
    """The hardware address that the device has of its own; "" where its driver does not tell."""
    question = _question()
    question["index"] = link.index
    with trying(f'looking up "{link.name}"'):
        _, part = route.ask(RTM_GETLINK, question)
    for kind, start, end in attributes(part, HEADER.size + IFINFOMSG.size, len(part)):
        if kind == IFLA_PERM_ADDRESS:
            return part[start:end].hex(":")
    return ""


def delete(route: Rtnetlink, link: Link) -> None:
    """Delete an interface; one that is gone already is fine."""
    what = f'deleting "{link.name}"'
    route.change(Change(what, RTM_DELLINK, _settings(link), accepted=(errno.ENODEV,)))


def _question() -> ifinfmsg:
    """A question about interfaces, without statistics: some are summed up over all CPUs."""
    question = ifinfmsg()
    question["attrs"] = [("IFLA_EXT_MASK", RTEXT_FILTER_SKIP_STATS)]
    return question


def _settings(link: Link, *attributes: tuple[str, object]) -> ifinfmsg:
    request = ifinfmsg()
    request["index"] = link.index
    request["attrs"] = list(attributes)
    return request


def _altname(link: Link, altname: str) -> ifinfmsg:
    return _settings(link, ("IFLA_PROP_LIST", {"attrs": [("IFLA_ALT_IFNAME", altname)]}))


def _get(
    route: Rtnetlink, what: str, question: ifinfmsg, after: Sequence[Change] = ()
) -> Link | None:
    try:
        return _link(route.get(RTM_GETLINK, question, after))
    except NetlinkError as refused:
        if refused.code == errno.ENODEV:
            return None
        raise explained(what, refused.code, refused.words) from None


def _link(message: ifinfmsg) -> Link:
    found = dict(message["attrs"])
    info = found.get("IFLA_LINKINFO")
    kind = (info.get_attr("IFLA_INFO_KIND") if info else None) or ""
    details = info.get_attr("IFLA_INFO_DATA") if info and kind == "ipoib" else None
    mode = details.get_attr("IFLA_IPOIB_MODE") if details else ""
    more = found.get("IFLA_PROP_LIST")
    return Link(
        index=message["index"],
        name=found["IFLA_IFNAME"],
        kind=kind,
        link_type=message["ifi_type"],
        mac=found.get("IFLA_ADDRESS") or "",
        broadcast=found.get("IFLA_BROADCAST") or "",
        mtu=found.get("IFLA_MTU") or 0,
        flags=message["flags"],
        alias=found.get("IFLA_IFALIAS") or "",
        parent=found.get("IFLA_LINK") or 0,
        device=found.get("IFLA_PARENT_DEV_NAME") or "",
        altnames=tuple(more.altnames()) if more else (),
        pkey=details.get_attr("IFLA_IPOIB_PKEY") if details else None,
        mode=mode or "",
        umcast=bool(details.get_attr("IFLA_IPOIB_UMCAST")) if details else False,
    )
