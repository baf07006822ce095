"""The devices of a pod, from the kubelet, the checkpoint and sysfs."""

from collections.abc import Iterator

import msgspec

from cli.node.state import ThisNode, gpu_label
from deviceplugin import checkpoint, pod_devices
from deviceplugin.kubelet.records import PodDevices
from deviceplugin.pod_devices import NOT_TOLD, PodDevice, Stale
from deviceplugin.pools.pool import Pool
from deviceplugin.pools.pool_config import ConfigError
from host.sysfs.gpus import address_of


class HeldRdmaDevice(msgspec.Struct, frozen=True):
    """An RDMA device of a container, with the uverbs numbers from its allocation."""

    rdma: str
    uverbs: str  # "uverbs0"; "" if it had none
    major: int
    minor: int


class HeldDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device id that a container holds, and an HCA that it stands for."""

    container: str
    resource: str
    id: str
    hca: str = ""  # id of the HCA; "" if the id is another device plugin's
    gpu: str = ""  # "GPU0 0000:1a:00.0", by another plugin
    verbs: tuple[HeldRdmaDevice, ...] = ()
    netdevs: tuple[str, ...] = ()
    since: str = ""


def devices_of(node: ThisNode, rows: list[PodDevices], notes: list[str]) -> Iterator[HeldDevice]:
    """The devices in the kubelet's rows, except those of our pools of GPUs. Adds to `notes`."""
    try:
        allocations = {allocation.key: allocation for allocation in node.allocations}
    except checkpoint.CheckpointDamaged as damage:
        notes.append(str(damage))
        allocations = {}
    ours = _our_pools(node, notes)
    for row in rows:
        for device_id in row.ids:
            allocation = allocations.get((row.resource, device_id))
            if allocation is not None and allocation.gpu is not None:
                continue
            if allocation is None or not allocation.devices:
                if allocation is not None:
                    notes.append(
                        f"it is unknown which HCA {row.resource} {device_id} is: {NOT_TOLD}"
                    )
                elif row.resource in ours:
                    notes.append(
                        f"{row.resource} {device_id} is not in {node.paths.checkpoint}: the agent "
                        "takes it over within a minute, if it runs"
                    )
                yield _unrecorded(node, row, device_id, ours.get(row.resource))
                continue
            for device in allocation.devices:
                device_of_pod = PodDevice(row.resource, device_id, device)
                notes += _staleness(node, device_of_pod)
                yield HeldDevice(
                    container=row.container,
                    resource=row.resource,
                    id=device_id,
                    hca=device.id,
                    verbs=tuple(_verbs(rdma) for rdma in device.rdma),
                    netdevs=device.netdevs,
                    since=allocation.time,
                )


def _our_pools(node: ThisNode, notes: list[str]) -> dict[str, Pool]:
    try:
        return {pool.config.resource: pool for pool in node.pools}
    except ConfigError as error:
        notes.append(str(error))
    except checkpoint.CheckpointDamaged:
        pass  # in the notes already
    return {}


def _unrecorded(node: ThisNode, row: PodDevices, device_id: str, pool: Pool | None) -> HeldDevice:
    """An id that the checkpoint lacks: a GPU's, another plugin's, or a very new allocation's."""
    address = address_of(node.gpus, device_id)
    slot = pool.slot(device_id) if pool is not None else None
    hca = node.hca(pod_devices.hca_of(device_id)) if slot is None else None
    if slot is not None and len(slot.hcas) == 1:
        hca = node.hca(slot.hcas[0])
    return HeldDevice(
        container=row.container,
        resource=row.resource,
        id=device_id,
        hca=hca.id if hca is not None else "",
        gpu=f"{gpu_label(node.gpus, address)} {address}" if address else "",
        netdevs=hca.netdevs if hca is not None else (),
    )


def _verbs(rdma: checkpoint.AllocatedRdmaDevice) -> HeldRdmaDevice:
    if rdma.uverbs is None:
        return HeldRdmaDevice(rdma.name, "", 0, 0)
    name = rdma.uverbs.path.rpartition("/")[2]
    return HeldRdmaDevice(rdma.name, name, rdma.uverbs.major, rdma.uverbs.minor)


def _staleness(node: ThisNode, device: PodDevice) -> list[str]:
    hca = node.hca(device.device.id)
    if hca is None:
        return [f"HCA {device.device.id} of {device.resource} is gone from this node"]
    try:
        pod_devices.require_current(node.paths, device, hca.rdma_names)
    except Stale as stale:
        return [str(stale)]
    return []
