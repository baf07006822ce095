"""Looks interfaces up. `link_changes` creates, moves, configures and deletes interfaces.

An index identifies an interface within one namespace. A move may change the index, so a caller
looks the interface up again after a move.
"""

import errno
import fcntl
import struct
import time
from collections.abc import Sequence

import msgspec
from pyroute2.netlink.rtnl import IFNAMSIZ, RTM_GETLINK
from pyroute2.netlink.rtnl.ifinfmsg import (
    IFF_LOWER_UP,
    IFF_NAMES,
    IFF_RUNNING,
    IFF_UP,
    XDP_FLAGS_DRV_MODE,
    XDP_FLAGS_HW_MODE,
    XDP_FLAGS_SKB_MODE,
)

from base import interrupts
from base.interrupts import wait_until
from host.errors import HostError, LinkMissing, explained
from host.netlink.messages import LinkMessage, attributes, message
from host.netlink.sockets import ChangeRequest, NetlinkError, Rtnetlink, trying

ARPHRD_ETHER = 1  # linux/if_arp.h
ARPHRD_INFINIBAND = 32
_CARRIER = IFF_RUNNING | IFF_LOWER_UP
IFALIASZ = 256
_CARRIER_PAUSE = 0.002  # seconds between the first two checks for carrier
SIOCGIFFLAGS, SIOCGIFHWADDR, SIOCGIFINDEX = 0x8913, 0x8927, 0x8933  # linux/sockios.h
_IFREQ = struct.Struct("=16si20x")  # struct ifreq, netdevice(7), with an index
_IFREQ_FLAGS = struct.Struct("=16sH22x")
_IFREQ_ADDRESS = struct.Struct("=16sH14s8x")  # with a hardware address

_FLAGS = "promisc allmulti debug notrailers noarp multicast portsel automedia dynamic"
FLAGS = {name: int(IFF_NAMES[f"IFF_{name.upper()}"]) for name in _FLAGS.split()}
"""The flags of linux/if.h that a user can set, without IFF_UP (__dev_change_flags)."""

SETTINGS = {
    "txqueuelen": "IFLA_TXQLEN",
    "group": "IFLA_GROUP",
    "mode": "IFLA_LINKMODE",  # 1: dormant, so that the interface's state never becomes UP
    "gso_max_segs": "IFLA_GSO_MAX_SEGS",
    "gso_max_size": "IFLA_GSO_MAX_SIZE",
    "gro_max_size": "IFLA_GRO_MAX_SIZE",
    "gso_ipv4_max_size": "IFLA_GSO_IPV4_MAX_SIZE",  # since Linux 6.3
    "gro_ipv4_max_size": "IFLA_GRO_IPV4_MAX_SIZE",
}
"""Settings that a move to another namespace does not reset, by their names in ip-link(8)."""

XDP_MODES = {  # the attribute with the program's id, and the flag of the mode
    "generic": ("IFLA_XDP_SKB_PROG_ID", XDP_FLAGS_SKB_MODE),
    "driver": ("IFLA_XDP_DRV_PROG_ID", XDP_FLAGS_DRV_MODE),
    "hardware": ("IFLA_XDP_HW_PROG_ID", XDP_FLAGS_HW_MODE),
}

_WITH_DATA = ("ipoib", "macvlan", "ipvlan", "vlan")  # the kinds whose data are read
IPVLAN_MODES = ("l2", "l3", "l3s")  # in the order of enum ipvlan_mode (linux/if_link.h)

LINK_TYPES = {ARPHRD_ETHER: "ether", ARPHRD_INFINIBAND: "infiniband", 772: "loopback"}


class Link(msgspec.Struct, frozen=True, kw_only=True):
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
    mode: str = ""  # of IPoIB ("datagram"), macvlan ("bridge") or ipvlan ("l2")
    umcast: bool = False
    vlan: int = 0  # the VLAN ID of a VLAN interface
    settings: dict[str, int] = {}  # the SETTINGS that this kernel has
    xdp: tuple[str, ...] = ()  # the XDP_MODES in which the interface has a program

    @property
    def up(self) -> bool:
        """Whether the interface is administratively up. Frames also need `carrier`."""
        return bool(self.flags & IFF_UP)

    @property
    def carrier(self) -> bool:
        """Whether the link can carry frames. An IPoIB interface first joins its broadcast group.

        IFF_LOWER_UP comes before the kernel starts the queues and adds the route for IPv6 multicast
        (linkwatch_do_dev, addrconf_notify). After a move, IFF_RUNNING may be out of date.
        """
        return bool(self.flags & _CARRIER == _CARRIER)

    @property
    def link_type_name(self) -> str:
        """The link type in the words of `ip link`."""
        return LINK_TYPES.get(self.link_type, str(self.link_type))


def find(route: Rtnetlink, name: str) -> Link | None:
    """The interface with that name or alternative name in the socket's namespace, if any."""
    answer = message_of(route, name)
    return None if answer is None else of_message(answer)


def message_of(
    route: Rtnetlink, name: str, form: type[LinkMessage] = LinkMessage
) -> LinkMessage | None:
    """The kernel's message about the interface of that name, if it exists."""
    short = len(name.encode(errors="surrogateescape")) < IFNAMSIZ
    named = question(("IFLA_IFNAME" if short else "IFLA_ALT_IFNAME", name), form=form)
    return _get(route, f'looking up interface "{name}"', named)


class LinkIdentity(msgspec.Struct, frozen=True):
    """The properties of an interface that can be read without the RTNL lock."""

    index: int
    link_type: int
    mac: bytes  # the first 14 of InfiniBand's 20 bytes, which include the queue pair's number

    def is_of(self, link: Link) -> bool:
        """Whether the properties fit `link`. Ignores the index, which a move may change."""
        whole = bytes.fromhex(link.mac.replace(":", ""))[: len(self.mac)]
        return self.link_type == link.link_type and self.mac[: len(whole)] == whole


def identify(route: Rtnetlink, name: str) -> LinkIdentity | None:
    """Identify the interface with that name or alternative name, without the RTNL lock."""
    encoded = name.encode(errors="surrogateescape")
    if len(encoded) >= IFNAMSIZ:
        raise HostError(f'looking up interface "{name}": the name is too long')
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

    Binds the socket to the interface for a moment, which needs no RTNL lock. ioctl(2) with an
    unknown name would start modprobe(8) twice (dev_load, net/core/dev_ioctl.c), which may take 200
    ms.
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
    """Whether the interface is up and has carrier. This takes a tenth of a look-up's time."""
    request = name.encode(errors="surrogateescape").ljust(_IFREQ.size, b"\0")
    try:
        return bool(_IFREQ_FLAGS.unpack(fcntl.ioctl(route, SIOCGIFFLAGS, request))[1] & IFF_RUNNING)
    except OSError:  # the interface has gone or has another name: the caller's look-up reports that
        return True


def by_index(route: Rtnetlink, index: int, after: Sequence[ChangeRequest] = ()) -> Link | None:
    """Make the changes `after`, then look up the interface by its index."""
    answer = _get(route, f"looking up interface {index}", question(index=index), after)
    return None if answer is None else of_message(answer)


def require(route: Rtnetlink, name: str) -> Link:
    """The interface with that name. Raises LinkMissing if it does not exist."""
    link = find(route, name)
    if link is None:
        raise LinkMissing(f'interface "{name}" does not exist')
    return link


def await_carrier(pod: Rtnetlink, link: Link, seconds: float) -> Link:
    """Wait up to `seconds` for carrier. Returns the last state. Raises LinkMissing."""
    latest = link
    end = 0.0

    def has_carrier() -> bool:
        nonlocal latest
        if not is_running(pod, link.name) and time.monotonic() < end:
            return False
        now = by_index(pod, link.index)
        if now is None:
            raise LinkMissing(
                f'interface "{link.name}" has gone from the pod while podfabric set it up'
            )
        latest = now
        return now.carrier

    if seconds and not link.carrier:
        interrupts.checkpoint()
        time.sleep(_CARRIER_PAUSE)
        end = time.monotonic() + seconds
        wait_until(has_carrier, seconds, pause=2 * _CARRIER_PAUSE)
    return latest


def every(route: Rtnetlink, kind: str = "") -> list[Link]:
    """All interfaces of the socket's namespace, or those of one kind."""
    of_kind = [("IFLA_LINKINFO", {"attrs": [("IFLA_INFO_KIND", kind)]})] if kind else []
    with trying("listing interfaces"):
        links = [of_message(answer) for answer in route.table(RTM_GETLINK, question(*of_kind))]
    # For a kind that the kernel does not know, the kernel lists all interfaces.
    return [link for link in links if not kind or link.kind == kind]


def permanent_mac(route: Rtnetlink, link: Link) -> str:
    """The device's permanent hardware address; "" if its driver does not report it."""
    with trying(f'looking up "{link.name}"'):
        answer = route.ask(RTM_GETLINK, question(index=link.index))
    return str(answer.get_attr("IFLA_PERM_ADDRESS", ""))


def question(
    *named: tuple[str, object], index: int = 0, form: type[LinkMessage] = LinkMessage
) -> LinkMessage:
    """A request for the state of interfaces."""
    return message(form, [("IFLA_EXT_MASK", form.ext_mask), *named], index=index)


def _get(
    route: Rtnetlink, what: str, request: LinkMessage, after: Sequence[ChangeRequest] = ()
) -> LinkMessage | None:
    try:
        answer: LinkMessage = route.ask(RTM_GETLINK, request, after=after)
    except NetlinkError as refused:
        if refused.code == errno.ENODEV:
            return None
        raise explained(what, refused.code, refused.words) from None
    return answer


def of_message(answer: LinkMessage) -> Link:
    """An interface from the kernel's RTM_NEWLINK."""
    shown = attributes(answer)
    info = shown.get("IFLA_LINKINFO")
    kind = info.get_attr("IFLA_INFO_KIND", "") if info else ""
    data = attributes(info.get_attr("IFLA_INFO_DATA")) if info and kind in _WITH_DATA else {}
    mode = data.get(f"IFLA_{kind.upper()}_MODE", "")
    if kind == "ipvlan":
        mode = dict(enumerate(IPVLAN_MODES)).get(mode)
    xdp = shown.get("IFLA_XDP")
    programs = attributes(xdp) if xdp else ()
    return Link(
        index=answer["index"],
        name=shown["IFLA_IFNAME"],
        kind=kind,
        link_type=answer["ifi_type"],
        mac=shown.get("IFLA_ADDRESS", ""),
        broadcast=shown.get("IFLA_BROADCAST", ""),
        mtu=shown.get("IFLA_MTU", 0),
        flags=answer["flags"],
        alias=shown.get("IFLA_IFALIAS", ""),
        parent=shown.get("IFLA_LINK", 0),
        device=shown.get("IFLA_PARENT_DEV_NAME", ""),
        altnames=tuple(shown["IFLA_PROP_LIST"].altnames()) if "IFLA_PROP_LIST" in shown else (),
        pkey=data.get("IFLA_IPOIB_PKEY"),
        mode=mode if isinstance(mode, str) else "",
        umcast=bool(data.get("IFLA_IPOIB_UMCAST")),
        vlan=data.get("IFLA_VLAN_ID", 0),
        settings={name: shown[kind] for name, kind in SETTINGS.items() if kind in shown},
        xdp=tuple(name for name, (kind, _) in XDP_MODES.items() if kind in programs),
    )
