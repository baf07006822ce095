"""Changes to interfaces: create, move, configure, delete.

`links` looks them up.
"""

import errno
from collections.abc import Mapping

from pyroute2.netlink import NLM_F_CREATE, NLM_F_EXCL
from pyroute2.netlink.rtnl import (
    RTM_DELLINK,
    RTM_DELLINKPROP,
    RTM_NEWLINK,
    RTM_NEWLINKPROP,
    RTM_SETLINK,
)
from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP

from host.errors import HostError
from host.namespaces import NetworkNamespace
from host.netlink import links
from host.netlink.links import IFALIASZ, XDP_MODES, Link
from host.netlink.messages import LinkMessage, message
from host.netlink.sockets import ChangeRequest, Rtnetlink

IN6_ADDR_GEN_MODE_NONE = 1  # linux/if_link.h


def make_ipoib_child(
    route: Rtnetlink, name: str, parent: Link, pkey: int, mode: str, umcast: bool
) -> Link:
    """Create a child of an IPoIB parent (drivers/infiniband/ulp/ipoib/ipoib_netlink.c).

    The message has no queue length, so that the driver's own applies (twice its send queue).
    """
    settings = [
        ("IFLA_IPOIB_PKEY", pkey),
        ("IFLA_IPOIB_MODE", mode),
        ("IFLA_IPOIB_UMCAST", int(umcast)),
    ]
    info = [("IFLA_INFO_KIND", "ipoib"), ("IFLA_INFO_DATA", {"attrs": settings})]
    request = message(
        LinkMessage,
        [
            ("IFLA_IFNAME", name),
            ("IFLA_LINK", parent.index),
            ("IFLA_LINKINFO", {"attrs": info}),
        ],
    )
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
    request = _settings(link, ("IFLA_MTU", mtu))
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
        ("IFLA_NET_NS_FD", target.descriptor),
        ("IFLA_IFNAME", name),
        ("IFLA_IFALIAS", alias[: IFALIASZ - 1]),
        *([("IFLA_MTU", mtu)] if mtu else []),
        *([("IFLA_ADDRESS", mac)] if mac else []),
        flags=IFF_UP if up else 0,
        change=IFF_UP if up else 0,
    )
    what = f'moving "{link.name}" into netns "{target.path}" as "{name}"'
    route.change(ChangeRequest(what, RTM_SETLINK, request))


def rename(route: Rtnetlink, link: Link, name: str) -> None:
    """Give an interface another name. Before Linux 6.2 it must be down."""
    request = _settings(link, ("IFLA_IFNAME", name))
    route.change(ChangeRequest(f'renaming "{link.name}" to "{name}"', RTM_SETLINK, request))


def set_alias(route: Rtnetlink, link: Link, alias: str) -> None:
    """Set the alias; an empty one is none."""
    request = _settings(link, ("IFLA_IFALIAS", alias[: IFALIASZ - 1]))
    route.change(ChangeRequest(f'setting the alias of "{link.name}"', RTM_SETLINK, request))


def set_mac(route: Rtnetlink, link: Link, mac: str) -> None:
    """Set the hardware address (6 bytes)."""
    what = f'setting the hardware address of "{link.name}" to {mac}'
    route.change(ChangeRequest(what, RTM_SETLINK, _settings(link, ("IFLA_ADDRESS", mac))))


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
    mode = {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", IN6_ADDR_GEN_MODE_NONE)]}
    request = _settings(link, ("IFLA_AF_SPEC", {"attrs": [("AF_INET6", mode)]}))
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
        *((links.SETTINGS[name], number) for name, number in settings.items()),
        *([("IFLA_BROADCAST", broadcast)] if broadcast else []),
        # The kernel leaves the state of a dormant interface as it is when the mode ends.
        *([("IFLA_OPERSTATE", "UP")] if settings.get("mode") == 0 else []),
    )
    words = [f"{name} {number}" for name, number in settings.items()]
    words += [f"broadcast {broadcast}"] if broadcast else []
    return ChangeRequest(f'setting {", ".join(words)} of "{link.name}"', RTM_SETLINK, request)


def without_xdp(link: Link, mode: str) -> ChangeRequest:
    """Detach the XDP program of that mode ("generic", "driver", "hardware")."""
    detached = [("IFLA_XDP_FD", -1), ("IFLA_XDP_FLAGS", XDP_MODES[mode][1])]
    request = _settings(link, ("IFLA_XDP", {"attrs": detached}))
    return ChangeRequest(f'detaching the XDP program of "{link.name}"', RTM_SETLINK, request)


def delete(route: Rtnetlink, link: Link) -> None:
    """Delete an interface, if it still exists."""
    what = f'deleting "{link.name}"'
    route.change(ChangeRequest(what, RTM_DELLINK, _settings(link), accepted=(errno.ENODEV,)))


def _settings(
    link: Link, *attributes: tuple[str, object], flags: int = 0, change: int = 0
) -> LinkMessage:
    return message(LinkMessage, attributes, index=link.index, flags=flags, change=change)


def _altname(link: Link, altname: str) -> LinkMessage:
    return _settings(link, ("IFLA_PROP_LIST", {"attrs": [("IFLA_ALT_IFNAME", altname)]}))
