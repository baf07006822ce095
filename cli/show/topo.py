"""`podfabric topo`: prints the distances between GPUs and HCAs."""

import argparse
import os
from typing import Literal

import msgspec

from base.paths import Paths
from cli import output
from cli.output import Cell, Lines, Table
from host.sysfs.topology import Distance
from node.state import ThisNode, gpu_label, numa_text, rdma_label

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


class TopologyDevice(msgspec.Struct, frozen=True, kw_only=True):
    label: str  # "GPU0", "mlx5_0"
    kind: Literal["gpu", "hca"]
    address: str
    netdevs: tuple[str, ...] = ()
    numa: int | None = None
    uuid: str = ""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """The devices, GPUs first. `distances[a][b]` is the distance between the labels a and b."""

    devices: tuple[TopologyDevice, ...]
    distances: dict[str, dict[str, str]]
    not_shown: tuple[str, ...] = ()  # VFs and SFs, at their PFs' positions
    without_place: tuple[str, ...] = ()  # devices without a PCI function


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output.add_option(parser)
    parser.add_argument(
        "--all", action="store_true", help="list also VFs and SFs, next to their PFs"
    )
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    node = ThisNode(Paths.from_environ(os.environ))
    drawn = picture(node, everything=arguments.all)
    if arguments.output != "table":
        output.document(drawn)
    elif drawn.devices:
        output.show(_matrix(drawn), _near(drawn), _LEGEND_TEXT, _notes(drawn))
    else:
        nothing = (
            f"no GPU and no HCA was found below {node.paths.sys} and {node.paths.proc}: does "
            "`lspci` show the HCA, and is its driver loaded (mlx5_ib, `ls /sys/class/infiniband`)? "
            "For GPUs, does /proc/driver/nvidia/gpus exist, which the NVIDIA driver creates?"
        )
        output.show(_notes(drawn) or nothing)
    return 0


def _matrix(drawn: Picture) -> Table:
    headers = ("", "ADDRESS", "NETDEVS", "NUMA", *(device.label for device in drawn.devices))
    rows: list[tuple[str | Cell, ...]] = []
    for device in drawn.devices:
        cells = (
            # nvidia-smi prints X for SAME.
            Cell("X" if distance == "SAME" else distance, _STYLES.get(distance, "dim"))
            for distance in drawn.distances[device.label].values()
        )
        names = ",".join(device.netdevs)
        rows.append((device.label, device.address, names, numa_text(device.numa), *cells))
    return Table(headers, rows)


def _near(drawn: Picture) -> Lines:
    gpus = [device.label for device in drawn.devices if device.kind == "gpu"]
    hcas = [device.label for device in drawn.devices if device.kind == "hca"]
    if not gpus or not hcas:
        return ""
    lines = []
    for gpu in gpus:
        near = [hca for hca in hcas if Distance[drawn.distances[gpu][hca]] <= Distance.PXB]
        lines.append(f"  {gpu:<6} {', '.join(near) or 'none'}")
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


def picture(node: ThisNode, *, everything: bool = False) -> Picture:
    topology = node.topology
    devices = []
    for gpu in node.gpus:
        label = gpu_label(node.gpus, gpu.address)
        devices.append(
            TopologyDevice(
                label=label, kind="gpu", address=gpu.address, uuid=gpu.uuid, numa=gpu.numa
            )
        )
    hcas = [hca for hca in node.hcas if hca.rdma_names]
    pfs = {hca.address for hca in hcas if hca.address}
    hidden = [] if everything else [hca for hca in hcas if hca.pf in pfs]
    without = [hca for hca in hcas if not hca.address]
    for hca in hcas:
        if hca not in hidden and hca not in without:
            label, numa = rdma_label(hca), hca.numa
            devices.append(
                TopologyDevice(
                    label=label, kind="hca", address=hca.address, netdevs=hca.netdevs, numa=numa
                )
            )
    return Picture(
        devices=tuple(devices),
        distances={
            a.label: {b.label: topology.distance(a.address, b.address).name for b in devices}
            for a in devices
        },
        not_shown=tuple(hca.id for hca in hidden),
        without_place=tuple(hca.id for hca in without),
    )
