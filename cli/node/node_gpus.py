"""The GPUs of a node: which pools offer them, what is free, who holds what, how far HCAs are."""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from base.types import DeviceId
from cli.node.state import DeviceHolder, ThisNode, gpu_label, rdma_label
from deviceplugin.checkpoint import AllocatedGPU, Allocation
from deviceplugin.kubelet.extended_resources import MOST_IDS
from gpu.driver import gpu_device_files
from gpu.driver.gpu_inventory import NOT_KEPT, NodeGPU
from gpu.gpu_pool import GpuPoolConfig
from gpu.limits.groups import GroupFiles, Groups
from gpu.limits.limits_file import GroupError
from gpu.limits.region import RegionInvalid, RegionUse
from gpu.pools.share_pool import Share, allocated, by_pool, kinds, shared_gpus
from host.sysfs.gpus import GPU

NOT_SELECTED = "no pool selects it (`devices`)"
_NO_MEMORY = (
    "how much memory it has is not known: NVIDIA's driver tells it; or write `memory` into the pool"
)


class GroupUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a group's files say of one GPU now. The tenant writes what its processes use."""

    memory_bytes: int  # what it may use
    compute_share: float  # of the GPU's time, in (0, 1]
    processes: int  # registered ones that have not ended
    used_bytes: int | None = None  # None: the tenant has damaged its file
    peak_bytes: int | None = None
    denied: int | None = None  # refused allocations


class GpuPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one container holds of one GPU."""

    gpu: str  # the GPU's address; "" until the container's start decides
    container: DeviceHolder
    resources: tuple[str, ...]
    ids: tuple[DeviceId, ...]
    memory_bytes: int  # by the allocation; 0: not limited
    compute_share: float  # of the GPU's time, by the allocation; 0: not limited
    group: str = ""  # whose limits they are; "" if nothing is limited
    use: GroupUse | None = None  # None: there is no group, or `problem`
    problem: str = ""  # why its use is not known, or what is wrong with it


def held_parts(node: ThisNode, notes: list[str]) -> list[GpuPart]:
    """Every part that a container holds, by GPU and holder.

    Raises CheckpointDamaged.
    """
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
    group = next((each.group for _, each in entries if each.group), "")
    use, problem = _use(node, group, gpu.uuid) if group else (None, "")
    return GpuPart(
        gpu=gpu.bdf,
        container=holder,
        resources=tuple(dict.fromkeys(entry.resource for entry, _ in entries)),
        ids=tuple(entry.id for entry, _ in entries),
        memory_bytes=sum(each.memory_bytes for _, each in entries),
        compute_share=round(sum(each.compute_share for _, each in entries), 4),
        group=group,
        use=use,
        problem=problem,
    )


def _use(node: ThisNode, group: str, uuid: str) -> tuple[GroupUse | None, str]:
    """What the group's files say of that GPU; and why not, or what is wrong with them."""
    opened = Groups(node.paths.run / "gpu")
    try:
        files = opened.read(group)
    except (GroupError, OSError) as error:
        return None, str(error)
    if files.limit.uuid != uuid:
        return None, f"group {group}: its limits are not of {uuid}"
    said, problem = _said(opened, group, files)
    return GroupUse(
        memory_bytes=files.limit.memory_bytes,
        compute_share=files.limit.compute_share,
        processes=len({each.host_pid for each in files.processes.values() if each.alive}),
        used_bytes=said.used_bytes if said else None,
        peak_bytes=said.peak_bytes if said else None,
        denied=said.denied if said else None,
    ), problem


def _said(opened: Groups, group: str, files: GroupFiles) -> tuple[RegionUse | None, str]:
    """What the tenant's file says."""
    try:
        with opened.region(group, files) as region:
            return region.use(), ""
    except (RegionInvalid, OSError) as error:
        return None, str(error)


def bytes_text(size: int | None) -> str:
    """Bytes of a GPU for a table; "" if they are not known."""
    if size is None:
        return ""
    return f"{size / 2**30:.4g} GiB"


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
    held = held_parts(node, notes)
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
