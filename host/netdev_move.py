"""An interface that exists: moved into a pod, configured there, and moved back as it was.

A name proves nothing, so a moved interface bears a mark: an alias that is made of its
attachment's key. A pod may overwrite that, so what it cannot change counts too.
"""

import errno
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from host import addresses, links
from host.addresses import Switch
from host.errors import HostError, LinkMissing
from host.links import Link
from host.namespaces import NetworkNamespace
from host.netlink import Rtnetlink

ALIAS_PREFIX = "podfabric:"
TEMPORARY_PREFIX = "pf"
MODES = links.IFF_PROMISC | links.IFF_ALLMULTI

# A move holds the kernel's RTNL lock for ~16 ms (it waits for all CPUs), and whoever wants that
# lock is served in the order they came. If all threads moved as soon as they could, then what
# was moved first would get its address last. With two, the next one is always ready.
_moving = threading.BoundedSemaphore(2)
IPV6_SWITCHES = (Switch(6, "disable_ipv6", "0"), Switch(6, "keep_addr_on_down", "1"))


class NameTaken(HostError):
    """An interface is to get a name that another one has."""


class Mark(msgspec.Struct, frozen=True):
    """What an attachment's interface is known by; `key` stands for the attachment."""

    key: str  # 32 hex digits

    @property
    def alias(self) -> str:
        """The interface's alias from its move on."""
        return ALIAS_PREFIX + self.key

    @property
    def temporary_name(self) -> str:
        """A name on the host that no other attachment's interface has: 15 bytes."""
        return TEMPORARY_PREFIX + self.key[:13]


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """How an interface was on the host, which it is to be again. The journal keeps it."""

    name: str
    kind: str
    mac: str
    mtu: int
    up: bool
    alias: str = ""
    device: str = ""
    altnames: tuple[str, ...] = ()
    flags: int = 0  # of MODES, those that are set


def origin_of(link: Link) -> Origin:
    """What to keep of an interface before it is moved."""
    return Origin(
        name=link.name,
        kind=link.kind,
        mac=link.mac,
        mtu=link.mtu,
        up=link.up,
        alias=link.alias,
        device=link.device,
        altnames=link.altnames,
        flags=link.flags & MODES,
    )


def require_free(pod: Rtnetlink, name: str) -> None:
    """Raise NameTaken if the pod has an interface of that name.

    The kernel says so only after a move, so whoever moves looks first.
    """
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
    """Move an interface into the pod under its name there. Answers it as it is in the pod.

    Its MTU is set with the move, if it is given.

    The caller has seen that the name is free. The interface is looked up afresh, because the
    kernel may renumber it, without a wait for the next one's move; `configure` asks for its mark.
    """
    _drop_clashing_altnames(host, pod, link, name)
    with _moving:
        links.move(host, link, namespace, name, mark.alias, mtu=mtu)
    seen = links.glance(pod, name)
    if seen is not None and seen.is_of(link):
        flags = link.flags & ~(links.IFF_UP | links.IFF_LOWER_UP)
        return msgspec.structs.replace(
            link, index=seen.index, name=name, alias=mark.alias, flags=flags, mtu=mtu or link.mtu
        )
    # A VF that is set down, as it is for a move, takes over the address that its PF has set.
    moved = links.by_index(pod, seen.index) if seen is not None else None
    if moved is None or moved.alias != mark.alias:
        raise LinkMissing(f'"{name}" in the pod is another interface than was moved')
    return moved


def set_address(route: Rtnetlink, link: Link, mac: str) -> None:
    """Give an interface a hardware address, of 6 bytes.

    A VF whose PF has set its address, and that is not trusted, may set none, not even that one
    (igb). It takes it over when its driver resets it, which going down is.
    """
    try:
        links.set_mac(route, link, mac)
    except HostError as refusal:
        if refusal.code not in (errno.EADDRNOTAVAIL, errno.EPERM, errno.EACCES):
            raise
        again = [links.up(link)] if link.up else []
        now = links.by_index(route, link.index, after=[links.up(link), links.down(link), *again])
        if now is None or now.mac != mac:
            raise


def configure(
    pod: Rtnetlink,
    namespace: NetworkNamespace,
    link: Link,
    cidrs: Sequence[str],
    switches: Sequence[Switch] = (),
    link_local: str = "",
    modes: tuple[int, int] = (0, 0),
) -> tuple[Link, list[str]]:
    """Switches, addresses, then up: the kernel announces nothing it learns in the other order.

    `link_local` replaces the address that the kernel would make, if the pod has IPv6 at all.
    `modes` are those of MODES that are to be on, among those that are to be on or off.
    Answers the interface as it is then, and every address that was given. LinkMissing if it
    is not the one that was moved.
    """
    if any(":" in cidr for cidr in cidrs):
        switches = (*switches, *IPV6_SWITCHES)
    if switches:
        addresses.set_switches(namespace, link, switches)
    given = list(cidrs)
    changes = []
    if link_local:
        changes.append(links.no_generated_address(link))
        if addresses.switch(namespace, 6, link, "disable_ipv6") == "0":
            given.append(link_local)
    if modes[1]:
        changes.append(links.flagged(link, *modes))
    changes += [addresses.addition(link, cidr) for cidr in given]
    ready = links.by_index(pod, link.index, after=[*changes, links.up(link)])
    if ready is None or ready.alias != link.alias:
        raise LinkMissing(f'"{link.name}" has gone from the pod while it was configured')
    return ready, given


def find(route: Rtnetlink, names: Sequence[str], origin: Origin, mark: Mark) -> Link | None:
    """The interface in a namespace, where it most likely has one of these names.

    Hardware is known by its device, which nobody can give to another interface: of two that one
    function has, by its mark or its address. Anything else is known by its mark; without that by
    its name, kind and address together, which another interface may each have. A pod may write
    marks as it likes.
    """
    for name in names:
        link = links.find(route, name) if links.has_name(route, name) else None
        if link is None or (origin.device and not _is_of_device(link, origin)):
            continue
        if link.alias == mark.alias or _is_unmarked(link, origin):
            return link
    present = links.every(route)
    if origin.device:
        same = [link for link in present if _is_of_device(link, origin)]
        for wanted in (
            [link for link in same if link.alias == mark.alias],
            [link for link in same if link.mac == origin.mac],
            same,
        ):
            if len(wanted) == 1:
                return wanted[0]
        return None
    return next((link for link in present if link.alias == mark.alias), None)


def bring_back(
    host: Rtnetlink, pod: Rtnetlink | None, name: str, origin: Origin, mark: Mark
) -> bool:
    """Move the interface, `name` in the pod, to the host, and make it what it was there.

    Also if it is on the host already, half restored or given back by a namespace that died
    (`pod` is None then). False if it is nowhere. Raises NameTaken if another interface has its
    name by now: it is on the host then, marked, under a temporary name. A call after any
    failure goes on from there.
    """
    link = find(pod, (name,), origin, mark) if pod is not None else None
    if pod is not None and link is not None:
        _move_out(host, pod, link, origin, mark)
    return _restore(host, origin, mark)


def _move_out(host: Rtnetlink, pod: Rtnetlink, link: Link, origin: Origin, mark: Mark) -> None:
    """Move an interface to the host, as it was there if its name is free."""
    free = not links.has_name(host, origin.name)
    name = origin.name if free else mark.temporary_name
    link = _without_foreign_altnames(pod, link, origin)
    _drop_clashing_altnames(pod, host, link, name)
    mtu = origin.mtu if link.mtu != origin.mtu else 0
    mac = _address_to_restore(link, origin)
    with NetworkNamespace.own() as home, _moving:
        try:
            if free:
                links.move(pod, link, home, name, origin.alias, mtu=mtu, mac=mac, up=origin.up)
            else:
                links.move(pod, link, home, name, mark.alias)
        except HostError:
            if links.by_index(pod, link.index) is not None:
                raise
            # It has been moved, and something after that failed: `_restore` finds out what.


def _restore(host: Rtnetlink, origin: Origin, mark: Mark) -> bool:
    """What is not yet as it was, of an interface on the host. The mark goes last."""
    link = find(host, (mark.temporary_name, origin.name), origin, mark)
    if link is None:
        return False
    if link.name != origin.name:
        if origin.name in link.altnames:  # udev gives one back by its policy for names
            links.drop_altname(host, link, origin.name)
            kept = tuple(name for name in link.altnames if name != origin.name)
            link = msgspec.structs.replace(link, altnames=kept)
        if links.has_name(host, origin.name):
            raise NameTaken(
                f'"{origin.name}" on the host is another interface now, so the one that came '
                f'back from the pod is called "{link.name}": rename one of them'
            )
        links.rename(host, link, origin.name)
    mac = _address_to_restore(link, origin)
    if mac:
        set_address(host, link, mac)
    if link.mtu != origin.mtu:
        links.set_mtu(host, link, origin.mtu)
    if (link.flags ^ origin.flags) & MODES:
        host.change(links.flagged(link, origin.flags, MODES))
    if origin.up and not link.up:
        host.change(links.up(link))
    if link.alias != origin.alias:  # else it is home already, and its names the host's affair
        link = _without_foreign_altnames(host, link, origin)
    for altname in origin.altnames:
        if altname not in link.altnames:
            with suppress(HostError):  # another interface has it by now
                links.add_altname(host, link, altname)
    if link.alias != origin.alias:
        links.set_alias(host, link, origin.alias)
    return True


def _is_of_device(link: Link, origin: Origin) -> bool:
    """Whether it is an interface of that hardware; an IPoIB child names its parent's, too."""
    return link.device == origin.device and link.kind == origin.kind and not link.parent


def _is_unmarked(link: Link, origin: Origin) -> bool:
    """Whether an interface with the right name is the one that was moved, without its mark."""
    same = (link.device, link.kind, link.mac) == (origin.device, origin.kind, origin.mac)
    return same and not link.alias.startswith(ALIAS_PREFIX)


def _address_to_restore(link: Link, origin: Origin) -> str:
    """Ethernet's only: a part of InfiniBand's is the port's, and cannot be set."""
    ethernet = link.link_type == links.ARPHRD_ETHER
    return origin.mac if ethernet and link.mac != origin.mac else ""


def _without_foreign_altnames(route: Rtnetlink, link: Link, origin: Origin) -> Link:
    """Take off the alternative names that a pod has given, or they clash with the next pod's."""
    for altname in link.altnames:
        if altname not in origin.altnames:
            links.drop_altname(route, link, altname)
    kept = tuple(altname for altname in link.altnames if altname in origin.altnames)
    return msgspec.structs.replace(link, altnames=kept)


def _drop_clashing_altnames(source: Rtnetlink, target: Rtnetlink, link: Link, name: str) -> None:
    """Take off the alternative names that would be in the way of a move.

    One that is the new name makes the rename fail after the move. One that another interface
    has over there: the kernel refuses the move, or before Linux 6.6 mixes the two up.
    """
    for altname in link.altnames:
        if altname == name or links.has_name(target, altname):
            links.drop_altname(source, link, altname)
