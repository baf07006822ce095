"""Makes tables of GPUs and of the containers that hold GPUs, for `devices` and `explain`."""

from collections.abc import Sequence

from cli.output import Cell, Lines, Table
from host.sysfs.topology import Distance
from node.node_gpus import GpuPart, ListedGPU, NodeGPUs, bytes_text
from node.state import numa_text


def offered(gpus: Sequence[ListedGPU]) -> Table:
    rows = [_row(gpu) for gpu in gpus if gpu.offered]
    headers = (
        "GPU", "ADDRESS", "NODE", "NUMA", "HEALTH", "RESOURCE", "IDS", "HELD", "FREE", "NEAREST",
    )  # fmt: skip
    return Table(headers, rows)


def held(gpus: Sequence[ListedGPU], unbound: Sequence[GpuPart] = ()) -> Table:
    rows = [_part(gpu.label, part) for gpu in gpus for part in gpu.held]
    rows += [_part("at the start", part) for part in unbound]
    headers = (
        "GPU", "HELD BY", "CONTAINER", "RESOURCE", "IDS", "LIMIT", "USED", "PEAK", "TIME",
    )  # fmt: skip
    return Table(headers, rows)


def not_well(gpus: Sequence[ListedGPU]) -> Table:
    rows = [
        (gpu.label, gpu.address, why)
        for gpu in gpus
        for why in (gpu.fault if gpu.offered or gpu.held else "", gpu.not_offered)
        if why
    ]
    return Table(("GPU", "ADDRESS", "WHY"), rows, folded=True)


def problems(found: NodeGPUs) -> Lines:
    of = [part for gpu in found.gpus for part in gpu.held]
    lines = [*found.notes, *(part.problem for part in (*of, *found.unbound) if part.problem)]
    return [f"* {line}" for line in dict.fromkeys(lines)]


def parts(found: Sequence[GpuPart], labels: Sequence[tuple[str, str]]) -> Table:
    """`found` has the parts of GPUs that one pod holds.

    `labels` has the address and the label of each GPU.
    """
    of = dict(labels)
    rows = []
    for part in found:
        _, _, *rest = _part("", part)
        label = of.get(part.gpu, part.gpu) or "at the start"
        rows.append((rest[0], label, *rest[1:]))
    headers = ("CONTAINER", "GPU", "RESOURCE", "IDS", "LIMIT", "USED", "PEAK", "TIME")
    return Table(headers, rows)


def _row(gpu: ListedGPU) -> tuple[Lines | Cell, ...]:
    free = ""
    if gpu.free_bytes is not None and gpu.free_share is not None:
        free = f"{bytes_text(gpu.free_bytes)}, {gpu.free_share:.0%}"
    return (
        gpu.label,
        gpu.address,
        "" if gpu.minor is None else f"nvidia{gpu.minor}",
        numa_text(gpu.numa),
        Cell("unhealthy", "red") if gpu.fault else Cell("healthy", "green"),
        [offer.resource for offer in gpu.offered],
        [str(offer.ids) for offer in gpu.offered],
        [str(offer.held) for offer in gpu.offered],
        free,
        _nearest(gpu),
    )


def _nearest(gpu: ListedGPU) -> str:
    """The nearest HCAs, such as "mlx5_0, mlx5_1 (PIX)"."""
    if not gpu.distances:
        return ""
    least = min(Distance[name] for name in gpu.distances.values())
    labels = [label for label, name in gpu.distances.items() if name == least.name]
    return f"{', '.join(labels)} ({least.name})"


def _part(label: str, part: GpuPart) -> tuple[Lines | Cell, ...]:
    use = part.use
    return (
        label,
        part.container.pod or "not known",
        part.container.name,
        part.resources,
        str(len(part.ids)),
        bytes_text(part.memory_bytes) if part.memory_bytes else "all",
        bytes_text(use.used_bytes) if use is not None else "",
        bytes_text(use.peak_bytes) if use is not None else "",
        f"{part.compute_share or 1.0:.0%}",
    )
