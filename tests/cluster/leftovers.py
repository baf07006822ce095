"""In the node: what is there of pods, as JSON. Nothing is, once the last pod is gone."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PODFABRIC = Path(sys.executable).with_name("podfabric")
STATE = Path("/var/lib/podfabric")


def found() -> dict[str, list[str]]:
    """By kind."""
    return {
        "interfaces": list(_interfaces()),
        "VFs that are away": list(_vfs_away()),
        "journal entries": _names(STATE / "attachments"),
        "addresses": [str(row) for row in _json(str(PODFABRIC), "ipam", "list", "-o", "json")],
        "allocations": list(_allocations()),
        "sandboxes": _names(Path("/run/netns")),
        "device information": [
            *_names(Path("/run/k8s.cni.cncf.io/devinfo/dp")),
            *_names(Path("/run/k8s.cni.cncf.io/devinfo/cni")),
        ],
    }


def _interfaces() -> Iterator[str]:
    """Children of an IPoIB parent, and interfaces with our alias."""
    for link in _json("ip", "-d", "-j", "link", "show"):
        if "podfabric" in link.get("ifalias", ""):
            yield f"{link['ifname']} {link['ifalias']}"
        elif "link" in link and link.get("linkinfo", {}).get("info_kind") == "ipoib":
            yield link["ifname"]


def _vfs_away() -> Iterator[str]:
    """VFs that their driver has, without an interface here: it is in a namespace."""
    for vf in Path("/sys/bus/pci/devices").glob("*/physfn"):
        driver = vf.parent / "driver"
        if driver.exists() and driver.resolve().name != "vfio-pci":
            netdevs = vf.parent / "net"
            if not netdevs.exists() or not list(netdevs.iterdir()):
                yield vf.parent.name


def _allocations() -> Iterator[str]:
    checkpoint = STATE / "devices/checkpoint.json"
    if checkpoint.exists():
        for each in json.loads(checkpoint.read_text())["allocations"]:
            yield f"{each['resource']} {each['id']}"


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def _json(*command: str) -> list[dict[str, Any]]:
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows: list[dict[str, Any]] = json.loads(printed or "[]")
    return rows


if __name__ == "__main__":
    print(json.dumps(found()))
