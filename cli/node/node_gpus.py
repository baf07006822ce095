"""The GPUs of a node: which pools offer them, what is free, who holds what, how far HCAs are."""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from cli.node.gpu_parts import GpuPart, parts
from cli.node.state import ThisNode, gpu_label, rdma_label
from deviceplugin.checkpoint import AllocatedGPU
from deviceplugin.kubelet.extended_resources import MOST_IDS
from gpu.driver import gpu_device_files
from gpu.driver.gpu_inventory import NOT_KEPT, NodeGPU
from gpu.gpu_pool import GpuPoolConfig
from gpu.pools.placement import Share
from gpu.pools.share_pool import by_pool, given, kinds, shared_gpus
from host.sysfs.gpus import GPU

NOT_SELECTED = "no pool selects it (`devices`)"
_NO_MEMORY = (
    "how much memory it has is not known: NVIDIA's driver tells it; or write `memory` into the pool"
)


class OfferedGpuIds(msgspec.Struct, frozen=True, kw_only=True):
    """How a resource offers a GPU."""

    resource: str
    ids: int  # as many as an empty GPU has
    held: int  # ids of the resource whose holders are on this GPU
    memory_bytes: int  # of one id; 0: not limited
    compute_share: float  # of one id; 0: not limited


class ListedGPU(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of this node, or one that is gone while a container holds it."""

    label: str  # "GPU0", as nvidia-smi numbers it
    address: str
    uuid: str  # "" while the driver has not set it up
    minor: int | None  # N of /dev/nvidiaN
    numa: int | None
    present: bool
    fault: str  # why it cannot be given now, or ""
    offered: tuple[OfferedGpuIds, ...]
    not_offered: str  # why no pool offers it, or ""
    memory_bytes: int | None  # that containers can be given together; None: not known, or replicas
    free_bytes: int | None
    free_share: float | None  # of its time
    held: tuple[GpuPart, ...]
    distances: dict[str, str]  # to each HCA, by the label of topo: "PIX"


class NodeGPUs(msgspec.Struct, frozen=True, kw_only=True):
    """All of them. `notes` say which sources could not be read."""

    gpus: tuple[ListedGPU, ...] = ()
    unbound: tuple[GpuPart, ...] = ()  # held parts whose GPU is chosen at the container's start
    notes: tuple[str, ...] = ()


def listed(node: ThisNode) -> NodeGPUs:
    """The GPUs, by address.

    Raises ConfigError or CheckpointDamaged.
    """
    notes: list[str] = []
    held = parts(node, notes)
    present = {gpu.address: gpu for gpu in node.gpus}
    recorded = [entry.gpu for entry in node.allocations if entry.gpu is not None]
    gone = {gpu.bdf: _gone(gpu) for gpu in recorded if gpu.bdf and gpu.bdf not in present}
    every = sorted([*present.values(), *gone.values()], key=lambda gpu: gpu.address)
    found = [_found(node, gpu, present=gpu.address in present) for gpu in every]
    offers = _offers(node, found)
    return NodeGPUs(
        gpus=tuple(_listed(node, each, offers[each.gpu.address], held) for each in found),
        unbound=tuple(part for part in held if not part.gpu),
        notes=tuple(dict.fromkeys(notes)),
    )


class _Offer(msgspec.Struct, frozen=True):
    """The pool that has a GPU, and what it offers of it."""

    config: GpuPoolConfig | None = None
    capacity: Share | None = None  # None: of a pool of replicas, or not known
    ids: dict[str, tuple[int, Share]] = {}  # how many, and of what, by resource


def _offers(node: ThisNode, found: Sequence[NodeGPU]) -> dict[str, _Offer]:
    """By address, as the device plugin would offer them if it started now."""
    offers = {each.gpu.address: _Offer() for each in found}
    for config, mine in by_pool(node.config.gpus, found):
        if config.mode == "replicas":
            count = min(config.replicas, MOST_IDS // max(len(mine), 1))
            of = _Offer(config, None, {config.resource: (count, Share())})
            offers |= {each.gpu.address: of for each in mine}
            continue
        offers |= {each.gpu.address: _Offer(config) for each in mine}
        for address, shared in shared_gpus(config, mine).items():
            ids = {kind.resource: (len(kind.ids(shared)), kind.share) for kind in kinds(config)}
            offers[address] = _Offer(config, shared.capacity, ids)
    return offers


def _listed(node: ThisNode, each: NodeGPU, offer: _Offer, held: list[GpuPart]) -> ListedGPU:
    gpu = each.gpu
    used = given(node.allocations).get(gpu.address, Share())
    free = offer.capacity.minus(used) if offer.capacity is not None else None
    counts = Counter(
        entry.resource
        for entry in node.allocations
        if entry.gpu is not None and entry.gpu.bdf == gpu.address
    )
    return ListedGPU(
        label=gpu_label(node.gpus, gpu.address),
        address=gpu.address,
        uuid=gpu.uuid,
        minor=gpu.minor,
        numa=gpu.numa,
        present=gpu in node.gpus,
        fault=each.fault or _obstacle(node, offer),
        offered=tuple(
            OfferedGpuIds(
                resource=resource,
                ids=count,
                held=counts[resource],
                memory_bytes=share.memory,
                compute_share=share.compute / 100,
            )
            for resource, (count, share) in offer.ids.items()
        ),
        not_offered=_not_offered(node, gpu, offer),
        memory_bytes=offer.capacity.memory if offer.capacity is not None else None,
        free_bytes=max(free.memory, 0) if free is not None else None,
        free_share=max(free.compute, 0) / 100 if free is not None else None,
        held=tuple(part for part in held if part.gpu == gpu.address),
        distances=dict(_distances(node, gpu)),
    )


def _obstacle(node: ThisNode, offer: _Offer) -> str:
    """Why the limits of a GPU cannot be kept, so that it is not given; "" if they can."""
    if offer.config is None or offer.config.mode == "replicas":
        return ""
    obstacle = node.shims.obstacle()
    return NOT_KEPT + obstacle if obstacle is not None else ""


def _not_offered(node: ThisNode, gpu: GPU, offer: _Offer) -> str:
    if offer.ids:
        return ""
    if not node.config.gpus:
        return "no pool of GPUs is configured"
    if offer.config is None:
        return NOT_SELECTED
    return _NO_MEMORY if gpu.uuid else "the driver has not set it up yet: it has no UUID"


def _found(node: ThisNode, gpu: GPU, *, present: bool) -> NodeGPU:
    fault: str | None = "it is not on this node now"
    if present and gpu.minor is None:
        fault = "the driver does not tell the number of its device node"
    elif present and gpu.minor is not None:
        fault = gpu_device_files.fault(node.paths, gpu.minor)
    minor = gpu.minor if gpu.minor is not None else -1
    return NodeGPU(gpu=gpu, minor=minor, fault=fault, memory=node.gpu_memory.get(gpu.uuid))


def _gone(gpu: AllocatedGPU) -> GPU:
    return GPU(uuid=gpu.uuid, address=gpu.bdf, minor=gpu.minor, numa=None)


def _distances(node: ThisNode, gpu: GPU) -> Iterator[tuple[str, str]]:
    hcas = [hca for hca in node.hcas if hca.address and hca.rdma_names]
    pfs = {hca.address for hca in hcas}
    hcas = [hca for hca in hcas if hca.pf not in pfs]  # VFs and SFs are where their PFs are
    for hca in hcas if gpu in node.gpus else ():
        yield rdma_label(hca), node.topology.distance(gpu.address, hca.address).name
