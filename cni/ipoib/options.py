"""What a network configuration of type `ipoib` may say, checked before anything is touched."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from base.types import DeviceId, PKey
from cni.attachments import pkeys
from cni.spec import arguments, config, limits
from cni.spec.errors import CNIError, Code, invalid_config
from cni.spec.request import Request
from cni.spec.result import DNS

DATAGRAM, CONNECTED = "datagram", "connected"
MACVLAN_MODES = ("bridge", "private", "vepa", "passthru", "source")
CONNECTED_MTU = 65520  # IPOIB_CM_MTU, drivers/infiniband/ulp/ipoib/ipoib.h
SMALLEST_MTU = 72  # ipoib_change_mtu: 68 of IPv4 and the 4 of IPoIB's own header
AUTO = "auto"  # as `master`: the parent on the HCA that the pod was given
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
    """A valid configuration. None leaves the choice to the parent.

    `umcast` is off unless asked: with it the kernel leaves out every multicast group that
    anybody else on the port has joined (ipoib_mcast_restart_task), the parent for one, and
    the child does not even hear IPv6's all-nodes group.
    """

    masters: tuple[str, ...]  # () leaves the choice to the match with the pod's HCAs
    device_id: DeviceId  # as the kubelet has it; "" if the runtime passed none
    match_device: bool  # the parent must be on an HCA of the pod, if it has any
    pkey: PKey | None
    mode: str | None
    umcast: bool
    mtu: int | None
    proxy_arp: bool
    carrier_wait: float  # seconds, 0 does not wait
    ipam_type: str  # "" is an interface without addresses
    dns: DNS
    pod: arguments.Pod


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


def _device_id(written: _IpoibConfig) -> DeviceId:
    """The kubelet's device id. Multus injects it in all of these places."""
    runtime = (written.runtimeConfig or {}).get("deviceID")
    places = {
        "deviceID": written.deviceID,
        "runtimeConfig.deviceID": runtime if isinstance(runtime, str) else None,
        "pciBusID": written.pciBusID,
    }
    given = {place: value for place, value in places.items() if value}
    if len(set(given.values())) > 1:
        listed = ", ".join(f'"{place}" is "{value}"' for place, value in given.items())
        raise invalid_config(f"{listed}: they must name the same device, or leave one out")
    return DeviceId(next(iter(given.values()), ""))


def _pkey(given: int | str | None) -> PKey | None:
    pkey = pkeys.read(given)
    # The kernel makes every child a full member (ipoib_vlan.c), so one spelling is enough.
    return None if pkey is None else PKey(pkey | 0x8000)


def _mode(given: str | None) -> str | None:
    if not given:  # ipoib-cni's definitions may say ""
        return None
    if given in (DATAGRAM, CONNECTED):
        return given
    hint = (
        ' (this is a mode of macvlan, which InfiniBand links cannot carry: "ipoib" is its equal)'
        if given in MACVLAN_MODES
        else ""
    )
    raise invalid_config(f'"mode": "{given}" is not "{DATAGRAM}" or "{CONNECTED}"{hint}')


def _mtu(given: int | None) -> int | None:
    if not given:  # ipoib-cni takes 0 for "as it comes"
        return None
    if not SMALLEST_MTU <= given <= CONNECTED_MTU:
        raise invalid_config(
            f'"mtu": {given} is out of range: {SMALLEST_MTU} to {CONNECTED_MTU}, '
            "and at most the parent's"
        )
    return given


def _carrier_wait(given: bool | float) -> float:
    if given is True:
        return DEFAULT_CARRIER_WAIT
    if not 0 <= given <= LONGEST_CARRIER_WAIT:
        raise invalid_config(
            f'"wait_carrier": {given:g} is out of range: seconds from 0 (do not wait) '
            f"to {LONGEST_CARRIER_WAIT:g}, true for {DEFAULT_CARRIER_WAIT:g}"
        )
    return float(given)


def _refuse_mac(written: _IpoibConfig, pairs: dict[str, str]) -> None:
    runtime = written.runtimeConfig or {}
    cni = (written.args.cni if written.args else None) or {}
    places = {
        '"mac"': written.mac,
        '"runtimeConfig.mac"': runtime.get("mac"),
        '"runtimeConfig.infinibandGUID"': runtime.get("infinibandGUID"),
        '"args.cni.mac"': cni.get("mac"),
        '"args.cni.guid"': cni.get("guid"),
    }
    for place, value in places.items():
        if value:
            raise invalid_config(f"{place}: {_NO_MAC}")
    if pairs.get("MAC"):
        raise CNIError(Code.INVALID_ENVIRONMENT, f"CNI_ARGS MAC: {_NO_MAC}")
