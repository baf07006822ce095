"""Lists the GPUs of a node: their pools, free parts, holders, and distances to HCAs."""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from base.types import DeviceId
from deviceplugin.checkpoint import AllocatedGPU, Allocation
from deviceplugin.kubelet.extended_resources import MOST_IDS
from gpu.driver import gpu_device_files
from gpu.driver.gpu_inventory import NOT_KEPT, NodeGPU
from gpu.gpu_pool import GpuPoolConfig
from gpu.pools.share_pool import Share, allocated, by_pool, kinds, shared_gpus
from host.sysfs.gpus import GPU
from node.state import DeviceHolder, ThisNode, gpu_label, rdma_label

NOT_SELECTED = "no pool selects it (`devices`)"
_NO_MEMORY = "its memory is not known: NVIDIA's driver reports it; or write `memory` into the pool"


class GroupUse(msgspec.Struct, frozen=True, kw_only=True):
    """A group's use of one GPU. The tenant's processes report the numbers, which may be wrong."""

    memory_bytes: int  # the memory that the group may use
    compute_share: float  # of the GPU's time, in (0, 1]
    processes: int  # registered processes that have not ended
    used_bytes: int | None = None  # `None` if the tenant has damaged the file
    peak_bytes: int | None = None
    denied: int | None = None  # refused allocations
    wait_ns: int | None = None  # the sum of all waits of launches


class GpuPart(msgspec.Struct, frozen=True, kw_only=True):
    gpu: str  # the GPU's address; "" until the container starts
    container: DeviceHolder
    resources: tuple[str, ...]
    ids: tuple[DeviceId, ...]
    memory_bytes: int  # according to the allocation; 0 means no limit
    compute_share: float  # of the GPU's time, according to the allocation; 0 means no limit
    group: str = ""  # the group with these limits; "" without limits
    use: GroupUse | None = None  # `None` without a group, or with a `problem`
    problem: str = ""  # the reason why `use` is `None`, or another defect


def held_parts(node: ThisNode, notes: list[str]) -> list[GpuPart]:
    """The GPU parts that containers hold, sorted. Raises CheckpointDamaged."""
    of_gpus = [entry for entry in node.allocations if entry.gpu is not None]
    if not of_gpus:
        return []
    holders, problems = node.holders
    notes += problems
    together: dict[tuple[str, ...], list[tuple[Allocation, AllocatedGPU]]] = {}
    for entry in of_gpus:
        assert entry.gpu is not None
        holder = holders.get(entry.key, DeviceHolder())
        own = entry.gpu.group or entry.resource
        who = (holder.pod, holder.name) if holder.pod else (own,)
        together.setdefault((entry.gpu.bdf, *who), []).append((entry, entry.gpu))
    made = [
        _part(node, entries, holders.get(entries[0][0].key, DeviceHolder()))
        for entries in together.values()
    ]
    return sorted(made, key=lambda part: (part.gpu, part.container.pod, part.container.name))


def _part(
    node: ThisNode, entries: list[tuple[Allocation, AllocatedGPU]], holder: DeviceHolder
) -> GpuPart:
    gpu = entries[0][1]
    group = next((part.group for _, part in entries if part.group), "")
    use, problem = _use(node, group, gpu.uuid) if group else (None, "")
    return GpuPart(
        gpu=gpu.bdf,
        container=holder,
        resources=tuple(dict.fromkeys(entry.resource for entry, _ in entries)),
        ids=tuple(entry.id for entry, _ in entries),
        memory_bytes=sum(part.memory_bytes for _, part in entries),
        compute_share=round(sum(part.compute_share for _, part in entries), 4),
        group=group,
        use=use,
        problem=problem,
    )


def _use(node: ThisNode, group: str, uuid: str) -> tuple[GroupUse | None, str]:
    """A group's use of the GPU, and an error text.

    The text is "" if the group's files can be read.
    """
    from gpu.limits.limits_file import LimitsFile, LimitsInvalid  # few nodes have groups
    from gpu.limits.region import Region, RegionInvalid

    directory = f"{node.paths.run}/gpu/{group}"
    try:
        with LimitsFile(f"{directory}/limits") as limits:
            limit, processes = limits.limit(), limits.processes()
            allocation = bytes(limits.header().allocation)
    except (LimitsInvalid, OSError) as error:
        return None, f"group {group}: {error}"
    if limit.uuid != uuid:
        return None, f"group {group}: its limits are not of {uuid}"
    problem, region = "", None
    try:
        with Region(f"{directory}/region", allocation) as opened:
            region = opened.use()
    except (RegionInvalid, OSError) as error:
        problem = str(error)
    return GroupUse(
        memory_bytes=limit.memory_bytes,
        compute_share=limit.compute_share,
        processes=len({one.host_pid for one in processes.values() if one.alive}),
        used_bytes=region.used_bytes if region else None,
        peak_bytes=region.peak_bytes if region else None,
        denied=region.denied if region else None,
        wait_ns=region.wait_ns if region else None,
    ), problem


def bytes_text(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.4g} GiB"


class OfferedGpuIds(msgspec.Struct, frozen=True, kw_only=True):
    resource: str
    ids: int  # the number of ids of an empty GPU
    held: int  # ids of this GPU that containers hold
    memory_bytes: int  # of one id; 0 means no limit
    compute_share: float  # of one id; 0 means no limit


class ListedGPU(msgspec.Struct, frozen=True, kw_only=True):
    label: str  # "GPU0", as nvidia-smi numbers it
    address: str
    uuid: str  # "" until the driver has set up the GPU
    minor: int | None  # N of /dev/nvidiaN
    numa: int | None
    present: bool
    fault: str  # the reason why it cannot be allocated now, or ""
    offered: tuple[OfferedGpuIds, ...]
    not_offered: str  # the reason why no pool offers it, or ""
    memory_bytes: int | None  # for all containers together; `None` if unknown, or for replicas
    free_bytes: int | None
    free_share: float | None  # of the GPU's time
    held: tuple[GpuPart, ...]
    distances: dict[str, str]  # by HCA, such as {"mlx5_0": "PIX"}


class NodeGPUs(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of a node. `notes` has the sources that cannot be read."""

    gpus: tuple[ListedGPU, ...] = ()
    unbound: tuple[GpuPart, ...] = ()  # held parts that get a GPU when the container starts
    notes: tuple[str, ...] = ()


def listed(node: ThisNode) -> NodeGPUs:
    """The GPUs, sorted by address. Raises ConfigError or CheckpointDamaged."""
    notes: list[str] = []
    held = held_parts(node, notes)
    present = {gpu.address: gpu for gpu in node.gpus}
    recorded = [entry.gpu for entry in node.allocations if entry.gpu is not None]
    gone = {
        gpu.bdf: GPU(uuid=gpu.uuid, address=gpu.bdf, minor=gpu.minor, numa=None)
        for gpu in recorded
        if gpu.bdf and gpu.bdf not in present
    }
    every = sorted([*present.values(), *gone.values()], key=lambda gpu: gpu.address)
    found = [_found(node, gpu, present=gpu.address in present) for gpu in every]
    offers = _offers(node, found)
    return NodeGPUs(
        gpus=tuple(_listed(node, known, offers[known.gpu.address], held) for known in found),
        unbound=tuple(part for part in held if not part.gpu),
        notes=tuple(dict.fromkeys(notes)),
    )


class _Offer(msgspec.Struct, frozen=True):
    config: GpuPoolConfig | None = None
    capacity: Share | None = None  # `None` in a pool of replicas, or if unknown
    ids: dict[str, tuple[int, Share]] = {}  # number and share of ids, by resource


def _offers(node: ThisNode, found: Sequence[NodeGPU]) -> dict[str, _Offer]:
    """By GPU address, the offers that the device plugin would make if it started now."""
    offers = {known.gpu.address: _Offer() for known in found}
    for config, mine in by_pool(node.config.gpus, found):
        if config.mode == "replicas":
            count = min(config.replicas, MOST_IDS // max(len(mine), 1))
            of = _Offer(config, None, {config.resource: (count, Share())})
            offers |= {known.gpu.address: of for known in mine}
            continue
        offers |= {known.gpu.address: _Offer(config) for known in mine}
        for address, shared in shared_gpus(config, mine).items():
            ids = {kind.resource: (len(kind.ids(shared)), kind.share) for kind in kinds(config)}
            offers[address] = _Offer(config, shared.capacity, ids)
    return offers


def _listed(node: ThisNode, known: NodeGPU, offer: _Offer, held: list[GpuPart]) -> ListedGPU:
    gpu = known.gpu
    limits_fault = ""
    if offer.config is not None and offer.config.mode != "replicas":
        obstacle = node.shims.obstacle()
        limits_fault = NOT_KEPT + obstacle if obstacle is not None else ""
    used = allocated(node.allocations).get(gpu.address, Share())
    free = offer.capacity - used if offer.capacity is not None else None
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
        fault=known.fault or limits_fault,
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
        fault = "the driver does not report the number of its device node"
    elif present and gpu.minor is not None:
        fault = gpu_device_files.fault(node.paths, gpu.minor)
    minor = gpu.minor if gpu.minor is not None else -1
    return NodeGPU(gpu=gpu, minor=minor, fault=fault, memory=node.gpu_memory.get(gpu.uuid))


def _distances(node: ThisNode, gpu: GPU) -> Iterator[tuple[str, str]]:
    hcas = [hca for hca in node.hcas if hca.address and hca.rdma_names]
    pfs = {hca.address for hca in hcas}
    hcas = [hca for hca in hcas if hca.pf not in pfs]  # VFs and SFs have the distances of their PFs
    for hca in hcas if gpu in node.gpus else ():
        yield rdma_label(hca), node.topology.distance(gpu.address, hca.address).name
