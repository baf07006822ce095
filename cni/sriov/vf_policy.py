"""Applies the policy's rules to a `sriov` attachment's options and device."""

from collections.abc import Mapping

from base.address_text import guid, mac
from cni.spec.request import Request
from cni.sriov import options
from cni.sriov.option_values import ETHERNET, TAG, VLAN_PROTOCOLS
from cni.sriov.options import SriovOptions
from cni.sriov.plan import DevicePlan, DeviceUnfit
from host.sysfs.pci import Function
from policy.allowance import Allowance

_OF_INTERFACES = ("mtu", "allmulti", "promisc")
# Options that a rule allows by name. The value that is here needs no rule.
_SAFE: Mapping[str, int | str | None] = {
    "accept_ra": False,
    "allmulti": False,
    "link_state": "auto",
    "max_tx_rate": None,
    "min_tx_rate": 0,
    "promisc": False,
    "spoofchk": True,
    "trust": False,
    "vlanProto": VLAN_PROTOCOLS[0],
    "vlanQoS": 0,
}


def by_options(wanted: SriovOptions, allowance: Allowance) -> Allowance:
    """The allowance, limited to the rules that list the options' values. Raises CNIError 121."""
    allowance.require_match(match_device=wanted.match_device, pf_only=wanted.pf_only)
    flags = {key: getattr(wanted, key) for key in ("accept_ra", "allmulti", "promisc")}
    for key, value in {**flags, **wanted.vf}.items():
        if value is not None and value != _SAFE.get(key, value):
            allowance.require_option(key, value, key, str(value).lower())
    if wanted.pkey is not None:
        allowance = allowance.using("pkeys", wanted.pkey, "pkey", f"{wanted.pkey:#06x}")
    for key, number in (("vlan", int), ("guid", guid), ("mac", mac)):
        if key in wanted.vf:
            value = wanted.vf[key]
            allowance = allowance.using(f"{key}s", int(number(value)), key, value)
    return allowance


def completed(
    request: Request,
    wanted: SriovOptions,
    allowance: Allowance,
    function: Function,
    *,
    infiniband: bool,
) -> tuple[SriovOptions, Allowance]:
    """The options, with the rules' values for missing keys. Raises CNIError 7, 121."""
    # A rule may fix a VLAN and a P_Key. A device can have only one of the two.
    keys = ["link_state", *(["pkey"] if infiniband else ETHERNET)]
    if not (function.userspace or wanted.vfio_pci_mode):
        keys += _OF_INTERFACES
    if "vlan" in wanted.vf:
        keys = [key for key in keys if key not in TAG]
    fixed = allowance.filled(options.in_our_case(request.config.keys), keys)
    if not fixed:
        return wanted, allowance
    for key in ("link_state", *ETHERNET):
        if key in fixed and not function.is_vf:
            raise DeviceUnfit(
                f'"{key}": a FabricPolicy rule for this namespace sets this option, but device '
                f"{function.address} is not a VF: use a VF, or ask the administrator"
            )
    wanted = options.read(request.with_keys(fixed))
    return wanted, by_options(wanted, allowance)


def as_planned(
    plan: DevicePlan, wanted: SriovOptions, allowance: Allowance, *, infiniband: bool
) -> Allowance:
    """The allowance, limited to rules that list the device's VLAN or P_Key. Raises CNIError 121.

    The device's VLAN is checked only if "vlan" is missing. An SF or a whole PF counts as VLAN 0,
    because its pod can send any tag. An MTU that the device already has needs no rule.
    """
    link = plan.link
    if wanted.mtu and link is not None and wanted.mtu != link.mtu:
        allowance.require_option("mtu", wanted.mtu, "mtu", wanted.mtu)
    if infiniband:
        # A new GUID may come with another partition, which is known after the rebind.
        return allowance if "guid" in wanted.vf else in_partition(plan, allowance)
    if "vlan" not in wanted.vf:
        vlan = plan.vf.vlan if plan.vf is not None else 0
        allowance = allowance.using("vlans", vlan, f"vlan of {plan.function.address}", vlan)
    return allowance


def in_partition(plan: DevicePlan, allowance: Allowance) -> Allowance:
    """The allowance, limited to the rules that list the interface's P_Key. Raises CNIError 121."""
    if plan.link is None or plan.link.pkey is None:
        return allowance
    pkey = plan.link.pkey
    return allowance.using("pkeys", pkey, f"pkey of {plan.function.address}", f"{pkey:#06x}")
