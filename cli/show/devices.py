"""`podfabric devices`: lists HCAs and GPUs, each with its pools or why it has none."""

import argparse
import os
import sys

from base.paths import Paths
from cli import output
from cli.arguments import file
from cli.output import Cell, Lines, Table
from cli.show import gpu_tables
from deviceplugin.checkpoint import CheckpointDamaged
from deviceplugin.pools.pool_config import ConfigError
from node import node_gpus, node_hcas
from node.node_gpus import NodeGPUs
from node.node_hcas import ListedHCA, Offered
from node.state import ThisNode, numa_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output.add_option(parser)
    parser.add_argument(
        "--gpus",
        action="store_true",
        help="list only GPUs; without this option, json has only HCAs",
    )
    parser.add_argument(
        "--config",
        type=file,
        metavar="FILE",
        help="use the pools of this file (default: config.yaml)",
    )
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    node = ThisNode(Paths.from_environ(os.environ), arguments.config)
    only_gpus, is_text = arguments.gpus, arguments.output == "table"
    try:
        hcas = [] if only_gpus else node_hcas.listed(node)
        gpus = node_gpus.listed(node) if only_gpus or is_text else NodeGPUs()
    except (ConfigError, CheckpointDamaged) as error:
        sys.stderr.write(f"podfabric devices: {error}\n")
        return 1
    if not is_text:
        output.document(gpus if only_gpus else hcas)
    else:
        _show(node, hcas, gpus, only_gpus=only_gpus)
    return 0


def _show(node: ThisNode, hcas: list[ListedHCA], gpus: NodeGPUs, *, only_gpus: bool) -> None:
    parts: list[Table | Lines] = []
    if hcas:
        parts = [_offered(hcas), _held(hcas), _unfit(hcas), _others(hcas)]
        parts.append(_problems(node, hcas, gpus))
    elif not only_gpus:
        parts = [
            f"no HCA was found below {node.paths.sys}: does `lspci` show it, and is this the "
            "host's /sys?"
        ]
    if node.config.gpus or gpus.unbound or any(gpu.held for gpu in gpus.gpus):
        parts += [gpu_tables.offered(gpus.gpus), gpu_tables.held(gpus.gpus, gpus.unbound)]
        parts += [gpu_tables.not_well(gpus.gpus), gpu_tables.problems(gpus)]
    elif only_gpus:
        parts = [gpu_tables.not_well(gpus.gpus) or f"no GPU was found below {node.paths.proc}"]
    output.show(*parts)


def _offered(hcas: list[ListedHCA]) -> Table | str:
    rows = [_row(device) for device in hcas if device.offered]
    headers = (
        "HCA", "RDMA", "UVERBS", "NETDEVS", "DRIVER", "NUMA", "LINK", "STATE", "RATE",
        "HEALTH", "POOL", "IDS", "HELD",
    )  # fmt: skip
    return Table(headers, rows) or "no pool offers any HCA"


def _row(device: ListedHCA) -> tuple[Lines | Cell, ...]:
    return (
        *_hardware(device),
        Cell(
            [_health(offer) for offer in device.offered],
            "red" if any(offer.unfit for offer in device.offered) else "green",
        ),
        [offer.resource for offer in device.offered],
        [str(offer.ids) for offer in device.offered],
        [str(offer.held) for offer in device.offered],
    )


def _held(hcas: list[ListedHCA]) -> Table:
    rows = [
        (
            device.hca.id,
            holder.container.pod or "not known",
            holder.container.name,
            holder.resource,
            str(holder.ids),
        )
        for device in hcas
        for holder in device.held
    ]
    return Table(("HCA", "HELD BY", "CONTAINER", "RESOURCE", "IDS"), rows)


def _health(offer: Offered) -> str:
    unfit = sum(offer.unfit.values())
    if not unfit:
        return "healthy"
    return "unhealthy" if unfit == offer.ids else f"{unfit} of {offer.ids} unhealthy"


def _unfit(hcas: list[ListedHCA]) -> Table:
    rows = [
        (device.hca.id, offer.resource, str(ids), why)
        for device in hcas
        for offer in device.offered
        for why, ids in offer.unfit.items()
    ]
    return Table(("UNHEALTHY", "POOL", "IDS", "WHY"), rows, folded=True)


def _hardware(listed: ListedHCA) -> tuple[Lines, ...]:
    hca = listed.hca
    ports = [port for rdma in hca.rdma for port in rdma.ports]
    several = len(ports) > 1
    elsewhere = not hca.rdma and hca.rdma_names
    return (
        hca.id,
        _rdma(listed),
        [
            f"{rdma.uverbs.name} {rdma.uverbs.major}:{rdma.uverbs.minor}"
            for rdma in hca.rdma
            if rdma.uverbs is not None
        ],
        ",".join(hca.netdevs),
        hca.driver,
        numa_text(hca.numa),
        list(dict.fromkeys(port.link_layer for port in ports)) or ",".join(hca.link_types),
        _place(listed)
        if elsewhere
        else [
            f"{f'{port.number}: ' if several else ''}{port.state or '?'}"
            + (f" ({port.physical_state})" if port.state != "ACTIVE" else "")
            for port in ports
        ],
        list(dict.fromkeys(port.rate for port in ports)),
    )


def _rdma(listed: ListedHCA) -> Lines:
    visible = [rdma.name for rdma in listed.hca.rdma]
    return visible or [f"{name} ({_place(listed)})" for name in listed.hca.rdma_names]


def _place(listed: ListedHCA) -> str:
    """The place of an HCA, if its RDMA device is not visible."""
    return "in a pod" if listed.present else "gone"


def _others(hcas: list[ListedHCA]) -> Table:
    rows = []
    for device in hcas:
        if device.offered:
            continue
        reasons: dict[str, list[str]] = {}
        for refusal in device.not_offered:
            reasons.setdefault(refusal.why, []).append(refusal.resource)
        several = len(device.not_offered) > 1
        lines = [
            f"{', '.join(resources)}: {why}" if several else why
            for why, resources in reasons.items()
        ]
        hca = device.hca
        rows.append((hca.id, _rdma(device), ",".join(hca.netdevs), hca.driver, lines))
    return Table(("NOT OFFERED", "RDMA", "NETDEVS", "DRIVER", "WHY"), rows, folded=True)


def _problems(node: ThisNode, hcas: list[ListedHCA], gpus: NodeGPUs) -> Lines:
    problems = [pool.problem for pool in node.pools if pool.problem]
    if any(device.held for device in hcas):
        problems += [text for text in node.holders.problems if text not in gpus.notes]
    return [f"* {problem}" for problem in problems]
