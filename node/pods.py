"""Finds a pod's devices and attachments, and checks that both use the same HCAs."""

from collections.abc import Collection, Iterator
from contextlib import suppress

import msgspec

from base.pod import Pod
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry
from cni.spec.errors import CNIError
from deviceplugin import checkpoint, current, pod_devices
from deviceplugin.allocate.preferred import COSTS
from deviceplugin.checkpoint import CheckpointDamaged
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable, PodDevices
from deviceplugin.pod_devices import NOT_TOLD, PodDevice, Stale
from deviceplugin.pools.pool import Pool
from deviceplugin.pools.pool_config import ConfigError
from host.sysfs.gpus import address_of
from host.sysfs.topology import Distance
from ipam.store.sqlite_store import SqliteStore
from node import node_gpus
from node.node_gpus import GpuPart
from node.state import ThisNode, gpu_label, rdma_label


class HeldRdmaDevice(msgspec.Struct, frozen=True):
    """An RDMA device of a container, with its uverbs device at the time of the allocation."""

    rdma: str
    uverbs: str  # "uverbs0"; "" if it had none
    major: int
    minor: int


class HeldDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device id that a container holds, and an HCA that the id stands for."""

    container: str
    resource: str
    id: str
    hca: str = ""  # the HCA's id; "" if the id is another device plugin's
    gpu: str = ""  # "GPU0 0000:1a:00.0", from another device plugin
    verbs: tuple[HeldRdmaDevice, ...] = ()
    netdevs: tuple[str, ...] = ()
    since: str = ""


class AttachedInterface(msgspec.Struct, frozen=True, kw_only=True):
    ifname: str
    network: str
    plugin: str
    container_id: str
    phase: str
    on: str  # the parent, or the device: "ib0", "0000:3b:00.2"
    pkey: str  # "0x8001", or ""
    hca: str
    rdma: str
    addresses: tuple[str, ...]
    matches: bool | None  # `None` if unknown, or if the pod has no HCA
    verdict: str


class AddressBeside(msgspec.Struct, frozen=True):
    """An address of podfabric on an interface of another project's plugin, such as macvlan."""

    ifname: str
    network: str
    address: str
    range: str


class Way(msgspec.Struct, frozen=True):
    """The distance of a GPU of the pod from an HCA of the pod."""

    gpu: str
    hca: str
    rdma: str
    distance: str
    cost: int  # of the distance (docs/use/devices.md)
    gpudirect: bool


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """The devices and interfaces of a pod. `notes` has unreadable sources and problems."""

    pod: Pod
    devices: tuple[HeldDevice, ...]
    attachments: tuple[AttachedInterface, ...]
    beside: tuple[AddressBeside, ...]
    ways: tuple[Way, ...]
    gpus: tuple[GpuPart, ...]  # parts that its containers hold of GPUs in podfabric's pools
    notes: tuple[str, ...]
    answered: bool  # whether the kubelet has reported the pod's devices

    @property
    def known(self) -> bool:
        return bool(self.devices or self.gpus or self.attachments or self.beside)


class InterfaceOrigin(msgspec.Struct, frozen=True, kw_only=True):
    on: str  # the parent, or the device: "ib0", "0000:3b:00.2"
    pkey: str  # "0x8001", or ""
    hca: str
    rdma: str
    mtu: int  # that the ADD has set; 0 if unknown


class _RecordedOrigin(msgspec.Struct):
    parent: str = ""
    pkey: int | None = None
    device: str = ""
    mtu: int = 0


def explained(node: ThisNode, namespace: str, name: str) -> Explained:
    """Find the devices and interfaces of a pod. A source that cannot be read becomes a note."""
    notes: list[str] = []
    entries = _entries(node, namespace, name, notes)
    every: list[PodDevices] | None = None
    try:
        every = records.from_pod_resources(node.paths)
    except KubeletUnreadable as error:
        notes.append(f"the kubelet was not asked: {error}")
    # A new pod may have the name of a pod that is gone. The last entry is the newest.
    uids = [entry.pod_uid for entry in entries if entry.pod_uid] or [""]
    pod = Pod(namespace, name, _uid(node, namespace, name, every or []) or uids[-1])
    rows = _rows(node, pod, notes, asked=every is not None)
    devices = tuple(devices_of(node, rows or [], notes))
    hcas = tuple(dict.fromkeys(device.hca for device in devices if device.hca))
    attachments = tuple(
        _attachment(node, entry, devices, asked=rows is not None) for entry in entries
    )
    parts: tuple[GpuPart, ...] = ()
    with suppress(CheckpointDamaged):  # `devices_of` has added a note
        every_part = node_gpus.held_parts(node, [])
        parts = tuple(one for one in every_part if one.container.pod in (str(pod), pod.uid or None))
    gpus = [device.gpu for device in devices if device.gpu]
    gpus += [f"{gpu_label(node.gpus, part.gpu)} {part.gpu}" for part in parts if part.gpu]
    ways = tuple(_ways(node, dict.fromkeys(gpus), hcas))
    notes += [part.problem for part in parts if part.problem]
    return Explained(
        pod=pod,
        devices=devices,
        attachments=attachments,
        beside=tuple(_beside(node, pod, entries, notes)),
        ways=ways,
        gpus=parts,
        notes=tuple(dict.fromkeys([*notes, *_warnings(ways), *_mismatches(attachments)])),
        answered=rows is not None,
    )


def _entries(node: ThisNode, namespace: str, name: str, notes: list[str]) -> list[JournalEntry]:
    entries = []
    for entry in Journal(node.paths).entries():
        if isinstance(entry, JournalDamaged):
            notes.append(f"{entry}: it may belong to this pod")
        elif (entry.pod_namespace, entry.pod_name) == (namespace, name):
            entries.append(entry)
    return sorted(entries, key=lambda entry: (entry.since, entry.ifname))


def _beside(
    node: ThisNode, pod: Pod, entries: list[JournalEntry], notes: list[str]
) -> Iterator[AddressBeside]:
    try:
        held = SqliteStore(node.paths.ipam, "").reservations()
    except CNIError as error:
        notes.append(f"its addresses are not known: {error}")
        return
    ours = {entry.attachment for entry in entries}
    for one in held:
        if one.is_of(pod) and one.attachment not in ours:
            yield AddressBeside(one.ifname, one.network, one.address, one.range)


def _uid(node: ThisNode, namespace: str, name: str, rows: list[PodDevices]) -> str:
    """The pod's present UID, from the kubelet's checkpoint, or "" if unknown."""
    own = [row for row in rows if (row.namespace, row.name) == (namespace, name)]
    held = {(row.resource, device_id) for row in own for device_id in row.ids}
    try:
        noted = records.from_checkpoint(node.paths)
    except KubeletUnreadable:
        return ""
    return next(
        (row.uid for row in noted for device_id in row.ids if (row.resource, device_id) in held), ""
    )


def _rows(node: ThisNode, pod: Pod, notes: list[str], *, asked: bool) -> list[PodDevices] | None:
    """The pod's devices from the kubelet, or `None` if the kubelet's records cannot be read."""
    if not asked and not pod.uid:  # the kubelet's checkpoint names pods by UID only
        return None
    try:
        return records.of_pod(node.paths, pod.namespace, pod.name, pod.uid)
    except KubeletUnreadable as error:
        notes.append(f"the kubelet was not asked: {error}")
        return None


def _attachment(
    node: ThisNode, entry: JournalEntry, devices: tuple[HeldDevice, ...], *, asked: bool
) -> AttachedInterface:
    origin = origin_of(node, entry)
    matches, verdict = _verdict(node, origin.hca, devices, asked=asked)
    return AttachedInterface(
        ifname=entry.ifname,
        network=entry.network,
        plugin=entry.plugin,
        container_id=entry.container_id,
        phase=entry.phase,
        on=origin.on,
        pkey=origin.pkey,
        hca=origin.hca,
        rdma=origin.rdma,
        addresses=entry.addresses,
        matches=matches,
        verdict=verdict,
    )


def origin_of(node: ThisNode, entry: JournalEntry) -> InterfaceOrigin:
    """The HCA and the partition of an attachment. The fields are "" if they are unknown."""
    try:
        undo = entry.undo_as(_RecordedOrigin)
    except JournalDamaged:
        undo = _RecordedOrigin()
    hca = node.on_netdev(undo.parent) if undo.parent else node.hca(entry.device)
    return InterfaceOrigin(
        on=undo.parent or undo.device or entry.device,
        pkey=f"0x{undo.pkey:04x}" if undo.pkey is not None else "",
        hca=hca.id if hca else entry.device,
        rdma=",".join(hca.rdma_names) if hca is not None else "",
        mtu=undo.mtu,
    )


def _verdict(
    node: ThisNode, hca: str, devices: tuple[HeldDevice, ...], *, asked: bool
) -> tuple[bool | None, str]:
    with_hca = [device for device in devices if device.hca]
    if not hca:
        return None, "unknown: its parent is gone, so its HCA is unknown"
    if not asked:
        return None, "unknown: the kubelet could not be asked"
    if not with_hca:
        return None, "the pod has no HCA from the kubelet"
    holders = dict.fromkeys(device.container for device in with_hca if device.hca == hca)
    if holders:
        return True, f"on the HCA of {', '.join(holders)}"
    others = dict.fromkeys(device.hca for device in with_hca)
    shown = ", ".join(_shown(node, hca_id) for hca_id in others)
    return False, f"on {_shown(node, hca)}, but the pod has {shown}"


def _shown(node: ThisNode, hca_id: str) -> str:
    hca = node.hca(hca_id)
    return f"{hca_id} ({rdma_label(hca)})" if hca and hca.rdma_names else hca_id


def _ways(node: ThisNode, gpus: Collection[str], hcas: Collection[str]) -> Iterator[Way]:
    for gpu in gpus:
        for hca_id in hcas:
            hca = node.hca(hca_id)
            distance = node.topology.distance(gpu.rpartition(" ")[2], hca.address if hca else "")
            rdma = rdma_label(hca) if hca else hca_id
            direct = distance <= Distance.PXB
            yield Way(gpu, hca_id, rdma, distance.name, COSTS[distance], direct)


def _warnings(ways: tuple[Way, ...]) -> Iterator[str]:
    """A warning for each GPU that GPUDirect RDMA cannot reach from any HCA of the pod."""
    for gpu in dict.fromkeys(way.gpu for way in ways):
        own = [way for way in ways if way.gpu == gpu]
        if any(way.gpudirect for way in own):
            continue
        near = min(own, key=lambda way: (Distance[way.distance], way.hca))
        yield (
            f"GPUDirect RDMA will not work for {gpu}: no HCA of the pod is at PXB or nearer, the "
            f"nearest is {near.rdma} at {near.distance}; NCCL copies through the host's memory"
        )


def _mismatches(attachments: tuple[AttachedInterface, ...]) -> Iterator[str]:
    for interface in attachments:
        if interface.matches is False:
            yield (
                f"{interface.ifname} is {interface.verdict}: the pod's RDMA devices and this "
                'interface use different HCAs; set "master": "auto", or check why '
                '"match_device" is false'
            )


def devices_of(node: ThisNode, rows: list[PodDevices], notes: list[str]) -> Iterator[HeldDevice]:
    """The devices in the kubelet's rows, without GPUs of our pools. Adds problems to `notes`."""
    try:
        allocations = {allocation.key: allocation for allocation in node.allocations}
    except CheckpointDamaged as damage:
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
    except CheckpointDamaged:
        pass  # `devices_of` has added a note
    return {}


def _unrecorded(node: ThisNode, row: PodDevices, device_id: str, pool: Pool | None) -> HeldDevice:
    """An id that podfabric's checkpoint lacks, such as an id of another device plugin."""
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
    return HeldRdmaDevice(rdma.name, *(current.uverbs_of(rdma) or ("", 0, 0)))


def _staleness(node: ThisNode, device: PodDevice) -> list[str]:
    hca = node.hca(device.device.id)
    if hca is None:
        return [f"HCA {device.device.id} of {device.resource} is gone from this node"]
    try:
        pod_devices.require_current(node.paths, device, hca.rdma_names)
    except Stale as stale:
        return [str(stale)]
    return []
