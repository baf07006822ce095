"""`podfabric topo`: how far GPUs and HCAs are from each other, and who holds parts of the GPUs."""

import argparse
import os
import sys
from pathlib import Path

from base.paths import Paths
from cli import gpu_tables, node_gpus, output, topo_svg
from cli.arguments import file_name
from cli.node_gpus import NodeGPUs
from cli.output import Cell, Lines, Table
from cli.this_node import ThisNode, numa_text
from cli.topo_picture import Picture, picture
from deviceplugin.checkpoint import CheckpointDamaged
from deviceplugin.pools.config import ConfigError
from host.errors import HostError
from host.topology import Distance

_LEGEND = (
    (Distance.SAME, "the device itself, or another function of its card"),
    (Distance.PIX, "at most one PCIe switch between them"),
    (Distance.PXB, "several PCIe switches, but not the host bridge"),
    (Distance.PHB, "one PCIe host bridge (the CPU)"),
    (Distance.NODE, "several host bridges of one NUMA node"),
    (Distance.SYS, "different NUMA nodes, or unknown"),
)
_LEGEND_TEXT = [
    f"  {'X' if distance is Distance.SAME else distance.name:<4}  {text}"
    for distance, text in _LEGEND
]
_STYLES = {"PIX": "green", "PXB": "green", "PHB": "yellow", "NODE": "yellow", "SYS": "red"}


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
    """Print the matrix or draw it; the exit code."""
    node = ThisNode(Paths.from_environ(os.environ))
    try:
        drawn = picture(node, everything=arguments.all)
    except HostError as error:
        sys.stderr.write(f"podfabric topo: {error}\n")
        return 1
    if arguments.svg:
        return _draw(drawn, _gpus(node), arguments.svg)
    gpus = _gpus(node)
    if arguments.output != "table":
        output.document(_document(drawn, gpus), arguments.output)
    elif drawn.devices:
        held = gpu_tables.held(gpus.gpus, gpus.unbound), gpu_tables.problems(gpus)
        output.show(_matrix(drawn), _near(drawn), _LEGEND_TEXT, _notes(drawn), *held)
    else:
        output.show(_notes(drawn) or _nothing(node.paths))
    return 0


def _gpus(node: ThisNode) -> NodeGPUs:
    """Who holds what of the GPUs. Distances do without the records that say it."""
    try:
        return node_gpus.listed(node)
    except (ConfigError, CheckpointDamaged) as error:
        return NodeGPUs(notes=(f"who holds what is not known: {error}",))


def printed(distance: str) -> str:
    """A distance as in the matrix: nvidia-smi writes X for SAME."""
    return "X" if distance == "SAME" else distance


def _draw(drawn: Picture, gpus: NodeGPUs, target: str) -> int:
    text = topo_svg.drawing(drawn, gpus)
    if target == "-":
        sys.stdout.write(text)
        return 0
    try:
        Path(target).write_text(text)
    except OSError as error:
        sys.stderr.write(f"podfabric topo: {target}: cannot be written: {error.strerror}\n")
        return 1
    return 0


def _document(drawn: Picture, gpus: NodeGPUs) -> object:
    labels = [device.label for device in drawn.devices]
    rows = zip(labels, drawn.distances, strict=True)
    return {
        "devices": drawn.devices,
        "distances": {label: dict(zip(labels, row, strict=True)) for label, row in rows},
        "not_shown": drawn.not_shown,
        "without_place": drawn.without_place,
        "gpus": gpus.gpus,
        "unbound": gpus.unbound,
        "notes": gpus.notes,
    }


def _matrix(drawn: Picture) -> Table:
    headers = ("", "ADDRESS", "NETDEVS", "NUMA", *(device.label for device in drawn.devices))
    rows: list[tuple[str | Cell, ...]] = []
    for device, distances in zip(drawn.devices, drawn.distances, strict=True):
        cells = (Cell(printed(distance), _STYLES.get(distance, "dim")) for distance in distances)
        names = ",".join(device.netdevs)
        rows.append((device.label, device.address, names, numa_text(device.numa), *cells))
    return Table(headers, rows)


def _near(drawn: Picture) -> Lines:
    """For each GPU the HCAs within reach of GPUDirect RDMA."""
    lines = []
    hcas = [index for index, device in enumerate(drawn.devices) if device.kind == "hca"]
    for device, row in zip(drawn.devices, drawn.distances, strict=True):
        if device.kind == "gpu" and hcas:
            near = [drawn.devices[at].label for at in hcas if Distance[row[at]] <= Distance.PXB]
            lines.append(f"  {device.label:<6} {', '.join(near) or 'none'}")
    if not lines:
        return ""
    return ("HCAs within reach of GPUDirect RDMA (PXB or nearer):", *lines)


def _notes(drawn: Picture) -> Lines:
    notes = []
    if drawn.not_shown:
        count = len(drawn.not_shown)
        notes.append(f"{count} VFs or SFs are not shown, each at its PF's position (--all)")
    if drawn.without_place:
        notes.append(
            f"without a PCI function, so without a position: {', '.join(drawn.without_place)}"
        )
    return notes


def _nothing(paths: Paths) -> str:
    return (
        f"no GPU and no HCA was found below {paths.sys} and {paths.proc}: does `lspci` show the "
        "HCA, and is its driver loaded (mlx5_ib, `ls /sys/class/infiniband`)? For GPUs, does "
        "/proc/driver/nvidia/gpus exist, which the NVIDIA driver creates?"
    )
