"""What the rules for a pod say of an attachment of `sriov`: of its options, and of a device."""

from cni.attachments.matching import require_allowed
from cni.policy.allowance import Allowance
from cni.policy.values import number_of
from cni.spec.request import Request
from cni.sriov import options
from cni.sriov.options import SriovOptions
from cni.sriov.plan import DevicePlan, DeviceUnfit
from cni.sriov.values import VLAN_PROTOCOLS
from host.pci import Function

_OF_TAGS = ("vlan", "vlanQoS", "vlanProto")
_OF_INTERFACES = ("mtu", "allmulti", "promisc")
_OF_ETHERNET = ("spoofchk", "trust", "min_tx_rate", "max_tx_rate", *_OF_TAGS)


def by_options(wanted: SriovOptions, allowance: Allowance) -> Allowance:
    """The allowance with these options, as far as no device is needed to tell. CNIError 121."""
    require_allowed(allowance, match_device=wanted.match_device, pf_only=wanted.pf_only)
    for key, value, safe in _options(wanted):
        if value is not None and value != safe:
            allowance.require_option(key, value, key, str(value).lower())
    if wanted.pkey is not None:
        allowance = allowance.using("pkeys", wanted.pkey, "pkey", f"{wanted.pkey:#06x}")
    if wanted.vlan is not None:
        allowance = allowance.using("vlans", wanted.vlan.id, "vlan", wanted.vlan.id)
    if wanted.guid:
        allowance = allowance.using("guids", number_of(wanted.guid), "guid", wanted.guid)
    if wanted.mac:
        allowance = allowance.using("macs", number_of(wanted.mac), "mac", wanted.mac)
    return allowance


def completed(
    request: Request,
    wanted: SriovOptions,
    allowance: Allowance,
    function: Function,
    *,
    infiniband: bool,
) -> tuple[SriovOptions, Allowance]:
    """The options with what rules put in where the configuration is silent. CNIError 7, 121.

    A rule may fix a VLAN and a P_Key: the device has one of them.
    """
    keys = ["link_state", *(["pkey"] if infiniband else _OF_ETHERNET)]
    if not (function.userspace or wanted.vfio_pci_mode):
        keys += _OF_INTERFACES
    if wanted.vlan is not None:
        keys = [key for key in keys if key not in _OF_TAGS]
    fixed = allowance.filled(options.in_our_case(request.config.keys), keys)
    if not fixed:
        return wanted, allowance
    for key in ("link_state", *_OF_ETHERNET):
        if key in fixed and not function.is_vf:
            raise DeviceUnfit(
                f'"{key}": a rule for this namespace puts it in, and device {function.address} is '
                "not a VF, which alone can have it: use a VF, or ask the administrator"
            )
    wanted = options.read(request.with_keys(fixed))
    return wanted, by_options(wanted, allowance)


def as_planned(
    plan: DevicePlan, wanted: SriovOptions, allowance: Allowance, *, infiniband: bool
) -> Allowance:
    """The allowance with what the device keeps where the configuration is silent. CNIError 121.

    These are an Ethernet device's VLAN and an InfiniBand interface's P_Key. No PF tags the frames
    of an SF or of a whole PF: as with VLAN 0, the pod may send any tag. The MTU that the device
    has is as good as none.
    """
    link = plan.link
    if wanted.mtu and link is not None and wanted.mtu != link.mtu:
        allowance.require_option("mtu", wanted.mtu, "mtu", wanted.mtu)
    if infiniband:
        # A new GUID brings another partition, which is known once the VF has it.
        return allowance if wanted.guid else in_partition(plan, allowance)
    if wanted.vlan is None:
        vlan = plan.vf.vlan if plan.vf is not None else 0
        allowance = allowance.using("vlans", vlan, f"vlan of {plan.function.address}", vlan)
    return allowance


def in_partition(plan: DevicePlan, allowance: Allowance) -> Allowance:
    """The allowance in the partition that an InfiniBand interface is in. CNIError 121.

    Only the subnet manager sets it: a "pkey" that is written moves the interface nowhere.
    """
    if plan.link is None or plan.link.pkey is None:
        return allowance
    pkey = plan.link.pkey
    return allowance.using("pkeys", pkey, f"pkey of {plan.function.address}", f"{pkey:#06x}")


def _options(wanted: SriovOptions) -> tuple[tuple[str, int | str | None, int | str | None], ...]:
    """The options that rules allow one by one: key, value, and the value that needs no rule."""
    vlan, lowest, highest = wanted.vlan, wanted.min_tx_rate, wanted.max_tx_rate
    if lowest is not None:
        highest = highest or 0  # as `settings.wanted` sets it: no limit
    return (
        ("accept_ra", wanted.accept_ra, False),
        ("allmulti", wanted.allmulti, False),
        ("link_state", wanted.link_state or None, "auto"),
        ("min_tx_rate", lowest, 0),
        ("max_tx_rate", highest, None),
        ("promisc", wanted.promisc, False),
        ("spoofchk", wanted.spoofchk, True),
        ("trust", wanted.trust, False),
        ("vlanProto", vlan.proto if vlan is not None else None, VLAN_PROTOCOLS[0]),
        ("vlanQoS", vlan.qos if vlan is not None else None, 0),
    )
