"""PreStartContainer: finds the container that starts, chooses its GPU, and writes its limits.

Before each start of a container, the kubelet calls PreStartContainer once per resource. At the
first call PodResources already lists all devices of the container, so later calls change nothing.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import grpc
from msgspec.structs import replace

from base.paths import Paths
from deviceplugin.allocate.preferred import COSTS
from deviceplugin.checkpoint import AllocatedGPU, Allocation, AllocationKey
from deviceplugin.kubelet import records
from deviceplugin.kubelet.plugin_server import Rejected
from deviceplugin.kubelet.pod_resources import PodResourcesClient
from deviceplugin.kubelet.records import KubeletUnreadable, PodDevices
from deviceplugin.ledger import Ledger
from gpu.limits.limits_file import Limit
from gpu.pools.container_files import ContainerFiles, group_of
from gpu.pools.holders import Holders
from gpu.pools.share_pool import WHOLE, Share, SharedGPU, SharePool, choose, percents
from host.sysfs.topology import Topology

ASK_KUBELET = 5.0  # seconds; the kubelet waits 30 seconds for PreStartContainer

_log = logging.getLogger(__name__)


class Starter:
    def __init__(
        self,
        paths: Paths,
        ledger: Ledger,
        kubelet: PodResourcesClient,
        files: ContainerFiles,
        holders: Holders,
    ) -> None:
        self._holders = holders
        self._paths = paths
        self._ledger = ledger
        self._kubelet = kubelet
        self._files = files

    def start(self, pool: SharePool, resource: str, ids: Sequence[str]) -> None:
        """Prepare the start of the container that has these ids of a resource. Raises Rejected."""
        rows = self._container(resource, ids)
        with self._ledger.allocating:
            held = self._held(pool, rows)
            resources = sorted({resource for resource, _ in held})
            if pool.config.mode == "slices" and len(resources) > 1:
                raise _refusal(
                    f"container {rows[0].container} requests {' and '.join(resources)}, but a "
                    "container can have slices of one shape only: request one of these resources"
                )
            first = min((key for key in held if _gpu(held[key]).memory_bytes), default=None)
            if first is None:
                raise _refusal(
                    f"container {rows[0].container} requests GPU time ({resource}) but no GPU "
                    f"memory: request {pool.config.memory_resource} too"
                )
            self._write(pool, self._choose(pool, held, first, rows), held, first, rows)

    def _container(self, resource: str, ids: Sequence[str]) -> list[PodDevices]:
        """All rows of the container that has exactly these ids. Raises Rejected if there is none.

        If an init container has the same ids, the container with the most devices counts.
        """
        sorted_ids = tuple(sorted(ids))
        problems = []
        for read in (self._listed, self._written):  # PodResources lacks init containers
            try:
                containers: dict[tuple[str, str, str, str], list[PodDevices]] = {}
                for row in read():
                    key = row.namespace, row.name, row.uid, row.container
                    containers.setdefault(key, []).append(row)
            except KubeletUnreadable as error:
                problems.append(str(error))
                continue
            matching = [
                rows
                for rows in containers.values()
                if any((row.resource, row.ids) == (resource, sorted_ids) for row in rows)
            ]
            if matching:
                return max(matching, key=lambda rows: sum(len(row.ids) for row in rows))
        reason = "; ".join(problems) or "the kubelet lists no container with these ids"
        raise Rejected(
            grpc.StatusCode.UNAVAILABLE,
            f"cannot find the container that has ids {', '.join(sorted_ids[:4])}: {reason} "
            "(the kubelet tries again)",
        )

    def _listed(self) -> list[PodDevices]:
        return records.from_answer(self._kubelet.list(ASK_KUBELET))

    def _written(self) -> list[PodDevices]:
        return records.from_checkpoint(self._paths)

    def _held(
        self, pool: SharePool, rows: Collection[PodDevices]
    ) -> dict[AllocationKey, Allocation]:
        """The container's allocations from the pool. Raises Rejected."""
        keys = [
            (row.resource, device_id)
            for row in rows
            if row.resource in pool.config.resources
            for device_id in row.ids
        ]
        known = {entry.key: entry for entry in self._ledger.allocations() if entry.gpu is not None}
        for key in keys:
            if key not in known:
                raise Rejected(
                    grpc.StatusCode.UNAVAILABLE,
                    f"{self._paths.checkpoint} does not list {key[1]} of {key[0]} yet: the "
                    "agent adds this id within a minute (the kubelet tries again)",
                )
        return {key: known[key] for key in keys}

    def _choose(
        self,
        pool: SharePool,
        held: Mapping[AllocationKey, Allocation],
        first: AllocationKey,
        rows: Iterable[PodDevices],
    ) -> SharedGPU:
        """The GPU of the container. Raises Rejected if the container's shares do not fit.

        At its first start, a container gets a GPU with enough room, the nearest one to its HCAs.
        """
        request = Share(
            sum(_gpu(entry).memory_bytes for entry in held.values()),
            sum(percents(_gpu(entry)) for entry in held.values()),
        )
        free = pool.free(held.keys())
        own = _gpu(held[first]).bdf
        if not all(_gpu(entry).group for entry in held.values()):  # a first start
            spread = pool.config.placement == "spread"
            costs = self._costs(free, rows)
            own = choose(free, request, spread=spread, costs=costs) or own
        if own in free and free[own].holds(request):
            return pool.gpus[own]
        name = pool.gpus[own].node.name if own in pool.gpus else own or "no GPU"
        raise _refusal(
            f"the container's memory is on {name}, which does not have {request} free: "
            f"{pool.shown(free)}: delete the pod, so that a new pod gets another GPU"
        )

    def _costs(self, gpus: Collection[str], rows: Iterable[PodDevices]) -> dict[str, int]:
        """The distance of each GPU from the container's HCAs (docs/use/devices.md)."""
        keys = {(row.resource, device_id) for row in rows for device_id in row.ids}
        held = (entry for entry in self._ledger.allocations() if entry.key in keys)
        hcas = sorted({hca.address for entry in held for hca in entry.devices if hca.address})
        if not hcas:
            return {}
        topology = Topology.read(self._paths, {*gpus, *hcas})
        return {gpu: sum(COSTS[topology.distance(gpu, hca)] for hca in hcas) for gpu in gpus}

    def _write(
        self,
        pool: SharePool,
        chosen: SharedGPU,
        held: Mapping[AllocationKey, Allocation],
        first: AllocationKey,
        rows: Sequence[PodDevices],
    ) -> None:
        """Write the ledger, then the limits. After a kill in between, the kubelet calls again."""
        group = group_of(*first)
        self._holders.starts(group, rows)
        bound = {
            key: replace(
                _gpu(entry),
                uuid=chosen.uuid,
                bdf=chosen.address,
                minor=chosen.node.minor,
                group=group,
            )
            for key, entry in held.items()
        }
        share = sum(percents(gpu) for gpu in bound.values())
        memory = sum(gpu.memory_bytes for gpu in bound.values())
        # Time is limited only if the container has a share of time.
        limit = Limit(chosen.uuid, memory, (share or WHOLE) / WHOLE)
        try:
            self._ledger.bind(bound)
            variables = _variables(group, share) if pool.config.mode == "units" else {}
            self._files.start(group, chosen.node.minor, limit, variables)
        except OSError as error:
            raise Rejected(
                grpc.StatusCode.INTERNAL,
                f"cannot write the container's GPU and limits: {error.filename}: {error.strerror}: "
                "check the disk and its free space (the kubelet tries again)",
            ) from None
        _log.info("%s: starts on %s with %s", group, chosen.address, Share(memory, share or WHOLE))


def _variables(group: str, percents: int) -> Mapping[str, str]:
    """The variables of Alnair's device plugin, except those that only Alnair's library reads.

    Source: CentaurusInfra/alnair, alnair-device-plugin/pkg/devicepluginserver.
    """
    time = {"ALNAIR_VGPU_COMPUTE_PERCENTILE": str(min(percents, WHOLE))} if percents else {}
    return {"ALNAIR_ID": group, **time}


def _gpu(entry: Allocation) -> AllocatedGPU:
    assert entry.gpu is not None
    return entry.gpu


def _refusal(text: str) -> Rejected:
    return Rejected(grpc.StatusCode.FAILED_PRECONDITION, text)
