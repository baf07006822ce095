"""The devices of one pod: what the kubelet, the checkpoint and sysfs say of its device ids."""

from collections.abc import Iterator

import msgspec

from cli.this_node import ThisNode, gpu_label
from deviceplugin import checkpoint, pod_devices
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.pod_devices import NOT_TOLD, PodDevice, Stale
from deviceplugin.pools.config import ConfigError
from deviceplugin.pools.pool import Pool
from host.gpus import address_of


class HeldRdmaDevice(msgspec.Struct, frozen=True):
    """A verbs device that a container was given, with the numbers of that time."""

    rdma: str
    uverbs: str  # "uverbs0"; "" if there was none
    major: int
    minor: int


class HeldDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device id that a container holds, once for each HCA behind it."""

    container: str
    resource: str
    id: str
    hca: str = ""  # id of the HCA; "" if it is none of ours
    gpu: str = ""  # "GPU0 0000:1a:00.0"
    verbs: tuple[HeldRdmaDevice, ...] = ()
    netdevs: tuple[str, ...] = ()
    since: str = ""


def devices_of(node: ThisNode, rows: list[PodDevices], notes: list[str]) -> Iterator[HeldDevice]:
    """What is behind the device ids of the kubelet's rows; what is amiss is added to `notes`."""
    try:
        allocations = {one.key: one for one in node.allocations}
    except checkpoint.CheckpointDamaged as damage:
        notes.append(str(damage))
        allocations = {}
    ours = _our_pools(node, notes)
    for row in rows:
        for known in row.ids:
            allocation = allocations.get((row.resource, known))
            if allocation is None or not allocation.devices:
                if allocation is not None:
                    notes.append(f"nothing tells which HCA {row.resource} {known} is: {NOT_TOLD}")
                elif row.resource in ours:
                    notes.append(
                        f"{row.resource} {known} is not in {node.paths.checkpoint}: the agent "
                        "takes it over within a minute, if it runs"
                    )
                yield _unrecorded(node, row, known, ours.get(row.resource))
                continue
            for device in allocation.devices:
                face = PodDevice(row.resource, known, device)
                notes += _staleness(node, face)
                yield HeldDevice(
                    container=row.container,
                    resource=row.resource,
                    id=known,
                    hca=device.id,
                    verbs=tuple(_verbs(one) for one in device.rdma),
                    netdevs=device.netdevs,
                    since=allocation.time,
                )


def _our_pools(node: ThisNode, notes: list[str]) -> dict[str, Pool]:
    try:
        return {pool.config.resource: pool for pool in node.pools}
    except ConfigError as error:
        notes.append(str(error))
    except checkpoint.CheckpointDamaged:
        pass  # told already
    return {}


def _unrecorded(node: ThisNode, row: PodDevices, known: str, pool: Pool | None) -> HeldDevice:
    """An id that the checkpoint does not have: a GPU's, another plugin's, or one to be adopted."""
    address = address_of(node.gpus, known)
    slot = pool.slot(known) if pool is not None else None
    hca = node.hca(pod_devices.hca_of(known)) if slot is None else None
    if slot is not None and len(slot.hcas) == 1:
        hca = node.hca(slot.hcas[0])
    return HeldDevice(
        container=row.container,
        resource=row.resource,
        id=known,
        hca=hca.id if hca is not None else "",
        gpu=f"{gpu_label(node.gpus, address)} {address}" if address else "",
        netdevs=hca.netdevs if hca is not None else (),
    )


def _verbs(rdma: checkpoint.AllocatedRdmaDevice) -> HeldRdmaDevice:
    if rdma.uverbs is None:
        return HeldRdmaDevice(rdma.name, "", 0, 0)
    name = rdma.uverbs.path.rpartition("/")[2]
    return HeldRdmaDevice(rdma.name, name, rdma.uverbs.major, rdma.uverbs.minor)


def _staleness(node: ThisNode, face: PodDevice) -> list[str]:
    hca = node.hca(face.device.id)
    if hca is None:
        return [f"HCA {face.device.id} of {face.resource} is gone from this node"]
    names = {*(rdma.name for rdma in hca.rdma), *hca.rdma_names}
    try:
        pod_devices.require_current(node.paths, face, names)
    except Stale as stale:
        return [str(stale)]
    return []
