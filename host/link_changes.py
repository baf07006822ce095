"""Changes to interfaces: create, move, configure, delete.

`links` looks them up.
"""

import errno
import socket
import struct
from collections.abc import Mapping

from host import links
from host.errors import HostError
from host.links import IFALIASZ, IFF_UP, IPOIB_MODES, XDP_MODES, Link
from host.namespaces import NetworkNamespace
from host.netlink import (
    NLA_F_NESTED,
    NLM_F_CREATE,
    NLM_F_EXCL,
    ChangeRequest,
    Rtnetlink,
    attribute,
    number,
    string,
)
from host.rtnetlink import (
    IFINFOMSG,
    IFLA_ADDRESS,
    IFLA_AF_SPEC,
    IFLA_ALT_IFNAME,
    IFLA_BROADCAST,
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
    IFLA_OPERSTATE,
    IFLA_PROP_LIST,
    IFLA_XDP,
    IFLA_XDP_FD,
    IFLA_XDP_FLAGS,
    RTM_DELLINK,
    RTM_DELLINKPROP,
    RTM_NEWLINK,
    RTM_NEWLINKPROP,
    RTM_SETLINK,
)

IN6_ADDR_GEN_MODE_NONE = 1  # linux/if_link.h
IF_OPER_UP = 6  # linux/if.h
_U16, _S32 = struct.Struct("=H"), struct.Struct("=i")


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
    route.change(ChangeRequest(what, RTM_NEWLINK, request, NLM_F_CREATE | NLM_F_EXCL))
    child = links.require(route, name)
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
    route.change(ChangeRequest(f'setting mtu {mtu} on "{link.name}"', RTM_SETLINK, request))


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
    route.change(ChangeRequest(what, RTM_SETLINK, request))


def rename(route: Rtnetlink, link: Link, name: str) -> None:
    """Give an interface another name. Before Linux 6.2 it must be down."""
    request = _settings(link, string(IFLA_IFNAME, name))
    route.change(ChangeRequest(f'renaming "{link.name}" to "{name}"', RTM_SETLINK, request))


def set_alias(route: Rtnetlink, link: Link, alias: str) -> None:
    """Set the alias; an empty one is none."""
    request = _settings(link, string(IFLA_IFALIAS, alias[: IFALIASZ - 1]))
    route.change(ChangeRequest(f'setting the alias of "{link.name}"', RTM_SETLINK, request))


def set_mac(route: Rtnetlink, link: Link, mac: str) -> None:
    """Set the hardware address (6 bytes)."""
    what = f'setting the hardware address of "{link.name}" to {mac}'
    route.change(
        ChangeRequest(what, RTM_SETLINK, _settings(link, attribute(IFLA_ADDRESS, _packed(mac))))
    )


def add_altname(route: Rtnetlink, link: Link, altname: str) -> None:
    """Add an alternative name to an interface."""
    what = f'giving "{link.name}" the alternative name "{altname}"'
    flags = NLM_F_CREATE | NLM_F_EXCL
    route.change(ChangeRequest(what, RTM_NEWLINKPROP, _altname(link, altname), flags))


def drop_altname(route: Rtnetlink, link: Link, altname: str) -> None:
    """Remove an alternative name from an interface."""
    what = f'removing the alternative name "{altname}" of "{link.name}"'
    route.change(ChangeRequest(what, RTM_DELLINKPROP, _altname(link, altname)))


def no_generated_address(link: Link) -> ChangeRequest:
    """Keep the kernel from making an IPv6 link-local address when the interface comes up."""
    mode = attribute(IFLA_INET6_ADDR_GEN_MODE, bytes((IN6_ADDR_GEN_MODE_NONE,)))
    request = _settings(link, attribute(IFLA_AF_SPEC, attribute(socket.AF_INET6, mode)))
    what = f'setting the address generation mode of "{link.name}"'
    return ChangeRequest(what, RTM_SETLINK, request, accepted=(errno.EAFNOSUPPORT,))


def up(link: Link) -> ChangeRequest:
    """Set an interface up."""
    request = _settings(link, flags=IFF_UP, change=IFF_UP)
    return ChangeRequest(f'setting "{link.name}" up', RTM_SETLINK, request)


def down(link: Link) -> ChangeRequest:
    """Set an interface down."""
    request = _settings(link, change=IFF_UP)
    return ChangeRequest(f'setting "{link.name}" down', RTM_SETLINK, request)


def flagged(link: Link, flags: int, among: int) -> ChangeRequest:
    """Set those of the IFF_* in `among` that are in `flags`, and clear the others of them."""
    request = _settings(link, flags=flags, change=among)
    what = " and ".join(
        f"{word} {'on' if flags & flag else 'off'}"
        for word, flag in links.FLAGS.items()
        if among & flag
    )
    return ChangeRequest(f'setting {what} of "{link.name}"', RTM_SETLINK, request)


def with_settings(link: Link, settings: Mapping[str, int], broadcast: str = "") -> ChangeRequest:
    """Set these of `links.SETTINGS` and, unless it is "", the broadcast address."""
    request = _settings(
        link,
        b"".join(
            attribute(kind, form.pack(settings[name]))
            for name, (kind, form) in links.SETTINGS.items()
            if name in settings
        )
        + (attribute(IFLA_BROADCAST, _packed(broadcast)) if broadcast else b"")
        # The kernel leaves the state of a dormant interface as it is when the mode ends.
        + (attribute(IFLA_OPERSTATE, bytes((IF_OPER_UP,))) if settings.get("mode") == 0 else b""),
    )
    words = [f"{name} {number}" for name, number in settings.items()]
    words += [f"broadcast {broadcast}"] if broadcast else []
    return ChangeRequest(f'setting {", ".join(words)} of "{link.name}"', RTM_SETLINK, request)


def without_xdp(link: Link, mode: str) -> ChangeRequest:
    """Detach the XDP program of that mode ("generic", "driver", "hardware")."""
    flag = XDP_MODES[mode][1]
    detached = attribute(IFLA_XDP_FD, _S32.pack(-1)) + number(IFLA_XDP_FLAGS, flag)
    request = _settings(link, attribute(IFLA_XDP | NLA_F_NESTED, detached))
    return ChangeRequest(f'detaching the XDP program of "{link.name}"', RTM_SETLINK, request)


def delete(route: Rtnetlink, link: Link) -> None:
    """Delete an interface, if it still exists."""
    what = f'deleting "{link.name}"'
    route.change(ChangeRequest(what, RTM_DELLINK, _settings(link), accepted=(errno.ENODEV,)))


def _settings(link: Link, attributes: bytes = b"", *, flags: int = 0, change: int = 0) -> bytes:
    return IFINFOMSG.pack(0, 0, link.index, flags, change) + attributes


def _altname(link: Link, altname: str) -> bytes:
    listed = attribute(IFLA_PROP_LIST | NLA_F_NESTED, string(IFLA_ALT_IFNAME, altname))
    return _settings(link, listed)


def _packed(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))
