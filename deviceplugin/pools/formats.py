"""Reads the configuration in any of its three formats.

`pools` is our own key. `configList` is from the Mellanox shared plugin, and `resourceList` from the
SR-IOV plugin. A file may have all three. The keys of the two plugins may be written in any case, as
their Go decoder allows. This module rejects a file that one of the plugins rejects. An unsupported
key is rejected if the key would change a pod's devices.

Sources: k8s-rdma-shared-dev-plugin pkg/resources/resources_manager.go and pkg/types/types.go;
sriov-network-device-plugin cmd/sriovdp/manager.go and pkg/types/types.go; their READMEs.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from base import documents
from base.documents import DocumentError
from base.text import resembling
from deviceplugin.kubelet import extended_resources
from deviceplugin.pools import pool_config
from deviceplugin.pools.pool_config import ConfigError, DevicePluginConfig, Mode, PoolConfig
from gpu import gpu_pool_keys
from host.sysfs import pci, selectors
from host.sysfs.selectors import Selector

_Nodes = tuple[Literal["umad", "issm"], ...]

POOL_KEYS = {
    "name": str,
    "mode": Mode,
    "amount": Annotated[int, msgspec.Meta(ge=1, le=10_000)],
    "slots": Annotated[int, msgspec.Meta(ge=1, le=1_000)],
    "placement": pool_config.Placement,
    "selectors": object,
    "nodes": _Nodes,
    "rdma": bool,
    "cdi": bool,
    "memlock": object,
    "trafficClass": Annotated[int, msgspec.Meta(ge=0, le=255)],
    "numa": bool,
    "overlap": bool,
}
_ONLY_OF: dict[str, Mode] = {"amount": "all", "slots": "shared", "placement": "shared"}

_MELLANOX = {
    "resourceName": str,
    "resourcePrefix": str,
    "rdmaHcaMax": int,
    "devices": tuple[str, ...],
    "selectors": object,
    "nodes": _Nodes,
}
_MELLANOX_NAME = re.compile(r"[a-zA-Z0-9_]+")
_MELLANOX_SELECTOR = {
    "vendors": "vendors",
    "deviceIDs": "devices",
    "drivers": "drivers",
    "ifNames": "ifNames",
    "linkTypes": "linkTypes",
}

_SRIOV = {
    "resourceName": str,
    "resourcePrefix": str,
    "deviceType": str,
    "excludeTopology": bool,
    "selectors": object,
    "additionalInfo": dict[str, dict[str, str]],
    "nodes": _Nodes,
}
_SRIOV_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_SRIOV_SELECTOR = {key: key for key in selectors.OWN if key not in ("ifNames", "rdmaDevices")}
_ONLY_NET = ("pciAddresses", "acpiIndexes", "pKeys")  # not for auxNetDevice
_UNSUPPORTED = {
    "ddpProfiles": "DDP profiles are not read: select by pciAddresses or pfNames",
    "vdpaType": "vDPA devices are not offered: leave this resource to the SR-IOV plugin",
    "needVhostNet": "pods do not get vhost-net: leave this resource to the SR-IOV plugin",
}
_ACCELERATOR = "accelerators are not offered: leave this resource to the SR-IOV plugin"


def load(
    path: Path, *, prefix: str = "", cdi: bool = False, required: bool = False
) -> DevicePluginConfig:
    """Read the file. If the file is missing and not `required`, returns the default pool.

    `parse` explains `prefix` and `cdi`. Raises ConfigError.
    """
    try:
        content = documents.read(path)
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise ConfigError(f"{path}: this file does not exist") from None
        content = b""
    except DocumentError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return parse(content, str(path), prefix=prefix, cdi=cdi)


def parse(content: bytes, name: str, *, prefix: str = "", cdi: bool = False) -> DevicePluginConfig:
    """Read the content of the file `name`. Raises ConfigError.

    `prefix` replaces the default domain of resource names. With `cdi`, every pool uses CDI.
    """
    try:
        configuration = _read(documents.decode(content, name), name, prefix)
    except DocumentError as error:
        raise ConfigError(str(error)) from None
    if cdi:
        pools = tuple(msgspec.structs.replace(pool, cdi=True) for pool in configuration.pools)
        configuration = msgspec.structs.replace(configuration, pools=pools)
    return configuration


def _read(document: object, name: str, prefix: str) -> DevicePluginConfig:
    whole = documents.mapping(document, name)
    parts: dict[str, Any] = {}
    for key, value in whole.items():
        part = resembling(key, pool_config.PARTS)
        if part is None or not pool_config.is_part(key):
            raise DocumentError(
                f"{name}: {key}: unknown key: {documents.hint(key, pool_config.PARTS)}"
            )
        if part in parts:
            raise DocumentError(f"{name}: {key}: appears twice: keep one")
        parts[part] = value
    _check_interval(parts, name)
    lists = [form for form in _FORMS if form.key in parts]
    if prefix and not any(form.prefix for form in lists):
        raise DocumentError(
            f"{name}: -resource-prefix is for files with resourceList or configList: remove "
            "the flag, and write the prefix into the names of the pools"
        )
    pools = tuple(pool for form in lists for pool in _each(parts, form, name, prefix))
    if not lists:
        pools = (pool_config.DEFAULT,)
    if (rails := parts.get("rails")) is not None:
        chosen = _rails(rails, f"{name}: rails")
        pools = tuple(msgspec.structs.replace(pool, rails=chosen) for pool in pools)
    gpus = gpu_pool_keys.parse(parts.get("gpus"), f"{name}: gpus")
    limits = gpu_pool_keys.limits(parts.get("gpuLimits"), f"{name}: gpuLimits")
    if problem := pool_config.together_problem(pools, gpus):
        raise DocumentError(f"{name}: {problem}")
    return DevicePluginConfig(pools=pools, gpus=gpus, gpu_limits=limits)


def _check_interval(parts: dict[str, Any], name: str) -> None:
    """Check the interval. The interval has no effect, because changes are seen at once."""
    where = f"{name}: periodicUpdateInterval"
    if "periodicUpdateInterval" in parts and "configList" not in parts:
        raise DocumentError(f"{where}: is only for files with configList: remove the key")
    if (interval := parts.get("periodicUpdateInterval")) is not None:
        documents.convert(interval, Annotated[int, msgspec.Meta(ge=0)], where)


def _each(parts: dict[str, Any], form: "_Form", name: str, prefix: str) -> tuple[PoolConfig, ...]:
    value, where = parts[form.key], f"{name}: {form.key}"
    if not isinstance(value, list):
        raise DocumentError(f"{where}: expected a list of pools, got {documents.shown(value)}")
    if not value and form.prefix:
        remedy = "remove the key" if "pools" in parts else 'to offer nothing, write "pools: []"'
        raise DocumentError(f"{where}: no resources configuration found: {remedy}")
    domain = prefix or form.prefix
    return tuple(form.read(pool, f"{where}[{n}]", domain) for n, pool in enumerate(value))


def _own(value: object, where: str, _: str) -> PoolConfig:
    values = documents.fields(value, POOL_KEYS, where)
    mode: Mode = values.get("mode", "shared")
    for key, of in _ONLY_OF.items():
        if key in values and mode != of:
            raise DocumentError(
                f"{where}.{key}: is for mode {of}, but this pool has mode {mode}: remove the key"
            )
    if "name" not in values:
        raise DocumentError(f'{where}.name: is required: write domain/name, such as "rdma/hca"')
    if "memlock" in values:
        values["memlock"] = _memlock(values["memlock"], f"{where}.memlock")
    written_selectors, nodes = values.pop("selectors", []), values.pop("nodes", ())
    chosen = _selectors(written_selectors, f"{where}.selectors", selectors.OWN)
    asking = {"nodes": bool(nodes), "selectors.isRdma": any(one.isRdma for one in chosen)}
    for key, asks in asking.items():
        if asks and not values.get("rdma", True):
            raise DocumentError(
                f'{where}.{key}: needs RDMA devices, but the pool has "rdma: false": remove one '
                "of the two keys"
            )
    return PoolConfig(
        resource=_resource(values.pop("name"), f"{where}.name"),
        used="named" if mode == "exclusive" else "offered",
        selectors=chosen,
        umad="umad" in nodes,
        issm="issm" in nodes,
        traffic_class=values.pop("trafficClass", None),
        **values,
    )


def _memlock(value: object, where: str) -> str:
    if value == "unlimited" or value is False or value == "":
        return value or ""
    return str(gpu_pool_keys.amount(value, where))


def _mellanox(value: object, where: str, prefix: str) -> PoolConfig:
    values = documents.fields(value, _MELLANOX, where, loose=True)
    resource = _prefixed(values, where, prefix, _MELLANOX_NAME)
    amount = values.get("rdmaHcaMax", 0)
    if not 0 <= amount <= extended_resources.MOST_IDS:
        most = f"is more than the kubelet accepts ({extended_resources.MOST_IDS})"
        why = "is below 0" if amount < 0 else most
        raise DocumentError(
            f"{where}.rdmaHcaMax: {amount}: {why}: write the number of pods that share the HCAs"
        )
    chosen = Selector()
    if "selectors" in values:
        chosen = selectors.parse(
            values["selectors"], f"{where}.selectors", _MELLANOX_SELECTOR, loose=True
        )
    names = values.get("devices", ())
    if (chosen == Selector()) is not bool(names):
        if names:
            raise DocumentError(f"{where}: both selectors and devices are set: remove devices")
        raise DocumentError(f"{where}.selectors: is missing or empty: write a key such as ifNames")
    if names:
        chosen = selectors.parse({"devices": list(names)}, where, {"devices": "ifNames"})
    return PoolConfig(
        resource=resource,
        mode="all",
        amount=amount,
        selectors=(chosen,),
        functions="pci",
        overlap=True,
        umad="umad" in values.get("nodes", ()),
        issm="issm" in values.get("nodes", ()),
    )


def _sriov(value: object, where: str, prefix: str) -> PoolConfig:
    values = documents.fields(value, _SRIOV, where, loose=True)
    resource = _prefixed(values, where, prefix, _SRIOV_NAME)
    kind = values.get("deviceType") or "netDevice"
    if kind not in ("netDevice", "auxNetDevice"):
        text = _ACCELERATOR if kind == "accelerator" else "expected one of netDevice, auxNetDevice"
        raise DocumentError(f"{where}.deviceType: {documents.shown(kind)}: {text}")
    if "selectors" not in values:
        raise DocumentError(
            f"{where}.selectors: is required: to select all network functions, write {{}}"
        )
    in_selectors = f"{where}.selectors"
    chosen = _selectors(values["selectors"], in_selectors, _SRIOV_SELECTOR, foreign=True)
    if kind == "auxNetDevice":
        _check_auxiliary(chosen, in_selectors)
    elif any(selector.auxTypes for selector in chosen):
        raise DocumentError(
            f"{in_selectors}.auxTypes: is for deviceType auxNetDevice: remove the key"
        )
    return PoolConfig(
        resource=resource,
        mode="exclusive",
        selectors=chosen,
        functions="auxiliary" if kind == "auxNetDevice" else "pci",
        rdma=any(selector.isRdma for selector in chosen),
        numa=not values.get("excludeTopology", False),
        used="left",
        additional_info=_additional(values.get("additionalInfo", {}), f"{where}.additionalInfo"),
        umad="umad" in values.get("nodes", ()),
        issm="issm" in values.get("nodes", ()),
    )


def _resource(name: str, where: str) -> str:
    if problem := extended_resources.resource_problem(name):
        raise DocumentError(f"{where}: {documents.shown(name)}: {problem}")
    return name


def _prefixed(values: dict[str, Any], where: str, prefix: str, valid: re.Pattern[str]) -> str:
    name = values.get("resourceName", "")
    if not name:
        raise DocumentError(f"{where}.resourceName: is required: write a name such as hca")
    if not valid.fullmatch(name):
        raise DocumentError(
            f"{where}.resourceName: {documents.shown(name)}: contains invalid characters: "
            f"write a name that matches {valid.pattern} (the domain belongs in "
            "resourcePrefix)"
        )
    return _resource(f"{values.get('resourcePrefix') or prefix}/{name}", f"{where}.resourceName")


def _selectors(
    value: object, where: str, spelling: Mapping[str, str], *, foreign: bool = False
) -> tuple[Selector, ...]:
    if isinstance(value, list):
        if foreign and not value:
            raise DocumentError(f"{where}: is empty: to select all network functions, write {{}}")
        items = [(item, f"{where}[{number}]") for number, item in enumerate(value)]
    elif isinstance(value, dict):
        items = [(value, where)]
    else:
        text = f"expected keys with values, or a list of these, got {documents.shown(value)}"
        raise DocumentError(f"{where}: {text}")
    if foreign:
        items = [(_supported(item, at), at) for item, at in items]
    return tuple(selectors.parse(item, at, spelling, loose=foreign) for item, at in items)


def _rails(value: object, where: str) -> tuple[Selector, ...]:
    if not isinstance(value, list):
        shown = documents.shown(value)
        raise DocumentError(f"{where}: expected a list of selectors, got {shown}")
    return _selectors(value, where, selectors.OWN)


def _supported(value: object, where: str) -> object:
    """Remove the keys of _UNSUPPORTED. Raises DocumentError if one of them has a value."""
    kept = dict(documents.mapping(value, where))
    for key, reason in _UNSUPPORTED.items():
        for written in [name for name in kept if name.lower() == key.lower()]:
            if kept.pop(written):
                raise DocumentError(f"{where}.{written}: is not supported: {reason}")
    return kept


def _check_auxiliary(chosen: tuple[Selector, ...], where: str) -> None:
    for selector in chosen:
        if not selector.auxTypes:
            raise DocumentError(f'{where}.auxTypes: is required for auxNetDevice: write ["sf"]')
        for key in _ONLY_NET:
            if getattr(selector, key):
                raise DocumentError(f"{where}.{key}: is not for auxNetDevice: remove the key")


def _additional(info: dict[str, dict[str, str]], where: str) -> dict[str, dict[str, str]]:
    by_address = {}
    for key, value in info.items():
        address = key if key == "*" else pci.canonical(key)
        if address is None:
            raise DocumentError(
                f'{where}.{key}: is neither a PCI address nor "*": write a PCI address, such as '
                '0000:3b:00.0, or "*"'
            )
        by_address[address] = value
    return by_address


class _Form(msgspec.Struct, frozen=True):
    key: str  # of the list, at the top of the file
    read: Callable[[object, str, str], PoolConfig]  # arguments: an entry, its path, the domain
    prefix: str = ""  # the domain of entries without a domain; "": names have domains


# Pools choose HCAs in this order. `configList` is last, because it also offers HCAs of other pools.
_FORMS = (
    _Form("pools", _own),
    _Form("resourceList", _sriov, "intel.com"),
    _Form("configList", _mellanox, "rdma"),
)
