"""What a network configuration of type `sriov` may say, checked before anything is touched.

The keys are those of sriov-cni, of ib-sriov-cni and, for `master` and `pfOnly`, of their common
ancestor. null is as good as not given. What is not given stays as it is on the device.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from base.pod import Pod
from base.types import Bdf, DeviceId, PKey
from cni.spec import config, limits
from cni.spec.errors import CNIError, invalid_config
from cni.spec.request import Request
from cni.spec.result import DNS
from cni.sriov import values
from cni.sriov.values import CNI_ARGS_MAC, Vlan, WrittenValue, wrong
from host import pci

# ib-kubernetes puts this into a pod's args.cni once the subnet manager knows its GUID.
IB_KUBERNETES_KEY, IB_KUBERNETES_DONE = "mellanox.infiniband.app", "configured"

_ETHERNET_KEYS = ("vlan", "vlanQoS", "vlanProto", "spoofchk")
_VF_KEYS = ("trust", "link_state", "min_tx_rate", "max_tx_rate")


class _SriovIpam(msgspec.Struct):
    type: str | None = None


class _SriovArguments(msgspec.Struct):
    cni: dict[str, Any] | None = None  # others' values may be of any type


class _SriovRuntimeConfig(msgspec.Struct):
    deviceID: str | None = None
    infinibandGUID: str | None = None
    mac: str | None = None


class _SriovConfig(msgspec.Struct, kw_only=True):
    """The JSON as users write it; `Options` is what it means."""

    deviceID: str | None = None
    pciBusID: str | None = None
    master: str | Annotated[list[str], Meta(max_length=limits.MASTERS)] | None = None
    pfOnly: bool | None = None
    match_device: bool | None = None
    vlan: int | None = None
    vlanQoS: int | None = None
    vlanProto: str | None = None
    mac: str | None = None
    upper_mac: str | None = msgspec.field(name="MAC", default=None)
    spoofchk: bool | str | None = None
    trust: bool | str | None = None
    link_state: str | None = None
    min_tx_rate: int | None = None
    max_tx_rate: int | None = None
    guid: str | None = None
    pkey: int | str | None = None
    rdmaIsolation: bool | None = None
    ibKubernetesEnabled: bool | None = None
    vfioPciMode: bool | None = None
    mtu: int | None = None
    allmulti: bool | None = None
    promisc: bool | None = None
    ipam: _SriovIpam | None = None
    dns: DNS | None = None
    runtimeConfig: _SriovRuntimeConfig | None = None
    args: _SriovArguments | None = None


# logLevel and logFile are sriov-cni's, without effect: the log and its level are the agent's.
# The runtime's own keys are nobody's to misspell: a vendor's "tags" is not meant to be "args".
KNOWN = frozenset(
    {"logLevel", "logFile", *(field.encode_name for field in msgspec.structs.fields(_SriovConfig))}
    - {"args", "runtimeConfig"}
)


class SriovOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A valid configuration. None and "" leave what they are about untouched."""

    device: Bdf  # canonical BDF or an auxiliary device's name, "" if it is to be chosen
    device_key: str  # where the configuration has that: "deviceID"; "" if it is to be chosen
    device_id: DeviceId  # as the kubelet has it, if that is no address: "0" of a pool of mode "all"
    masters: tuple[str, ...]  # PF netdevs, of which a free VF is taken; () if a device is given
    pf_only: bool  # the PF itself
    match_device: bool  # it must be a device of the pod, if the pod was given any HCA
    vlan: Vlan | None
    mac: str  # lower case
    spoofchk: bool | None
    trust: bool | None
    link_state: str  # "auto", "enable", "disable"
    min_tx_rate: int | None  # Mbit/s
    max_tx_rate: int | None  # Mbit/s, 0 is no limit
    guid: str  # "00:11:22:33:44:55:66:77", lower case
    pkey: PKey | None  # as written: to be found in the port's table, which only the SM fills
    rdma_isolation: bool
    vfio_pci_mode: bool | None  # None: as the device is
    mtu: int | None
    allmulti: bool | None
    promisc: bool | None
    ipam_type: str  # "" is an interface without addresses
    dns: DNS
    pod: Pod


def _in_our_case(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys that are ours but for upper and lower case, which Go's decoder does not tell apart."""
    ours = {key.lower(): key for key in sorted(KNOWN)}
    folded = {ours.get(key.lower(), key): value for key, value in keys.items() if key not in KNOWN}
    return folded | {key: value for key, value in keys.items() if key in KNOWN}


def read(request: Request, *, needs_device: bool = True) -> SriovOptions:
    """The options of a request. Raises CNIError 4 (CNI_ARGS) and 7, naming key and remedy.

    A STATUS is about no pod, so it `needs_device` not: nobody has chosen one yet.
    """
    network = msgspec.structs.replace(request.config, keys=_in_our_case(request.config.keys))
    config.refuse_misspelt(network.keys, KNOWN)
    written = config.convert(network.keys, _SriovConfig)
    ids = network.device_ids()
    device, device_id = _device(ids)
    masters = values.masters(written.master)
    pod = request.arguments.pod
    if device_id and not pod.name:
        raise no_such_device(device_id, next(path for path in ids if ids[path] == device_id))
    if needs_device and not device and not masters and not pod.name:
        raise no_device()
    mac = _given_mac(written, request)
    guid = _given_guid(written)
    vlan = values.vlan(written.vlan, written.vlanQoS, written.vlanProto)
    _refuse_vf_options_of_a_pf(written, mac, guid)
    _refuse_mixture(written, mac, guid)
    _refuse_netdev_options_without_netdev(written)
    if needs_device:
        _check_ib_kubernetes(written, guid)
    min_tx_rate, max_tx_rate = values.rates(written.min_tx_rate, written.max_tx_rate)
    return SriovOptions(
        device=device,
        device_key=next(iter(ids), ""),
        device_id=device_id,
        masters=() if device or device_id else masters,
        pf_only=bool(written.pfOnly),
        match_device=written.match_device is not False,
        vlan=vlan,
        mac=values.mac(mac),
        spoofchk=values.switch("spoofchk", written.spoofchk),
        trust=values.switch("trust", written.trust),
        link_state=values.link_state(written.link_state),
        min_tx_rate=min_tx_rate,
        max_tx_rate=max_tx_rate,
        guid=values.guid(guid),
        pkey=config.pkey(written.pkey),
        rdma_isolation=bool(written.rdmaIsolation),
        vfio_pci_mode=written.vfioPciMode,
        mtu=values.mtu(written.mtu),
        allmulti=written.allmulti,
        promisc=written.promisc,
        ipam_type=_ipam_type(written, guid),
        dns=written.dns or DNS(),
        pod=pod,
    )


def device_of(request: Request) -> Bdf:
    """Only the device, for a DEL that must work with whatever configuration it gets."""
    try:
        return _device(request.config.device_ids())[0]
    except CNIError:
        return Bdf("")


def _device(given: dict[str, DeviceId]) -> tuple[Bdf, DeviceId]:
    """The address that is given, and a device id that is none: one of the two is ""."""
    if given and len(set(given.values())) == 1:
        device_id = next(iter(given.values()))
        address = _address(device_id)
        return (Bdf(""), device_id) if address is None else (address, DeviceId(""))
    chosen, place = Bdf(""), ""
    for key, text in given.items():
        address = _address(text)
        if address is None:
            raise no_such_device(text, key)
        if chosen and address != chosen:
            raise invalid_config(
                f'"{place}" is {chosen}, but "{key}" is {address}: they must name the same '
                "device, or leave one out"
            )
        chosen, place = chosen or address, place or key
    return chosen, DeviceId("")


def _address(device_id: str) -> Bdf | None:
    """The device that an id names, or of which it is a slot of a shared pool: "0000:af:06.0-3"."""
    return pci.canonical(device_id) or pci.canonical(device_id.rpartition("-")[0])


def no_such_device(device_id: str, place: str = "deviceID") -> CNIError:
    """The error for a device id that is no address and that the pod does not hold."""
    return invalid_config(
        f'"{place}": "{device_id}" is no device: give a PCI address such as "0000:af:06.0", '
        'or the name of an auxiliary device such as "mlx5_core.sf.6"'
    )


def no_device() -> CNIError:
    """The error for an attachment that nobody has chosen a device for."""
    return invalid_config(
        '"deviceID" is missing: Multus passes it only if the NetworkAttachmentDefinition has '
        'the annotation "k8s.v1.cni.cncf.io/resourceName" and the pod requests that resource. '
        'Without a device plugin, set "master" to the PF\'s interface (such as "enp175s0f1"), '
        "or to a list of them: a free VF is taken"
    )


def _given_mac(written: _SriovConfig, request: Request) -> WrittenValue:
    """Where the MAC comes from: the runtime before CNI_ARGS, those before the configuration."""
    mac, upper = written.mac, written.upper_mac  # sriov-cni reads the key in any case
    if mac and upper and mac.lower() != upper.lower():
        raise invalid_config(f'"mac" is {mac}, but "MAC" is {upper}: leave one out')
    return _first(
        WrittenValue(
            '"runtimeConfig.mac"', (written.runtimeConfig or _SriovRuntimeConfig()).mac or ""
        ),
        WrittenValue(CNI_ARGS_MAC, request.arguments.mac),
        WrittenValue('"args.cni.mac"', _cni_argument(written, "mac")),
        WrittenValue('"mac"', mac or ""),
        WrittenValue('"MAC"', upper or ""),
    )


def _given_guid(written: _SriovConfig) -> WrittenValue:
    runtime = written.runtimeConfig or _SriovRuntimeConfig()
    return _first(
        WrittenValue('"runtimeConfig.infinibandGUID"', runtime.infinibandGUID or ""),
        WrittenValue('"args.cni.guid"', _cni_argument(written, "guid")),
        WrittenValue('"guid"', written.guid or ""),
    )


def _first(*places: WrittenValue) -> WrittenValue:
    return next((given for given in places if given.value), WrittenValue("", ""))


def _cni_argument(written: _SriovConfig, key: str) -> str:
    value = _cni_arguments(written).get(key)
    return config.convert(value, str, f"args.cni.{key}") if value is not None else ""


def _cni_arguments(written: _SriovConfig) -> dict[str, Any]:
    return (written.args.cni if written.args else None) or {}


def _ipam_type(written: _SriovConfig, guid: WrittenValue) -> str:
    named = (written.ipam.type if written.ipam else "") or ""
    infiniband = _infiniband(written, guid)
    if named == "dhcp" and infiniband:
        raise invalid_config(
            f'"ipam.type": dhcp cannot serve InfiniBand, which {infiniband[0]} asks for (a client '
            "needs an identifier, RFC 4390, which the dhcp plugin does not send): use "
            '"podfabric-ipam", "host-local" or "static"'
        )
    return named


def _refuse_vf_options_of_a_pf(
    written: _SriovConfig, mac: WrittenValue, guid: WrittenValue
) -> None:
    if not written.pfOnly:
        return
    for place in (*_set(written, _ETHERNET_KEYS + _VF_KEYS), mac.place, guid.place):
        if place:
            raise wrong(
                place, 'a VF has that, but "pfOnly" asks for the PF itself: remove one of them'
            )


def _refuse_mixture(written: _SriovConfig, mac: WrittenValue, guid: WrittenValue) -> None:
    ethernet = ([mac.place] if mac.place else []) + _set(written, _ETHERNET_KEYS)
    infiniband = _infiniband(written, guid)
    if ethernet and infiniband:
        raise wrong(
            ethernet[0],
            f"that is of Ethernet, but {infiniband[0]} is of InfiniBand, and no device has both: "
            "remove one of them",
        )


def _refuse_netdev_options_without_netdev(written: _SriovConfig) -> None:
    if written.vfioPciMode:
        for place in _set(written, ("mtu", "allmulti", "promisc")):
            raise wrong(
                place,
                'that is of an interface, and with "vfioPciMode" there is none: remove one of them',
            )


def _check_ib_kubernetes(written: _SriovConfig, guid: WrittenValue) -> None:
    if not written.ibKubernetesEnabled:
        return
    if _cni_arguments(written).get(IB_KUBERNETES_KEY) != IB_KUBERNETES_DONE:
        raise invalid_config(
            f'"ibKubernetesEnabled": "args.cni" has no "{IB_KUBERNETES_KEY}": '
            f'"{IB_KUBERNETES_DONE}", which ib-kubernetes sets once the subnet manager knows the '
            "pod's GUID: see whether it runs, and its log"
        )
    if not guid.value and not written.pfOnly:
        raise invalid_config(
            '"ibKubernetesEnabled": ib-kubernetes gave no GUID, neither in '
            '"runtimeConfig.infinibandGUID" nor in "args.cni.guid": see its log'
        )


def _infiniband(written: _SriovConfig, guid: WrittenValue) -> list[str]:
    """What is given that only InfiniBand has, as an error names it."""
    return ([guid.place] if guid.place else []) + _set(written, ("pkey",))


def _set(written: _SriovConfig, keys: tuple[str, ...]) -> list[str]:
    """Those of `keys` that are given, as an error names them."""
    return [f'"{key}"' for key in keys if getattr(written, key) not in (None, "")]
