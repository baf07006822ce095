"""Modes "slices" and "units": an id is a part of a GPU, as one resource of the pool offers it.

A slice is memory and time of one GPU. In mode units, memory and time are two resources, as
Alnair's are. The kubelet allocates them in random order and does not say for which container, so
Allocate only reserves room, and `pre_start` decides when the container starts.

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
from gpu.limit_settings import CONTEXT_RESERVE
from gpu.pools import ids as gpu_ids
from gpu.pools import slot_files
from gpu.pools.container_files import Giver, group_of
from gpu.pools.ids import adopted, numa, refusal
from gpu.pools.placement import Share, choose
from gpu.pools.pre_start import Starter
from gpu.pools.share_pool import IdKind, SharedGPU, SharePool, healthy_ids

_log = logging.getLogger(__name__)


class ShareService(ServedPool):
    """One resource of a pool of shares, as the kubelet sees it. Several threads may call it."""

    pre_start_required = True

    def __init__(
        self,
        pool: SharePool,
        kind: IdKind,
        giver: Giver,
        starter: Starter,
        allocated: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(kind.resource)
        self.kind = kind
        self.pool = pool
        self._giver = giver
        self._starter = starter
        self._allocated = allocated
        self._gpus: dict[str, SharedGPU] = {}  # that an id names

    def update(self, expected: Collection[str] = ()) -> bool:
        """List the ids of the pool's GPUs; True if the kubelet must get a new list.

        `expected` as in `ReplicaService.update`.
        """
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
        room = self.pool.free()
        fits = {address: free.count(self.kind.share) for address, free in room.items()}
        pending = self.pool.pending() if self.kind.share.compute and not self.kind.shape else 0
        healthy = set() if self._giver.leaving else healthy_ids(free_ids, fits, pending)
        for device_id, allocation in held.items():
            named = gpus[device_id].address if device_id in gpus else ""
            given = allocation.gpu
            if given is None or (given.bdf or named) not in bad_for_holders:
                healthy.add(device_id)
        self._gpus = gpus
        return self.relist(
            [(device_id, device_id in healthy, numa(gpu.node)) for device_id, gpu in gpus.items()]
        )

    def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """Any: which GPU the container has is chosen when it starts."""
        return gpu_ids.preferred({}, available, must_include, size, {}, spread=False)

    def allocate(self, ids: list[str]) -> v1beta1_pb2.ContainerAllocateResponse:
        """Reserve room on one GPU. It is on disk before this returns."""
        ordered = sorted({DeviceId(device_id) for device_id in ids})
        with self.pool.ledger.allocating:
            self._check(ordered)
            keys = [(self.name, device_id) for device_id in ordered]
            wanted = self.kind.share.times(len(ordered))
            chosen = self._choose(len(ordered), keys, wanted)
            self._check_context(chosen, wanted)
            given = self._given(ordered, chosen)
            group = group_of(self.name, given.slot) if given.slot else ""
            try:
                if group:  # an earlier holder's processes have ended: the kubelet gives its slot
                    self._giver.remove(group)
                self.pool.ledger.record(self.name, dict.fromkeys(ordered, given))
            except OSError as error:
                raise gpu_ids.unwritten(error) from None
        self._allocated()
        _log.info("%s: %s allocated", self.name, ", ".join(ordered))
        names = [slot_files.qualified(group)] if group else []
        return v1beta1_pb2.ContainerAllocateResponse(
            cdi_devices=[v1beta1_pb2.CDIDevice(name=name) for name in names]
        )

    def pre_start(self, ids: list[str]) -> None:
        """Decide what the container that starts has, and write it down. Raises Rejected."""
        self._starter.start(self.pool, self.name, ids)
        self._allocated()

    def adopt(self, rows: Sequence[PodDevices]) -> None:
        """Record what only the kubelet knows, on the GPU that its container was given.

        Raises OSError.
        """
        missing = set(adopted(self.pool.ledger, self.name, rows)) & self._gpus.keys()
        for row in rows:
            ids = sorted(missing.intersection(row.ids)) if row.resource == self.name else []
            if ids:
                known = self._recorded(row, ids, rows)
                self.pool.ledger.adopt(self.name, dict.fromkeys(ids, known))
                missing.difference_update(ids)
                self._allocated()

    def _check(self, ids: Sequence[str]) -> None:
        if self._giver.leaving:
            why = "podfabric is leaving this node: let the pod run on another one"
            raise refusal(self.name, f"{len(ids)} ids", why)
        gpu_ids.check(self.name, ids, {name: gpu.node for name, gpu in self._gpus.items()})

    def _check_context(self, gpu: SharedGPU | None, wanted: Share) -> None:
        """Refuse a limit within which no program could begin to use CUDA."""
        if gpu is None or wanted.memory > CONTEXT_RESERVE:
            return
        raise refusal(
            self.name,
            f"{wanted.memory >> 20} MiB",
            f"a CUDA context is charged with {CONTEXT_RESERVE >> 20} MiB, and a container must "
            f"have more: ask for {CONTEXT_RESERVE // self.kind.share.memory + 1} or more",
        )

    def _choose(
        self, count: int, keys: Collection[AllocationKey], wanted: Share
    ) -> SharedGPU | None:
        """A GPU with room for so many ids; None for time alone, which follows the memory."""
        free = self.pool.free(keys)
        fitting = {address: room for address, room in free.items() if room.holds(wanted)}
        alone = not self.kind.share.memory
        left = sum(room.compute for room in free.values()) - self.pool.pending(keys)
        if not fitting or (alone and left < wanted.compute):
            raise refusal(
                self.name,
                f"{count} ids",
                f"no GPU has {_amount(wanted)} free: {self.pool.shown(free)}: parts of a "
                "container are on one GPU",
            )
        if alone:
            return None
        spread = self.pool.config.placement == "spread"
        return self.pool.gpus[choose(fitting, wanted, spread=spread) or ""]

    def _given(self, ids: Sequence[str], gpu: SharedGPU | None) -> AllocatedGPU:
        """What each of the ids is, before the container has started."""
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
        """What an id of a container is that has started before, by the kubelet's record of it.

        The limits of its group have its GPU. If they do not tell, the ids do.
        """
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
        uuid = self._giver.uuid(group)
        gpus = self.pool.gpus.values()
        by_limits = (gpu for gpu in gpus if gpu.uuid == uuid)
        by_name = (gpu for gpu in gpus if slot.startswith((f"{gpu.uuid}_", f"{gpu.short}.")))
        gpu = next(chain(by_limits, by_name), self._gpus[ids[0]])
        made = self._given(ids, gpu)
        return replace(made, group=group, slot=slot if self.kind.share.memory else "")


def _amount(wanted: Share) -> str:
    if not wanted.memory:
        return f"{wanted.compute} % of its time"
    memory = f"{wanted.memory / 2**30:.4g} GiB"
    return f"{memory} and {wanted.compute} % of its time" if wanted.compute else memory
