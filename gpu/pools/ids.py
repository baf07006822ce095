"""Ids of a resource of GPUs: which may be allocated, and which the kubelet has given."""

from collections.abc import Iterable, Mapping, Sequence

import grpc

from base.types import DeviceId
from deviceplugin.kubelet.plugin_server import Rejected
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.ledger import Ledger
from gpu.driver.gpu_inventory import NodeGPU


def check(resource: str, ids: Sequence[str], known: Mapping[str, NodeGPU]) -> None:
    """Raise Rejected, which names the first id that cannot be allocated; `known` has their GPUs."""
    for device_id in ids:
        if device_id not in known:
            raise Rejected(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"cannot allocate {device_id} of {resource}: the pool has no such id",
            )
    for device_id in ids:
        if fault := known[device_id].fault:
            raise refusal(resource, device_id, f"its GPU is unhealthy: {fault}")


def refusal(resource: str, what: str, why: str) -> Rejected:
    """The refusal of an Allocate."""
    return Rejected(
        grpc.StatusCode.FAILED_PRECONDITION, f"cannot allocate {what} of {resource}: {why}"
    )


def unwritten(error: OSError) -> Rejected:
    """The answer where an allocation cannot be written."""
    return Rejected(
        grpc.StatusCode.INTERNAL,
        f"cannot write the allocation: {error.filename}: {error.strerror}: check the disk and its "
        "free space",
    )


def adopted(ledger: Ledger, resource: str, rows: Iterable[PodDevices]) -> list[DeviceId]:
    """The ids of a resource that the kubelet gave to containers and the ledger lacks, sorted."""
    known = ledger.keys()
    ids = {device_id for row in rows if row.resource == resource for device_id in row.ids}
    return sorted(device_id for device_id in ids if (resource, device_id) not in known)


def numa(gpu: NodeGPU) -> tuple[int, ...]:
    """The GPU's NUMA node for a list; () if the kernel does not know."""
    node = gpu.gpu.numa
    return (node,) if node is not None and node >= 0 else ()
