"""Chooses the parent and plans the child."""

import msgspec

from base import interrupts
from base.paths import Paths
from cni.attachments.matching import Match, mismatch, none_given
from cni.ipoib import options as ipoib_options
from cni.ipoib.options import CONNECTED, CONNECTED_MTU, DATAGRAM, IpoibOptions
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from host.netlink import links
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink
from host.sysfs import infiniband, pci
from policy.allowance import Allowance, joined

UD_MTU = 4092  # a 4096 byte InfiniBand MTU less IPoIB's header of 4


class ChildPlan(msgspec.Struct, frozen=True, kw_only=True):
    options: IpoibOptions  # with the values that rules fix
    parent: Link
    port: infiniband.IpoibPort | None
    pkey: int
    mode: str
    mtu: int
    umcast: bool
    bdf: str
    hca: str  # host.sysfs.discovery.HCA.id of the parent's HCA, "" if there is none
    allowance: Allowance = Allowance()  # of the attachment, for its addresses

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
    """Plan the child on the first master that can be its parent.

    With `match`, the parent must be on an HCA of the pod, if the pod holds any. Raises CNIError 11
    if a wait may help, 120 if the pod does not hold the HCA, and 7 otherwise. The error has a
    reason for each master.
    """
    refusals: list[CNIError] = []
    for name in options.masters or _given_parents(route, paths, options, match):
        interrupts.checkpoint()
        try:
            return _child_on(name, route, paths, options, request, match)
        except CNIError as refusal:
            refusals.append(refusal)
    raise joined(refusals)


def _child_on(
    name: str,
    route: Rtnetlink,
    paths: Paths,
    options: IpoibOptions,
    request: Request | None,
    match: Match | None,
) -> ChildPlan:
    parent = _parent(route, name)
    plan = _plan(paths, parent, options)
    if match is not None and request is not None:
        plan = _allowed(paths, plan, request, match)
    _require_possible(plan)
    if match is not None:
        match.require_own(plan.hca, plan.rdma, f'parent "{plan.parent.name}"')
    if not parent.up:
        raise CNIError(
            Code.TRY_AGAIN,
            f'parent "{name}" is down: run `ip link set {name} up`',
        )
    return plan


def _parent(route: Rtnetlink, name: str) -> Link:
    """The IPoIB interface of that name. Raises CNIError 7 if it cannot be a parent."""
    parent = links.find(route, name)
    if parent is None:
        reason = "does not exist"
    elif parent.kind == "macvlan":
        reason = "is a macvlan, not an IPoIB interface"
    elif parent.link_type != links.ARPHRD_INFINIBAND:
        reason = f"has link type {parent.link_type_name}, not infiniband"
    elif parent.kind != "ipoib":
        reason = f'is of kind "{parent.kind}", not ipoib'
    elif parent.parent:
        raise invalid_config(
            f'parent "{name}" is itself the child of an IPoIB interface: set "master" to the '
            f'parent of "{name}", and "pkey" to "{parent.pkey or 0:#06x}"'
        )
    else:
        return parent
    raise invalid_config(f'parent "{name}" {reason}: {_possible_parents(route)}')


def _given_parents(
    route: Rtnetlink, paths: Paths, options: IpoibOptions, match: Match | None
) -> list[str]:
    """The parents on the pod's HCAs, or without `match` on all HCAs. ACTIVE ports come first."""
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
            raise invalid_config(
                '"master": "auto": the host has no IPoIB interface with a port: load the module '
                "ib_ipoib, and check that the HCA's link layer is InfiniBand"
            )
        return sorted(names, key=lambda name: name not in active)
    held = match.candidates(options.device_id)
    if not held:
        raise none_given(paths, options.pod, '"master": "auto"')
    names = [name for hca in held for _, name in sorted(by_hca.get(hca.device.id, ()))]
    if not names:
        listed = ", ".join(map(str, held))
        raise mismatch(
            '"master": "auto": no IPoIB interface of the host is on an HCA of the pod '
            f"({listed}): check that the HCA's link layer is InfiniBand, and that the module "
            "ib_ipoib is loaded"
        )
    return sorted(names, key=lambda name: name not in active)


def _allowed(paths: Paths, plan: ChildPlan, request: Request, match: Match) -> ChildPlan:
    """The plan, with the values that the policy's rules require.

    Raises NotAllowed if no rule allows the plan.
    """
    parent = plan.parent
    allowance = match.using(plan.hca, "master", parent.name, parent=parent.name)
    fixed = allowance.filled(request.config.keys, ("pkey", "mtu", "proxy_arp"))
    if fixed:
        options = ipoib_options.read(request.with_keys(fixed))
        allowance = ipoib_options.allowed(options, allowance)
        plan = _plan(paths, parent, options)
    allowance = allowance.using("pkeys", plan.pkey, "pkey", f"{plan.pkey:#06x}")
    mtu = plan.options.mtu
    if mtu and mtu != _inherited_mtu(parent, plan.mode):
        allowance.require_option("mtu", mtu, "mtu", mtu)
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


def _require_possible(plan: ChildPlan) -> None:
    """Raise CNIError 7 if the child cannot be made."""
    parent, port = plan.parent, plan.port
    if port is not None and not port.has_pkey(plan.pkey):
        table = ", ".join(f"{pkey:#06x}" for pkey in port.pkeys) or "empty"
        what = '"pkey":' if plan.options.pkey else f'parent "{parent.name}": P_Key'
        raise invalid_config(
            f"{what} {plan.pkey:#06x} is not in the P_Key table of {port.hca} port "
            f"{port.number} ({table}): add the port to this partition in the subnet manager, or "
            'set "pkey" to a P_Key of this table'
        )
    limit = CONNECTED_MTU if plan.mode == CONNECTED else parent.mtu
    if plan.mode == DATAGRAM and parent.mode == CONNECTED:
        limit = min(parent.mtu, UD_MTU)
    if plan.mtu > limit:
        raise invalid_config(
            f'"mtu": {plan.mtu} is over the limit of {limit} in {plan.mode} mode on parent '
            f'"{parent.name}": lower "mtu", or remove the key to use the parent\'s MTU'
        )


def why_no_carrier(paths: Paths, plan: ChildPlan, parent: Link | None) -> str:
    """The reason why a child that is up has no carrier."""
    if parent is None:
        return f'parent "{plan.parent.name}" is gone'
    port = infiniband.port_of(paths, parent)
    if port is None:
        return f'parent "{parent.name}" has no port in sysfs'
    at = f"port {port.number} of {port.hca}"
    if port.state != "ACTIVE":
        return f"{at} is {port.state}, its physical state {port.physical_state}: check the cable"
    if not port.has_pkey(plan.pkey):
        return f"P_Key {plan.pkey:#06x} has left the table of {at}: add it in the subnet manager"
    if not port.sm_lid:
        return f"{at} has no subnet manager: start one"
    return (
        f"{at} is ACTIVE, but the broadcast group of P_Key {plan.pkey:#06x} could not be "
        "joined: check the subnet manager's partitions (ipoib flag, rate, mtu) and dmesg"
    )


def _possible_parents(route: Rtnetlink) -> str:
    """The IPoIB interfaces that could be parents, for an error text."""
    names = [link.name for link in links.every(route, "ipoib") if not link.parent]
    if not names:
        return (
            "the host has no IPoIB interface: load the module ib_ipoib, and check that the HCA's "
            "link layer is InfiniBand"
        )
    return f'set "master" to an IPoIB interface ({", ".join(names)} found)'
