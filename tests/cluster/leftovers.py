"""In the node: the remains of pods, as JSON. After the last pod there are none.

The tests run this repeatedly on an emulated CPU. It needs only the standard library, reads only
files, and starts no process.
"""

import json
from collections.abc import Iterator
from pathlib import Path

NET = Path("/sys/class/net")
INFINIBAND = "32"  # linux/if_arp.h
ATTRIBUTES = ("ifalias", "ifindex", "iflink", "type")
STATE = Path("/var/lib/podfabric")


def found() -> dict[str, list[str]]:
    """All remains except addresses, by kind."""
    return {
        "interfaces": list(_interfaces()),
        "VFs that are away": list(_vfs_away()),
        "journal entries": _names(STATE / "attachments"),
        "allocations": list(_allocations()),
        "sandboxes": _names(Path("/run/netns")),
        "device information": [
            *_names(Path("/run/k8s.cni.cncf.io/devinfo/dp")),
            *_names(Path("/run/k8s.cni.cncf.io/devinfo/cni")),
        ],
    }


def _interfaces() -> Iterator[str]:
    """Children of an IPoIB parent, and interfaces with our alias."""
    for link in NET.glob("*/ifindex"):
        try:
            of = {name: (link.parent / name).read_text().strip() for name in ATTRIBUTES}
        except OSError:
            continue  # it is being removed
        is_child = of["type"] == INFINIBAND and of["iflink"] != of["ifindex"]
        if is_child or "podfabric" in of["ifalias"]:
            yield f"{link.parent.name} {of['ifalias']}".strip()


def _vfs_away() -> Iterator[str]:
    """VFs that a driver has and that have no interface here: it is in a namespace."""
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


if __name__ == "__main__":
    print(json.dumps(found()))
