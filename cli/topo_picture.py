"""Where the GPUs and HCAs of a node are, for the matrix and the drawing of `podfabric topo`."""

from typing import Literal

import msgspec

from cli.this_node import ThisNode, gpu_label, rdma_label
from host.discovery import HCA
from host.topology import Topology


class TopologyDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or an HCA, and the bridge and switches above it ("" if unknown)."""

    label: str  # "GPU0", "mlx5_0"
    kind: Literal["gpu", "hca"]
    address: str
    netdevs: tuple[str, ...] = ()
    numa: int | None = None
    bridge: str = ""  # "pci0000:17"
    switches: tuple[str, ...] = ()  # upstream ports of the switches, the topmost first
    uuid: str = ""
    working: bool = True


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Devices, GPUs first; `distances` has a row and a column for each device, in that order."""

    devices: tuple[TopologyDevice, ...]
    distances: tuple[tuple[str, ...], ...]
    not_shown: tuple[str, ...] = ()  # VFs and SFs, at their PFs' positions
    without_place: tuple[str, ...] = ()  # devices without a PCI function


def picture(node: ThisNode, *, everything: bool = False) -> Picture:
    """The GPUs and HCAs of a node, with VFs and SFs if `everything` is set.

    Raises HostError if the topology file is wrong.
    """
    topology = node.topology
    devices = []
    for gpu in node.gpus:
        label = gpu_label(node.gpus, gpu.address)
        device = TopologyDevice(
            label=label, kind="gpu", address=gpu.address, uuid=gpu.uuid, numa=gpu.numa
        )
        devices.append(_located(device, topology))
    hcas = [hca for hca in node.hcas if hca.rdma or hca.rdma_names]
    pfs = {hca.address for hca in hcas if hca.address}
    hidden = [] if everything else [hca for hca in hcas if hca.pf in pfs]
    without = [hca for hca in hcas if not hca.address]
    for hca in hcas:
        if hca not in hidden and hca not in without:
            devices.append(_located(_hca(hca), topology))
    return Picture(
        devices=tuple(devices),
        distances=tuple(
            tuple(topology.distance(a.address, b.address).name for b in devices) for a in devices
        ),
        not_shown=tuple(hca.id for hca in hidden),
        without_place=tuple(hca.id for hca in without),
    )


def _hca(hca: HCA) -> TopologyDevice:
    return TopologyDevice(
        label=rdma_label(hca),
        kind="hca",
        address=hca.address,
        netdevs=hca.netdevs,
        numa=hca.numa,
        working=hca.working or not hca.rdma,
    )


def _located(device: TopologyDevice, topology: Topology) -> TopologyDevice:
    location = topology.location(device.address)
    if location is None:
        return device
    return msgspec.structs.replace(
        device,
        numa=location.numa if location.numa is not None else device.numa,
        bridge=location.bridge,
        switches=tuple(port for port in location.ports[1:-1:2] if port not in location.flat),
    )
