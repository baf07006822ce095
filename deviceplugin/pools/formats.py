"""The forms of a configuration: our own, the Mellanox shared plugin's, the SR-IOV plugin's.

The other two are known by their top-level keys, `configList` and `resourceList`, alone or beside
`agent` and `devices`. What is an error in those plugins is one here. Keys are matched as their Go
decoder does it, whatever the case of the letters. A key that would change what a pod gets and
that nothing here acts on is refused, never ignored.

Sources: k8s-rdma-shared-dev-plugin pkg/resources/resources_manager.go and pkg/types/types.go;
sriov-network-device-plugin cmd/sriovdp/manager.go and pkg/types/types.go; their READMEs.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from base import documents
from base.documents import DocumentError
from base.text import resembling
from deviceplugin.pools import config, selectors
from deviceplugin.pools.config import (
    DevicePluginConfig,
    Mode,
    Placement,
    PoolConfig,
    Registration,
    Selector,
)
from host import pci

_Nodes = tuple[Literal["umad", "issm"], ...]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]

POOL_KEYS = {
    "name": str,
    "mode": Mode,
    "amount": Annotated[int, msgspec.Meta(ge=1, le=10_000)],
    "slots": Annotated[int, msgspec.Meta(ge=1, le=1_000)],
    "placement": Placement,
    "selectors": object,
    "nodes": _Nodes,
    "cdi": bool,
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
_ONLY_NET = ("pciAddresses", "acpiIndexes", "pKeys")  # no keys of auxNetDevice
_UNSUPPORTED = {
    "ddpProfiles": "DDP profiles are not read: select by pciAddresses or pfNames",
    "vdpaType": "vDPA devices are not offered: leave this resource to the SR-IOV plugin",
    "needVhostNet": "vhost-net is not given to pods: leave this resource to the SR-IOV plugin",
}
_ACCELERATOR = "accelerators are not offered: leave this resource to the SR-IOV plugin"


def read(document: object, name: str, prefix: str) -> DevicePluginConfig:
    """The configuration in a decoded file called `name`, of whichever form. DocumentError.

    `prefix` is the resources' domain where another plugin's file gives none, "" for its own.
    """
    whole = documents.mapping(document, name)
    parts: dict[str, Any] = {}
    for key, value in whole.items():
        part = resembling(key, config.PARTS)
        if part is None or not config.is_part(key):
            raise DocumentError(f"{name}: {key}: unknown key: {documents.hint(key, config.PARTS)}")
        if part in parts:
            raise DocumentError(f"{name}: {key}: appears twice: keep one")
        parts[part] = value
    forms = sorted({"pools", "configList", "resourceList"}.intersection(parts))
    if len(forms) > 1:
        raise DocumentError(
            f"{name}: {forms[0]} and {forms[1]}: keep one, and write all pools there"
        )
    given = _devices(parts, name)
    if "resourceList" in parts:
        pools = _each(parts["resourceList"], f"{name}: resourceList", prefix or "intel.com", _sriov)
    elif "configList" in parts:
        pools = _each(parts["configList"], f"{name}: configList", prefix or "rdma", _mellanox)
    elif prefix:
        raise DocumentError(
            f"{name}: a resource prefix is for files with a resourceList or configList: here the "
            "names of the pools have it"
        )
    elif "pools" in parts:
        pools = _each(parts["pools"], f"{name}: pools", "", _own)
    else:
        pools = (config.DEFAULT,)
    if problem := config.together_problem(pools):
        raise DocumentError(f"{name}: {problem}")
    return DevicePluginConfig(pools=pools, **given)


def _devices(parts: dict[str, Any], name: str) -> dict[str, Any]:
    """What is not of one pool: `registration`, `rescan`."""
    shapes = {"registration": Registration, "rescan": _Seconds}
    given = documents.fields(parts.get("devices"), shapes, f"{name}: devices")
    interval = parts.get("periodicUpdateInterval")
    if "periodicUpdateInterval" not in parts:
        return given
    where = f"{name}: periodicUpdateInterval"
    if "configList" not in parts:
        raise DocumentError(f'{where}: goes with configList: write "devices: {{rescan: 60}}"')
    if "rescan" in given:
        raise DocumentError(f"{where}: devices.rescan is there, too: keep one")
    if interval is not None:
        seconds = Annotated[int, msgspec.Meta(ge=0, le=86400)]
        given["rescan"] = float(documents.convert(interval, seconds, where))
    return given


_Read = Callable[[object, str, str], PoolConfig]


def _each(given: object, where: str, prefix: str, read_one: _Read) -> tuple[PoolConfig, ...]:
    if not isinstance(given, list):
        raise DocumentError(f"{where}: expected a list of pools, got {documents.shown(given)}")
    if not given and read_one is not _own:
        raise DocumentError(
            f'{where}: no resources configuration found: for none write "pools: []"'
        )
    return tuple(read_one(one, f"{where}[{n}]", prefix) for n, one in enumerate(given))


def _own(given: object, where: str, _: str) -> PoolConfig:
    values = documents.fields(given, POOL_KEYS, where)
    mode: Mode = values.get("mode", "shared")
    for key, of in _ONLY_OF.items():
        if key in values and mode != of:
            raise DocumentError(
                f"{where}.{key}: is for mode {of}, this pool's is {mode}: remove it"
            )
    if "name" not in values:
        raise DocumentError(f'{where}.name: is required: write domain/name, such as "rdma/hca"')
    given_selectors, nodes = values.pop("selectors", []), values.pop("nodes", ())
    return PoolConfig(
        resource=_resource(values.pop("name"), f"{where}.name"),
        used="named" if mode == "exclusive" else "offered",
        selectors=_selectors(given_selectors, f"{where}.selectors", selectors.OWN),
        umad="umad" in nodes,
        issm="issm" in nodes,
        **values,
    )


def _mellanox(given: object, where: str, prefix: str) -> PoolConfig:
    values = documents.fields(given, _MELLANOX, where, loose=True)
    resource = _prefixed(values, where, prefix, _MELLANOX_NAME)
    amount = values.get("rdmaHcaMax", 0)
    if not 0 <= amount <= config.MOST_IDS:
        why = "is below 0" if amount < 0 else f"is more than the kubelet takes ({config.MOST_IDS})"
        raise DocumentError(
            f"{where}.rdmaHcaMax: {amount}: {why}: write how many pods share the HCAs"
        )
    chosen = Selector()
    if "selectors" in values:
        chosen = selectors.parse(
            values["selectors"], f"{where}.selectors", _MELLANOX_SELECTOR, loose=True
        )
    names = values.get("devices", ())
    if (chosen == Selector()) is not bool(names):
        text = "both are given" if names else "neither is given"
        raise DocumentError(
            f"{where}: selectors, devices: {text}: keep selectors, with one key at least"
        )
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


def _sriov(given: object, where: str, prefix: str) -> PoolConfig:
    values = documents.fields(given, _SRIOV, where, loose=True)
    resource = _prefixed(values, where, prefix, _SRIOV_NAME)
    kind = values.get("deviceType") or "netDevice"
    if kind not in ("netDevice", "auxNetDevice"):
        text = _ACCELERATOR if kind == "accelerator" else "expected one of netDevice, auxNetDevice"
        raise DocumentError(f"{where}.deviceType: {documents.shown(kind)}: {text}")
    if "selectors" not in values:
        raise DocumentError(
            f"{where}.selectors: is required: write {{}} for every network function"
        )
    place = f"{where}.selectors"
    chosen = _selectors(values["selectors"], place, _SRIOV_SELECTOR, foreign=True)
    if kind == "auxNetDevice":
        _check_auxiliary(chosen, place)
    elif any(one.auxTypes for one in chosen):
        raise DocumentError(f"{place}.auxTypes: is for deviceType auxNetDevice: remove it")
    return PoolConfig(
        resource=resource,
        mode="exclusive",
        selectors=chosen,
        functions="auxiliary" if kind == "auxNetDevice" else "pci",
        rdma=any(one.isRdma for one in chosen),
        numa=not values.get("excludeTopology", False),
        used="left",
        additional_info=_additional(values.get("additionalInfo", {}), f"{where}.additionalInfo"),
        umad="umad" in values.get("nodes", ()),
        issm="issm" in values.get("nodes", ()),
    )


def _resource(name: str, where: str) -> str:
    if problem := config.resource_problem(name):
        raise DocumentError(f"{where}: {documents.shown(name)}: {problem}")
    return name


def _prefixed(values: dict[str, Any], where: str, prefix: str, valid: re.Pattern[str]) -> str:
    name = values.get("resourceName", "")
    if not name:
        raise DocumentError(f"{where}.resourceName: is required")
    if not valid.fullmatch(name):
        raise DocumentError(
            f"{where}.resourceName: {documents.shown(name)}: contains invalid characters: the "
            f"domain goes into resourcePrefix, the name is {valid.pattern}"
        )
    return _resource(f"{values.get('resourcePrefix') or prefix}/{name}", f"{where}.resourceName")


def _selectors(
    given: object, where: str, spelling: Mapping[str, str], *, foreign: bool = False
) -> tuple[Selector, ...]:
    if isinstance(given, list):
        if foreign and not given:
            raise DocumentError(f"{where}: is empty: write {{}} for every network function")
        places = [(one, f"{where}[{number}]") for number, one in enumerate(given)]
    elif isinstance(given, dict):
        places = [(given, where)]
    else:
        text = f"expected keys with values, or a list of such, got {documents.shown(given)}"
        raise DocumentError(f"{where}: {text}")
    if foreign:
        places = [(_supported(one, at), at) for one, at in places]
    return tuple(selectors.parse(one, at, spelling, loose=foreign) for one, at in places)


def _supported(given: object, where: str) -> object:
    """The selector without the keys of _UNSUPPORTED, if those ask for nothing."""
    kept = dict(documents.mapping(given, where))
    for key, reason in _UNSUPPORTED.items():
        for written in [one for one in kept if one.lower() == key.lower()]:
            if kept.pop(written):
                raise DocumentError(f"{where}.{written}: is not supported: {reason}")
    return kept


def _check_auxiliary(chosen: tuple[Selector, ...], where: str) -> None:
    for one in chosen:
        if not one.auxTypes:
            raise DocumentError(f'{where}.auxTypes: is required for auxNetDevice: write ["sf"]')
        for key in _ONLY_NET:
            if getattr(one, key):
                raise DocumentError(f"{where}.{key}: is not for auxNetDevice: remove it")


def _additional(given: dict[str, dict[str, str]], where: str) -> dict[str, dict[str, str]]:
    found = {}
    for key, value in given.items():
        address = key if key == "*" else pci.canonical(key)
        if address is None:
            raise DocumentError(f'{where}.{key}: is neither an address nor "*"')
        found[address] = value
    return found
