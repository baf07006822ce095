"""Creates, moves, configures and deletes interfaces. `links` looks interfaces up."""

import errno
from collections.abc import Mapping, Sequence

from pyroute2.netlink import NLM_F_CREATE, NLM_F_EXCL
from pyroute2.netlink.rtnl import (
    RTM_DELLINK,
    RTM_DELLINKPROP,
    RTM_NEWLINK,
    RTM_NEWLINKPROP,
    RTM_SETLINK,
)
from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP

from host.namespaces import NetworkNamespace
from host.netlink import links
from host.netlink.links import IFALIASZ, XDP_MODES, Link
from host.netlink.messages import LinkMessage, message
from host.netlink.sockets import ChangeRequest, Rtnetlink

IN6_ADDR_GEN_MODE_NONE = 1  # linux/if_link.h


def make_child(
    parents: Rtnetlink,
    pod: Rtnetlink,
    namespace: NetworkNamespace,
    name: str,
    index: int,
    parent: Link,
    kind: str,
    settings: Sequence[tuple[str, object]],
    mac: str = "",
) -> Link:
    """Create a child of `parent` in the pod. `settings` are attributes of the kind.

    `parents` is a socket in the parent's namespace. For IPoIB this skips two RCU waits of a move
    and a rename (drivers/infiniband/ulp/ipoib/ipoib_netlink.c). Neither namespace may have the name
    or the index (rtnl_newlink).
    """
    info = [("IFLA_INFO_KIND", kind), ("IFLA_INFO_DATA", {"attrs": list(settings)})]
    request = message(
        LinkMessage,
        [
            ("IFLA_IFNAME", name),
            ("IFLA_LINK", parent.index),
            ("IFLA_NET_NS_FD", namespace.descriptor),
            *([("IFLA_ADDRESS", mac)] if mac else []),
            ("IFLA_LINKINFO", {"attrs": info}),
        ],
        index=index,
    )
    words = ", ".join(f"{name.rpartition('_')[2].lower()} {value}" for name, value in settings)
    what = f'making a child of kind {kind} of "{parent.name}" with {words}'
    parents.change(ChangeRequest(what, RTM_NEWLINK, request, NLM_F_CREATE | NLM_F_EXCL))
    return links.require(pod, name)


def set_mtu(route: Rtnetlink, link: Link, mtu: int) -> None:
    route.change(_set(link, f'setting mtu {mtu} on "{link.name}"', ("IFLA_MTU", mtu)))


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

    `name` must be free in the target, because the kernel answers EEXIST only after the move.
    do_setlink (net/core/rtnetlink.c) uses this order: move, address, MTU, name, alias, up. So the
    alias proves that the move succeeded. An `mtu` of 0 or a `mac` of "" changes nothing.
    """
    request = _set(
        link,
        f'moving "{link.name}" into netns "{target.path}" as "{name}"',
        ("IFLA_NET_NS_FD", target.descriptor),
        ("IFLA_IFNAME", name),
        ("IFLA_IFALIAS", alias[: IFALIASZ - 1]),
        *([("IFLA_MTU", mtu)] if mtu else []),
        *([("IFLA_ADDRESS", mac)] if mac else []),
        flags=IFF_UP if up else 0,
        change=IFF_UP if up else 0,
    )
    route.change(request)


def finish(pod: Rtnetlink, link: Link, name: str, alias: str, mtu: int) -> None:
    """Give a new interface its MTU, its name and its alias, in this order (do_setlink)."""
    request = _set(
        link,
        f'setting mtu {mtu}, name "{name}" and the alias of "{link.name}"',
        *([("IFLA_MTU", mtu)] if mtu != link.mtu else []),
        *([("IFLA_IFNAME", name)] if name != link.name else []),
        ("IFLA_IFALIAS", alias[: IFALIASZ - 1]),
    )
    pod.change(request)


def rename(route: Rtnetlink, link: Link, name: str) -> None:
    """Rename an interface. Before Linux 6.2 the interface must be down."""
    route.change(_set(link, f'renaming "{link.name}" to "{name}"', ("IFLA_IFNAME", name)))


def set_alias(route: Rtnetlink, link: Link, alias: str) -> None:
    value = ("IFLA_IFALIAS", alias[: IFALIASZ - 1])
    route.change(_set(link, f'setting the alias of "{link.name}"', value))


def set_mac(route: Rtnetlink, link: Link, mac: str) -> None:
    what = f'setting the hardware address of "{link.name}" to {mac}'
    route.change(_set(link, what, ("IFLA_ADDRESS", mac)))


def add_altname(route: Rtnetlink, link: Link, altname: str) -> None:
    what = f'giving "{link.name}" the alternative name "{altname}"'
    flags = NLM_F_CREATE | NLM_F_EXCL
    route.change(ChangeRequest(what, RTM_NEWLINKPROP, _altname(link, altname), flags))


def drop_altname(route: Rtnetlink, link: Link, altname: str) -> None:
    what = f'removing the alternative name "{altname}" of "{link.name}"'
    route.change(ChangeRequest(what, RTM_DELLINKPROP, _altname(link, altname)))


def no_generated_address(link: Link) -> ChangeRequest:
    """Keep the kernel from making an IPv6 link-local address when the interface comes up."""
    mode = {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", IN6_ADDR_GEN_MODE_NONE)]}
    value = ("IFLA_AF_SPEC", {"attrs": [("AF_INET6", mode)]})
    what = f'setting the address generation mode of "{link.name}"'
    return _set(link, what, value)._replace(accepted=(errno.EAFNOSUPPORT,))


def up(link: Link) -> ChangeRequest:
    return _set(link, f'setting "{link.name}" up', flags=IFF_UP, change=IFF_UP)


def down(link: Link) -> ChangeRequest:
    return _set(link, f'setting "{link.name}" down', change=IFF_UP)


def flagged(link: Link, flags: int, mask: int) -> ChangeRequest:
    """Set the IFF_* bits of `mask` that are in `flags`. Clear the other bits of `mask`."""
    words = " and ".join(
        f"{word} {'on' if flags & flag else 'off'}"
        for word, flag in links.FLAGS.items()
        if mask & flag
    )
    return _set(link, f'setting {words} of "{link.name}"', flags=flags, change=mask)


def with_settings(link: Link, settings: Mapping[str, int], broadcast: str = "") -> ChangeRequest:
    """Set `settings` of `links.SETTINGS`, and the `broadcast` address unless it is ""."""
    words = [f"{name} {number}" for name, number in settings.items()]
    words += [f"broadcast {broadcast}"] if broadcast else []
    return _set(
        link,
        f'setting {", ".join(words)} of "{link.name}"',
        *((links.SETTINGS[name], number) for name, number in settings.items()),
        *([("IFLA_BROADCAST", broadcast)] if broadcast else []),
        # When an interface stops being dormant, the kernel does not change its state.
        *([("IFLA_OPERSTATE", "UP")] if settings.get("mode") == 0 else []),
    )


def without_xdp(link: Link, mode: str) -> ChangeRequest:
    """Detach the XDP program of that mode ("generic", "driver", "hardware")."""
    detached = [("IFLA_XDP_FD", -1), ("IFLA_XDP_FLAGS", XDP_MODES[mode][1])]
    value = ("IFLA_XDP", {"attrs": detached})
    return _set(link, f'detaching the XDP program of "{link.name}"', value)


def delete(route: Rtnetlink, link: Link) -> None:
    """Delete an interface, if it still exists."""
    what, request = f'deleting "{link.name}"', message(LinkMessage, index=link.index)
    route.change(ChangeRequest(what, RTM_DELLINK, request, accepted=(errno.ENODEV,)))


def _set(
    link: Link, what: str, *attributes: tuple[str, object], flags: int = 0, change: int = 0
) -> ChangeRequest:
    request = message(LinkMessage, attributes, index=link.index, flags=flags, change=change)
    return ChangeRequest(what, RTM_SETLINK, request)


def _altname(link: Link, altname: str) -> LinkMessage:
    names = {"attrs": [("IFLA_ALT_IFNAME", altname)]}
    return message(LinkMessage, [("IFLA_PROP_LIST", names)], index=link.index)
