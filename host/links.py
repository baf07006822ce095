"""Interfaces, as the kernel shows them. `link_changes` creates, moves, configures, deletes them.

An interface's index identifies it within one namespace. The kernel may assign another index when
an interface moves, so look it up again after a move.
"""

import errno
import fcntl
import struct
from collections.abc import Sequence

import msgspec

from host.errors import HostError, LinkMissing, explained
from host.netlink import (
    HEADER,
    ChangeRequest,
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
    IFLA_ALT_IFNAME,
    IFLA_BROADCAST,
    IFLA_EXT_MASK,
    IFLA_GRO_IPV4_MAX_SIZE,
    IFLA_GRO_MAX_SIZE,
    IFLA_GROUP,
    IFLA_GSO_IPV4_MAX_SIZE,
    IFLA_GSO_MAX_SEGS,
    IFLA_GSO_MAX_SIZE,
    IFLA_IFALIAS,
    IFLA_IFNAME,
    IFLA_INFO_DATA,
    IFLA_INFO_KIND,
    IFLA_IPOIB_MODE,
    IFLA_IPOIB_PKEY,
    IFLA_IPOIB_UMCAST,
    IFLA_LINK,
    IFLA_LINKINFO,
    IFLA_LINKMODE,
    IFLA_MTU,
    IFLA_PARENT_DEV_NAME,
    IFLA_PERM_ADDRESS,
    IFLA_PROP_LIST,
    IFLA_TXQLEN,
    IFLA_XDP,
    IFLA_XDP_DRV_PROG_ID,
    IFLA_XDP_HW_PROG_ID,
    IFLA_XDP_SKB_PROG_ID,
    RTEXT_FILTER_SKIP_STATS,
    RTM_GETLINK,
)

ARPHRD_ETHER = 1  # linux/if_arp.h
ARPHRD_INFINIBAND = 32
IFF_UP, IFF_PROMISC, IFF_ALLMULTI = 0x1, 0x100, 0x200  # linux/if.h
IFF_RUNNING, IFF_LOWER_UP = 0x40, 0x10000
_CARRIER = IFF_RUNNING | IFF_LOWER_UP
IFNAMSIZ, IFALIASZ = 16, 256
SIOCGIFFLAGS, SIOCGIFHWADDR, SIOCGIFINDEX = 0x8913, 0x8927, 0x8933  # linux/sockios.h
_U16 = struct.Struct("=H")
_IFREQ = struct.Struct("=16si20x")  # struct ifreq, netdevice(7): with an index,
_IFREQ_FLAGS = struct.Struct("=16sH22x")
_IFREQ_ADDRESS = struct.Struct("=16sH14s8x")  # with a hardware address
IPOIB_MODES = ("datagram", "connected")  # IPOIB_MODE_*, linux/if_link.h

FLAGS = {
    "promisc": IFF_PROMISC,
    "allmulti": IFF_ALLMULTI,
    "debug": 0x4,
    "notrailers": 0x20,
    "noarp": 0x80,
    "multicast": 0x1000,
    "portsel": 0x2000,
    "automedia": 0x4000,
    "dynamic": 0x8000,
}
"""The flags of linux/if.h that a user can set, besides IFF_UP (__dev_change_flags)."""

_U8, _U32 = struct.Struct("=B"), struct.Struct("=I")
SETTINGS = {
    "txqueuelen": (IFLA_TXQLEN, _U32),
    "group": (IFLA_GROUP, _U32),
    "mode": (IFLA_LINKMODE, _U8),  # 1: dormant, so that it never gets into operation
    "gso_max_segs": (IFLA_GSO_MAX_SEGS, _U32),
    "gso_max_size": (IFLA_GSO_MAX_SIZE, _U32),
    "gro_max_size": (IFLA_GRO_MAX_SIZE, _U32),
    "gso_ipv4_max_size": (IFLA_GSO_IPV4_MAX_SIZE, _U32),  # since Linux 6.3
    "gro_ipv4_max_size": (IFLA_GRO_IPV4_MAX_SIZE, _U32),
}
"""Settings that are kept when an interface moves to another namespace, as ip-link(8) calls them."""

XDP_MODES = {  # where the kernel shows the program's id, and the flag that names the mode
    "generic": (IFLA_XDP_SKB_PROG_ID, 0x2),
    "driver": (IFLA_XDP_DRV_PROG_ID, 0x4),
    "hardware": (IFLA_XDP_HW_PROG_ID, 0x8),
}

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
    settings: dict[str, int] = {}  # those of SETTINGS that this kernel has
    xdp: tuple[str, ...] = ()  # those of XDP_MODES in which it has a program

    @property
    def up(self) -> bool:
        """Whether it is administratively up. On InfiniBand this does not mean it can be used."""
        return bool(self.flags & IFF_UP)

    @property
    def carrier(self) -> bool:
        """Whether the link can carry frames; on IPoIB this needs the broadcast group.

        For a moment after IFF_LOWER_UP it cannot: the kernel has yet to start its queues and to add
        the route for IPv6 multicast (linkwatch_do_dev, addrconf_notify). IFF_RUNNING alone may be
        from before the interface moved.
        """
        return self.flags & _CARRIER == _CARRIER

    @property
    def link_type_name(self) -> str:
        """The link type as `ip link` prints it."""
        return LINK_TYPES.get(self.link_type, str(self.link_type))


def find(route: Rtnetlink, name: str) -> Link | None:
    """The interface of that name, or alternative name, in the socket's namespace."""
    part = message_of(route, name)
    return None if part is None else of_message(part)


def message_of(route: Rtnetlink, name: str, more: int = 0) -> bytes | None:
    """The kernel's message about the interface of that name; None if there is none.

    `more`: what to ask for besides (RTEXT_FILTER_* of linux/rtnetlink.h).
    """
    short = len(name.encode(errors="surrogateescape")) < IFNAMSIZ
    named = string(IFLA_IFNAME if short else IFLA_ALT_IFNAME, name)
    return _get(route, f'looking up interface "{name}"', _question(attributes=named, more=more))


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


def is_running(route: Rtnetlink, name: str) -> bool:
    """Whether the interface with that name is up and has carrier, at a tenth of a look-up's cost.

    True also if that cannot be told, because it has gone or has another name: a look-up can.
    """
    request = name.encode(errors="surrogateescape").ljust(_IFREQ.size, b"\0")
    try:
        return bool(_IFREQ_FLAGS.unpack(fcntl.ioctl(route, SIOCGIFFLAGS, request))[1] & IFF_RUNNING)
    except OSError:
        return True


def by_index(route: Rtnetlink, index: int, after: Sequence[ChangeRequest] = ()) -> Link | None:
    """The interface of that index in the socket's namespace, after these changes."""
    part = _get(route, f"looking up interface {index}", _question(index), after)
    return None if part is None else of_message(part)


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
        links = [
            of_message(part) for _, part in route.table(RTM_GETLINK, _question(attributes=info))
        ]
    # The kernel shows all of them where it does not know the kind.
    return [link for link in links if not kind or link.kind == kind]


def permanent_mac(route: Rtnetlink, link: Link) -> str:
    """The hardware address that the device has of its own; "" where its driver does not tell."""
    with trying(f'looking up "{link.name}"'):
        _, part = route.ask(RTM_GETLINK, _question(link.index))
    return fields(part, HEADER.size + IFINFOMSG.size).get(IFLA_PERM_ADDRESS, b"").hex(":")


def _question(index: int = 0, attributes: bytes = b"", more: int = 0) -> bytes:
    """A question about interfaces, without statistics: some are summed up over all CPUs."""
    mask = number(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS | more)
    return IFINFOMSG.pack(0, 0, index, 0, 0) + mask + attributes


def _get(
    route: Rtnetlink, what: str, question: bytes, after: Sequence[ChangeRequest] = ()
) -> bytes | None:
    try:
        return route.ask(RTM_GETLINK, question, after=after)[1]
    except NetlinkError as refused:
        if refused.code == errno.ENODEV:
            return None
        raise explained(what, refused.code, refused.words) from None


def of_message(part: bytes) -> Link:
    """An interface from the kernel's RTM_NEWLINK, with the netlink header in front."""
    _, link_type, index, flags, _ = IFINFOMSG.unpack_from(part, HEADER.size)
    shown = fields(part, HEADER.size + IFINFOMSG.size)
    info = fields(shown[IFLA_LINKINFO]) if IFLA_LINKINFO in shown else {}
    kind = text(info.get(IFLA_INFO_KIND, b""))
    pkey = mode = umcast = None
    if kind == "ipoib":
        ipoib = fields(info.get(IFLA_INFO_DATA, b""))
        pkey, mode, umcast = (
            _U16.unpack(ipoib[key])[0] if key in ipoib else None
            for key in (IFLA_IPOIB_PKEY, IFLA_IPOIB_MODE, IFLA_IPOIB_UMCAST)
        )
    listed = shown.get(IFLA_PROP_LIST, b"")
    xdp = fields(shown.get(IFLA_XDP, b""))
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
        )
        if listed
        else (),
        pkey=pkey,
        mode=IPOIB_MODES[mode] if mode is not None and mode < len(IPOIB_MODES) else "",
        umcast=bool(umcast),
        settings={
            name: form.unpack_from(shown[kind])[0]
            for name, (kind, form) in SETTINGS.items()
            if kind in shown
        },
        xdp=tuple(name for name, (kind, _) in XDP_MODES.items() if kind in xdp),
    )
