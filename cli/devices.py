"""`podfabric devices`: every HCA of the node, which pools offer it, and why others do not."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Mapping

import msgspec

from base.paths import Paths
from cli import output
from cli.arguments import file
from cli.output import Cell, Table
from cli.this_node import ThisNode, numa_text
from deviceplugin import availability
from deviceplugin.checkpoint import CheckpointDamaged
from deviceplugin.pools.config import ConfigError
from deviceplugin.pools.pool import Pool
from host.discovery import HCA


class Offered(msgspec.Struct, frozen=True):
    """What a pool makes of an HCA."""

    resource: str
    ids: int  # device ids that its holders get this HCA by
    held: int  # of these, by the checkpoint
    unfit: dict[str, int]  # of these, those that may not be handed out, by the reason


class NotOffered(msgspec.Struct, frozen=True):
    """That a pool does not take an HCA."""

    resource: str
    why: str


class ListedHCA(msgspec.Struct, frozen=True, kw_only=True):
    """An HCA with what the pools make of it."""

    hca: HCA
    present: bool  # false of one that a container holds and that is gone
    fault: str  # "" of one that is well, as far as the pools that offer it need that
    offered: tuple[Offered, ...]
    not_offered: tuple[NotOffered, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    output.add_option(parser)
    parser.add_argument("--pool", metavar="RESOURCE", help='only this pool: "rdma/hca"')
    parser.add_argument(
        "--config", type=file, metavar="FILE", help="pools of this file (default: config.yaml)"
    )
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what `arguments` ask for; the exit code."""
    node = ThisNode(Paths.from_environ(os.environ), arguments.config)
    try:
        found = devices(node)
    except (ConfigError, CheckpointDamaged) as error:
        sys.stderr.write(f"podfabric devices: {error}\n")
        return 1
    resources = [pool.config.resource for pool in node.pools]
    if arguments.pool is not None and arguments.pool not in resources:
        known = ", ".join(resources) or "none"
        sys.stderr.write(f"podfabric devices: there is no pool {arguments.pool}: {known}\n")
        return 1
    if arguments.pool is not None:
        found = [_narrowed(one, arguments.pool) for one in found]
    if arguments.output != "table":
        output.document(found, arguments.output)
    elif found:
        output.show(_offered(found), _unfit(found), _others(found), _problems(node))
    else:
        output.show(
            f"no HCA was found below {node.paths.sys}: is it in `lspci`, and this the host's /sys?"
        )
    return 0


def devices(node: ThisNode) -> list[ListedHCA]:
    """Every HCA by id, and those that are gone and held. Raises ConfigError, Damaged."""
    held = Counter((one.resource, device.id) for one in node.allocations for device in one.devices)
    offered: dict[str, list[Offered]] = {}
    faults = dict(node.reports)
    for pool in node.pools:
        resource = pool.config.resource
        ids = Counter(known for slot in pool.slots for known in slot.hcas)
        of_pool = {one.id: availability.fault(pool, one, node.reports) for one in pool.hcas}
        unfit = _reasons(pool, of_pool, node.unfit[resource])
        for hca in pool.hcas:
            known = hca.id
            has = Offered(resource, ids[known], held[resource, known], unfit.get(known, {}))
            faults[known] = of_pool[known] or (faults[known] if known in offered else None)
            offered.setdefault(known, []).append(has)
    left: dict[str, list[NotOffered]] = {}
    for one in node.left_out:
        left.setdefault(one.hca, []).append(NotOffered(one.resource, one.why))
    gone = {hca.id for hca in node.gone}
    return [
        ListedHCA(
            hca=hca,
            present=hca.id not in gone,
            fault=faults[hca.id] or "",
            offered=tuple(offered.get(hca.id, ())),
            not_offered=tuple(left.get(hca.id, ())),
        )
        for hca in sorted([*node.hcas, *node.gone], key=lambda hca: hca.id)
    ]


def _reasons(
    pool: Pool, faults: Mapping[str, str | None], unfit: Mapping[str, str]
) -> dict[str, dict[str, int]]:
    """By HCA, how many of its ids cannot be handed out, or not with it, for which reason."""
    found: dict[str, dict[str, int]] = {}
    for slot in pool.slots:
        for known in slot.hcas:
            if why := faults[known] or unfit.get(slot.id, ""):
                reasons = found.setdefault(known, {})
                reasons[why] = reasons.get(why, 0) + 1
    return found


def _narrowed(device: ListedHCA, resource: str) -> ListedHCA:
    return msgspec.structs.replace(
        device,
        offered=tuple(one for one in device.offered if one.resource == resource),
        not_offered=tuple(one for one in device.not_offered if one.resource == resource),
    )


def _offered(found: list[ListedHCA]) -> Table | str:
    rows = [_row(device) for device in found if device.offered]
    if not rows:
        return "no pool offers any HCA"
    headers = (
        "ADAPTER", "RDMA", "UVERBS", "NETDEVS", "DRIVER", "NUMA", "LINK", "STATE", "RATE",
        "HEALTH", "POOL", "IDS", "HELD",
    )  # fmt: skip
    return Table(headers, rows)


def _row(device: ListedHCA) -> tuple[str | Cell, ...]:
    hca = device.hca
    return (
        *_hardware(hca),
        Cell(
            "\n".join(_health(one) for one in device.offered),
            "red" if any(one.unfit for one in device.offered) else "green",
        ),
        "\n".join(one.resource for one in device.offered),
        "\n".join(str(one.ids) for one in device.offered),
        "\n".join(str(one.held) for one in device.offered),
    )


def _health(one: Offered) -> str:
    unfit = sum(one.unfit.values())
    if not unfit:
        return "well"
    return "not well" if unfit == one.ids else f"{unfit} of {one.ids} not well"


def _unfit(found: list[ListedHCA]) -> Table | str:
    """Why ids are not handed out."""
    rows = [
        (device.hca.id, one.resource, str(ids), why)
        for device in found
        for one in device.offered
        for why, ids in one.unfit.items()
    ]
    return Table(("NOT WELL", "POOL", "IDS", "WHY"), rows, folded=True) if rows else ""


def _hardware(hca: HCA) -> tuple[str, ...]:
    ports = [port for rdma in hca.rdma for port in rdma.ports]
    several = len(ports) > 1
    elsewhere = not hca.rdma and hca.rdma_names
    return (
        hca.id,
        _rdma(hca),
        "\n".join(
            f"{one.uverbs.name} {one.uverbs.major}:{one.uverbs.minor}"
            for one in hca.rdma
            if one.uverbs is not None
        ),
        ",".join(hca.netdevs),
        hca.driver,
        numa_text(hca.numa),
        "\n".join(dict.fromkeys(port.link_layer for port in ports)) or ",".join(hca.link_types),
        "in a pod"
        if elsewhere
        else "\n".join(
            f"{f'{port.number}: ' if several else ''}{port.state or '?'}"
            + (f" ({port.physical_state})" if port.state != "ACTIVE" else "")
            for port in ports
        ),
        "\n".join(dict.fromkeys(port.rate for port in ports)),
    )


def _rdma(hca: HCA) -> str:
    visible = [one.name for one in hca.rdma]
    return "\n".join(visible or [f"{name} (in a pod)" for name in hca.rdma_names])


def _others(found: list[ListedHCA]) -> Table | str:
    """Those that no pool offers; of a node with one pool, or of one pool, its reasons alone."""
    left = [device for device in found if not device.offered]
    if not left:
        return ""
    rows = []
    for device in left:
        reasons: dict[str, list[str]] = {}
        for one in device.not_offered:
            reasons.setdefault(one.why, []).append(one.resource)
        several = len(device.not_offered) > 1
        text = "\n".join(
            f"{', '.join(resources)}: {why}" if several else why
            for why, resources in reasons.items()
        )
        hca = device.hca
        rows.append((hca.id, _rdma(hca), ",".join(hca.netdevs), hca.driver, text))
    return Table(("NOT OFFERED", "RDMA", "NETDEVS", "DRIVER", "WHY"), rows, folded=True)


def _problems(node: ThisNode) -> str:
    return "\n".join(pool.problem for pool in node.pools if pool.problem)
