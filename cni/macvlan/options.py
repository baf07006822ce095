"""Reads and checks a network configuration of type `macvlan` or `ipvlan`.

The keys are those of the reference plugins (containernetworking/plugins, plugins/main).
"""

import msgspec

from base import address_text
from base.pod import Pod
from base.types import DeviceId
from cni.spec import config
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from cni.spec.result import DNS
from host.netlink.links import IPVLAN_MODES
from policy.allowance import Allowance

AUTO = "auto"  # a value of `master`: the interface of the HCA that the pod holds
PASSTHRU = "passthru"
MODES = {"macvlan": ("bridge", "private", "vepa", PASSTHRU), "ipvlan": IPVLAN_MODES}
"""The values of "mode" by kind of interface. The first is the default."""


class MacvlanKeys(msgspec.Struct, kw_only=True):
    """The keys of the plugins, as users write them. `MacvlanOptions` has the checked values."""

    master: str = ""
    mode: str = ""
    mtu: int = 0
    mac: str = ""
    linkInContainer: bool = False
    accept_ra: bool = False
    match_device: bool = True
    dns: DNS | None = None


KNOWN = frozenset({"ipam", "rails", *MacvlanKeys.__struct_fields__})


class MacvlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A valid configuration."""

    kind: str  # "macvlan" or "ipvlan"
    master: str  # "" means the interface of the default route
    device_id: DeviceId  # the kubelet's device id; "" if the runtime passed none
    match_device: bool  # the master must be on an HCA of the pod, if the pod has any
    mode: str
    mtu: int  # 0 means the master's
    mac: str  # "" means that the kernel chooses
    in_container: bool  # the master is in the pod
    accept_ra: bool  # accept router advertisements even with IPv6 addresses from the IPAM plugin
    ipam_type: str  # "" for an interface without addresses
    dns: DNS
    pod: Pod = Pod()

    @property
    def auto(self) -> bool:
        return self.master == AUTO


def read(request: Request, kind: str) -> MacvlanOptions:
    """The options of a request. Raises CNIError 4 for CNI_ARGS, otherwise 7."""
    network = request.config
    written = config.convert(network.keys, MacvlanKeys)
    config.refuse_misspelt(network.keys, KNOWN)
    mode = written.mode or MODES[kind][0]
    if mode not in MODES[kind]:
        listed = ", ".join(f'"{each}"' for each in MODES[kind])
        raise invalid_config(f'"mode": "{mode}" is not one of {listed}')
    if written.mtu < 0:
        raise invalid_config(f'"mtu": {written.mtu} is negative: use 0 for the MTU of the master')
    # As in the reference, the later of these has precedence.
    macs = {"mac": written.mac, "CNI_ARGS MAC": request.arguments.mac}
    macs["runtimeConfig.mac"] = network.at("runtimeConfig.mac", str) or ""
    return MacvlanOptions(
        kind=kind,
        master=_master(written, request, kind),
        device_id=network.device_id(),
        match_device=written.match_device,
        mode=mode,
        mtu=written.mtu,
        mac=_mac({where: text for where, text in macs.items() if text}, kind),
        in_container=written.linkInContainer,
        accept_ra=written.accept_ra,
        ipam_type=network.at("ipam.type", str) or "",
        dns=written.dns or DNS(),
        pod=request.arguments.pod,
    )


def allowed(options: MacvlanOptions, allowance: Allowance) -> Allowance:
    """The allowance, narrowed by the options that need no master. Raises CNIError 121.

    A child of mode "passthru" receives all frames of its master, as a promiscuous interface does.
    """
    allowance.require_match(match_device=options.match_device)
    if options.accept_ra:
        allowance.require_option("accept_ra", True, "accept_ra", "true")
    if options.mode == PASSTHRU:
        allowance.require_option("promisc", True, "mode", PASSTHRU)
    if not options.mac:
        return allowance
    return allowance.using("macs", int(address_text.mac(options.mac)), "mac", options.mac)


def _master(written: MacvlanKeys, request: Request, kind: str) -> str:
    master = written.master or (AUTO if request.rail_of else "")
    if master == AUTO and written.linkInContainer:
        raise invalid_config('"linkInContainer" needs the name of an interface in "master"')
    if not master and kind == "ipvlan" and "prevResult" in request.config.keys:
        raise invalid_config('"master" is missing: podfabric does not read it from "prevResult"')
    if master:
        config.require_interface_name(master, "master")
    return master


def _mac(written: dict[str, str], kind: str) -> str:
    """The hardware address in the kernel's spelling. "" without one."""
    for where, text in written.items():
        try:
            chosen = str(address_text.mac(text))
        except ValueError as error:
            code = Code.INVALID_ENVIRONMENT if where.startswith("CNI_ARGS") else Code.INVALID_CONFIG
            raise CNIError(code, f'"{where}": {error}') from None
        if kind == "ipvlan":
            raise invalid_config(f'"{where}": an ipvlan has the address of its master: remove it')
    return chosen if written else ""
