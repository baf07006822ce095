"""Measures what pods use now: RDMA objects on shared HCAs, and parts of GPUs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import cache

import msgspec

from base.text import printable
from cni.attachments.journal import Journal, JournalEntry
from gpu.limits import processes
from host.errors import HostError
from host.netlink import rdma, rdma_objects
from host.netlink.rdma import RdmaNetlink
from node import locked_memory, node_gpus
from node.node_gpus import GpuPart, bytes_text
from node.state import ThisNode

_MOST_PODS = 256  # with a limit of locked memory


class Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A part of a FabricNode's status."""


class RdmaObjects(Part, frozen=True):
    """The RDMA objects of a pod's processes on a device of the host's namespace.

    The fields have the kernel's names: queue pairs, memory regions, completion queues, connection
    ids.
    """

    pod: str  # "ml/worker-0", or else the pod's UID
    device: str  # "mlx5_0"
    qp: int = 0
    mr: int = 0
    cq: int = 0
    cm_id: int = 0

    @property
    def texts(self) -> tuple[str, ...]:
        """The fields in their order, for a table."""
        return (self.pod, self.device, *map(str, (self.qp, self.mr, self.cq, self.cm_id)))


class GpuPartStatus(Part, frozen=True):
    """A container's part of a GPU. The container reports its use, which may be wrong."""

    gpu: str  # PCI address
    pod: str
    container: str = ""
    memory_bytes: int | None = None  # `None`: no limit
    percent: int | None = None  # of the GPU's time; `None`: no limit
    used_bytes: int | None = None  # in whole MiB; `None`: unknown
    waited_seconds: int | None = None  # the sum of all waits of launches; `None`: unknown

    @property
    def texts(self) -> tuple[str, ...]:
        """GPU, pod, container, memory limit, used memory, time limit and waits, for a table."""
        return (
            self.gpu,
            self.pod or "not known",
            self.container,
            bytes_text(self.memory_bytes) or "all",
            bytes_text(self.used_bytes),
            "all" if self.percent is None else f"{self.percent} %",
            "" if self.waited_seconds is None else f"{self.waited_seconds} s",
        )


class LockedMemory(Part, frozen=True):
    """The lowest limit of locked memory of a pod's containers that have HCAs.

    `wanted` is the limit that the container's pool gives, if the limit is lower.
    """

    pod: str
    limit: str  # "unlimited", or bytes
    wanted: str = ""


class Usage(msgspec.Struct, frozen=True):
    objects: tuple[RdmaObjects, ...] = ()
    gpu_parts: tuple[GpuPartStatus, ...] = ()
    locked_memory: tuple[LockedMemory, ...] = ()
    problem: str = ""  # the reason why objects cannot be counted
    totals: object = None  # host.netlink.rdma_objects.totals


NO_USAGE = Usage()


def measured(node: ThisNode, before: Usage = NO_USAGE) -> Usage:
    """The present use. Counts RDMA objects only if a pod holds a device or has an interface.

    The objects are those of `before` if no device has another number of objects. The locked memory
    is read only if `before` is NO_USAGE.
    """
    parts = tuple(map(_part, node_gpus.held_parts(node, [])))
    if not (node.allocations or any(Journal(node.paths).entries())):
        return Usage(gpu_parts=parts)
    locked = tuple(_locked_memory(node)) if before is NO_USAGE else before.locked_memory
    try:
        with rdma.rdma() as socket:
            totals, objects = rdma_objects.totals(socket), before.objects
            if totals != before.totals:
                objects = tuple(_objects(node, socket))
    except HostError as error:
        return Usage((), parts, locked, problem=str(error))
    return Usage(objects, parts, locked, totals=totals)


def _part(part: GpuPart) -> GpuPartStatus:
    used, waited = (part.use.used_bytes, part.use.wait_ns) if part.use else (None, None)
    return GpuPartStatus(
        gpu=part.gpu,
        pod=part.container.pod,
        container=part.container.name,
        memory_bytes=part.memory_bytes or None,
        percent=round(100 * part.compute_share) or None,
        used_bytes=None if used is None else used >> 20 << 20,
        waited_seconds=None if waited is None else waited // 10**9,
    )


def _objects(node: ThisNode, socket: RdmaNetlink) -> Iterator[RdmaObjects]:
    """The objects of each pod on each device, sorted. Raises HostError.

    The cgroup of an object's process names the pod. Yields nothing outside the host's PID
    namespace, because the kernel hides the pids there.
    """
    counts: dict[tuple[str, str], Counter[str]] = {}
    container_of = cache(processes.container_of)  # a process may have objects of each kind
    for device in rdma.devices(socket) if processes.sees_the_host() else ():
        for kind, by_pid in rdma_objects.by_process(socket, device).items():
            for pid, count in by_pid.items():
                if container := container_of(pid):
                    of_pod = counts.setdefault((container.pod_uid, device.name), Counter())
                    of_pod[kind] += count
    names = _names(node, {uid for uid, _ in counts})
    for (uid, device_name), found in sorted(counts.items()):
        pod = printable(names.get(uid, uid))[:330]  # within the lengths of the schema
        yield RdmaObjects(pod=pod, device=printable(device_name)[:64], **found)


def _locked_memory(node: ThisNode) -> Iterator[LockedMemory]:
    """The lowest limit of each pod that holds HCAs, sorted by pod."""
    holders = node.holders.by_key if any(one.devices for one in node.allocations) else {}
    keys = [one.key for one in node.allocations if one.devices and one.key in holders]
    pods = {holders[key].uid: holders[key].pod for key in keys if holders[key].uid}
    if not pods:
        return
    lowest: dict[str, locked_memory.ContainerLimit] = {}
    limits = locked_memory.wanted(node.pools)
    for one in locked_memory.of_containers(node.paths, limits, pods):
        pod, size = pods[one.container.pod_uid], locked_memory.size_of
        lowest[pod] = min(lowest.get(pod, one), one, key=lambda each: size(each.limit))
    for pod, one in sorted(lowest.items())[:_MOST_PODS]:
        yield LockedMemory(
            pod=pod[:330], limit=one.limit[:20], wanted=one.wanted if one.is_low else ""
        )


def _names(node: ThisNode, uids: Set[str]) -> Mapping[str, str]:
    """The names of pods that hold a device or have an interface, by UID."""
    holders = node.holders.by_key.values() if uids else ()
    names = {holder.uid: holder.pod for holder in holders if "/" in holder.pod}
    if not uids <= names.keys():
        for entry in Journal(node.paths).entries():
            if isinstance(entry, JournalEntry):
                names.setdefault(entry.pod_uid, f"{entry.pod_namespace}/{entry.pod_name}")
    return names
