"""Reads and checks a network configuration of type `sriov`.

Accepts the keys of sriov-cni, of ib-sriov-cni, and of their common ancestor. A key that is missing
or null leaves its setting unchanged.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from base.pod import Pod
from base.types import Bdf, DeviceId, PKey
from cni.spec import config, limits
from cni.spec.config import NetworkConfig
from cni.spec.errors import CNIError, invalid_config
from cni.spec.request import Request
from cni.spec.result import DNS
from cni.sriov import option_values
from cni.sriov.option_values import CNI_ARGS_MAC, TAG, WrittenValue, wrong
from host.sysfs import pci

# ib-kubernetes sets this key in a pod's args.cni once the subnet manager has the pod's GUID.
IB_KUBERNETES_KEY, IB_KUBERNETES_DONE = "mellanox.infiniband.app", "configured"
# The other Ethernet settings may be set for a VF without an interface: its link layer is unknown.
_NEVER_INFINIBAND = (*TAG, "mac", "spoofchk")


class _SriovIpam(msgspec.Struct):
    type: str | None = None


class _SriovArguments(msgspec.Struct):
    cni: dict[str, Any] | None = None  # keys of other programs may have values of any type


class _SriovRuntimeConfig(msgspec.Struct):
    deviceID: str | None = None
    infinibandGUID: str | None = None
    mac: str | None = None


class _SriovConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON as users write it. `SriovOptions` has the checked values."""

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
    accept_ra: bool | None = None
    ipam: _SriovIpam | None = None
    dns: DNS | None = None
    runtimeConfig: _SriovRuntimeConfig | None = None
    args: _SriovArguments | None = None


# sriov-cni's logLevel and logFile have no effect here. Runtimes write "args" and "runtimeConfig".
# So similar keys, such as a vendor's "tags", are not misspellings.
KNOWN = frozenset(
    {
        "logLevel",
        "logFile",
        "rails",
        *(field.encode_name for field in msgspec.structs.fields(_SriovConfig)),
    }
    - {"args", "runtimeConfig"}
)
_IN_OUR_CASE = {key.lower(): key for key in sorted(KNOWN)}


class SriovOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A valid configuration. A value of `None` or "" leaves its setting unchanged.

    `vf` has the PF's settings for its VF, by key. A missing key leaves its setting unchanged. The
    three VLAN keys occur only together, and so do the two rate keys.
    """

    device: Bdf  # canonical BDF or an auxiliary device's name; "" if not named
    device_key: str  # the key that names the device, such as "deviceID"; "" without such a key
    device_id: DeviceId  # the kubelet's id if no address: "0" of a pool with mode "all"
    masters: tuple[str, ...]  # PF netdevs whose free VFs may be used; () if a device is named
    pf_only: bool  # attach the PF itself
    match_device: bool  # the device must be one of the pod's, if the pod has any HCA
    vf: Mapping[str, Any]
    pkey: PKey | None  # the port's table must have it; only the subnet manager fills the table
    rdma_isolation: bool
    vfio_pci_mode: bool | None  # `None` accepts either driver
    mtu: int | None
    allmulti: bool | None
    promisc: bool | None
    accept_ra: bool  # accept router advertisements even with IPv6 addresses from the IPAM plugin
    ipam_type: str  # "" for an interface without addresses
    dns: DNS
    pod: Pod


def in_our_case(keys: dict[str, Any]) -> dict[str, Any]:
    """Spell known keys in our case, because sriov-cni (with Go's decoder) accepts any case."""
    folded = {
        _IN_OUR_CASE.get(key.lower(), key): value for key, value in keys.items() if key not in KNOWN
    }
    return folded | {key: value for key, value in keys.items() if key in KNOWN}


def read(request: Request, *, needs_device: bool = True) -> SriovOptions:
    """The options of a request.

    Raises CNIError 4 for wrong CNI_ARGS, and CNIError 7 for other errors.
    """
    written, ids = request.config.derived(_written)
    device, device_id = _device(ids)
    masters = option_values.masters(written.master)
    pod = request.arguments.pod
    if device_id and not pod.name:
        raise no_such_device(device_id, next(path for path in ids if ids[path] == device_id))
    if needs_device and not device and not masters and not pod.name:
        raise no_device()
    mac = _mac(written, request)
    guid = _guid(written)
    vf = _vf(written, mac, guid)
    _refuse_conflicts(written, {key: f'"{key}"' for key in vf} | {"mac": mac.key, "guid": guid.key})
    if needs_device:
        _check_ib_kubernetes(written, guid)
    return SriovOptions(
        device=device,
        device_key=next(iter(ids), ""),
        device_id=device_id,
        masters=() if device or device_id else masters,
        pf_only=bool(written.pfOnly),
        match_device=written.match_device is not False,
        vf=vf,
        pkey=config.pkey(written.pkey),
        rdma_isolation=bool(written.rdmaIsolation),
        vfio_pci_mode=written.vfioPciMode,
        mtu=option_values.mtu(written.mtu),
        allmulti=written.allmulti,
        promisc=written.promisc,
        accept_ra=bool(written.accept_ra),
        ipam_type=(written.ipam.type if written.ipam else "") or "",
        dns=written.dns or DNS(),
        pod=pod,
    )


def _written(network: NetworkConfig) -> tuple[_SriovConfig, Mapping[str, DeviceId]]:
    """The values by key, and the device ids by JSON path."""
    network = msgspec.structs.replace(network, keys=in_our_case(network.keys))
    config.refuse_misspelt(network.keys, KNOWN)
    return config.convert(network.keys, _SriovConfig), network.device_ids()


def device_of(request: Request) -> Bdf:
    """The device that a configuration names, or "". Other keys are not checked."""
    try:
        return _device(request.config.device_ids())[0]
    except CNIError:
        return Bdf("")


def _device(by_key: Mapping[str, DeviceId]) -> tuple[Bdf, DeviceId]:
    """Either (address, ""), or ("", device id) if the id is not an address."""
    if by_key and len(set(by_key.values())) == 1:
        device_id = next(iter(by_key.values()))
        address = _address(device_id)
        return (Bdf(""), device_id) if address is None else (address, DeviceId(""))
    first, first_key = Bdf(""), ""
    for key, text in by_key.items():
        address = _address(text)
        if address is None:
            raise no_such_device(text, key)
        if first and address != first:
            raise invalid_config(
                f'"{first_key}" is {first}, but "{key}" is {address}: write one device into '
                "both keys, or remove one key"
            )
        first, first_key = first or address, first_key or key
    return first, DeviceId("")


def _address(device_id: str) -> Bdf | None:
    """The device that an id names. Ids of shared pools have a slot number: "0000:af:06.0-3"."""
    return pci.canonical(device_id) or pci.canonical(device_id.rpartition("-")[0])


def no_such_device(device_id: str, key: str = "deviceID") -> CNIError:
    return invalid_config(
        f'"{key}": "{device_id}" is not a device: give a PCI address such as "0000:af:06.0", '
        'or the name of an auxiliary device such as "mlx5_core.sf.6"'
    )


def no_device(addition: str = "") -> CNIError:
    return invalid_config(
        '"deviceID" is missing: Multus passes it only if the NetworkAttachmentDefinition has '
        'the annotation "k8s.v1.cni.cncf.io/resourceName" and the pod requests that resource. '
        'Without a device plugin, set "master" to the PF\'s interface (such as "enp175s0f1"), '
        f"or to a list of interfaces, to use a free VF{addition}"
    )


def _mac(written: _SriovConfig, request: Request) -> WrittenValue:
    mac, upper = written.mac, written.upper_mac  # sriov-cni ignores the key's case
    if mac and upper and mac.lower() != upper.lower():
        raise invalid_config(f'"mac" is {mac}, but "MAC" is {upper}: remove one of the two keys')
    return _first(
        WrittenValue(
            '"runtimeConfig.mac"', (written.runtimeConfig or _SriovRuntimeConfig()).mac or ""
        ),
        WrittenValue(CNI_ARGS_MAC, request.arguments.mac),
        WrittenValue('"args.cni.mac"', _cni_argument(written, "mac")),
        WrittenValue('"mac"', mac or ""),
        WrittenValue('"MAC"', upper or ""),
    )


def _guid(written: _SriovConfig) -> WrittenValue:
    runtime = written.runtimeConfig or _SriovRuntimeConfig()
    return _first(
        WrittenValue('"runtimeConfig.infinibandGUID"', runtime.infinibandGUID or ""),
        WrittenValue('"args.cni.guid"', _cni_argument(written, "guid")),
        WrittenValue('"guid"', written.guid or ""),
    )


def _first(*candidates: WrittenValue) -> WrittenValue:
    return next((written for written in candidates if written.value), WrittenValue("", ""))


def _cni_argument(written: _SriovConfig, key: str) -> str:
    value = _cni_arguments(written).get(key)
    return config.convert(value, str, f"args.cni.{key}") if value is not None else ""


def _cni_arguments(written: _SriovConfig) -> dict[str, Any]:
    return (written.args.cni if written.args else None) or {}


def _vf(written: _SriovConfig, mac: WrittenValue, guid: WrittenValue) -> dict[str, Any]:
    found = {
        "mac": option_values.mac(mac),
        **option_values.vlan(written.vlan, written.vlanQoS, written.vlanProto),
        **option_values.rates(written.min_tx_rate, written.max_tx_rate),
        "spoofchk": option_values.switch("spoofchk", written.spoofchk),
        "trust": option_values.switch("trust", written.trust),
        "link_state": option_values.link_state(written.link_state),
        "guid": option_values.guid(guid),
    }
    return {key: value for key, value in found.items() if value not in (None, "")}


def _refuse_conflicts(written: _SriovConfig, vf: Mapping[str, str]) -> None:
    """Raise CNIError for options that exclude each other. `vf` maps keys to names in errors."""
    named = [name for name in vf.values() if name]
    if written.pfOnly and named:
        raise wrong(
            named[0],
            'this is an option for VFs, but "pfOnly" asks for the PF: remove this option or '
            '"pfOnly"',
        )
    ethernet = [name for key, name in vf.items() if key in _NEVER_INFINIBAND and name]
    infiniband = vf["guid"] or ('"pkey"' if written.pkey not in (None, "") else "")
    if ethernet and infiniband:
        raise wrong(
            ethernet[0],
            f"this is an Ethernet option, but {infiniband} is an InfiniBand option: remove "
            "one of these two options",
        )
    if infiniband and written.ipam is not None and written.ipam.type == "dhcp":
        raise invalid_config(
            f'"ipam.type": the dhcp plugin cannot serve InfiniBand, which {infiniband} asks '
            'for: use "podfabric-ipam", "host-local" or "static"'
        )
    for key in ("mtu", "allmulti", "promisc", "accept_ra"):
        if written.vfioPciMode and getattr(written, key) is not None:
            raise invalid_config(
                f'"{key}" needs an interface, but with "vfioPciMode" a pod gets none: remove '
                f'"{key}" or "vfioPciMode"'
            )


def _check_ib_kubernetes(written: _SriovConfig, guid: WrittenValue) -> None:
    if not written.ibKubernetesEnabled:
        return
    if _cni_arguments(written).get(IB_KUBERNETES_KEY) != IB_KUBERNETES_DONE:
        raise invalid_config(
            f'"ibKubernetesEnabled": ib-kubernetes has not set "{IB_KUBERNETES_KEY}" in '
            f'"args.cni" to "{IB_KUBERNETES_DONE}": check that ib-kubernetes runs, and read '
            "the log of ib-kubernetes"
        )
    if not guid.value and not written.pfOnly:
        raise invalid_config(
            '"ibKubernetesEnabled": ib-kubernetes gave no GUID, neither in '
            '"runtimeConfig.infinibandGUID" nor in "args.cni.guid": read the log of ib-kubernetes'
        )
