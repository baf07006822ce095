"""What the rules for a pod say of an attachment of `sriov`: of its options, and of a device."""

from collections.abc import Mapping
from typing import Any

from base.paths import Paths
from cni.attachments.matching import Match, require_allowed
from cni.policy.allowance import Allowance
from cni.policy.values import number_of
from cni.spec.request import Request
from cni.sriov import options
from cni.sriov.devices import hca_of
from cni.sriov.options import SriovOptions
from cni.sriov.plan import DevicePlan, DeviceUnfit
from cni.sriov.values import VLAN_PROTOCOLS
from host.pci import Function

_OF_TAGS = ("vlan", "vlanQoS", "vlanProto")
_OF_INTERFACES = ("mtu", "allmulti", "promisc")
_OF_ETHERNET = ("spoofchk", "trust", "min_tx_rate", "max_tx_rate", *_OF_TAGS)
_OF_INFINIBAND = ("pkey",)
FIXED = ("link_state", *_OF_INTERFACES, *_OF_ETHERNET, *_OF_INFINIBAND)
"""Options that a rule may put in."""


def by_options(wanted: SriovOptions, allowance: Allowance) -> Allowance:
    """The allowance with these options, as far as no device is needed to tell. CNIError 121."""
    require_allowed(allowance, match_device=wanted.match_device, pf_only=wanted.pf_only)
    for key, value, safe in _options(wanted):
        if value is not None and value != safe:
            allowance.require_option(key, value, key, _shown(value))
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

    A rule may fix a VLAN and a P_Key: the device has one of them. What does not go with the
    configuration is left out, so that the plan tells which of its keys the device cannot have.
    """
    if not any(rule.fixed for rule in allowance.left):
        return wanted, allowance
    if function.userspace and not infiniband:
        _require_ethernet(wanted, function)
    keys = ["link_state"]
    if infiniband and not _asks_for_ethernet(wanted):
        keys += _OF_INFINIBAND
    if not infiniband and not wanted.guid and wanted.pkey is None:
        keys += _OF_ETHERNET
    if not (function.userspace or wanted.vfio_pci_mode):
        keys += _OF_INTERFACES
    if wanted.vlan is not None:
        keys = [key for key in keys if key not in _OF_TAGS]
    fixed = allowance.filled(options.in_our_case(request.config.keys), keys)
    if not fixed:
        return wanted, allowance
    if not function.is_vf:
        _require_none_of_vfs(fixed, function)
    wanted = options.read(request.with_keys(fixed))
    return wanted, by_options(wanted, allowance)


def on_device(
    paths: Paths, match: Match, function: Function, wanted: SriovOptions, allowance: Allowance
) -> Allowance:
    """The allowance on a device. CNIError 121."""
    key = wanted.device_key or "master"
    hca = hca_of(paths, function, match)
    return match.using(hca, key, function.address, allowance=allowance)


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


def _require_ethernet(wanted: SriovOptions, function: Function) -> None:
    """Refuse options of InfiniBand, which the plan cannot tell of a device without an interface.

    With them, what a rule fixes for Ethernet would be left out.
    """
    for key, is_set in (("guid", bool(wanted.guid)), ("pkey", wanted.pkey is not None)):
        if is_set:
            raise DeviceUnfit(
                f'"{key}": the link layer of device {function.address} is Ethernet, which has '
                "none: remove it"
            )


def _require_none_of_vfs(fixed: Mapping[str, Any], function: Function) -> None:
    """Refuse a device that cannot have what a rule fixes: no PF sets it for an SF or a PF."""
    for key in ("link_state", *_OF_ETHERNET):
        if key in fixed:
            raise DeviceUnfit(
                f'"{key}": a rule for this namespace puts it in, and device {function.address} is '
                "not a VF, which alone can have it: use a VF, or ask the administrator"
            )


def _asks_for_ethernet(wanted: SriovOptions) -> bool:
    values = (wanted.vlan, wanted.spoofchk, wanted.trust, wanted.min_tx_rate, wanted.max_tx_rate)
    return bool(wanted.mac) or any(value is not None for value in values)


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


def _shown(value: int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
