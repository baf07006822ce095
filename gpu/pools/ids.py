"""Ids of GPU resources: checks, refusals, preferred ids, and ids that the ledger lacks."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import grpc

from base.types import DeviceId
from deviceplugin.kubelet.plugin_server import Rejected
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.ledger import Ledger
from gpu.driver.gpu_inventory import NodeGPU


def check(resource: str, ids: Sequence[str], known: Mapping[str, NodeGPU]) -> None:
    """Raise Rejected for the first id that cannot be allocated. `known` has the GPU of each id."""
    for device_id in ids:
        if device_id not in known:
            raise Rejected(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"cannot allocate {device_id} of {resource}: the pool has no such id",
            )
    for device_id in ids:
        if fault := known[device_id].fault:
            raise refusal(resource, device_id, f"its GPU is unhealthy: {fault}")


def refusal(resource: str, subject: str, reason: str) -> Rejected:
    return Rejected(
        grpc.StatusCode.FAILED_PRECONDITION, f"cannot allocate {subject} of {resource}: {reason}"
    )


def unwritten(error: OSError) -> Rejected:
    return Rejected(
        grpc.StatusCode.INTERNAL,
        f"cannot write the allocation: {error.filename}: {error.strerror}: check the disk and its "
        "free space",
    )


def adopted(ledger: Ledger, resource: str, rows: Iterable[PodDevices]) -> list[DeviceId]:
    """The ids of a resource that the kubelet's rows list and the ledger lacks."""
    known = ledger.keys()
    ids = {device_id for row in rows if row.resource == resource for device_id in row.ids}
    return sorted(device_id for device_id in ids if (resource, device_id) not in known)


def numa(gpu: NodeGPU) -> tuple[int, ...]:
    """The GPU's NUMA node as a tuple; empty if the kernel does not report it."""
    node = gpu.gpu.numa
    return (node,) if node is not None and node >= 0 else ()


def preferred(
    gpu_of: Mapping[str, str],
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    held: Mapping[str, int],
    *,
    spread: bool,
) -> list[str]:
    """Choose up to `size` ids: first `must_include`, then ids of as few GPUs as possible.

    `gpu_of` has the GPU of each id. `held` has the number of held ids of each GPU. With `spread`,
    GPUs with few held ids come first, otherwise GPUs with many.
    """
    free = dict.fromkeys(available)
    chosen = [device_id for device_id in dict.fromkeys(must_include) if device_id in free]
    chosen = chosen[: max(size, 0)]
    by_gpu: dict[str, list[str]] = {}
    for device_id in sorted(set(free).difference(chosen), key=_order):
        by_gpu.setdefault(gpu_of.get(device_id, ""), []).append(device_id)
    unknown = by_gpu.pop("", [])
    taken = Counter(gpu_of[device_id] for device_id in chosen if device_id in gpu_of)
    missing = size - len(chosen)

    def order(gpu: str) -> tuple[int, int, int, tuple[str, int]]:
        load = held.get(gpu, 0)
        enough = min(len(by_gpu[gpu]), missing)
        return -taken[gpu], -enough, load if spread else -load, _order(gpu)

    ranked = (device_id for gpu in sorted(by_gpu, key=order) for device_id in by_gpu[gpu])
    return [*chosen, *ranked, *unknown][: max(size, 0)]


def _order(text: str) -> tuple[str, int]:
    """The key to sort by name, then number: "nvidia0-_-9" comes before "nvidia0-_-10"."""
    name = text.rstrip("0123456789")
    number = text[len(name) :]
    return name, int(number) if number and len(number) < 10 else -1
