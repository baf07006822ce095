"""What GetPreferredAllocation would answer now: `podfabric explain --dry-run`."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from cli import node_gpus
from cli.this_node import ThisNode, gpu_label, rdma_label
from deviceplugin.allocate.preferred import preferred
from deviceplugin.checkpoint import CheckpointDamaged
from deviceplugin.pools.config import ConfigError
from deviceplugin.pools.pool import Pool
from host import pci
from host.errors import HostError
from host.gpus import address_of

_SHOWN = 4  # reasons why ids are unhealthy


class Impossible(Exception):
    """The question has no answer. The text says why and what to do."""


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """A device id, where its HCA is, and how far that is from the nearest GPU."""

    id: str
    hca: str  # "" in mode "all", where an id stands for every HCA
    rdma: str
    held: int  # allocations that the HCA has already
    near: tuple[str, ...]  # the nearest of the GPUs in question; several that are as near
    distance: str


class PreferredIds(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and how many ids there were to choose from."""

    resource: str
    available: int
    held: int
    unhealthy: int
    gpus: tuple[str, ...]
    chosen: tuple[Chosen, ...]
    notes: tuple[str, ...]


def choose(node: ThisNode, resource: str, size: int, gpus: Sequence[str]) -> PreferredIds:
    """The choice of `size` ids for a container with these GPUs. Raises Impossible."""
    try:
        pool = next((pool for pool in node.pools if pool.config.resource == resource), None)
        allocations, topology = node.allocations, node.topology
    except (ConfigError, CheckpointDamaged, HostError) as error:
        raise Impossible(str(error)) from None
    if any(resource in config.resources for config in node.config.gpus):
        raise Impossible(_of_gpus(node, resource))
    if pool is None:
        names = ", ".join(pool.config.resource for pool in node.pools) or "none"
        raise Impossible(f"no pool {resource}: the pools of {node.config_file} are {names}")
    near = [_gpu(node, text) for text in gpus]
    taken = {allocation.id for allocation in allocations if allocation.resource == resource}
    unfit = node.unfit[resource]
    free = [slot.id for slot in pool.slots if slot.id not in taken and slot.id not in unfit]
    loads = Counter(device.id for entry in allocations for device in entry.devices)
    notes = [] if len(free) >= size else [f"{size} ids were asked for, {len(free)} are free"]
    notes += _unhealthy(unfit)
    chosen = []
    for device_id in preferred(pool, free, (), size, loads, near, topology):
        hca = pool.hca(_hca_of(pool, device_id))
        address = (hca.address or hca.id) if hca is not None else ""
        ways = {gpu: topology.distance(address, gpu) for gpu in near} if address else {}
        distance = min(ways.values(), default=None)
        chosen.append(
            Chosen(
                id=device_id,
                hca=hca.id if hca else "",
                rdma=rdma_label(hca) if hca else "",
                held=loads[hca.id] if hca else 0,
                near=tuple(gpu_label(node.gpus, gpu) for gpu in ways if ways[gpu] == distance),
                distance=distance.name if distance is not None else "",
            )
        )
    return PreferredIds(
        resource=resource,
        available=len(free),
        held=len(taken),
        unhealthy=len(unfit),
        gpus=tuple(near),
        chosen=tuple(chosen),
        notes=tuple(notes),
    )


def _unhealthy(unfit: Mapping[str, str]) -> list[str]:
    reasons = Counter(unfit.values()).most_common()
    shown = [f"unhealthy: {why} ({count} ids)" for why, count in reasons[:_SHOWN]]
    more = len(reasons) - _SHOWN
    return [*shown, f"{more} more reasons: see `podfabric devices`"] if more > 0 else shown


def _gpu(node: ThisNode, text: str) -> str:
    """The PCI address of a GPU from its address, UUID or label. Raises Impossible."""
    for gpu in node.gpus:
        if gpu_label(node.gpus, gpu.address).lower() == text.lower():
            return gpu.address
    address = pci.canonical(text) or address_of(node.gpus, text)
    if any(gpu.address == address for gpu in node.gpus):
        return address
    gpus = ", ".join(f"{gpu_label(node.gpus, gpu.address)} {gpu.address}" for gpu in node.gpus)
    raise Impossible(f"{text} is not a GPU of this node: its GPUs are {gpus or 'none'}")


def _of_gpus(node: ThisNode, resource: str) -> str:
    """What can be said of a resource of GPUs, whose ids are tokens."""
    of = [gpu for gpu in node_gpus.listed(node).gpus if gpu.fault and not gpu.not_offered]
    faults = "".join(f"; {gpu.label} is not given: {gpu.fault}" for gpu in of)
    return (
        f"{resource} is of GPUs, and which one a container gets is decided when it is there: "
        f"`podfabric devices --pool {resource}` shows what is free{faults}"
    )


def _hca_of(pool: Pool, device_id: str) -> str:
    slot = pool.slot(device_id)
    return slot.hcas[0] if slot is not None and pool.config.mode != "all" else ""
