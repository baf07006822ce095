"""The options of a network configuration of type `ipoib`, checked before anything is changed."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from base.pod import Pod
from cni.spec import arguments, config, limits
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from cni.spec.result import DNS

DATAGRAM, CONNECTED = "datagram", "connected"
MACVLAN_MODES = ("bridge", "private", "vepa", "passthru", "source")
CONNECTED_MTU = 65520  # IPOIB_CM_MTU, drivers/infiniband/ulp/ipoib/ipoib.h
SMALLEST_MTU = 72  # ipoib_change_mtu: 68 of IPv4 and the 4 of IPoIB's own header
AUTO = "auto"  # as `master`: the parent on the HCA that the pod holds
DEFAULT_CARRIER_WAIT = 5.0  # seconds
LONGEST_CARRIER_WAIT = 60.0

_NO_MAC = (
    "the hardware address of an IPoIB interface is its queue pair number and its port's GUID, "
    "and no other address is reachable on the fabric: remove it"
)


class _IpoibIpam(msgspec.Struct):
    type: str = ""


class _IpoibArguments(msgspec.Struct):
    cni: dict[str, Any] | None = None


class _IpoibConfig(msgspec.Struct, kw_only=True):
    """The JSON as users write it; `Options` is what it means."""

    master: str | Annotated[list[str], Meta(max_length=limits.MASTERS)] = ""
    pkey: int | str | None = None
    mode: str | None = None
    umcast: bool = False
    mtu: int | None = None
    proxy_arp: bool = False
    wait_carrier: bool | float = True
    ipam: _IpoibIpam | None = None
    dns: DNS | None = None
    mac: str | None = None
    match_device: bool = True
    deviceID: str | None = None
    pciBusID: str | None = None
    runtimeConfig: dict[str, Any] | None = None
    args: _IpoibArguments | None = None


KNOWN = frozenset(
    (
        *("master", "pkey", "mode", "umcast", "mtu", "proxy_arp", "wait_carrier", "ipam", "dns"),
        "match_device",
    )
)


class IpoibOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A valid configuration. None takes the parent's value.

    `umcast` is off by default: with it the kernel does not join multicast groups that another
    interface of the port has joined (ipoib_mcast_restart_task), such as the parent, and the child
    does not even hear IPv6's all-nodes group.
    """

    masters: tuple[str, ...]  # (): the parents on the pod's HCAs
    device_id: str  # the kubelet's; "" if the runtime passed none
    match_device: bool  # the parent must be on an HCA of the pod, if it holds any
    pkey: int | None
    mode: str | None
    umcast: bool
    mtu: int | None
    proxy_arp: bool
    carrier_wait: float  # seconds, 0 does not wait
    ipam_type: str  # "": an interface without addresses
    dns: DNS
    pod: Pod


def read(request: Request) -> IpoibOptions:
    """The options of a request. Raises CNIError 4 (CNI_ARGS) and 7, naming key and remedy."""
    written = config.decode(request.config, _IpoibConfig)
    config.refuse_misspelt(msgspec.json.decode(request.config, type=dict[str, msgspec.Raw]), KNOWN)
    pairs = arguments.parse(request.args, ("IP", "GATEWAY", "MAC"))
    _refuse_mac(written, pairs)
    ipam_type = written.ipam.type if written.ipam else ""
    if ipam_type == "dhcp":
        raise invalid_config(
            '"ipam.type": dhcp cannot serve IPoIB (a client needs an identifier, RFC 4390, which '
            'the dhcp plugin does not send): use "podfabric-ipam", "host-local" or "static"'
        )
    return IpoibOptions(
        masters=_masters(written.master),
        device_id=_device_id(written),
        match_device=written.match_device,
        pkey=_pkey(written.pkey),
        mode=_mode(written.mode),
        umcast=written.umcast,
        mtu=_mtu(written.mtu),
        proxy_arp=written.proxy_arp,
        carrier_wait=_carrier_wait(written.wait_carrier),
        ipam_type=ipam_type,
        dns=written.dns or DNS(),
        pod=arguments.pod_of(pairs),
    )


def _masters(master: str | list[str]) -> tuple[str, ...]:
    names = (master,) if isinstance(master, str) else tuple(dict.fromkeys(master))
    if not names or not all(names):
        raise invalid_config(
            '"master" is missing: name the IPoIB interface of the host (such as "ib0"), '
            'or a list of them to be tried in order, or "auto" for the HCA that the pod was given'
        )
    if names == (AUTO,):
        return ()
    if AUTO in names:
        raise invalid_config('"master": "auto" stands alone: remove it, or the others')
    for name in names:
        config.require_interface_name(name, "master")
    return names


def _device_id(written: _IpoibConfig) -> str:
    """The kubelet's device id. Multus writes it to all of these keys."""
    runtime = (written.runtimeConfig or {}).get("deviceID")
    values = {
        "deviceID": written.deviceID,
        "runtimeConfig.deviceID": runtime if isinstance(runtime, str) else None,
        "pciBusID": written.pciBusID,
    }
    ids = {key: value for key, value in values.items() if value}
    if len(set(ids.values())) > 1:
        listed = ", ".join(f'"{key}" is "{device_id}"' for key, device_id in ids.items())
        raise invalid_config(f"{listed}: they must name the same device, or leave one out")
    return next(iter(ids.values()), "")


def _pkey(written: int | str | None) -> int | None:
    pkey = config.pkey(written)
    # The kernel makes every child a full member (ipoib_vlan.c), so one spelling is enough.
    return None if pkey is None else pkey | 0x8000


def _mode(mode: str | None) -> str | None:
    if not mode:  # ipoib-cni's definitions may say ""
        return None
    if mode in (DATAGRAM, CONNECTED):
        return mode
    hint = (
        ' (this is a mode of macvlan, which InfiniBand links cannot carry: "ipoib" is its equal)'
        if mode in MACVLAN_MODES
        else ""
    )
    raise invalid_config(f'"mode": "{mode}" is not "{DATAGRAM}" or "{CONNECTED}"{hint}')


def _mtu(mtu: int | None) -> int | None:
    if not mtu:  # ipoib-cni takes 0 for "as it comes"
        return None
    if not SMALLEST_MTU <= mtu <= CONNECTED_MTU:
        raise invalid_config(
            f'"mtu": {mtu} is out of range: {SMALLEST_MTU} to {CONNECTED_MTU}, '
            "and at most the parent's"
        )
    return mtu


def _carrier_wait(wait: bool | float) -> float:
    if wait is True:
        return DEFAULT_CARRIER_WAIT
    if not 0 <= wait <= LONGEST_CARRIER_WAIT:
        raise invalid_config(
            f'"wait_carrier": {wait:g} is out of range: seconds from 0 (do not wait) '
            f"to {LONGEST_CARRIER_WAIT:g}, true for {DEFAULT_CARRIER_WAIT:g}"
        )
    return float(wait)


def _refuse_mac(written: _IpoibConfig, pairs: dict[str, str]) -> None:
    runtime = written.runtimeConfig or {}
    cni = (written.args.cni if written.args else None) or {}
    values = {
        '"mac"': written.mac,
        '"runtimeConfig.mac"': runtime.get("mac"),
        '"runtimeConfig.infinibandGUID"': runtime.get("infinibandGUID"),
        '"args.cni.mac"': cni.get("mac"),
        '"args.cni.guid"': cni.get("guid"),
    }
    for key, value in values.items():
        if value:
            raise invalid_config(f"{key}: {_NO_MAC}")
    if pairs.get("MAC"):
        raise CNIError(Code.INVALID_ENVIRONMENT, f"CNI_ARGS MAC: {_NO_MAC}")
