"""PreStartContainer: which container starts, what it has of which GPU, and its limits.

The kubelet calls this before each start of a container, once for each of its resources and in
random order. By then it lists all of the container's devices (PodResources), so each call finds the
same, and the second one changes nothing. The kubelet tries again after an error.
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
from gpu.pools.container_files import Giver, group_of
from gpu.pools.holders import Holders
from gpu.pools.placement import WHOLE, Share, choose
from gpu.pools.share_pool import SharedGPU, SharePool, percents
from host.sysfs.topology import Topology

ASK_KUBELET = 5.0  # seconds, of the 30 that the kubelet waits

_log = logging.getLogger(__name__)


class Starter:
    """Decides at the start of a container."""

    def __init__(
        self,
        paths: Paths,
        ledger: Ledger,
        kubelet: PodResourcesClient,
        giver: Giver,
        holders: Holders,
    ) -> None:
        self._holders = holders
        self._paths = paths
        self._ledger = ledger
        self._kubelet = kubelet
        self._giver = giver

    def start(self, pool: SharePool, resource: str, ids: Sequence[str]) -> None:
        """A container with these ids of a resource starts. Raises Rejected."""
        rows = self._container(resource, ids)
        with self._ledger.allocating:
            held = self._held(pool, rows)
            _check_one_slot(pool, held)
            memory = {key: entry for key, entry in held.items() if _gpu(entry).memory_bytes}
            if not memory:
                raise _refusal(
                    f"{rows[0].container} asks for {resource} alone, which is time of a GPU: ask "
                    f"for {pool.config.memory_resource} too"
                )
            chosen = self._choose(pool, held, memory, self._hcas(rows))
            self._write(pool, chosen, held, memory, rows)

    def _container(self, resource: str, ids: Sequence[str]) -> list[PodDevices]:
        """All rows of the container that has exactly these ids of the resource.

        An init container leaves its ids to the containers after it: of several with the same ids,
        the one that has the most devices counts. Raises Rejected.
        """
        wanted = tuple(sorted(ids))
        problems = []
        for written in (False, True):  # PodResources does not list init containers
            try:
                containers: dict[tuple[str, str, str, str], list[PodDevices]] = {}
                for row in self._rows(written=written):
                    key = row.namespace, row.name, row.uid, row.container
                    containers.setdefault(key, []).append(row)
            except KubeletUnreadable as error:
                problems.append(str(error))
                continue
            matching = [
                rows
                for rows in containers.values()
                if any((row.resource, row.ids) == (resource, wanted) for row in rows)
            ]
            if matching:
                return max(matching, key=lambda rows: sum(len(row.ids) for row in rows))
        why = "; ".join(problems) or "it lists no container with these ids"
        raise Rejected(
            grpc.StatusCode.UNAVAILABLE,
            f"the kubelet does not say which container starts with {', '.join(wanted[:4])}: {why} "
            "(it tries again)",
        )

    def _rows(self, *, written: bool) -> list[PodDevices]:
        if written:
            return records.from_checkpoint(self._paths)
        return records.from_answer(self._kubelet.list(ASK_KUBELET))

    def _held(
        self, pool: SharePool, rows: Collection[PodDevices]
    ) -> dict[AllocationKey, Allocation]:
        """The container's allocations of the pool. Raises Rejected."""
        wanted = [
            (row.resource, device_id)
            for row in rows
            if row.resource in pool.config.resources
            for device_id in row.ids
        ]
        known = {entry.key: entry for entry in self._ledger.allocations() if entry.gpu is not None}
        for key in wanted:
            if key not in known:
                raise Rejected(
                    grpc.StatusCode.UNAVAILABLE,
                    f"{key[1]} of {key[0]} is not in {self._paths.checkpoint}: it is taken over "
                    "from the kubelet within a minute (the kubelet tries again)",
                )
        return {key: known[key] for key in wanted}

    def _choose(
        self,
        pool: SharePool,
        held: Mapping[AllocationKey, Allocation],
        memory: Mapping[AllocationKey, Allocation],
        hcas: Sequence[str],
    ) -> SharedGPU:
        """The GPU of the container. Raises Rejected.

        At the first start of the container it is the nearest to its HCAs that has room. That may be
        another one than its pod's init container had, which has ended.
        """
        wanted = Share(
            sum(_gpu(entry).memory_bytes for entry in held.values()),
            sum(percents(_gpu(entry)) for entry in held.values()),
        )
        free = pool.free(held.keys())
        own = _gpu(next(iter(memory.values()))).bdf
        if not all(_gpu(entry).group for entry in held.values()):  # some an init container had
            spread = pool.config.placement == "spread"
            costs = self._costs(free, hcas)
            own = choose(free, wanted, spread=spread, costs=costs) or own
        if own in free and free[own].holds(wanted):
            return pool.gpus[own]
        names = pool.gpus[own].node.name if own in pool.gpus else own or "no GPU"
        raise _refusal(
            f"its memory is on {names}, and no GPU has {wanted} free for it: {pool.shown(free)}: "
            "delete the pod, so that it gets another place"
        )

    def _hcas(self, rows: Iterable[PodDevices]) -> list[str]:
        """The addresses of the HCAs of our pools that a container has."""
        keys = {(row.resource, device_id) for row in rows for device_id in row.ids}
        held = (entry for entry in self._ledger.allocations() if entry.key in keys)
        return sorted({of.address for entry in held for of in entry.devices if of.address})

    def _costs(self, gpus: Collection[str], hcas: Sequence[str]) -> dict[str, int]:
        """How far each GPU is from these HCAs together, in the costs of docs/allocation.md.

        All are equal without HCAs.
        """
        if not hcas:
            return {}
        topology = Topology.read(self._paths, {*gpus, *hcas})
        return {gpu: sum(COSTS[topology.distance(gpu, hca)] for hca in hcas) for gpu in gpus}

    def _write(
        self,
        pool: SharePool,
        chosen: SharedGPU,
        held: Mapping[AllocationKey, Allocation],
        memory: Mapping[AllocationKey, Allocation],
        rows: Sequence[PodDevices],
    ) -> None:
        """Write the ledger, then the limits. After a kill between them the kubelet calls again."""
        resource = next(iter(memory))[0]
        slot = min(device_id for _, device_id in memory)
        group = group_of(resource, slot)
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
        limit = Limit(
            chosen.uuid,
            sum(gpu.memory_bytes for gpu in bound.values()),
            share / 100 if share else 1.0,  # without time, it is not limited
        )
        try:
            self._ledger.bind(bound)
            variables = _variables(group, share) if pool.config.mode == "units" else {}
            self._giver.start(group, chosen.node.minor, limit, variables)
        except OSError as error:
            raise Rejected(
                grpc.StatusCode.INTERNAL,
                f"cannot write what the container has: {error.filename}: {error.strerror}: check "
                "the disk and its free space (the kubelet tries again)",
            ) from None
        _log.info("%s: starts on %s with %s", group, chosen.address, limit)


def _variables(group: str, percents: int) -> Mapping[str, str]:
    """The variables that Alnair's device plugin gives, for programs that read them.

    Nothing depends on them here. Those that only Alnair's own library reads are not set, since that
    is not there: LD_PRELOAD, ALNAIR_SOCKET, ALNAIR_WORKSPACE_PATH.

    Source: CentaurusInfra/alnair, alnair-device-plugin/pkg/devicepluginserver.
    """
    time = {"ALNAIR_VGPU_COMPUTE_PERCENTILE": str(min(percents, WHOLE))} if percents else {}
    return {"ALNAIR_ID": group, **time}


def _check_one_slot(pool: SharePool, held: Collection[AllocationKey]) -> None:
    resources = sorted({resource for resource, _ in held})
    if pool.config.mode == "slices" and len(resources) > 1:
        raise _refusal(
            f"a container can have slices of one shape, and this one asks for "
            f"{' and '.join(resources)}: ask for one of them"
        )


def _gpu(entry: Allocation) -> AllocatedGPU:
    assert entry.gpu is not None
    return entry.gpu


def _refusal(text: str) -> Rejected:
    return Rejected(grpc.StatusCode.FAILED_PRECONDITION, text)
