"""Finds NVIDIA GPUs in the driver's /proc files, also by a device plugin's id.

Sources: the driver's README, "The /proc interface" (gpus/*/information); for ids, the device
plugins of NVIDIA, GKE, Deepomatic, Alnair and HAMi.
"""

import re
from collections.abc import Iterable

import msgspec

from base.paths import Paths
from host.sysfs import attribute_files, pci

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_GPU = re.compile(rf"GPU-{_UUID}", re.IGNORECASE)
# NVIDIA's "GPU-…" and replicas "GPU-…::3", Alnair's "GPU-…_3", HAMi's "GPU-…-3", old drivers'
# "MIG-GPU-…/1/0". An id "MIG-…" without the GPU's UUID does not name the GPU.
_BY_UUID = re.compile(
    rf"(?:(GPU-{_UUID})(?:(?:::|_|-)[0-9]+)?|MIG-(GPU-{_UUID})/[0-9]+/[0-9]+(?:::[0-9]+)?)",
    re.IGNORECASE,
)
# GKE's "nvidia0", "nvidia0/gi1", "nvidia0/vgpu3", "nvidia0/gi1/vgpu0"; Deepomatic's "nvidia0-_-7"
_BY_MINOR = re.compile(r"nvidia([0-9]+)(?:(?:/gi[0-9]+)?(?:/vgpu[0-9]+)?|-_-[0-9]+)")


class GPU(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU with NVIDIA's driver."""

    uuid: str  # "GPU-…"; "" while the driver has not set the GPU up yet
    address: str  # "0000:1a:00.0"
    minor: int | None  # N in /dev/nvidiaN
    numa: int | None  # `None` if unknown


def gpus(paths: Paths) -> list[GPU]:
    """The node's readable GPUs, sorted by address; [] without NVIDIA's driver."""
    gpus = []
    directory = _directory(paths)
    for name in attribute_files.names(directory):
        information = attribute_files.text(f"{directory}/{name}/information", errors="replace")
        lines = (line.partition(":") for line in information.splitlines())
        fields = {key.strip(): value.strip() for key, _, value in lines}
        address = pci.canonical(fields.get("Bus Location", "")) or pci.canonical(name)
        if address is None:
            continue
        uuid, minor = fields.get("GPU UUID", ""), fields.get("Device Minor", "")
        gpus.append(
            GPU(
                # The driver shows "GPU-????????-…" until the GPU is set up.
                uuid=uuid if _GPU.fullmatch(uuid) else "",
                address=address,
                minor=int(minor) if minor.isdecimal() else None,
                numa=attribute_files.numa_node(f"{paths.sys}/bus/pci/devices/{address}"),
            )
        )
    return sorted(gpus, key=lambda gpu: gpu.address)


class GPUs:
    """The GPUs of the node, cached. They are read again if names change or a UUID is missing."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._names: set[str] = set()
        self._gpus: list[GPU] = []

    def read(self) -> list[GPU]:
        names = set(attribute_files.names(_directory(self._paths)))
        if names != self._names or not all(gpu.uuid for gpu in self._gpus):
            self._gpus = gpus(self._paths)
            self._names = names
        return self._gpus


def is_uuid(text: str) -> bool:
    return _GPU.fullmatch(text) is not None


def address_of(gpus: Iterable[GPU], device_id: str) -> str:
    """The PCI address of the GPU that a device plugin's id names; "" if the GPU is unknown."""
    if by_uuid := _BY_UUID.fullmatch(device_id):
        uuid = (by_uuid[1] or by_uuid[2]).lower()
        return next((gpu.address for gpu in gpus if gpu.uuid.lower() == uuid), "")
    if by_minor := _BY_MINOR.fullmatch(device_id):
        minor = int(by_minor[1])
        return next((gpu.address for gpu in gpus if gpu.minor == minor), "")
    return ""


def _directory(paths: Paths) -> str:
    return f"{paths.proc}/driver/nvidia/gpus"
