"""Detects changes in sysfs without a slow read of all HCAs.

The device plugin calls these functions every second and for every allocation.
"""

import os
from collections.abc import Iterable

from base.paths import Paths
from host.sysfs import attribute_files
from host.sysfs.discovery import HCA, CharacterDevice

_UVERBS = "class/infiniband_verbs"
_PARTS = ("class/infiniband", _UVERBS, "bus/pci/devices", "bus/auxiliary/devices")


def hardware(paths: Paths) -> frozenset[str]:
    """Names in sysfs. The set changes when hardware, a driver or an interface comes or goes."""
    sys = paths.sys
    entries = {
        f"{part}/{name}" for part in _PARTS for name in attribute_files.names(f"{sys}/{part}")
    }
    interfaces = attribute_files.names(f"{sys}/class/net")
    for name in interfaces:
        if "/virtual/" not in attribute_files.link(f"{sys}/class/net/{name}"):
            entries.add(name)
    return frozenset(entries)


def uverbs(paths: Paths) -> frozenset[str]:
    """The uverbs devices, each with its RDMA device: "uverbs0 mlx5_0"."""
    root = f"{paths.sys}/{_UVERBS}"
    return frozenset(
        f"{name} {attribute_files.text(f'{root}/{name}/ibdev')}"
        for name in attribute_files.names(root)
    )


def has_other_ports(paths: Paths, hcas: Iterable[HCA], *, rates: bool = False) -> bool:
    """Whether a port's state differs from its state in `hcas`. With `rates`, rates count too."""
    for rdma in (rdma for hca in hcas for rdma in hca.rdma):
        for port in rdma.ports:
            at = f"{paths.sys}/class/infiniband/{rdma.name}/ports/{port.number}"
            if attribute_files.text(f"{at}/state").partition(": ")[2] != port.state:
                return True
            if rates and attribute_files.text(f"{at}/rate") != port.rate:
                return True
    return False


def is_absent(paths: Paths, hca_id: str) -> bool:
    """Whether no device on any bus has that id."""
    directories = ("bus/pci/devices", "bus/auxiliary/devices", "class/infiniband")
    return not any(os.path.lexists(f"{paths.sys}/{at}/{hca_id}") for at in directories)


def has_its_devices(paths: Paths, hca: HCA) -> bool:
    """Whether the HCA still has the RDMA devices and character devices that `hca` lists.

    A reload of a driver may swap the names and numbers of two HCAs.
    """
    sys = paths.sys
    if not hca.rdma:  # RDMA devices may have come back from a pod
        return not any(os.path.lexists(f"{sys}/class/infiniband/{name}") for name in hca.rdma_names)
    for rdma in hca.rdma:
        directory = attribute_files.link(f"{sys}/class/infiniband/{rdma.name}")
        # ".../0000:3b:00.0/infiniband/mlx5_0"
        if hca.address and directory.split("/")[-3:-2] != [hca.address]:
            return False
        if rdma.uverbs is None or not _belongs(paths, _UVERBS, rdma.uverbs, rdma.name):
            return False
        for node in (node for port in rdma.ports for node in (port.umad, port.issm)):
            if node is not None and not _belongs(paths, "class/infiniband_mad", node, rdma.name):
                return False
    return True


def _belongs(paths: Paths, of: str, node: CharacterDevice, rdma: str) -> bool:
    directory = f"{paths.sys}/{of}/{node.name}"
    numbers = f"{node.major}:{node.minor}"
    return (
        attribute_files.text(f"{directory}/dev") == numbers
        and attribute_files.text(f"{directory}/ibdev") == rdma
    )
