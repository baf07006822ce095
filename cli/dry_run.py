"""What GetPreferredAllocation would answer now, and why."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from cli.this_node import ThisNode, gpu_label, rdma_label
from deviceplugin.allocate.preferred import preferred
from deviceplugin.checkpoint import CheckpointDamaged
from deviceplugin.pools.config import ConfigError
from deviceplugin.pools.pool import Pool
from host import pci
from host.discovery import HCA
from host.errors import HostError
from host.gpus import address_of
from host.topology import Distance

_TOLD = 4  # reasons why ids are not well


class Impossible(Exception):
    """There is no answer. The text says why and what to do."""


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """A device id; of the HCA behind it where it is, and how far from which GPU."""

    id: str
    hca: str  # "" in mode "all", where an id is of every HCA
    rdma: str
    numa: int | None
    switch: str
    held: int  # allocations of the HCA before
    gpu: str  # the nearest one of those that were named
    distance: str
    why: str


class PreferredIds(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and how many ids there were to choose from."""

    resource: str
    mode: str
    available: int
    held: int
    unhealthy: int
    gpus: tuple[str, ...]
    chosen: tuple[Chosen, ...]
    rule: str
    notes: tuple[str, ...]


def choose(node: ThisNode, resource: str, size: int, gpus: Sequence[str]) -> PreferredIds:
    """The choice of `size` ids for a container with these GPUs. Raises Impossible."""
    try:
        pool = next((one for one in node.pools if one.config.resource == resource), None)
        allocations, topology = node.allocations, node.topology
    except (ConfigError, CheckpointDamaged, HostError) as error:
        raise Impossible(str(error)) from None
    if pool is None:
        known = ", ".join(one.config.resource for one in node.pools) or "none"
        raise Impossible(f"there is no pool {resource}; {node.config_file} gives: {known}")
    near = [_gpu(node, text) for text in gpus]
    taken = {one.id for one in allocations if one.resource == resource}
    unfit = node.unfit[resource]
    free = [slot.id for slot in pool.slots if slot.id not in taken and slot.id not in unfit]
    loads = node.loads()
    notes = [] if len(free) >= size else [f"{size} ids were asked for, {len(free)} are free"]
    notes += _not_well(unfit)
    chosen = []
    for known in preferred(pool, free, (), size, loads, near, topology):
        hca = pool.hca(_hca_of(pool, known))
        address = (hca.address or hca.id) if hca is not None else ""
        nearest = min(near, key=lambda gpu: topology.distance(address, gpu)) if near else ""
        distance = topology.distance(address, nearest) if near and address else None
        chosen.append(
            Chosen(
                id=known,
                hca=hca.id if hca else "",
                rdma=rdma_label(hca) if hca else "",
                numa=hca.numa if hca else None,
                switch=topology.switch(address),
                held=loads[hca.id] if hca else 0,
                gpu=gpu_label(node.gpus, nearest) if distance is not None else "",
                distance=distance.name if distance is not None else "",
                why=_why(pool, distance, loads[hca.id] if hca else 0),
            )
        )
    notes += _out_of_reach(node, near, [pool.hca(one.hca) for one in chosen])
    return PreferredIds(
        resource=resource,
        mode=pool.config.mode,
        available=len(free),
        held=len(taken),
        unhealthy=len(unfit),
        gpus=tuple(near),
        chosen=tuple(chosen),
        rule=_rule(pool, near),
        notes=tuple(notes),
    )


def _not_well(unfit: Mapping[str, str]) -> list[str]:
    reasons = Counter(unfit.values()).most_common()
    told = [f"not well: {why} ({count} ids)" for why, count in reasons[:_TOLD]]
    more = len(reasons) - _TOLD
    return [*told, f"{more} more reasons: `podfabric devices`"] if more > 0 else told


def _gpu(node: ThisNode, text: str) -> str:
    """The address of a GPU as somebody may call it. Raises Impossible."""
    for gpu in node.gpus:
        if gpu_label(node.gpus, gpu.address).lower() == text.lower():
            return gpu.address
    address = pci.canonical(text) or address_of(node.gpus, text)
    if any(gpu.address == address for gpu in node.gpus):
        return address
    known = ", ".join(f"{gpu_label(node.gpus, one.address)} {one.address}" for one in node.gpus)
    raise Impossible(f"{text} is no GPU of this node: {known or 'it has none'}")


def _hca_of(pool: Pool, known: str) -> str:
    slot = pool.slot(known)
    return slot.hcas[0] if slot is not None and pool.config.mode != "all" else ""


def _why(pool: Pool, distance: Distance | None, held: int) -> str:
    if pool.config.mode == "all":
        return "each id is of every HCA"
    loaded = {0: "nobody holds it", 1: "1 holder before"}.get(held, f"{held} holders before")
    if distance is None:
        return loaded
    reach = "GPUDirect RDMA works" if distance <= Distance.PXB else "no GPUDirect RDMA"
    return f"{reach}; {loaded}"


def _rule(pool: Pool, near: Sequence[str]) -> str:
    if pool.config.mode == "all":
        return "mode all: ids are alike, the lowest are taken"
    if pool.config.mode == "shared" and pool.config.placement == "pack":
        return "placement pack: as few HCAs as can be, the most loaded of them first"
    if near:
        return "one HCA for each GPU, at the least sum of distances; then the least loaded"
    return (
        "no GPU is named: every HCA once before any twice, the least loaded first, over the "
        "switches in turn"
    )


def _out_of_reach(node: ThisNode, near: Sequence[str], hcas: Sequence[HCA | None]) -> list[str]:
    there = [one for one in hcas if one is not None]
    notes = []
    for gpu in near:
        ways = [node.topology.distance(gpu, one.address) for one in there]
        if ways and min(ways) > Distance.PXB:
            notes.append(
                f"GPUDirect RDMA would not work for {gpu_label(node.gpus, gpu)} ({gpu}): the "
                f"nearest of these HCAs is at {min(ways).name}"
            )
    return notes
