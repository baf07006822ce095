"""Counts the free share of each GPU, and chooses the GPU of a container.

The kubelet chooses the ids of each resource independently. So an id names a GPU, but the container
may get another GPU. The ledger records the one GPU of each container.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from deviceplugin.checkpoint import AllocatedGPU, Allocation, AllocationKey
from deviceplugin.ledger import Ledger
from gpu.driver.gpu_inventory import NodeGPU
from gpu.gpu_pool import GpuPoolConfig, Shape

WHOLE = 100  # percent of a GPU's time
_SHORT = len("GPU-12345678")


class Share(msgspec.Struct, frozen=True):
    """Memory and time of a GPU."""

    memory: int = 0  # bytes
    compute: int = 0  # percent

    def __mul__(self, count: int) -> "Share":
        return Share(self.memory * count, self.compute * count)

    def __add__(self, other: "Share") -> "Share":
        return Share(self.memory + other.memory, self.compute + other.compute)

    def __sub__(self, other: "Share") -> "Share":
        return Share(self.memory - other.memory, self.compute - other.compute)

    def holds(self, other: "Share") -> bool:
        return other.memory <= self.memory and other.compute <= self.compute

    def count(self, other: "Share") -> int:
        """How often `other` fits into this share. `other` must not be empty."""
        counts = []
        if other.memory:
            counts.append(self.memory // other.memory)
        if other.compute:
            counts.append(self.compute // other.compute)
        return max(min(counts), 0)

    def __str__(self) -> str:
        return f"{self.memory / 2**30:.4g} GiB and {self.compute} %"


class SharedGPU(msgspec.Struct, frozen=True):
    node: NodeGPU
    capacity: Share
    short: str  # the start of the GPU's UUID, unique in the pool

    @property
    def address(self) -> str:
        return self.node.gpu.address

    @property
    def uuid(self) -> str:
        return self.node.gpu.uuid


class IdKind(msgspec.Struct, frozen=True):
    """A resource of the pool, and the share that each id of the resource stands for."""

    resource: str
    share: Share
    shape: str = ""  # "10g-25" for a slice; "" for a unit of memory or time

    def ids(self, gpu: SharedGPU) -> list[str]:
        """The ids of a GPU: as many as fit on an empty GPU."""
        beginning = f"{gpu.short}.{self.shape}." if self.shape else f"{gpu.uuid}_"
        return [f"{beginning}{k}" for k in range(gpu.capacity.count(self.share))]


def kinds(config: GpuPoolConfig) -> tuple[IdKind, ...]:
    if config.mode == "slices":
        return tuple(
            IdKind(shape.resource, Share(shape.memory, shape.compute), _text(shape))
            for shape in config.shapes
        )
    return (
        IdKind(config.memory_resource, Share(memory=config.unit)),
        IdKind(config.compute_resource, Share(compute=1)),
    )


def by_pool(
    configs: Iterable[GpuPoolConfig], gpus: Iterable[NodeGPU]
) -> Iterator[tuple[GpuPoolConfig, list[NodeGPU]]]:
    """The GPUs of each pool. A GPU belongs to the first pool that selects it."""
    free = list(gpus)
    for config in configs:
        mine = [gpu for gpu in free if config.selects(gpu.gpu)]
        free = [gpu for gpu in free if gpu not in mine]
        yield config, mine


class SharePool:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.config = GpuPoolConfig()
        self.gpus: Mapping[str, SharedGPU] = {}  # with known memory, by address
        self.problem: str | None = None

    def update(self, config: GpuPoolConfig, nodes: Sequence[NodeGPU]) -> None:
        self.config, self.gpus = config, shared_gpus(config, nodes)
        unknown = [node.name for node in nodes if node.gpu.address not in self.gpus]
        self.problem = None
        if unknown:
            self.problem = (
                f"{', '.join(unknown)}: not offered, because the size of the memory is unknown: "
                "run the agent, which queries NVML, or set `memory` of the pool"
            )

    def free(self, without: Collection[AllocationKey] = ()) -> dict[str, Share]:
        """The free share of each healthy GPU, by address. Ignores the allocations in `without`."""
        used = allocated(entry for entry in self.ledger.allocations() if entry.key not in without)
        return {
            address: gpu.capacity - used.get(address, Share())
            for address, gpu in self.gpus.items()
            if gpu.node.fault is None
        }

    def pending(self, without: Collection[AllocationKey] = ()) -> int:
        """The allocated percents of time that are not bound to a GPU yet."""
        return sum(
            percents(allocation.gpu)
            for allocation in self.ledger.allocations()
            if allocation.resource in self.config.resources
            and allocation.key not in without
            and allocation.gpu is not None
            and not allocation.gpu.bdf
        )

    def with_room(self) -> set[str]:
        """The GPUs with room: for the waiting container if only one waits, else for any share."""
        waiting: dict[tuple[str, str], Share] = {}  # by resource and slot
        keys: list[AllocationKey] = []
        for entry in self.ledger.allocations():
            gpu = entry.gpu
            if gpu is not None and gpu.open and entry.resource in self.config.resources:
                at = entry.resource, gpu.slot
                share = Share(gpu.memory_bytes, percents(gpu))
                waiting[at] = waiting.get(at, Share()) + share
                keys.append(entry.key)
        if len(waiting) == 1:
            requests, free = [*waiting.values()], self.free(keys)
        else:
            shares = (kind.share for kind in kinds(self.config))
            requests, free = [share for share in shares if share.memory], self.free()
        return {
            address
            for address, share in free.items()
            if any(share.holds(request) for request in requests)
        }

    def shown(self, free: Mapping[str, Share]) -> str:
        texts = [f"{self.gpus[address].node.name} has {share}" for address, share in free.items()]
        texts += [
            f"{gpu.node.name} is unhealthy: {gpu.node.fault}"
            for gpu in self.gpus.values()
            if gpu.node.fault is not None
        ]
        return "; ".join(texts) or "there is no GPU"


def choose(
    free: Mapping[str, Share],
    request: Share,
    *,
    spread: bool,
    costs: Mapping[str, int] | None = None,
) -> str | None:
    """The address of the GPU for a container; `None` if the request fits on no GPU.

    `costs` has the distance of each GPU from the container's HCAs. At equal costs, the GPU with the
    least free memory comes first; with `spread`, the GPU with the most.
    """

    def order(address: str) -> tuple[int, int, int, str]:
        share = free[address]
        sign = -1 if spread else 1
        cost = costs.get(address, 0) if costs else 0
        return cost, sign * share.memory, sign * share.compute, address

    fitting = [address for address, share in free.items() if share.holds(request)]
    return min(fitting, key=order, default=None)


def shared_gpus(config: GpuPoolConfig, nodes: Sequence[NodeGPU]) -> dict[str, SharedGPU]:
    """The GPUs of a pool, by address. Leaves out GPUs with unknown memory."""
    known = [node for node in nodes if node.gpu.uuid and _usable(config, node) is not None]
    shorts = [node.gpu.uuid[:_SHORT] for node in known]
    return {
        node.gpu.address: SharedGPU(
            node,
            Share(_usable(config, node) or 0, WHOLE),
            (short if shorts.count(short) == 1 else node.gpu.uuid).removeprefix("GPU-"),
        )
        for node, short in zip(known, shorts, strict=True)
    }


def allocated(allocations: Iterable[Allocation]) -> dict[str, Share]:
    """The allocated share of each GPU, by address."""
    shares: dict[str, Share] = {}
    for allocation in allocations:
        gpu = allocation.gpu
        if gpu is not None and gpu.bdf:
            share = Share(gpu.memory_bytes, percents(gpu))
            shares[gpu.bdf] = shares.get(gpu.bdf, Share()) + share
    return shares


def percents(gpu: AllocatedGPU) -> int:
    return round(gpu.compute_share * WHOLE)


def healthy_ids(
    free_ids: Mapping[str, Sequence[str]], fits: Mapping[str, int], pending: int = 0
) -> set[str]:
    """The free ids that may be allocated: as many as fit on all GPUs together.

    Ids of full GPUs come last, because a container may get another GPU than its ids name.
    `free_ids` has the free ids of each healthy GPU. `fits` has the number of ids that fit on each
    GPU. `pending` is the number of allocated ids without a GPU.
    """
    total = max(sum(fits.get(address, 0) for address in free_ids) - pending, 0)
    own = [ids[: fits.get(address, 0)] for address, ids in free_ids.items()]
    rest = [ids[fits.get(address, 0) :] for address, ids in free_ids.items()]
    return set([*chain(*own, *rest)][:total])


def _usable(config: GpuPoolConfig, node: NodeGPU) -> int | None:
    """The bytes of a GPU's memory that containers can get; `None` if unknown."""
    if config.memory:
        return max(config.memory - config.reserve, 0)
    if node.memory is None:
        return None
    return max(node.memory.usable - config.reserve, 0)


def _text(shape: Shape) -> str:
    gib, rest = divmod(shape.memory, 1 << 30)
    memory = f"{shape.memory >> 20}m" if rest else f"{gib}g"
    return f"{memory}-{shape.compute}"
