"""Reads and checks a network configuration of type `ipoib`."""

from typing import Annotated

import msgspec
from msgspec import Meta

from base.pod import Pod
from base.types import DeviceId, PKey
from cni.spec import config, limits
from cni.spec.config import NetworkConfig
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from cni.spec.result import DNS
from policy.allowance import Allowance

DATAGRAM, CONNECTED = "datagram", "connected"
CONNECTED_MTU = 65520  # IPOIB_CM_MTU, drivers/infiniband/ulp/ipoib/ipoib.h
SMALLEST_MTU = 72  # ipoib_change_mtu: 68 of IPv4 and the 4 of IPoIB's own header
AUTO = "auto"  # a value of `master`: the parent on the HCA that the pod holds
DEFAULT_CARRIER_WAIT = 5.0  # seconds
LONGEST_CARRIER_WAIT = 60.0

_NO_MAC = (
    "the hardware address of an IPoIB interface is its queue pair number and its port's GUID, "
    "and no other address is reachable on the fabric: remove this address"
)

_MAC_PATHS = (
    "mac",
    "runtimeConfig.mac",
    "runtimeConfig.infinibandGUID",
    "args.cni.mac",
    "args.cni.guid",
)


class IpoibKeys(msgspec.Struct, kw_only=True):
    """The keys of the plugin, as users write them. `IpoibOptions` has the checked values."""

    master: str | Annotated[list[str], Meta(max_length=limits.MASTERS)] = ""
    pkey: int | str | None = None
    mode: str | None = None
    umcast: bool = False
    mtu: int | None = None
    proxy_arp: bool = False
    accept_ra: bool = False
    wait_carrier: bool | float = True
    dns: DNS | None = None
    match_device: bool = True


KNOWN = frozenset({"ipam", "rails", *IpoibKeys.__struct_fields__})


class IpoibOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A valid configuration. `None` means the parent's value.

    With `umcast`, the kernel joins no multicast group that another interface of the port has joined
    (ipoib_mcast_restart_task). The child then misses even packets to IPv6's all-nodes group.
    """

    masters: tuple[str, ...]  # () means a parent on one of the pod's HCAs
    device_id: DeviceId  # the kubelet's device id; "" if the runtime passed none
    match_device: bool  # the parent must be on an HCA of the pod, if the pod has any
    pkey: PKey | None
    mode: str | None
    umcast: bool
    mtu: int | None
    proxy_arp: bool
    accept_ra: bool  # accept router advertisements even with IPv6 addresses from the IPAM plugin
    carrier_wait: float  # seconds
    ipam_type: str  # "" for an interface without addresses
    dns: DNS
    pod: Pod = Pod()


def read(request: Request) -> IpoibOptions:
    """The options of a request. Raises CNIError 4 for CNI_ARGS, otherwise 7."""
    if request.arguments.mac:
        raise CNIError(Code.INVALID_ENVIRONMENT, f"CNI_ARGS MAC: {_NO_MAC}")
    options = request.config.derived(_read)
    return msgspec.structs.replace(options, pod=request.arguments.pod)


def allowed(options: IpoibOptions, allowance: Allowance) -> Allowance:
    """The allowance, narrowed by the options that need no parent. Raises CNIError 121."""
    allowance.require_match(match_device=options.match_device)
    for key, is_on in (("proxy_arp", options.proxy_arp), ("accept_ra", options.accept_ra)):
        if is_on:
            allowance.require_option(key, True, key, "true")
    if options.pkey is None:
        return allowance
    return allowance.using("pkeys", options.pkey, "pkey", f"{options.pkey:#06x}")


def _read(network: NetworkConfig) -> IpoibOptions:
    written = config.convert(network.keys, IpoibKeys)
    config.refuse_misspelt(network.keys, KNOWN)
    for path in _MAC_PATHS:
        if network.at(path, str):
            raise invalid_config(f'"{path}": {_NO_MAC}')
    pkey = config.pkey(written.pkey)
    ipam_type = network.at("ipam.type", str) or ""
    if ipam_type == "dhcp":
        raise invalid_config(
            '"ipam.type": the dhcp plugin cannot serve IPoIB interfaces: use '
            '"podfabric-ipam", "host-local" or "static"'
        )
    return IpoibOptions(
        masters=_masters(written.master),
        device_id=network.device_id(),
        match_device=written.match_device,
        # The kernel makes every child a full member (ipoib_vlan.c).
        pkey=None if pkey is None else PKey(pkey | 0x8000),
        mode=_mode(written.mode),
        umcast=written.umcast,
        mtu=_mtu(written.mtu),
        proxy_arp=written.proxy_arp,
        accept_ra=written.accept_ra,
        carrier_wait=_carrier_wait(written.wait_carrier),
        ipam_type=ipam_type,
        dns=written.dns or DNS(),
    )


def _masters(master: str | list[str]) -> tuple[str, ...]:
    names = (master,) if isinstance(master, str) else tuple(dict.fromkeys(master))
    if not names or not all(names):
        raise invalid_config(
            '"master" is missing: write an IPoIB interface such as "ib0", a list of such '
            'interfaces, or "auto" for the pod\'s HCA'
        )
    if names == (AUTO,):
        return ()
    if AUTO in names:
        raise invalid_config(
            '"master": "auto" must be the only entry: remove "auto", or all other entries'
        )
    for name in names:
        config.require_interface_name(name, "master")
    return names


def _mode(mode: str | None) -> str | None:
    if not mode:  # ipoib-cni's definitions may have ""
        return None
    if mode in (DATAGRAM, CONNECTED):
        return mode
    raise invalid_config(f'"mode": "{mode}" is not "{DATAGRAM}" or "{CONNECTED}"')


def _mtu(mtu: int | None) -> int | None:
    if not mtu:  # 0 means the parent's MTU, as in ipoib-cni
        return None
    if not SMALLEST_MTU <= mtu <= CONNECTED_MTU:
        raise invalid_config(
            f'"mtu": {mtu} is out of range: use {SMALLEST_MTU} to {CONNECTED_MTU}, '
            "and at most the parent's MTU"
        )
    return mtu


def _carrier_wait(seconds: bool | float) -> float:
    if seconds is True:
        return DEFAULT_CARRIER_WAIT
    if not 0 <= seconds <= LONGEST_CARRIER_WAIT:
        raise invalid_config(
            f'"wait_carrier": {seconds:g} is out of range: use 0 (no wait) to '
            f"{LONGEST_CARRIER_WAIT:g} seconds, or true for {DEFAULT_CARRIER_WAIT:g} seconds"
        )
    return float(seconds)
