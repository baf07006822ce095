"""Moves an interface into a pod, and restores it on the host.

A moved interface gets a mark, because a name does not identify an interface. The mark is an alias
made from the attachment's key. A pod may overwrite the alias, so podfabric also compares properties
that a pod cannot change.
"""

import errno
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from pyroute2.netlink.rtnl.ifinfmsg import IFF_LOWER_UP, IFF_RUNNING, IFF_UP

from host.errors import HostError, LinkMissing
from host.namespaces import NetworkNamespace
from host.netlink import link_changes, links
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink

ALIAS_PREFIX = "podfabric:"
TEMPORARY_PREFIX = "pf"
_INDEXES = 0x70000000  # of interfaces made in pods; the kernel counts from 1
MODES = links.FLAGS["promisc"] | links.FLAGS["allmulti"]
_FLAGS = sum(links.FLAGS.values())

# A move holds the kernel's RTNL lock for ~16 ms. The kernel grants the lock in order of arrival. If
# all threads moved at once, each interface would get its address only after all moves. With two
# moves at a time the lock is never idle.
_moving = threading.BoundedSemaphore(2)


class NameTaken(HostError):
    """Another interface has the name."""


class Mark(msgspec.Struct, frozen=True):
    """Identifies an attachment's interface."""

    key: str  # the attachment's key, 32 hex digits

    @property
    def alias(self) -> str:
        """The alias of the interface after the move."""
        return ALIAS_PREFIX + self.key

    @property
    def temporary_name(self) -> str:
        """A name on the host that is unique to the attachment: 15 bytes."""
        return TEMPORARY_PREFIX + self.key[:13]

    @property
    def index(self) -> int:
        """The index of an interface made in the pod. 24 bits are of the key.

        If the kernel chose the index of the parent, IFLA_LINK would be missing (nla_put_iflink).
        """
        return _INDEXES | int(self.key[:6], 16)

    def is_on_new(self, link: Link) -> bool:
        """Whether an interface without an alias has the index or the temporary name."""
        return not link.alias and (link.index == self.index or link.name == self.temporary_name)


def is_unfinished(link: Link) -> bool:
    """Whether an interface without an alias has the index of a mark."""
    return not link.alias and link.index & ~0xFFFFFF == _INDEXES


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The properties to restore for an interface on the host. Default values are not restored."""

    name: str
    kind: str
    mac: str
    mtu: int
    up: bool
    alias: str = ""
    device: str = ""
    altnames: tuple[str, ...] = ()
    flags: int = 0  # the flags of `flags_known` that are set
    flags_known: int = MODES
    broadcast: str = ""
    settings: dict[str, int] = {}  # of links.SETTINGS
    xdp: tuple[str, ...] | None = None  # modes in which the interface has an XDP program


def origin_of(link: Link) -> Origin:
    return Origin(
        name=link.name,
        kind=link.kind,
        mac=link.mac,
        mtu=link.mtu,
        up=link.up,
        alias=link.alias,
        device=link.device,
        altnames=link.altnames,
        flags=link.flags & _FLAGS,
        flags_known=_FLAGS,
        broadcast=link.broadcast if link.link_type == links.ARPHRD_ETHER else "",
        settings=link.settings,
        xdp=link.xdp,
    )


def require_free(pod: Rtnetlink, name: str) -> None:
    """Raise NameTaken if the pod has the name: the kernel refuses the name only after a move."""
    if not links.has_name(pod, name):
        return
    taken = links.find(pod, name)
    what = f"a link of kind {taken.kind}" if taken is not None and taken.kind else "a link"
    raise NameTaken(f'the pod already has {what} named "{name}"')


def move_in(
    host: Rtnetlink,
    pod: Rtnetlink,
    namespace: NetworkNamespace,
    link: Link,
    name: str,
    mark: Mark,
    *,
    mtu: int = 0,
) -> Link:
    """Move an interface into the pod, rename it to `name` and mark it. Returns its new state.

    The name must be free. An `mtu` of 0 leaves the MTU unchanged. A move may change the index, so
    the interface is looked up again. The look-up avoids the RTNL lock, which other moves hold.
    `interface_addresses.configure` checks the mark.

    Raises HostError, and LinkMissing if another interface in the pod has that name.
    """
    _drop_clashing_altnames(host, pod, link, name)
    with _moving:
        link_changes.move(host, link, namespace, name, mark.alias, mtu=mtu)
    seen = links.identify(pod, name)
    if seen is not None and seen.is_of(link):
        flags = link.flags & ~(IFF_UP | IFF_RUNNING | IFF_LOWER_UP)
        return msgspec.structs.replace(
            link, index=seen.index, name=name, alias=mark.alias, flags=flags, mtu=mtu or link.mtu
        )
    # The address may differ: a VF that goes down in a move takes the address that its PF has set.
    moved = links.by_index(pod, seen.index) if seen is not None else None
    if moved is None or moved.alias != mark.alias:
        raise LinkMissing(f'interface "{name}" has gone from the pod right after its move')
    return moved


def set_address(route: Rtnetlink, link: Link, mac: str) -> None:
    """Set an interface's hardware address (6 bytes).

    Once the PF has set an address, some drivers (igb) let no untrusted VF set its own address. The
    VF takes the PF's address when the VF's interface is set down.
    """
    try:
        link_changes.set_mac(route, link, mac)
    except HostError as refusal:
        if refusal.code not in (errno.EADDRNOTAVAIL, errno.EPERM, errno.EACCES):
            raise
        again = [link_changes.up(link)] if link.up else []
        now = links.by_index(
            route, link.index, after=[link_changes.up(link), link_changes.down(link), *again]
        )
        if now is None or now.mac != mac:
            raise


def find(route: Rtnetlink, names: Sequence[str], origin: Origin, mark: Mark) -> Link | None:
    """Find an attachment's interface in a namespace, under any name.

    `names` are tried first, in their order. A pod can change or forge the mark, so a hardware
    interface is identified by its device. If a device has two interfaces, the mark or else the
    address decides. An interface without a device is found by the mark, or by name, kind and
    address together.
    """
    for position, name in enumerate(names):
        # A check whether a name exists takes less time than a look-up that fails.
        likely = position == 0 or links.has_name(route, name)
        link = links.find(route, name) if likely else None
        if link is None or (origin.device and not _is_of_device(link, origin)):
            continue
        if link.alias == mark.alias or _is_unmarked(link, origin):
            return link
    present = links.every(route)
    if origin.device:
        same = [link for link in present if _is_of_device(link, origin)]
        for found in (
            [link for link in same if link.alias == mark.alias],
            [link for link in same if link.mac == origin.mac],
            same,
        ):
            if len(found) == 1:
                return found[0]
        return None
    return next((link for link in present if link.alias == mark.alias), None)


def restore(host: Rtnetlink, pod: Rtnetlink | None, name: str, origin: Origin, mark: Mark) -> bool:
    """Move the interface `name` of the pod to the host, and restore its properties there.

    The interface may be on the host already. After a failure, a second call continues. Returns
    False if neither namespace has the interface. Raises NameTaken if another host interface has the
    old name. After NameTaken, the interface is on the host with its mark, under a temporary name.
    """
    link = find(pod, (name,), origin, mark) if pod is not None else None
    if pod is not None and link is not None:
        return restore_from(host, pod, link, origin, mark)
    return _restore(host, origin, mark)


def restore_from(host: Rtnetlink, pod: Rtnetlink, link: Link, origin: Origin, mark: Mark) -> bool:
    """Like `restore`, for the interface `link`, which was found in the pod."""
    name = _move_out(host, pod, link, origin, mark)
    return _restore(host, origin, mark, name)


def _move_out(host: Rtnetlink, pod: Rtnetlink, link: Link, origin: Origin, mark: Mark) -> str:
    """Move an interface to the host, under its old name if the name is free. Returns the name."""
    free = not links.has_name(host, origin.name)
    name = origin.name if free else mark.temporary_name
    link = _without_foreign_altnames(pod, link, origin)
    _drop_clashing_altnames(pod, host, link, name)
    _restore_flags(pod, link, origin)  # before the move: IPv6 starts on the host by the flags
    mtu = origin.mtu if link.mtu != origin.mtu else 0
    mac = _address_to_restore(link, origin)
    with NetworkNamespace.own() as home, _moving:
        try:
            if free:
                link_changes.move(
                    pod, link, home, name, origin.alias, mtu=mtu, mac=mac, up=origin.up
                )
            else:
                link_changes.move(pod, link, home, name, mark.alias)
        except HostError:
            if links.by_index(pod, link.index) is not None:
                raise
            # The move succeeded and a later part of the message failed: `_restore` continues.
    return name


def _restore(host: Rtnetlink, origin: Origin, mark: Mark, name: str = "") -> bool:
    """Restore the interface's changed properties on the host. Removes the mark last."""
    names = (name,) if name else (mark.temporary_name, origin.name)
    link = find(host, names, origin, mark)
    if link is None:
        return False
    if link.name != origin.name:
        if origin.name in link.altnames:  # udev's naming policy may have added it
            link_changes.drop_altname(host, link, origin.name)
            kept = tuple(name for name in link.altnames if name != origin.name)
            link = msgspec.structs.replace(link, altnames=kept)
        if links.has_name(host, origin.name):
            raise NameTaken(
                f'the interface from the pod is named "{link.name}", because another '
                f'interface on the host has the name "{origin.name}": rename the other '
                "interface"
            )
        link_changes.rename(host, link, origin.name)
    mac = _address_to_restore(link, origin)
    if mac:
        set_address(host, link, mac)
    if origin.mtu not in (0, link.mtu):
        link_changes.set_mtu(host, link, origin.mtu)
    _restore_settings(host, link, origin)
    if origin.up and not link.up:
        host.change(link_changes.up(link))
    if link.alias != origin.alias:  # otherwise the interface is restored already
        link = _without_foreign_altnames(host, link, origin)
    for altname in origin.altnames:
        if altname not in link.altnames:
            with suppress(HostError):  # another interface may have this name now
                link_changes.add_altname(host, link, altname)
    if link.alias != origin.alias:
        link_changes.set_alias(host, link, origin.alias)
    return True


def _restore_flags(route: Rtnetlink, link: Link, origin: Origin) -> None:
    different = (link.flags ^ origin.flags) & origin.flags_known
    if different:
        route.change(link_changes.flagged(link, origin.flags, different))


def _restore_settings(host: Rtnetlink, link: Link, origin: Origin) -> None:
    """Restore the settings that a pod may have changed, and that a move does not reset."""
    _restore_flags(host, link, origin)
    changed = {
        name: value
        for name, value in origin.settings.items()
        if link.settings.get(name, value) != value
    }
    broadcast = origin.broadcast if link.broadcast != origin.broadcast else ""
    if changed or broadcast:
        host.change(link_changes.with_settings(link, changed, broadcast))
    for mode in set(link.xdp).difference(link.xdp if origin.xdp is None else origin.xdp):
        host.change(link_changes.without_xdp(link, mode))


def _is_of_device(link: Link, origin: Origin) -> bool:
    """Whether the interface is the device's own interface, and not an IPoIB child on it."""
    return link.device == origin.device and link.kind == origin.kind and not link.parent


def _is_unmarked(link: Link, origin: Origin) -> bool:
    """Whether an interface without a mark has the device, kind and MAC of the moved interface."""
    same = (link.device, link.kind, link.mac) == (origin.device, origin.kind, origin.mac)
    return same and not link.alias.startswith(ALIAS_PREFIX)


def _address_to_restore(link: Link, origin: Origin) -> str:
    """The hardware address to set, "" for none. An InfiniBand address comes from the port."""
    ethernet = link.link_type == links.ARPHRD_ETHER
    return origin.mac if ethernet and link.mac != origin.mac else ""


def _without_foreign_altnames(route: Rtnetlink, link: Link, origin: Origin) -> Link:
    """Remove the pod's alternative names, which could clash with the next pod's names."""
    for altname in link.altnames:
        if altname not in origin.altnames:
            link_changes.drop_altname(route, link, altname)
    kept = tuple(altname for altname in link.altnames if altname in origin.altnames)
    return msgspec.structs.replace(link, altnames=kept)


def _drop_clashing_altnames(source: Rtnetlink, target: Rtnetlink, link: Link, name: str) -> None:
    """Remove alternative names that prevent a move.

    If an alternative name equals the new name, the rename fails after the move. If the target has
    the alternative name, the kernel refuses the move. Before Linux 6.6 the move succeeds, but the
    kernel confuses the two interfaces.
    """
    for altname in link.altnames:
        if altname == name or links.has_name(target, altname):
            link_changes.drop_altname(source, link, altname)
