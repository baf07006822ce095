"""Modes "slices" and "units": an id is a part of a GPU, as one resource of the pool offers it.

A slice is memory and time of one GPU. In mode units, memory and time are two resources, as
Alnair's are. The kubelet allocates them in random order and does not say for which container, so
Allocate only reserves room, and `start` decides when the container starts.

Sources: CentaurusInfra/alnair, alnair-device-plugin, for names, units and ids of mode units.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain

import grpc
from msgspec.structs import replace

from base.types import DeviceId
from deviceplugin.api import v1beta1_pb2
from deviceplugin.checkpoint import AllocatedGPU, AllocationKey
from deviceplugin.gpus import preferred
from deviceplugin.gpus.given import Giver, group_of
from deviceplugin.gpus.near import Nearness
from deviceplugin.gpus.records import adopted
from deviceplugin.gpus.replicas import numa
from deviceplugin.gpus.share_pool import IdKind, SharedGPU, SharePool, healthy_ids
from deviceplugin.gpus.start import Starter
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.kubelet.server import Listing, Rejected
from gpu.group_limits import Limit
from gpu.placement import Share, choose

_log = logging.getLogger(__name__)


class ShareService:
    """One resource of a pool of shares, as the kubelet sees it. Several threads may call it."""

    pre_start_required = True

    def __init__(
        self,
        pool: SharePool,
        kind: IdKind,
        giver: Giver,
        starter: Starter,
        near: Nearness,
        allocated: Callable[[], object] = lambda: None,
    ) -> None:
        self.kind = kind
        self.pool = pool
        self._giver = giver
        self._starter = starter
        self._near = near
        self._allocated = allocated
        self._listing: Listing = []
        self._refused: set[AllocationKey] = set()  # that pods had which were refused
        self._gpus: dict[str, SharedGPU] = {}  # that an id names

    @property
    def name(self) -> str:
        """The resource."""
        return self.kind.resource

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
            given = allocation.gpu
            if given is None or (given.bdf or gpus_address(gpus, device_id)) not in bad_for_holders:
                healthy.add(device_id)
        listing: Listing = [
            (device_id, device_id in healthy, numa(gpu.node)) for device_id, gpu in gpus.items()
        ]
        changed = listing != self._listing
        self._gpus, self._listing = gpus, listing
        return changed

    def listing(self) -> Listing:
        """Every device id, whether it is healthy, and the NUMA node of the GPU that it names."""
        return self._listing

    def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """The ids of one GPU, if one has enough; near the container's HCAs, if these are known."""
        free = {(self.name, DeviceId(device_id)) for device_id in available}
        used = {
            address: gpu.capacity.minus(room)
            for address, room in self.pool.free(free).items()
            if (gpu := self.pool.gpus.get(address)) is not None
        }
        of = {
            device_id: gpu.address
            for device_id in available
            if (gpu := self._gpus.get(device_id)) is not None
        }
        loads = {address: share.memory or share.compute for address, share in used.items()}
        spread = self.pool.config.placement == "spread"
        costs: dict[str, int] = {}
        if self._giver.binding == "admission":  # else the start knows them
            hcas = self._near.waiting_hcas([self.name])
            costs = self._near.costs({*of.values()}, hcas)
        return preferred.together(
            of, available, must_include, size, loads, spread=spread, costs=costs
        )

    def allocate(self, ids: list[str]) -> v1beta1_pb2.ContainerAllocateResponse:
        """Reserve room on one GPU. It is on disk before this returns."""
        ordered = sorted({DeviceId(device_id) for device_id in ids})
        with self.pool.ledger.allocating:
            self._check(ordered)
            keys = [(self.name, device_id) for device_id in ordered]
            wanted = self.kind.share.times(len(ordered))
            chosen = self._choose(ordered, keys, wanted)
            self._check_context(chosen, wanted)
            given = self._given(ordered, chosen)
            self._refused.difference_update(keys)
            try:
                self._giver.clear(self.name, given)
                self.pool.ledger.record_gpus(self.name, dict.fromkeys(ordered, given))
                limit = self._limit(given.uuid, wanted)
                answer = self._giver.answer(self.name, given, self.pool.config, limit)
            except OSError as error:
                raise Rejected(
                    grpc.StatusCode.INTERNAL,
                    f"cannot write the allocation: {error.filename}: {error.strerror}: check the "
                    "disk and its free space",
                ) from None
        self._allocated()
        where = given.bdf or "a GPU that is chosen at the start"
        _log.info("%s: %s allocated on %s", self.name, ", ".join(ordered), where)
        return answer

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
                self.pool.ledger.record_gpus(self.name, dict.fromkeys(ids, known), adopted=True)
                missing.difference_update(ids)
                self._allocated()

    def _check(self, ids: Sequence[str]) -> None:
        if self._giver.leaving:
            raise self._refusal(
                f"{len(ids)} ids", "podfabric is leaving this node: let the pod run on another one"
            )
        for device_id in ids:
            if device_id not in self._gpus:
                raise Rejected(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"cannot allocate {device_id} of {self.name}: the pool has no such id",
                )
        for device_id in ids:
            if fault := self._gpus[device_id].node.fault:
                raise self._refusal(device_id, f"its GPU is unhealthy: {fault}")
        most = self.pool.config.most
        if most and len(ids) > most:
            raise self._refusal(
                f"{len(ids)} ids", f"a container may have {most} (maxPerContainer): ask for fewer"
            )

    def _check_context(self, gpu: SharedGPU | None, wanted: Share) -> None:
        """Refuse a limit within which no program could begin to use CUDA."""
        reserve, unit = self._giver.context_reserve, self.kind.share.memory
        if gpu is None or wanted.memory > reserve:
            return
        raise self._refusal(
            f"{wanted.memory >> 20} MiB",
            f"a CUDA context is charged with {reserve >> 20} MiB (gpuLimits.contextReserve), and a "
            f"container must have more: ask for {reserve // unit + 1} or more",
        )

    def _choose(
        self, ids: Sequence[str], keys: Collection[AllocationKey], wanted: Share
    ) -> SharedGPU | None:
        """The GPU with room for all ids; None for time alone, which follows the memory.

        It is the one that they were on, or that they name, if that is one with room.
        """
        free = self.pool.free(keys)
        named = {self._gpus[device_id].address for device_id in ids}
        fitting = {address: room for address, room in free.items() if room.holds(wanted)}
        alone = not self.kind.share.memory
        left = sum(room.compute for room in free.values()) - self.pool.pending(keys)
        if not fitting or (alone and left < wanted.compute):
            raise self._refusal(
                f"{len(ids)} ids",
                f"no GPU has {_amount(wanted)} free: {self.pool.shown(free)}: parts of a "
                "container are on one GPU",
            )
        if alone:
            return None
        # A container after an init container of its pod gets ids that were that one's.
        former = {
            entry.key: entry.gpu
            for entry in self.pool.ledger.allocations()
            if entry.key in keys and entry.gpu is not None
        }
        before = {gpu.bdf for gpu in former.values()}
        self._check_before(former, fitting, wanted)
        preferred_gpus = next((few for few in (before, named) if len(few) == 1), set())
        candidates = {key: fitting[key] for key in preferred_gpus & fitting.keys()} or fitting
        spread = self.pool.config.placement == "spread"
        return self.pool.gpus[choose(candidates, wanted, spread=spread) or ""]

    def _check_before(
        self,
        former: Mapping[AllocationKey, AllocatedGPU],
        fitting: Mapping[str, Share],
        wanted: Share,
    ) -> None:
        """Refuse another GPU than an init container has, which was given nodes and not started.

        The ledger has one GPU for each id: that container would use one of which it holds nothing.
        What the ledger has may also be a pod's that was never started and is gone. A pod that is
        refused is gone for good, so no second one is refused for the same.
        """
        for key, gpu in former.items():
            started = gpu.cdi or gpu.group or not gpu.slot
            if not started and gpu.bdf not in fitting and key not in self._refused:
                self._refused.update(former)
                raise self._refusal(
                    _amount(wanted),
                    f"nvidia{gpu.minor}, which its pod's init container was given, has not so much "
                    "free, and parts of a pod's containers that follow each other are on one GPU: "
                    "let the init container ask for as much, or write devices: {gpuBinding: start}",
                )

    def _given(self, ids: Sequence[str], gpu: SharedGPU | None) -> AllocatedGPU:
        """What each of the ids is, before the container has started."""
        return AllocatedGPU(
            uuid=gpu.uuid if gpu is not None else "",
            bdf=gpu.address if gpu is not None else "",
            minor=gpu.node.minor if gpu is not None else -1,
            memory_bytes=self.kind.share.memory,
            compute_share=self.kind.share.compute / 100,
            slot=ids[0] if gpu is not None else "",
            cdi=gpu is not None and self._giver.binding == "start",
        )

    def _limit(self, uuid: str, wanted: Share) -> Limit:
        share = wanted.compute / 100 or 1.0  # without time, it is not limited
        return Limit(uuid, wanted.memory, share)

    def _recorded(
        self, row: PodDevices, ids: Sequence[DeviceId], rows: Sequence[PodDevices]
    ) -> AllocatedGPU:
        """What an id of a container is that has started before, by the kubelet's record of it.

        The memory's record has the nodes of its GPU or the name of its CDI device. If neither
        tells, the ids do.
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
        slot, has_slot = min(main.ids), bool(self.kind.share.memory)
        started = self._giver.started(main.resource, slot)
        minors = set(main.gpus) or started
        gpus = self.pool.gpus.values()
        by_node = (gpu for gpu in gpus if gpu.node.minor in minors)
        by_name = (gpu for gpu in gpus if slot.startswith((f"{gpu.uuid}_", f"{gpu.short}.")))
        gpu = next(chain(by_node, by_name), self._gpus[ids[0]])
        made, cdi = self._given(ids, gpu), has_slot and bool(main.cdi or started)
        return replace(
            made,
            group=group_of(main.resource, slot),
            slot=slot if has_slot else "",
            cdi=cdi,
        )

    def _refusal(self, what: str, why: str) -> Rejected:
        return Rejected(
            grpc.StatusCode.FAILED_PRECONDITION, f"cannot allocate {what} of {self.name}: {why}"
        )


def gpus_address(gpus: dict[str, SharedGPU], device_id: str) -> str:
    """The address of the GPU that an id names; "" if the pool has no such id."""
    gpu = gpus.get(device_id)
    return gpu.address if gpu is not None else ""


def _amount(wanted: Share) -> str:
    if not wanted.memory:
        return f"{wanted.compute} % of its time"
    memory = f"{wanted.memory / 2**30:.4g} GiB"
    return f"{memory} and {wanted.compute} % of its time" if wanted.compute else memory
