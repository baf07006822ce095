"""Reads `gpus` and `gpuLimits` of config.yaml (docs/use/gpus.md)."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec

from base import documents
from base.documents import DocumentError
from deviceplugin.kubelet import extended_resources
from gpu.driver.driver_files import SharedFile
from gpu.gpu_pool import (
    CONTEXT_RESERVE,
    Action,
    GpuLimitSettings,
    GpuMode,
    GpuPoolConfig,
    Placement,
    Shape,
)
from host.sysfs import gpus, pci

SMALLEST = 256 << 20  # bytes; smaller units would make more ids than a kubelet accepts
_QUANTITY = re.compile(r"([0-9]{1,15})(Ki|Mi|Gi|Ti|)")
_FACTORS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}

_MOUNT = {"host": str, "container": str}
_SHAPE = {"name": str, "memory": object, "compute": Annotated[int, msgspec.Meta(ge=1, le=100)]}
KEYS: Mapping[str, object] = {
    "mode": GpuMode,
    "name": str,
    "replicas": Annotated[int, msgspec.Meta(ge=1, le=10_000)],
    "shapes": list[object],
    "memoryName": str,
    "computeName": str,
    "unit": object,
    "devices": tuple[str, ...],
    "placement": Placement,
    "reserve": object,
    "memory": object,
    "driverMount": object,
}
LIMIT_KEYS: Mapping[str, object] = {"driverRoot": str, "onOveruse": Action}
_ONLY_OF: Sequence[tuple[tuple[GpuMode, ...], tuple[str, ...]]] = (
    (("replicas",), ("name", "replicas", "driverMount")),
    (("slices",), ("shapes",)),
    (("units",), ("memoryName", "computeName", "unit")),
    (("slices", "units"), ("reserve", "memory")),
)


def parse(value: object, where: str) -> tuple[GpuPoolConfig, ...]:
    """Read the list `gpus`. Raises DocumentError."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise DocumentError(f"{where}: expected a list of pools, got {documents.shown(value)}")
    return tuple(_pool(entry, f"{where}[{number}]") for number, entry in enumerate(value))


def limits(value: object, where: str) -> GpuLimitSettings:
    """Read `gpuLimits`. Raises DocumentError."""
    values = documents.fields(value, LIMIT_KEYS, where)
    settings = GpuLimitSettings(on_overuse=values.get("onOveruse", "report"))
    if "driverRoot" not in values:
        return settings
    root = _directory(values["driverRoot"], f"{where}.driverRoot")
    return msgspec.structs.replace(settings, driver_root=Path(root))


def _pool(value: object, where: str) -> GpuPoolConfig:
    values = documents.fields(value, KEYS, where)
    mode: GpuMode = values.pop("mode", "slices")
    for modes, keys in _ONLY_OF:
        for key in values.keys() & keys if mode not in modes else ():
            raise DocumentError(
                f"{where}.{key}: is for mode {' or '.join(modes)}, but this pool has mode "
                f"{mode}: remove the key"
            )
    fields: dict[str, Any] = {
        "mode": mode,
        "placement": values.get("placement", "spread" if mode == "replicas" else "pack"),
        "devices": _devices(values.get("devices", ()), f"{where}.devices"),
    }
    if "driverMount" in values:
        fields["driver_mount"] = driver_mount(values["driverMount"], f"{where}.driverMount")
    for key in ("reserve", "memory"):
        if key in values:
            fields[key] = amount(values[key], f"{where}.{key}")
    return GpuPoolConfig(**fields, **_OF_MODE[mode](values, where))


def driver_mount(value: object, where: str) -> SharedFile:
    """Read a `driverMount`. Raises DocumentError."""
    fields = documents.fields(value, _MOUNT, where)
    host, container = (
        str(_directory(fields.get(key, ""), f"{where}.{key}", least=2)) for key in _MOUNT
    )
    return SharedFile(host, container)


def _directory(text: str, where: str, least: int = 1) -> PurePosixPath:
    """Read a path of at least `least` components. "/" counts as one."""
    path = PurePosixPath(text)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < least:
        raise DocumentError(
            f'{where}: {documents.shown(text)}: write an absolute path other than "/" and '
            'without "..", such as "/opt/nvidia"'
        )
    return path


def _of_replicas(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in ("name", "replicas"):
        if key not in values:
            example = '"example.com/shared-gpu"' if key == "name" else "8"
            raise DocumentError(
                f"{where}.{key}: is required in mode replicas: write a value such as {example}"
            )
    return {"resource": _resource(values["name"], f"{where}.name"), "replicas": values["replicas"]}


def _of_slices(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not values.get("shapes"):
        raise DocumentError(
            f"{where}.shapes: is required in mode slices: write "
            "[{name: podfabric.io/gpu-10g-25, memory: 10Gi, compute: 25}]"
        )
    shapes = []
    for number, entry in enumerate(values["shapes"]):
        at = f"{where}.shapes[{number}]"
        fields = documents.fields(entry, _SHAPE, at)
        for key in _SHAPE:
            if key not in fields:
                raise DocumentError(f"{at}.{key}: is required: write name, memory and compute")
        memory = amount(fields["memory"], f"{at}.memory")
        if memory <= CONTEXT_RESERVE:  # the charge for a context until it is measured
            raise DocumentError(
                f"{at}.memory: {memory >> 20}Mi is too little, because a CUDA context alone "
                f"takes {CONTEXT_RESERVE >> 20}Mi: set a larger value"
            )
        name = _resource(fields["name"], f"{at}.name")
        shapes.append(Shape(resource=name, memory=memory, compute=fields["compute"]))
    return {"shapes": tuple(shapes)}


def _of_units(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, field in (("memoryName", "memory_resource"), ("computeName", "compute_resource")):
        if key in values:
            fields[field] = _resource(values[key], f"{where}.{key}")
    if "unit" in values:
        fields["unit"] = amount(values["unit"], f"{where}.unit", SMALLEST)
    return fields


_OF_MODE = {"replicas": _of_replicas, "slices": _of_slices, "units": _of_units}


def _resource(name: str, where: str) -> str:
    if problem := extended_resources.resource_problem(name):
        raise DocumentError(f"{where}: {documents.shown(name)}: {problem}")
    return name


def _devices(names: Sequence[str], where: str) -> tuple[str, ...]:
    devices = []
    for name in names:
        address = pci.canonical(name)
        if address is None and not gpus.is_uuid(name):
            raise DocumentError(
                f"{where}: {documents.shown(name)}: is neither the PCI address nor the UUID "
                "of a GPU: write a PCI address or UUID that `podfabric topo` shows"
            )
        devices.append(address or name)
    return tuple(devices)


def amount(value: object, where: str, least: int = 0) -> int:
    """Read a number of bytes, such as "10Gi". Raises DocumentError."""
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        size = value
    elif match is not None:
        size = int(match[1]) * _FACTORS[match[2]]
    else:
        raise DocumentError(
            f"{where}: {documents.shown(value)}: expected a number of bytes, such as "
            '"10Gi" or "512Mi"'
        )
    if size < least:
        ids = (80 << 30) // max(size, 1)
        raise DocumentError(
            f"{where}: {documents.shown(value)}: a GPU of 80 GiB would have {ids} ids, but a "
            f"kubelet accepts at most {extended_resources.MOST_IDS} ids for all GPUs of a node: "
            "write 256Mi or more"
        )
    if size > 1 << 50:
        raise DocumentError(f"{where}: {documents.shown(value)}: is more than 1 PiB: write less")
    return size
