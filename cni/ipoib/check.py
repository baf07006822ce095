"""CHECK: everything that ADD set, compared with what the kernel shows now."""

from typing import Any

import msgspec

from cni.attachments.entry import Attachment, Damaged
from cni.attachments.journal import Journal
from cni.ipoib import child
from cni.spec import config
from cni.spec import result as results
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from cni.spec.result import Interface, IPConfig, Result, Route
from host import addresses, links
from host.links import Link
from host.namespaces import NetworkNamespace
from host.netlink import Rtnetlink, netlink


class _Previous(msgspec.Struct):
    prevResult: msgspec.Raw = msgspec.Raw()


def previous_document(request: Request) -> dict[str, Any] | None:
    """The prevResult of a request as plain values, checked to be of the request's version."""
    raw = _raw(request)
    if raw is None:
        return None
    results.decode(raw, request.cni_version)
    return config.decode(raw, dict[str, Any])


def check(journal: Journal, attachment: Attachment, request: Request) -> None:
    """Raise CNIError 102 for the first thing that differs; 7 where prevResult is missing."""
    raw = _raw(request)
    if raw is None:
        raise invalid_config("prevResult missing: CHECK compares with the result of ADD")
    previous = results.decode(raw, request.cni_version)
    position, interface = _our_interface(previous, request)
    record = _record(journal, attachment)
    with (
        NetworkNamespace.open(request.netns) as namespace,
        netlink() as host,
        netlink(namespace) as pod,
    ):
        link = links.find(pod, request.ifname)
        if link is None:
            raise _differs(f'interface "{request.ifname}" is gone from the pod')
        _check_link(link, attachment, links.find(host, record.parent), record, interface)
        ours = [ip for ip in previous.ips if ip.interface in (position, None)]
        _check_addresses(pod, link, ours)
        _check_routes(pod, previous.routes)


def _raw(request: Request) -> bytes | None:
    raw = bytes(msgspec.json.decode(request.config, type=_Previous).prevResult)
    return None if raw in (b"", b"null") else raw


def _our_interface(previous: Result, request: Request) -> tuple[int, Interface]:
    for position, interface in enumerate(previous.interfaces):
        if interface.name == request.ifname and interface.sandbox:
            if interface.sandbox != request.netns:
                raise _differs(
                    f'sandbox in prevResult is "{interface.sandbox}", CNI_NETNS is '
                    f'"{request.netns}"'
                )
            return position, interface
    raise _differs(f'prevResult has no interface "{request.ifname}" in a sandbox')


def _record(journal: Journal, attachment: Attachment) -> child.Record:
    try:
        entry = journal.read(attachment)
        if entry is None:
            raise _differs(f"the journal has no entry for {attachment}")
        return entry.undo_as(child.Record)
    except Damaged as damage:
        raise CNIError(Code.JOURNAL_DAMAGED, str(damage)) from None


def _check_link(
    link: Link,
    attachment: Attachment,
    parent: Link | None,
    record: child.Record,
    interface: Interface,
) -> None:
    if parent is None:
        raise _differs(f'parent "{record.parent}" is gone from the host')
    wanted = {
        "kind": (link.kind, "ipoib"),
        "alias": (link.alias, child.alias_of(attachment)),
        "parent": (link.parent, parent.index),
        "P_Key": (f"{link.pkey or 0:#06x}", f"{record.pkey:#06x}"),
        "mode": (link.mode, record.mode),
        "umcast": (link.umcast, record.umcast),
        "mtu": (link.mtu, interface.mtu or record.mtu),
        "mac": (link.mac, interface.mac or link.mac),
        "administrative state": (_up(link.up), "up"),
        "carrier": (_up(link.carrier), "up"),
    }
    for what, (found, expected) in wanted.items():
        if found != expected:
            raise _differs(f'{what} of "{link.name}" is {found}, {expected} was set')


def _check_addresses(pod: Rtnetlink, link: Link, ips: list[IPConfig]) -> None:
    present = addresses.of(pod, link)
    for ip in ips:
        if ip.address not in present:
            raise _differs(f"Failed to match addr {ip.address} on interface {link.name}")


def _check_routes(pod: Rtnetlink, routes: tuple[Route, ...]) -> None:
    for route in routes:
        hop = addresses.Hop(
            destination=route.dst, gateway=route.gw, table=route.table, priority=route.priority
        )
        if not addresses.has_route(pod, hop):
            via = f" via {route.gw}" if route.gw else ""
            raise _differs(f"route {route.dst}{via} is gone from the pod")


def _up(value: bool) -> str:
    return "up" if value else "down"


def _differs(message: str) -> CNIError:
    return CNIError(Code.CHECK_FAILED, message)
