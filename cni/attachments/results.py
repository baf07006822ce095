"""Results: an ADD's, made; and a CHECK's, compared with what there is now."""

from typing import Any, TypeVar

import msgspec

from cni.attachments.entry import JournalDamaged
from cni.attachments.journal import Journal
from cni.spec import config
from cni.spec import result as protocol
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from cni.spec.result import DNS, Interface, Result
from host import addresses
from host.links import Link
from host.netlink import Rtnetlink

R = TypeVar("R")


class _Previous(msgspec.Struct):
    prevResult: msgspec.Raw = msgspec.Raw()


class Expected(msgspec.Struct, frozen=True):
    """What the runtime says an ADD's answer was, and which interface of it is the attachment's."""

    result: Result
    position: int
    interface: Interface

    def compare_addresses(self, pod: Rtnetlink, link: Link) -> None:
        """Raise CNIError 102 for an address of the interface, or a route, that is gone."""
        present = addresses.of(pod, link)
        for ip in self.result.ips:
            if ip.interface in (self.position, None) and ip.address not in present:
                raise differs(f"Failed to match addr {ip.address} on interface {link.name}")
        if not self.result.routes:
            return
        present_routes = addresses.Routes(pod)
        for route in self.result.routes:
            hop = addresses.Hop(
                destination=route.dst, gateway=route.gw, table=route.table, priority=route.priority
            )
            if not present_routes.has(hop):
                via = f" via {route.gw}" if route.gw else ""
                raise differs(f"route {route.dst}{via} is gone from the pod")


def previous_document(request: Request) -> dict[str, Any] | None:
    """The prevResult of a request as plain values, checked to be of the request's version."""
    raw = _raw(request)
    if raw is None:
        return None
    protocol.decode(raw, request.cni_version)
    return config.decode(raw, dict[str, Any])


def document(request: Request, interface: Interface, answer: Result, dns: DNS) -> dict[str, Any]:
    """The result of an ADD in the request's version, behind those of earlier plugins.

    The addresses are the interface's; `dns` counts more than the IPAM plugin's.
    """
    result = Result(
        interfaces=(interface,),
        ips=tuple(msgspec.structs.replace(ip, interface=0) for ip in answer.ips),
        routes=answer.routes,
        dns=dns if dns != DNS() else answer.dns,
    )
    previous = previous_document(request)
    return protocol.after_previous(previous or {}, result, request.cni_version)


def expected(request: Request) -> Expected:
    """The prevResult of a CHECK. CNIError 7 where it is missing, 102 where it is another's."""
    raw = _raw(request)
    if raw is None:
        raise invalid_config("prevResult missing: CHECK compares with the result of ADD")
    previous = protocol.decode(raw, request.cni_version)
    for position, interface in enumerate(previous.interfaces):
        if interface.name == request.ifname and interface.sandbox:
            if interface.sandbox != request.netns:
                raise differs(
                    f'sandbox in prevResult is "{interface.sandbox}", CNI_NETNS is '
                    f'"{request.netns}"'
                )
            return Expected(previous, position, interface)
    raise differs(f'prevResult has no interface "{request.ifname}" in a sandbox')


def recorded(journal: Journal, attachment: Attachment, shape: type[R]) -> R:
    """What the journal keeps of an attachment. CNIError 102 where it keeps nothing, 113."""
    try:
        entry = journal.read(attachment)
        if entry is None:
            raise differs(f"the journal has no entry for {attachment}")
        return entry.undo_as(shape)
    except JournalDamaged as damage:
        raise CNIError(Code.JOURNAL_DAMAGED, str(damage)) from None


def compare(where: str, wanted: dict[str, tuple[object, object]]) -> None:
    """Raise CNIError 102 for the first of (found, expected) that differ, by what they are."""
    for what, (found, right) in wanted.items():
        if found != right:
            raise differs(f"{what} of {where} is {found}, {right} was set")


def up(value: bool) -> str:
    """The administrative state or the carrier, in words."""
    return "up" if value else "down"


def differs(message: str) -> CNIError:
    """The error for a difference that CHECK has found."""
    return CNIError(Code.CHECK_FAILED, message)


def _raw(request: Request) -> bytes | None:
    raw = bytes(msgspec.json.decode(request.config, type=_Previous).prevResult)
    return None if raw in (b"", b"null") else raw
