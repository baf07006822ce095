"""Makes the result of an ADD, and compares the prevResult of a CHECK with the kernel's state."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from base.paths import Paths
from cni.attachments.journal import Journal
from cni.spec import result as protocol
from cni.spec.attachment import Attachment
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from cni.spec.result import DNS, Interface, Result
from host.netlink import interface_addresses
from host.netlink.interface_addresses import Hop
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink
from host.sysfs import pci

R = TypeVar("R")


class Expected(msgspec.Struct, frozen=True):
    """The prevResult of a CHECK, and our interface in it."""

    result: Result
    position: int
    interface: Interface

    def compare_addresses(self, pod: Rtnetlink, link: Link) -> None:
        """Raise CNIError 102 for a missing address of the interface or a missing route."""
        present = interface_addresses.of(pod, link)
        for ip in self.result.ips:
            if ip.interface in (self.position, None) and ip.address not in present:
                raise differs(f"Failed to match addr {ip.address} on interface {link.name}")
        if not self.result.routes:
            return
        present_routes = interface_addresses.Routes(pod)
        for route in self.result.routes:
            hop = Hop(
                destination=route.dst, gateway=route.gw, table=route.table, priority=route.priority
            )
            if not present_routes.has(hop):
                via = f" via {route.gw}" if route.gw else ""
                raise differs(f"route {route.dst}{via} is gone from the pod")


def previous_document(request: Request) -> dict[str, Any] | None:
    """The prevResult as plain values. Raises CNIError 6 if it is not a valid result."""
    if request.previous_result is None:
        return None
    return request.config.at("prevResult", dict[str, Any])


def interface_of(
    paths: Paths, request: Request, *, mac: str, mtu: int, bdf: str, rdma: Iterable[str]
) -> Interface:
    """The interface of an ADD. Its RDMA device is the first of `rdma` with a uverbs device."""
    numbers = ((name, pci.uverbs_number(paths, name)) for name in rdma)
    with_uverbs = ((name, number[0]) for name, number in numbers if number is not None)
    rdma_device, uverbs = next(with_uverbs, ("", ""))
    return Interface(
        name=request.ifname,
        mac=mac,
        mtu=mtu,
        sandbox=request.netns,
        pciID=bdf,
        rdmaDevice=rdma_device,
        uverbs=uverbs,
    )


def hops(answer: Result) -> list[Hop]:
    """Routes without gateway get the gateway of their family, except routes of scope 253 (link)."""
    gateways: dict[int, str] = {}
    for ip in answer.ips:
        if ip.gateway:
            gateways.setdefault(ip.family, ip.gateway)
    return [
        Hop(
            destination=route.dst,
            gateway=route.gw or (None if route.scope == 253 else gateways.get(route.family)),
            table=route.table,
            scope=route.scope,
            priority=route.priority,
            mtu=route.mtu,
            advmss=route.advmss,
        )
        for route in answer.routes
    ]


def document(request: Request, interface: Interface, answer: Result, dns: DNS) -> dict[str, Any]:
    """The result of an ADD, added to the prevResult. `dns` overrides the IPAM plugin's settings."""
    result = Result(
        interfaces=(interface,),
        ips=tuple(msgspec.structs.replace(ip, interface=0) for ip in answer.ips),
        routes=answer.routes,
        dns=dns if dns != DNS() else answer.dns,
    )
    previous = previous_document(request)
    return protocol.after_previous(previous or {}, result, request.cni_version)


def expected(request: Request) -> Expected:
    """The prevResult of a CHECK. Raises CNIError 7 if it is missing, 102 for another sandbox."""
    previous = request.previous_result
    if previous is None:
        raise invalid_config("prevResult missing: pass the result of the ADD to CHECK")
    for position, interface in enumerate(previous.interfaces):
        if interface.name == request.ifname and interface.sandbox:
            if interface.sandbox != request.netns:
                raise differs(
                    f'the sandbox in prevResult is "{interface.sandbox}", but CNI_NETNS is '
                    f'"{request.netns}"'
                )
            return Expected(previous, position, interface)
    raise differs(f'prevResult has no interface "{request.ifname}" in a sandbox')


def previous_interface(request: Request) -> Interface | None:
    """The pod's interface in the prevResult of a DEL, if any."""
    with suppress(CNIError):
        for interface in (request.previous_result or Result()).interfaces:
            if interface.name == request.ifname and interface.sandbox:
                return interface
    return None


def recorded(journal: Journal, attachment: Attachment, shape: type[R]) -> R:
    """The plugin's record. Raises JournalDamaged, or CNIError 102 without an entry."""
    entry = journal.read(attachment)
    if entry is None:
        raise differs(f"podfabric's journal has no entry for attachment {attachment}")
    return entry.undo_as(shape)


def compare(where: str, settings: dict[str, tuple[object, object]]) -> None:
    """Raise CNIError 102 for the first setting with different (present, expected) values."""
    for name, (present, right) in settings.items():
        if present != right:
            raise differs(f'{name} of {where} is "{present}", but the ADD set "{right}"')


def up(value: bool) -> str:
    return "up" if value else "down"


def differs(message: str) -> CNIError:
    return CNIError(Code.CHECK_FAILED, message)
