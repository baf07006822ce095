"""`podfabric topo`: how far GPUs and HCAs are from each other, as a matrix or a drawing."""

import argparse
import os
import sys
from pathlib import Path
from typing import Literal

import msgspec

from base.paths import Paths
from cli import output
from cli.arguments import file_name
from cli.output import Cell, Table
from cli.this_node import ThisNode, gpu_label, numa_text, rdma_label
from host.discovery import HCA
from host.errors import HostError
from host.topology import Distance, Topology

_LEGEND = (
    (Distance.SAME, "the device itself, or another function of its card"),
    (Distance.PIX, "at most one PCIe switch between them"),
    (Distance.PXB, "several PCIe switches, and not the host bridge"),
    (Distance.PHB, "one PCIe host bridge (the CPU)"),
    (Distance.NODE, "several host bridges of one NUMA node"),
    (Distance.SYS, "NUMA nodes, or not known"),
)
_LEGEND_TEXT = "\n".join(
    f"  {'X' if one is Distance.SAME else one.name:<4}  {text}" for one, text in _LEGEND
)
_STYLES = {"PIX": "green", "PXB": "green", "PHB": "yellow", "NODE": "yellow", "SYS": "red"}


class TopologyDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or an HCA, with what it hangs on ("" where that is not known)."""

    label: str  # "GPU0", "mlx5_0"
    kind: Literal["gpu", "hca"]
    address: str
    netdevs: tuple[str, ...] = ()
    numa: int | None = None
    bridge: str = ""  # "pci0000:17"
    switches: tuple[str, ...] = ()  # upstream ports of the switches above it, the topmost first
    uuid: str = ""
    working: bool = True


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """The matrix: `distances` has a row per device in their order, GPUs first."""

    devices: tuple[TopologyDevice, ...]
    distances: tuple[tuple[str, ...], ...]
    not_shown: tuple[str, ...] = ()  # VFs and SFs, which are where their PFs are
    without_place: tuple[str, ...] = ()  # on no PCI function


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    output.add_option(parser)
    parser.add_argument(
        "--svg",
        type=file_name,
        metavar="FILE",
        help='draw it into this file; "-" is standard output',
    )
    parser.add_argument("--all", action="store_true", help="also VFs and SFs, beside their PFs")
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what `arguments` ask for; the exit code."""
    node = ThisNode(Paths.from_environ(os.environ))
    try:
        drawn = picture(node, everything=arguments.all)
    except HostError as error:
        sys.stderr.write(f"podfabric topo: {error}\n")
        return 1
    if arguments.svg:
        return _draw(drawn, arguments.svg)
    if arguments.output != "table":
        output.document(_document(drawn), arguments.output)
    elif drawn.devices:
        output.show(_matrix(drawn), _near(drawn), _LEGEND_TEXT, _notes(drawn))
    else:
        output.show(_notes(drawn) or _nothing(node.paths))
    return 0


def picture(node: ThisNode, *, everything: bool = False) -> Picture:
    """The GPUs and HCAs of a node; HostError if the topology file is wrong."""
    topology = node.topology
    devices = []
    for gpu in node.gpus:
        label = gpu_label(node.gpus, gpu.address)
        made = TopologyDevice(
            label=label, kind="gpu", address=gpu.address, uuid=gpu.uuid, numa=gpu.numa
        )
        devices.append(_placed(made, topology))
    hcas = [one for one in node.hcas if one.rdma or one.rdma_names]
    pfs = {one.address for one in hcas if one.address}
    hidden = [] if everything else [one for one in hcas if one.pf in pfs]
    without = [one for one in hcas if not one.address]
    for hca in hcas:
        if hca not in hidden and hca not in without:
            devices.append(_placed(_hca(hca), topology))
    return Picture(
        devices=tuple(devices),
        distances=tuple(
            tuple(topology.distance(a.address, b.address).name for b in devices) for a in devices
        ),
        not_shown=tuple(one.id for one in hidden),
        without_place=tuple(one.id for one in without),
    )


def printed(distance: str) -> str:
    """A class as the matrix has it: nvidia-smi writes X for SAME."""
    return "X" if distance == "SAME" else distance


def _hca(hca: HCA) -> TopologyDevice:
    return TopologyDevice(
        label=rdma_label(hca),
        kind="hca",
        address=hca.address,
        netdevs=hca.netdevs,
        numa=hca.numa,
        working=hca.working or not hca.rdma,
    )


def _placed(device: TopologyDevice, topology: Topology) -> TopologyDevice:
    location = topology.location(device.address)
    if location is None:
        return device
    return msgspec.structs.replace(
        device,
        numa=location.numa if location.numa is not None else device.numa,
        bridge=location.bridge,
        switches=tuple(port for port in location.ports[1:-1:2] if port not in location.flat),
    )


def _draw(drawn: Picture, target: str) -> int:
    from cli import topo_svg

    text = topo_svg.drawing(drawn)
    if target == "-":
        sys.stdout.write(text)
        return 0
    try:
        Path(target).write_text(text)
    except OSError as error:
        sys.stderr.write(f"podfabric topo: {target}: cannot be written: {error.strerror}\n")
        return 1
    return 0


def _document(drawn: Picture) -> object:
    labels = [device.label for device in drawn.devices]
    rows = zip(labels, drawn.distances, strict=True)
    return {
        "devices": drawn.devices,
        "distances": {label: dict(zip(labels, row, strict=True)) for label, row in rows},
        "not_shown": drawn.not_shown,
        "without_place": drawn.without_place,
    }


def _matrix(drawn: Picture) -> Table:
    headers = ("", "ADDRESS", "NETDEVS", "NUMA", *(device.label for device in drawn.devices))
    rows: list[tuple[str | Cell, ...]] = []
    for device, distances in zip(drawn.devices, drawn.distances, strict=True):
        cells = (Cell(printed(one), _STYLES.get(one, "dim")) for one in distances)
        names = ",".join(device.netdevs)
        rows.append((device.label, device.address, names, numa_text(device.numa), *cells))
    return Table(headers, rows)


def _near(drawn: Picture) -> str:
    """For each GPU the HCAs within reach of GPUDirect RDMA."""
    lines = []
    hcas = [index for index, device in enumerate(drawn.devices) if device.kind == "hca"]
    for device, row in zip(drawn.devices, drawn.distances, strict=True):
        if device.kind == "gpu" and hcas:
            near = [drawn.devices[at].label for at in hcas if Distance[row[at]] <= Distance.PXB]
            lines.append(f"  {device.label:<6} {', '.join(near) or 'none'}")
    if not lines:
        return ""
    return "\n".join(("HCAs within reach of GPUDirect RDMA (PXB or nearer):", *lines))


def _notes(drawn: Picture) -> str:
    notes = []
    if drawn.not_shown:
        count = len(drawn.not_shown)
        which = "1 VF or SF is where its PF is" if count == 1 else f"{count} VFs or SFs are where"
        notes.append(f"{which}{'' if count == 1 else ' their PFs are'} (--all shows them)")
    if drawn.without_place:
        notes.append(f"on no PCI function, so nowhere: {', '.join(drawn.without_place)}")
    return "\n".join(notes)


def _nothing(paths: Paths) -> str:
    return (
        f"no GPU and no HCA was found below {paths.sys} and {paths.proc}: is the HCA in "
        "`lspci`, and its driver loaded (mlx5_ib, `ls /sys/class/infiniband`)? For GPUs, is there "
        "/proc/driver/nvidia/gpus, which the NVIDIA driver makes?"
    )
