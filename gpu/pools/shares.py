"""Modes "slices" and "units": an id is a share of a GPU.

A slice is memory and time of one GPU. In mode units, memory and time are two resources, as in
Alnair. The kubelet allocates the two in random order and does not name the container. So Allocate
only reserves the share, and `pre_start` chooses the GPU when the container starts.

Sources: CentaurusInfra/alnair, alnair-device-plugin, for names, units and ids of mode units.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from itertools import chain

from msgspec.structs import replace

from base.types import DeviceId
from deviceplugin.api import v1beta1_pb2
from deviceplugin.checkpoint import AllocatedGPU, AllocationKey
from deviceplugin.kubelet.plugin_server import ServedPool
from deviceplugin.kubelet.records import PodDevices
from gpu.gpu_pool import CONTEXT_RESERVE
from gpu.pools import ids as gpu_ids
from gpu.pools.container_files import KIND, ContainerFiles, group_of
from gpu.pools.ids import adopted, numa, refusal
from gpu.pools.pre_start import Starter
from gpu.pools.share_pool import IdKind, Share, SharedGPU, SharePool, choose, healthy_ids

_log = logging.getLogger(__name__)


class ShareService(ServedPool):
    """One resource of a pool of shares. Several threads may call it."""

    pre_start_required = True

    def __init__(
        self,
        pool: SharePool,
        kind: IdKind,
        files: ContainerFiles,
        starter: Starter,
        allocated: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(kind.resource)
        self.kind = kind
        self.pool = pool
        self._files = files
        self._starter = starter
        self._allocated = allocated
        self._gpus: dict[str, SharedGPU] = {}  # by device id

    def update(self, expected: Collection[str] = ()) -> bool:
        """List the ids of the pool's GPUs. Returns True if the kubelet must get a new list."""
        held = self.pool.ledger.held(self.name)
        bad = {gpu.address for gpu in self.pool.gpus.values() if gpu.node.fault is not None}
        bad_for_holders = bad.difference(expected)
        free_ids: dict[str, list[str]] = {}
        gpus: dict[str, SharedGPU] = {}
        for address, gpu in self.pool.gpus.items():
            ids = self.kind.ids(gpu)
            gpus |= dict.fromkeys(ids, gpu)
            if address not in bad:
                free_ids[address] = [device_id for device_id in ids if device_id not in held]
        free = self.pool.free()
        fits = {address: share.count(self.kind.share) for address, share in free.items()}
        pending = self.pool.pending() if self.kind.share.compute and not self.kind.shape else 0
        healthy = set() if self._files.leaving else healthy_ids(free_ids, fits, pending)
        for device_id, allocation in held.items():
            named = gpus[device_id].address if device_id in gpus else ""
            recorded = allocation.gpu
            if recorded is None or (recorded.bdf or named) not in bad_for_holders:
                healthy.add(device_id)
        self._gpus = gpus
        return self.relist(
            [(device_id, device_id in healthy, numa(gpu.node)) for device_id, gpu in gpus.items()]
        )

    def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """Choose any free ids, because the GPU is chosen when the container starts."""
        return gpu_ids.preferred({}, available, must_include, size, {}, spread=False)

    def allocate(self, ids: list[str]) -> v1beta1_pb2.ContainerAllocateResponse:
        """Reserve the shares on one GPU. Writes the allocation to disk first."""
        ordered = sorted({DeviceId(device_id) for device_id in ids})
        with self.pool.ledger.allocating:
            self._check(ordered)
            keys = [(self.name, device_id) for device_id in ordered]
            request = self.kind.share * len(ordered)
            chosen = self._choose(len(ordered), keys, request)
            self._check_context(chosen, request)
            recorded = self._reserved(ordered, chosen)
            group = group_of(self.name, recorded.slot) if recorded.slot else ""
            try:
                if group:  # the processes of the slot's previous holder have ended
                    self._files.remove(group)
                self.pool.ledger.record(self.name, dict.fromkeys(ordered, recorded))
            except OSError as error:
                raise gpu_ids.unwritten(error) from None
        self._allocated()
        _log.info("%s: %s allocated", self.name, ", ".join(ordered))
        names = [f"{KIND}={group}"] if group else []
        return v1beta1_pb2.ContainerAllocateResponse(
            cdi_devices=[v1beta1_pb2.CDIDevice(name=name) for name in names]
        )

    def pre_start(self, ids: list[str]) -> None:
        """Choose the GPU of the container that starts, and write its limits. Raises Rejected."""
        self._starter.start(self.pool, self.name, ids)
        self._allocated()

    def adopt(self, rows: Sequence[PodDevices]) -> None:
        """Record containers that the kubelet has and the ledger lacks. Raises OSError."""
        missing = set(adopted(self.pool.ledger, self.name, rows)) & self._gpus.keys()
        for row in rows:
            ids = sorted(missing.intersection(row.ids)) if row.resource == self.name else []
            if ids:
                known = self._recorded(row, ids, rows)
                self.pool.ledger.adopt(self.name, dict.fromkeys(ids, known))
                missing.difference_update(ids)
                self._allocated()

    def _check(self, ids: Sequence[str]) -> None:
        if self._files.leaving:
            reason = "podfabric is leaving this node: run the pod on another node"
            raise refusal(self.name, f"{len(ids)} ids", reason)
        gpu_ids.check(self.name, ids, {name: gpu.node for name, gpu in self._gpus.items()})

    def _check_context(self, gpu: SharedGPU | None, request: Share) -> None:
        """Refuse a memory limit that is too small for a CUDA context."""
        if gpu is None or request.memory > CONTEXT_RESERVE:
            return
        raise refusal(
            self.name,
            f"{request.memory >> 20} MiB",
            f"a CUDA context alone takes {CONTEXT_RESERVE >> 20} MiB: request "
            f"{CONTEXT_RESERVE // self.kind.share.memory + 1} or more of {self.name}",
        )

    def _choose(
        self, count: int, keys: Collection[AllocationKey], request: Share
    ) -> SharedGPU | None:
        """The GPU for `count` ids; `None` for ids of time, because ids of memory decide the GPU."""
        free = self.pool.free(keys)
        fitting = {address: share for address, share in free.items() if share.holds(request)}
        only_time = not self.kind.share.memory
        unbound = sum(share.compute for share in free.values()) - self.pool.pending(keys)
        if not fitting or (only_time and unbound < request.compute):
            raise refusal(
                self.name,
                f"{count} ids",
                f"no GPU has {_amount(request)} free: {self.pool.shown(free)}: one GPU must have "
                "all shares of a container, and shares of starting containers are not free",
            )
        if only_time:
            return None
        spread = self.pool.config.placement == "spread"
        return self.pool.gpus[choose(fitting, request, spread=spread) or ""]

    def _reserved(self, ids: Sequence[str], gpu: SharedGPU | None) -> AllocatedGPU:
        """The record for each id before the container starts."""
        return AllocatedGPU(
            uuid=gpu.uuid if gpu is not None else "",
            bdf=gpu.address if gpu is not None else "",
            minor=gpu.node.minor if gpu is not None else -1,
            memory_bytes=self.kind.share.memory,
            compute_share=self.kind.share.compute / 100,
            slot=ids[0] if gpu is not None else "",
        )

    def _recorded(
        self, row: PodDevices, ids: Sequence[DeviceId], rows: Sequence[PodDevices]
    ) -> AllocatedGPU:
        """The record for an id of a started container. The limits or the ids name the GPU."""
        memory = self.pool.config.resources[0] if not self.kind.shape else self.name
        own = (row.uid, row.namespace, row.name, row.container)
        main = next(
            (
                other
                for other in rows
                if (other.uid, other.namespace, other.name, other.container) == own
                and other.resource == memory
            ),
            row,
        )
        slot = min(main.ids)
        group = group_of(main.resource, slot)
        uuid = self._files.uuid(group)
        gpus = self.pool.gpus.values()
        by_limits = (gpu for gpu in gpus if gpu.uuid == uuid)
        by_name = (gpu for gpu in gpus if slot.startswith((f"{gpu.uuid}_", f"{gpu.short}.")))
        gpu = next(chain(by_limits, by_name), self._gpus[ids[0]])
        made = self._reserved(ids, gpu)
        return replace(made, group=group, slot=slot if self.kind.share.memory else "")


def _amount(request: Share) -> str:
    if not request.memory:
        return f"{request.compute} % of its time"
    memory = f"{request.memory / 2**30:.4g} GiB"
    return f"{memory} and {request.compute} % of its time" if request.compute else memory
