"""The kubelet's kubelet_internal_checkpoint."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kubelet.devices import Held, Response


def write(
    path: Path,
    held: Sequence[Held],
    registered: Mapping[str, Sequence[str]],
    boot_id: str = "",
) -> None:
    """Replace the file by a rename, as the kubelet does.

    The checksum is computed over this JSON. The kubelet's is computed over Go's own dump of the
    data, and only the kubelet reads it.
    """
    entries = [
        {
            "PodUID": reservation.uid,
            "ContainerName": reservation.container,
            "ResourceName": reservation.resource,
            "DeviceIDs": _by_node(reservation),
            "AllocResp": base64.b64encode(reservation.response.SerializeToString()).decode(),
        }
        for reservation in held
    ]
    data = {
        "PodDeviceEntries": entries or None,  # a nil slice of Go's
        "RegisteredDevices": {name: list(ids) for name, ids in registered.items()},
    }
    whole: dict[str, Any] = {"Data": data, "Checksum": _fnv(json.dumps(data).encode())}
    if boot_id:
        whole["BootID"] = boot_id
    temporary = path.with_name(f".{path.name}-writing")
    temporary.write_text(json.dumps(whole))
    temporary.replace(path)


def read(path: Path) -> tuple[list[Held], dict[str, list[str]]]:
    """Read the holders and the resources, as a kubelet does when it starts."""
    try:
        data = json.loads(path.read_text())["Data"]
    except FileNotFoundError:
        return [], {}
    held = []
    for entry in data["PodDeviceEntries"] or ():
        devices: dict[str, tuple[int, ...]] = {}
        for node, ids in entry["DeviceIDs"].items():
            for device_id in ids:
                known = devices.get(device_id, ())
                devices[device_id] = known if int(node) < 0 else (*known, int(node))
        held.append(
            Held(
                uid=entry["PodUID"],
                container=entry["ContainerName"],
                resource=entry["ResourceName"],
                devices=devices,
                response=Response.FromString(base64.b64decode(entry["AllocResp"])),
            )
        )
    return held, dict(data["RegisteredDevices"] or {})


def _by_node(held: Held) -> dict[str, list[str]]:
    """By NUMA node: a device of two nodes is in both lists, one without a node under -1."""
    nodes: dict[str, list[str]] = {}
    for device_id, numa in sorted(held.devices.items()):
        for node in numa or (-1,):
            nodes.setdefault(str(node), []).append(device_id)
    return nodes


def _fnv(content: bytes) -> int:
    """FNV-1 (not FNV-1a) with 32 bits, as New32 of Go's hash/fnv."""
    value = 0x811C9DC5
    for byte in content:
        value = (value * 0x01000193 & 0xFFFFFFFF) ^ byte
    return value
