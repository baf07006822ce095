"""Lists the devices that an ADD may try, and checks whether the pod may have a device."""

from collections.abc import Iterator, Sequence

from base.paths import Paths
from cni.attachments.matching import Denied, Match, mismatch, without_kubelet
from cni.spec.errors import CNIError, Code
from cni.sriov.options import SriovOptions, no_device, no_such_device
from cni.sriov.plan import DeviceUnfit, require_isolation
from host.netlink import links
from host.netlink.sockets import Rtnetlink
from host.sysfs import attribute_files, pci
from host.sysfs.pci import Function


def candidates(paths: Paths, options: SriovOptions, match: Match) -> Iterator[str]:
    """The addresses of the devices to try, in order. Raises CNIError if no candidate exists.

    If the configuration names a device, this device is the only candidate. Otherwise the candidates
    are the devices that the kubelet gave to the pod. If the kubelet gave none, the candidates are
    free devices of the PFs in "master".
    """
    if options.device:
        yield options.device
        return
    if options.device_id and match.holdings.hca(options.device_id) is None:
        raise no_such_device(options.device_id)
    own = _devices_of_pod(paths, options, match)
    if own:
        yield from own
        return
    if not options.masters:
        if not match.holdings.ids:
            raise no_device(without_kubelet(paths))
        raise mismatch(
            f"pod {match.holdings.pod} was given {match.holdings.shown()}, and no "
            f"{'PF' if options.pf_only else 'VF or SF'} of this node: have the pod request one "
            '(resources.limits), or set "master"'
        )
    away: list[str] = []
    denied: list[Denied] = []
    has_candidate = False
    for pf in filter(None, (pci.of_netdev(paths, master) for master in options.masters)):
        functions = [pf] if options.pf_only else pci.vfs(paths, pf.address)
        for function in functions:
            if function.userspace != bool(options.vfio_pci_mode):
                continue
            refused = match.denied((function.address, *function.rdma))
            if refused is not None:
                denied.append(Denied(function.address, refused.resource, refused.held))
                continue
            has_candidate = True
            if options.vfio_pci_mode or function.netdevs:
                yield function.address
            else:
                away.append(function.address)
    yield from away  # these devices are in pods, which may be dead
    if not has_candidate:
        raise _no_vf(paths, options, match, denied)


def _devices_of_pod(paths: Paths, options: SriovOptions, match: Match) -> list[str]:
    """The addresses of the pod's devices that fit `options`, in order."""
    pfs = {pf.address for pf in (pci.of_netdev(paths, master) for master in options.masters) if pf}
    addresses = []
    for hca in match.candidates(options.device_id):
        # A software device has no address.
        function = pci.find(paths, hca.device.address) if hca.device.address else None
        if function is None or (function.is_vf or ":" not in function.address) is options.pf_only:
            continue
        if not options.masters or {function.pf, function.address} & pfs:
            addresses.append(function.address)
    return addresses


def is_infiniband(host: Rtnetlink, paths: Paths, function: Function) -> bool:
    """Whether the device is InfiniBand. If it has no interface, the PF's interface decides."""
    names = (*function.netdevs, pci.pf_netdev(paths, function.pf) if function.pf else "")
    found = (links.find(host, name) for name in names if name)
    link = next(filter(None, found), None)
    return link is not None and link.link_type == links.ARPHRD_INFINIBAND


def rdma_devices_of(paths: Paths, function: Function) -> tuple[str, ...]:
    """The names of the device's hardware RDMA devices. Without any, its Soft-RoCE devices."""
    return pci.rdma_of(paths, function.address) or function.rdma


def require_entitled(paths: Paths, address: str, options: SriovOptions, match: Match) -> None:
    """Call `require_match`, unless the kubelet gave the device to the pod.

    The kubelet can give the pod a device that a dead attachment still has. The caller first takes
    such a device from the dead attachment, then calls `require_match`.
    """
    function = pci.find(paths, address)
    if function is not None and match.holdings.hca(function.address) is None:
        require_match(paths, function, options, match)


def require_match(paths: Paths, function: Function, options: SriovOptions, match: Match) -> None:
    """Raise CNIError 120 or 121 if the device is not allowed for the pod."""
    address, what = function.address, f"device {function.address}"
    # Without HCAs or RDMA devices there are no uverbs devices to compare.
    names = options.match_device and match.holdings.hcas and rdma_devices_of(paths, function)
    if names:
        remedy = 'remove "deviceID" and "master"'
        reason = match.refusal(address, what, names, remedy)
        if reason is not None:
            raise mismatch(reason)
    denied = match.denied((address, *function.rdma))
    if denied is not None:
        raise match.error(denied, options.device_key or "master", what)


def _no_vf(paths: Paths, options: SriovOptions, match: Match, denied: Sequence[Denied]) -> CNIError:
    """The error if the masters have no candidate. `denied` has the refused devices."""
    offered = [refusal for refusal in denied if not refusal.held]
    if offered:
        listed = ", ".join(f"{refusal.device} of {refusal.resource}" for refusal in offered)
        return match.not_assigned(
            f'"master": no device is free, and a device that this pod was not given ({listed})',
            "have the pod request such a device (resources.limits)",
        )
    reasons = []
    for master in options.masters:
        pf = pci.of_netdev(paths, master)
        if pf is None:
            reasons.append(_no_master(master))
            continue
        existing, possible = pci.vf_count(paths, pf.address)
        functions = [pf] if options.pf_only else pci.vfs(paths, pf.address)
        own = {function.address for function in functions}
        of_pods = [refusal for refusal in denied if refusal.device in own]
        if of_pods:
            listed = ", ".join(f"{refusal.device} as {refusal.resource}" for refusal in of_pods)
            reasons.append(f"the kubelet gave {listed} of {master} to other pods")
        elif not possible:
            reasons.append(f"{master} cannot have VFs")
        elif not existing:
            reasons.append(f"{master} has no VFs: write a number to its sriov_numvfs")
        else:
            driver = "vfio-pci's driver" if options.vfio_pci_mode else "a network driver"
            reasons.append(f"none of the {existing} VFs of {master} has {driver}")
    return DeviceUnfit(f'"master": no device is free: {"; ".join(reasons)}', Code.TRY_AGAIN)


def _no_master(master: str) -> str:
    return f"{master} is not an interface of a PCI or auxiliary device on the host"


def missing(paths: Paths, options: SriovOptions) -> list[str]:
    """The reasons why an ADD would fail on this node now."""
    reasons: list[str] = []
    if options.rdma_isolation:
        try:
            require_isolation()
        except DeviceUnfit as unfit:
            reasons.append(unfit.message)
    if options.device:
        if not pci.is_present(paths, options.device):
            reasons.append(f'device "{options.device}" is not on this node')
        return reasons
    functions = [pci.of_netdev(paths, master) for master in options.masters]
    pfs = [function.address for function in functions if function is not None]
    if options.masters and not pfs:
        reasons += [f'"master": {_no_master(master)}' for master in options.masters]
        return reasons
    addresses = pfs or attribute_files.names(f"{paths.sys}/bus/pci/devices")
    if not options.pf_only and not any(pci.vf_count(paths, address)[0] for address in addresses):
        where = ", ".join(options.masters) or "this node"
        reasons.append(f"{where} has no VFs: write a number to sriov_numvfs of a PF")
    return reasons
