"""Chooses the master and plans the child.

The HCA of a master is the HCA of the interface under the master. A master may be the HCA's
interface itself, a VLAN on the interface, or a bond of interfaces.
"""

import msgspec

from base import interrupts
from base.paths import Paths
from cni.attachments.matching import Match, mismatch, none_given
from cni.macvlan import options as macvlan_options
from cni.macvlan.options import MacvlanOptions
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from host.netlink import interface_addresses, links
from host.netlink.links import Link
from host.netlink.sockets import Rtnetlink
from host.sysfs import attribute_files, infiniband, pci
from host.sysfs.discovery import HCAsByName, unknown
from policy.allowance import Allowance, joined

_ON_ANOTHER = ("vlan", "macvlan", "ipvlan")  # kinds of interfaces on one other interface


class MacvlanPlan(msgspec.Struct, frozen=True, kw_only=True):
    options: MacvlanOptions  # with the values that rules fix
    master: Link
    base: str = ""  # the interface under the master, "" for a master in the pod
    vlans: tuple[int, ...] = (0,)  # the VLAN IDs between `base` and the child
    hca: str = ""  # host.sysfs.discovery.HCA.id, "" if there is none
    bdf: str = ""
    rdma: tuple[str, ...] = ()  # the RDMA devices of the HCA
    allowance: Allowance = Allowance()  # of the attachment, for its addresses

    @property
    def mtu(self) -> int:
        return self.options.mtu or self.master.mtu


def choose(
    route: Rtnetlink, paths: Paths, options: MacvlanOptions, request: Request, match: Match
) -> MacvlanPlan:
    """Plan the child on the first master that it can have.

    `route` is a socket in the master's namespace. The master must be on an HCA of the pod, if the
    pod holds any. Raises CNIError 11 if a wait may help, 120 if the pod does not hold the HCA, and
    7 otherwise. The error has a reason for each master.
    """
    refusals: list[CNIError] = []
    for name in _given(paths, options, match) if options.auto else [options.master]:
        interrupts.checkpoint()
        try:
            return _plan_on(_master(route, name), route, paths, options, request, match)
        except CNIError as refusal:
            refusals.append(refusal)
    raise joined(refusals)


def _plan_on(
    master: Link,
    route: Rtnetlink,
    paths: Paths,
    options: MacvlanOptions,
    request: Request,
    match: Match,
) -> MacvlanPlan:
    if options.in_container:
        plan = MacvlanPlan(options=options, master=master, allowance=match.allowance)
    else:
        plan = _allowed(_plan(master, route, paths, options, match), request, match)
        match.require_own(plan.hca or "unknown", plan.rdma, f'master "{master.name}"')
    if plan.options.mtu > master.mtu:
        raise invalid_config(
            f'"mtu": {plan.options.mtu} is over the MTU {master.mtu} of master "{master.name}": '
            'lower "mtu", or remove the key to use the MTU of the master'
        )
    if not master.up:
        raise CNIError(
            Code.TRY_AGAIN, f'master "{master.name}" is down: run `ip link set {master.name} up`'
        )
    return plan


def _master(route: Rtnetlink, name: str) -> Link:
    """The interface of that name; without a name, that of the default route. Raises CNIError 7."""
    if name:
        master = links.find(route, name)
    else:
        index = interface_addresses.default_route(route)
        master = links.by_index(route, index) if index else None
    if master is None:
        what = f'master "{name}" does not exist' if name else '"master" is missing'
        raise invalid_config(
            f'{what}: set "master" to an interface, or to "auto" for the interface of the pod\'s '
            "HCA; without the key there must be a default route"
        )
    if master.link_type != links.ARPHRD_ETHER:
        other = master.link_type == links.ARPHRD_INFINIBAND
        raise invalid_config(
            f'master "{master.name}" has link type {master.link_type_name}, not ether: '
            + ('use the plugin "ipoib"' if other else "set another master")
        )
    return master


def _given(paths: Paths, options: MacvlanOptions, match: Match) -> list[str]:
    """The interfaces of the pod's HCAs, in the order of the HCAs. ACTIVE ports come first."""
    held = match.candidates(options.device_id)
    if not held:
        raise none_given(paths, options.pod, '"master": "auto"')
    by_name = HCAsByName(paths)
    found: dict[str, bool] = {}
    for device in held:
        hca = by_name.get(device.device.id) or unknown(device.device.id)
        ports = [port for rdma in hca.rdma for port in rdma.ports if port.state != "ACTIVE"]
        down = {name for port in ports for name in port.netdevs}
        for name in hca.netdevs:
            # The GID table of a software device also has VLANs on its interface.
            if not set(_lower(paths, name)).intersection(hca.netdevs):
                bond = attribute_files.target(f"{paths.sysfs}/class/net/{name}/master")
                found.setdefault(bond if _is_bond(paths, bond) else name, name in down)
    if not found:
        listed = ", ".join(map(str, held))
        raise mismatch(
            '"master": "auto": no interface of the host is on an HCA of the pod '
            f"({listed}): check that the HCA's driver is loaded and that the interface is in the "
            "host's network namespace"
        )
    return sorted(found, key=found.__getitem__)


def _lower(paths: Paths, name: str) -> list[str]:
    """The interfaces that this interface is on, such as the members of a bond."""
    entries = attribute_files.names(f"{paths.sysfs}/class/net/{name}")
    return sorted(each.removeprefix("lower_") for each in entries if each.startswith("lower_"))


def _is_bond(paths: Paths, name: str) -> bool:
    return name != "" and attribute_files.exists(f"{paths.sysfs}/class/net/{name}/bonding")


def _plan(
    master: Link, route: Rtnetlink, paths: Paths, options: MacvlanOptions, match: Match
) -> MacvlanPlan:
    """The plan on a master of the host, with the HCA. One that the pod holds comes first."""
    base, vlans = master, []
    while base.kind in _ON_ANOTHER and base.parent:
        vlans += [base.vlan] if base.kind == "vlan" else []
        under = links.by_index(route, base.parent)
        if under is None:
            break
        base = under
    names = (_lower(paths, base.name) if _is_bond(paths, base.name) else []) or [base.name]
    plans: list[MacvlanPlan] = []
    for name in names:
        function = pci.of_netdev(paths, name)
        address = function.address if function is not None else ""
        rdma = function.rdma if function is not None else pci.soft_rdma_of(paths, name)
        own = [hca for hca in (address, *rdma) if hca and match.holdings.hca(hca) is not None]
        plan = MacvlanPlan(
            options=options,
            master=master,
            base=name,
            vlans=tuple(vlans) or (0,),
            hca=own[0] if own else address or next(iter(rdma), ""),
            bdf=infiniband.bdf_of(paths, name),
            rdma=rdma,
        )
        plans.insert(0 if own else len(plans), plan)
    return plans[0]


def _allowed(plan: MacvlanPlan, request: Request, match: Match) -> MacvlanPlan:
    """The plan, with the values that the policy's rules require.

    Raises NotAllowed if no rule allows the plan.
    """
    master, options = plan.master, plan.options
    allowance = match.using(plan.hca, "master", master.name, parent=plan.base)
    fixed = allowance.filled(request.config.keys, ("mtu",))
    if fixed:
        options = macvlan_options.read(request.with_keys(fixed), options.kind)
    for vlan in plan.vlans:
        allowance = allowance.using("vlans", vlan, f"vlan of {master.name}", vlan)
    if options.mtu and options.mtu != master.mtu:
        allowance.require_option("mtu", options.mtu, "mtu", options.mtu)
    return msgspec.structs.replace(plan, options=options, allowance=allowance)
