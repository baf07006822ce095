"""Chooses the parent and plans the child on it, or says why not (P_Key table, MTU, HCA)."""

from collections.abc import Callable

import msgspec

from base import interrupts
from base.paths import Paths
from cni.attachments.matching import Match, mismatch, none_given
from cni.ipoib import permitted
from cni.ipoib.options import CONNECTED, CONNECTED_MTU, DATAGRAM, IpoibOptions
from cni.policy.allowance import Allowance, NotAllowed
from cni.spec.errors import CNIError, Code
from cni.spec.request import Request
from host import infiniband, links, pci
from host.links import Link
from host.netlink import Rtnetlink

UD_MTU = 4092  # a 4096 byte InfiniBand MTU less IPoIB's header of 4


class ChildPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The child to be made."""

    options: IpoibOptions  # with what rules put in
    parent: Link
    port: infiniband.IpoibPort | None
    pkey: int
    mode: str
    mtu: int
    umcast: bool
    bdf: str
    hca: str  # host.discovery.HCA.id of the HCA under the parent, "" if it has none
    allowance: Allowance = Allowance()  # what the attachment may use beside it

    @property
    def rdma(self) -> tuple[str, ...]:
        """The RDMA device under the parent, if sysfs shows it."""
        return (self.port.hca,) if self.port is not None else ()


def choose(
    route: Rtnetlink,
    paths: Paths,
    options: IpoibOptions,
    request: Request | None = None,
    match: Match | None = None,
) -> ChildPlan:
    """The first of the masters that can have the child, on an HCA of the pod if it holds any.

    An ADD passes its request and the match of its pod. Raises CNIError with the reason for each
    master that cannot: 7, 11 if waiting may help, 120 if only other HCAs than the pod's can.
    """
    reasons = []
    code: int = Code.INVALID_CONFIG
    refused: NotAllowed | None = None

    def others() -> str:
        return _others(route)  # a look at all interfaces of the host

    for name in options.masters or _given_parents(route, paths, options, match):
        interrupts.checkpoint()
        parent = links.find(route, name)
        reason = _unfit(name, parent, others)
        if parent is not None and reason is None:
            plan = _plan(paths, parent, options)
            refusal: CNIError | None = None
            if match is not None and request is not None:
                try:
                    plan = _allowed(paths, plan, request, match)
                except NotAllowed as not_allowed:
                    refusal = refused = not_allowed
            reason = _refused(plan) if refusal is None else None
            if match is not None and reason is None and refusal is None:
                refusal = _other_hca(plan, match)
            if refusal is not None:
                reason, code = refusal.message, refusal.code
            if reason is None and parent.up:
                return plan
        if reason is None:
            code = Code.TRY_AGAIN
            reason = (
                f'parent "{name}" is down, so its children have no carrier: ip link set {name} up'
            )
        reasons.append(reason)
    raise refused.among(code, reasons) if refused else CNIError(code, "; ".join(reasons))


def _unfit(name: str, parent: Link | None, others: Callable[[], str]) -> str | None:
    """Why an interface cannot be a parent; None if it can. `others` names those that can."""
    if parent is None:
        return f'parent "{name}" does not exist: {others()}'
    if parent.kind == "macvlan":
        return f'parent "{name}" is a macvlan, not an IPoIB interface: {others()}'
    if parent.link_type != links.ARPHRD_INFINIBAND:
        return f'parent "{name}" has link type {parent.link_type_name}, not infiniband: {others()}'
    if parent.kind != "ipoib":
        return f'parent "{name}" is of kind "{parent.kind}", not ipoib: {others()}'
    if parent.parent:
        return (
            f'parent "{name}" is itself the child of another IPoIB interface, and a child can '
            f'have none: set "master" to that one and "pkey" to "{parent.pkey or 0:#06x}"'
        )
    return None


def _given_parents(
    route: Rtnetlink, paths: Paths, options: IpoibOptions, match: Match | None
) -> list[str]:
    """The parents on the HCAs that the pod holds, in the order in which they are tried.

    Those on ACTIVE ports come first: the children of others have no carrier. Without a `match`
    (STATUS) the parents on all HCAs.
    """
    by_hca: dict[str, list[tuple[int, str]]] = {}
    active = set()
    for link in links.every(route, "ipoib"):
        port = None if link.parent else infiniband.port_of(paths, link)
        if port is not None:
            hca = pci.holder_of_rdma(paths, port.hca) or port.hca
            by_hca.setdefault(hca, []).append((port.number, link.name))
            if port.state == "ACTIVE":
                active.add(link.name)
    if match is None:
        names = [name for parents in by_hca.values() for _, name in sorted(parents)]
        if not names:
            raise CNIError(Code.INVALID_CONFIG, f'"master": "auto": {_others(route)}')
        return sorted(names, key=lambda name: name not in active)
    held = match.candidates(options.device_id)
    if not held:
        raise none_given(paths, options.pod, '"master": "auto"')
    names = [name for hca in held for _, name in sorted(by_hca.get(hca.device.id, ()))]
    if not names:
        listed = ", ".join(map(str, held))
        raise CNIError(
            Code.DEVICE_MISMATCH,
            f'"master": "auto": no IPoIB interface of the host is on {listed}, which the pod was '
            f"given: {_others(route)}",
        )
    return sorted(names, key=lambda name: name not in active)


def _other_hca(plan: ChildPlan, match: Match) -> CNIError | None:
    """The error if the parent's HCA is not the pod's, or is exclusively another pod's."""
    what = f'parent "{plan.parent.name}"'
    reason = match.refusal(plan.hca, what, plan.rdma, 'set "master": "auto"')
    if reason is not None:
        return mismatch(reason)
    held = match.entitlement.held((plan.hca, *plan.rdma))
    return match.entitlement.error(held, "master", what) if held is not None else None


def _allowed(paths: Paths, plan: ChildPlan, request: Request, match: Match) -> ChildPlan:
    """The plan with what rules put in, and what the attachment may use beside it.

    NotAllowed if no rule has it.
    """
    parent = plan.parent
    allowance = match.using(plan.hca, "master", parent.name, parent=parent.name)
    options, allowance = permitted.completed(request, plan.options, allowance)
    if options is not plan.options:
        plan = _plan(paths, parent, options)
    usual = _inherited_mtu(parent, plan.mode)
    allowance = permitted.as_planned(options, plan.pkey, usual, allowance)
    return msgspec.structs.replace(plan, allowance=allowance)


def _inherited_mtu(parent: Link, mode: str) -> int:
    # A parent in connected mode may have a larger MTU than a datagram child can have.
    return min(parent.mtu, UD_MTU) if mode == DATAGRAM else parent.mtu


def _plan(paths: Paths, parent: Link, options: IpoibOptions) -> ChildPlan:
    mode = options.mode or parent.mode or DATAGRAM
    port = infiniband.port_of(paths, parent)
    return ChildPlan(
        options=options,
        parent=parent,
        port=port,
        pkey=options.pkey or (parent.pkey or 0xFFFF) | infiniband.FULL_MEMBER,
        mode=mode,
        mtu=options.mtu or _inherited_mtu(parent, mode),
        umcast=options.umcast,
        bdf=infiniband.bdf_of(paths, parent.name),
        hca=(pci.holder_of_rdma(paths, port.hca) or port.hca) if port is not None else "",
    )


def _refused(plan: ChildPlan) -> str | None:
    """Why the child cannot be made; None if it can."""
    parent, port = plan.parent, plan.port
    if port is not None and not port.has_pkey(plan.pkey):
        table = ", ".join(f"{pkey:#06x}" for pkey in port.pkeys) or "empty"
        origin = "asked for" if plan.options.pkey else f'of parent "{parent.name}"'
        return (
            f"P_Key {plan.pkey:#06x} {origin} is not in the table of {port.hca} port "
            f"{port.number} ({table}): make the port a member in the subnet manager, or set "
            '"pkey" to one of these'
        )
    limit = CONNECTED_MTU if plan.mode == CONNECTED else parent.mtu
    if plan.mode == DATAGRAM and parent.mode == CONNECTED:
        limit = min(parent.mtu, UD_MTU)
    if plan.mtu > limit:
        return (
            f'"mtu": {plan.mtu} is over the limit of {limit} in {plan.mode} mode on parent '
            f'"{parent.name}": lower it, or leave it out for the parent\'s'
        )
    return None


def why_no_carrier(paths: Paths, plan: ChildPlan, parent: Link | None) -> str:
    """Why a child that is up has no carrier, by what sysfs shows."""
    if parent is None:
        return f'parent "{plan.parent.name}" is gone'
    port = infiniband.port_of(paths, parent)
    if port is None:
        return f'parent "{parent.name}" has no port in sysfs'
    at = f"port {port.number} of {port.hca}"
    if port.state != "ACTIVE":
        return f"{at} is {port.state}, its physical state {port.physical_state}: check the cable"
    if not port.has_pkey(plan.pkey):
        return f"P_Key {plan.pkey:#06x} has left the table of {at}"
    if not port.sm_lid:
        return f"{at} knows no subnet manager: start one"
    return (
        f"{at} is ACTIVE, but the broadcast group of P_Key {plan.pkey:#06x} could not be "
        "joined: see the subnet manager's partitions (ipoib flag, rate, mtu) and dmesg"
    )


def _others(route: Rtnetlink) -> str:
    """The IPoIB interfaces that could be parents, as an error names them."""
    names = [link.name for link in links.every(route, "ipoib") if not link.parent]
    if not names:
        return (
            "the host has no IPoIB interface (is the module ib_ipoib loaded and the HCA's "
            "link layer InfiniBand?)"
        )
    return f'set "master" to an IPoIB interface ({", ".join(names)} found)'
