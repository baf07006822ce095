"""Whether sysfs is as it was: at a fraction of the cost of reading all HCAs anew.

These run every second and with every allocation.
"""

import os
from collections.abc import Iterable

from base.paths import Paths
from host import sysfs
from host.discovery import HCA, CharacterDevice

_UVERBS = "class/infiniband_verbs"
_PARTS = ("class/infiniband", _UVERBS, "bus/pci/devices", "bus/auxiliary/devices")


def hardware(paths: Paths) -> frozenset[str]:
    """Names that come and go with the hardware, its drivers and its interfaces."""
    sys = paths.sys
    found = {f"{part}/{name}" for part in _PARTS for name in sysfs.names(f"{sys}/{part}")}
    interfaces = sysfs.names(f"{sys}/class/net")
    found.update(name for name in interfaces if _is_hardware(f"{sys}/class/net/{name}"))
    return frozenset(found)


def uverbs(paths: Paths) -> frozenset[str]:
    """The uverbs devices, each with the RDMA device that it is of."""
    root = f"{paths.sys}/{_UVERBS}"
    return frozenset(f"{name} {sysfs.text(f'{root}/{name}/ibdev')}" for name in sysfs.names(root))


def has_other_states(paths: Paths, hcas: Iterable[HCA], *, every: bool) -> bool:
    """Whether a port's state is another than `hcas` say.

    Unless `every` port is to be read, those with an interface that has a carrier are passed over:
    the kernel tells of its end, and to read a port's state is to ask the HCA's firmware.
    """
    return any(
        _state(paths, rdma.name, port.number) != port.state
        for hca in hcas
        for rdma in hca.rdma
        for port in rdma.ports
        if every or not any(_has_carrier(paths, netdev) for netdev in port.netdevs)
    )


def has_other_rates(paths: Paths, hcas: Iterable[HCA]) -> bool:
    """Whether a port's rate is another than `hcas` say."""
    ports = ((rdma.name, port) for one in hcas for rdma in one.rdma for port in rdma.ports)
    return any(
        sysfs.text(f"{paths.sys}/class/infiniband/{name}/ports/{port.number}/rate") != port.rate
        for name, port in ports
    )


def is_absent(paths: Paths, hca_id: str) -> bool:
    """Nothing on any bus has that name."""
    places = ("bus/pci/devices", "bus/auxiliary/devices", "class/infiniband")
    return not any(os.path.lexists(f"{paths.sys}/{place}/{hca_id}") for place in places)


def has_its_devices(paths: Paths, hca: HCA, *, mad: bool = True) -> bool:
    """Whether an HCA's RDMA devices and character devices are still those that it says.

    Their names and numbers are handed out anew when a driver is loaded, also to one another.
    Without `mad` its umad and issm devices are not looked at: who gives none away need not know.
    """
    sys = paths.sys
    if not hca.rdma:  # they may be back from a pod
        return not any(os.path.lexists(f"{sys}/class/infiniband/{name}") for name in hca.rdma_names)
    for rdma in hca.rdma:
        place = sysfs.link(f"{sys}/class/infiniband/{rdma.name}")
        # ".../0000:3b:00.0/infiniband/mlx5_0"
        if hca.address and place.split("/")[-3:-2] != [hca.address]:
            return False
        if rdma.uverbs is None or not _belongs(paths, _UVERBS, rdma.uverbs, rdma.name):
            return False
        for node in (node for port in rdma.ports if mad for node in (port.umad, port.issm)):
            if node is not None and not _belongs(paths, "class/infiniband_mad", node, rdma.name):
                return False
    return True


def _state(paths: Paths, rdma: str, port: int) -> str:
    state = sysfs.text(f"{paths.sys}/class/infiniband/{rdma}/ports/{port}/state")
    return state.partition(": ")[2]


def _has_carrier(paths: Paths, netdev: str) -> bool:
    return sysfs.text(f"{paths.sys}/class/net/{netdev}/carrier") == "1"


def _belongs(paths: Paths, of: str, node: CharacterDevice, rdma: str) -> bool:
    directory = f"{paths.sys}/{of}/{node.name}"
    numbers = f"{node.major}:{node.minor}"
    return sysfs.text(f"{directory}/dev") == numbers and sysfs.text(f"{directory}/ibdev") == rdma


def _is_hardware(netdev: str) -> bool:
    return "/virtual/" not in sysfs.link(netdev)
