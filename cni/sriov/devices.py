"""Which device an attachment gets: those that may be tried, whose they are, what a node lacks.

Nothing is changed here.
"""

from collections.abc import Iterator, Sequence

from base.paths import Paths
from cni.attachments.matching import Denied, Match, mismatch
from cni.policy import rules
from cni.spec.errors import CNIError, Code
from cni.sriov.options import SriovOptions, no_device, no_such_device
from cni.sriov.plan import DeviceUnfit, require_isolation
from host import links, pci, sysfs
from host.netlink import Rtnetlink
from host.pci import Function


def candidates(paths: Paths, options: SriovOptions, match: Match) -> Iterator[str]:
    """The addresses of the devices to be tried, in order. Raises CNIError where there are none.

    The one that is named; else those that the kubelet gave to the pod; else any of a master's
    that is for no other pod.
    """
    if options.device:
        yield options.device
        return
    if options.device_id and match.holdings.hca(options.device_id) is None:
        raise no_such_device(options.device_id)
    given = _given(paths, options, match)
    if given:
        yield from given
        return
    if not options.masters:
        if not match.holdings.ids:
            raise no_device()
        raise mismatch(
            f"pod {match.holdings.pod} was given {match.holdings.shown()}, of which none is "
            f"{'a PF' if options.pf_only else 'a VF or SF'} of this node: have a container request "
            'a resource of such devices, or set "master"'
        )
    away: list[str] = []
    denied: list[Denied] = []
    found = False
    for pf in filter(None, (pci.of_netdev(paths, master) for master in options.masters)):
        functions = [pf] if options.pf_only else pci.vfs(paths, pf.address)
        for function in functions:
            if function.userspace != bool(options.vfio_pci_mode):
                continue
            refused = match.entitlement.denied((function.address, *function.rdma))
            if refused is not None:
                denied.append(Denied(function.address, refused.resource, refused.held))
                continue
            found = True
            if options.vfio_pci_mode or function.netdevs:
                yield function.address
            else:
                away.append(function.address)
    yield from away  # in pods, of which one may be dead
    if not found:
        raise _no_vf(paths, options, denied)


def _given(paths: Paths, options: SriovOptions, match: Match) -> list[str]:
    """The devices that the pod was given and that `options` can be about, in order."""
    pfs = {pf.address for pf in (pci.of_netdev(paths, master) for master in options.masters) if pf}
    found = []
    for hca in match.candidates(options.device_id):
        # A software device is on the function that its interface is of.
        address = hca.device.address or pci.holder_of_rdma(paths, hca.device.id)
        function = pci.find(paths, address) if address else None
        if function is None or (function.is_vf or ":" not in function.address) is options.pf_only:
            continue
        if not options.masters or {function.pf, function.address} & pfs:
            found.append(function.address)
    return found


def hca_of(paths: Paths, function: Function, match: Match) -> str:
    """The id by which pools know a device: a software device's name, where it is of that one."""
    address = function.address
    if match.holdings.hca(address) is not None or pci.rdma_of(paths, address):
        return address
    return next((one for one in function.rdma if match.holdings.hca(one) is not None), address)


def require_entitled(paths: Paths, address: str, options: SriovOptions, match: Match) -> None:
    """`require_match` before anything of the device is locked, unless it is the pod's own.

    The numbers of the pod's own may be others until an attachment that is dead has given it back.
    """
    function = pci.find(paths, address)
    if function is not None and match.holdings.hca(hca_of(paths, function, match)) is None:
        require_match(paths, function, options, match)


def require_match(paths: Paths, function: Function, options: SriovOptions, match: Match) -> None:
    """Raise CNIError 120 if the pod's verbs devices are those of another HCA.

    And 120 or 121 if the device is for other pods. A VF without an RDMA device is an interface
    like any other: it has nothing to differ in.
    """
    address, what = function.address, f"device {function.address}"
    names = pci.rdma_of(paths, address) or function.rdma
    if names and options.match_device:
        remedy = 'leave "deviceID" and "master" out'
        reason = match.refusal(hca_of(paths, function, match), what, names, remedy)
        if reason is not None:
            raise mismatch(reason)
    denied = match.entitlement.denied((address, *function.rdma))
    if denied is not None:
        raise match.entitlement.error(denied, options.device_key or "master", what)


def _no_vf(paths: Paths, options: SriovOptions, denied: Sequence[Denied]) -> CNIError:
    """Why no device of the masters can be tried; `denied` are those that are for other pods."""
    offered = [one for one in denied if not one.held]
    if offered:
        listed = ", ".join(f"{one.device} of {one.resource}" for one in offered)
        return rules.not_allowed(
            f'"master": no device is free, and to take one that this pod was not given ({listed})',
            "unassigned_devices",
            "have the pod request one (resources.limits)",
        )
    told = []
    for master in options.masters:
        pf = pci.of_netdev(paths, master)
        if pf is None:
            told.append(_no_master(master))
            continue
        there, possible = pci.vf_count(paths, pf.address)
        own = {one.address for one in ([pf] if options.pf_only else pci.vfs(paths, pf.address))}
        pods = [one for one in denied if one.device in own]
        if pods:
            listed = ", ".join(f"{one.device} as {one.resource}" for one in pods)
            told.append(f"the kubelet gave {listed} of {master} to other pods")
        elif not possible:
            told.append(f"{master} cannot have VFs")
        elif not there:
            told.append(f"{master} has no VFs: write a number to its sriov_numvfs")
        else:
            kind = "has vfio-pci's driver" if options.vfio_pci_mode else "has an interface's driver"
            told.append(f"none of the {there} VFs of {master} {kind}")
    return DeviceUnfit(f'"master": no device is free: {"; ".join(told)}', Code.TRY_AGAIN)


def _no_master(master: str) -> str:
    return f"{master} is no interface of a PCI or auxiliary device on the host"


def missing(host: Rtnetlink, paths: Paths, options: SriovOptions) -> list[str]:
    """What an ADD would lack on this node now, for STATUS: no VFs, a PF that is down."""
    found: list[str] = []
    if options.rdma_isolation:
        try:
            require_isolation()
        except DeviceUnfit as unfit:
            found.append(unfit.message)
    absent = [one for one in options.masters if pci.of_netdev(paths, one) is None]
    pfs = _pfs(paths, options)
    if options.device and not pfs:
        found.append(f'there is no device "{options.device}" on this node')
    elif not pfs and not absent:
        found.append("this node has no VFs: write a number to sriov_numvfs of a PF")
    reasons = [f'"master": {_no_master(one)}' for one in absent]
    reasons += [_unready(host, paths, pf, options) for pf in pfs]
    if all(reasons):  # one that can is enough
        found += reasons
    return found


def _pfs(paths: Paths, options: SriovOptions) -> list[str]:
    """The PFs that count for STATUS, or the devices themselves where they are no VFs."""
    if options.masters:
        functions = [pci.of_netdev(paths, master) for master in options.masters]
        return [function.address for function in functions if function is not None]
    if options.device:
        function = pci.find(paths, options.device)
        return [function.pf or function.address] if function is not None else []
    every = sysfs.names(f"{paths.sys}/bus/pci/devices")
    return sorted(address for address in every if pci.vf_count(paths, address)[0])


def _unready(host: Rtnetlink, paths: Paths, pf: str, options: SriovOptions) -> str:
    """Why a PF is of no use now, "" if it is."""
    if ":" not in pf or options.pf_only:
        return ""
    there, possible = pci.vf_count(paths, pf)
    if not possible:
        return f"{pf} cannot have VFs"
    if not there:
        return f"the PF {pf} has no VFs: write a number to its sriov_numvfs"
    name = pci.pf_netdev(paths, pf)
    link = links.find(host, name) if name else None
    if link is None:
        return f"the PF {pf} has no interface on the host"
    if not link.up:
        return f"the PF {name} is down: ip link set {name} up"
    return ""
