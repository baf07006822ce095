"""What is known of one pod: its devices, its attachments, and whether the two belong together."""

from collections.abc import Iterator

import msgspec

from base.pod import Pod
from cli.pod_devices import HeldDevice, devices_of
from cli.this_node import ThisNode, rdma_label
from cni.attachments import pod_choices
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable, PodDevices
from host.discovery import HCA
from host.errors import HostError
from host.topology import Distance


class AttachedInterface(msgspec.Struct, frozen=True, kw_only=True):
    """An interface that a CNI plugin made for the pod."""

    ifname: str
    network: str
    plugin: str
    container_id: str
    phase: str
    on: str  # the parent, or the device: "ib0", "0000:3b:00.2"
    pkey: str  # "0x8001", "" where there is none
    hca: str
    rdma: str
    addresses: tuple[str, ...]
    matches: bool | None  # None if the pod was given no HCA, or it cannot be told
    verdict: str


class Way(msgspec.Struct, frozen=True):
    """How far a GPU of the pod is from an HCA of it."""

    gpu: str
    hca: str
    rdma: str
    distance: str
    gpudirect: bool


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `notes` say what could not be asked, and what is wrong."""

    pod: Pod
    devices: tuple[HeldDevice, ...]
    attachments: tuple[AttachedInterface, ...]
    claims: dict[str, str]  # the HCA that an attachment keeps, by "network/interface"
    ways: tuple[Way, ...]
    notes: tuple[str, ...]
    answered: bool  # the kubelet told what the pod holds

    @property
    def known(self) -> bool:
        """Anything at all is known of the pod."""
        return bool(self.devices or self.attachments or self.claims)


class _RecordedOrigin(msgspec.Struct):
    """What the records of the plugins have that says where an interface came from."""

    parent: str = ""
    pkey: int | None = None
    device: str = ""


def explained(node: ThisNode, namespace: str, name: str) -> Explained:
    """What there is to say of a pod; whatever cannot be read becomes a note."""
    notes: list[str] = []
    entries = _entries(node, namespace, name, notes)
    claims = {
        one.uid: one.claims
        for one in pod_choices.every(node.paths)
        if (one.namespace, one.name) == (namespace, name)
    }
    told = _told(node, notes)
    # A name is a new pod's once its former bearer is gone; what is last is the youngest.
    uids = [uid for uid in (*claims, *(one.pod_uid for one in entries)) if uid] or [""]
    pod = Pod(namespace, name, _uid(node, namespace, name, told or []) or uids[-1])
    rows = _rows(node, pod, notes, asked=told is not None)
    devices = tuple(devices_of(node, rows or [], notes))
    given = tuple(dict.fromkeys(one.hca for one in devices if one.hca))
    attachments = tuple(
        _attachment(node, one, claims.get(one.pod_uid, {}), devices, asked=rows is not None)
        for one in entries
    )
    ways = tuple(_ways(node, devices, given, notes))
    return Explained(
        pod=pod,
        devices=devices,
        attachments=attachments,
        claims=claims.get(pod.uid) or claims.get("", {}),  # not every runtime tells the UID
        ways=ways,
        notes=tuple(dict.fromkeys([*notes, *_warnings(ways), *_mismatches(attachments)])),
        answered=rows is not None,
    )


def _entries(node: ThisNode, namespace: str, name: str, notes: list[str]) -> list[JournalEntry]:
    found = []
    for entry in Journal(node.paths).entries():
        if isinstance(entry, JournalDamaged):
            notes.append(f"{entry}: it may be an attachment of this pod")
        elif (entry.pod_namespace, entry.pod_name) == (namespace, name):
            found.append(entry)
    return sorted(found, key=lambda one: (one.since, one.ifname))


def _told(node: ThisNode, notes: list[str]) -> list[PodDevices] | None:
    """What PodResources has, None if it could not be asked."""
    try:
        return records.from_pod_resources(node.paths)
    except KubeletUnreadable as error:
        notes.append(f"the kubelet was not asked: {error}")
        return None


def _uid(node: ThisNode, namespace: str, name: str, told: list[PodDevices]) -> str:
    """The UID of the pod that has the name now, by a device that it holds; "" if none tells."""
    own = [one for one in told if (one.namespace, one.name) == (namespace, name)]
    held = {(one.resource, known) for one in own for known in one.ids}
    try:
        noted = records.from_checkpoint(node.paths)
    except KubeletUnreadable:
        return ""
    return next(
        (row.uid for row in noted for known in row.ids if (row.resource, known) in held), ""
    )


def _rows(node: ThisNode, pod: Pod, notes: list[str], *, asked: bool) -> list[PodDevices] | None:
    """What the kubelet says; None if it could not be asked at all."""
    if not asked and not pod.uid:  # by which alone its checkpoint knows pods
        return None
    try:
        return records.of_pod(node.paths, pod.namespace, pod.name, pod.uid)
    except KubeletUnreadable as error:
        notes.append(f"the kubelet was not asked: {error}")
        return None


def _attachment(
    node: ThisNode,
    entry: JournalEntry,
    claims: dict[str, str],
    devices: tuple[HeldDevice, ...],
    *,
    asked: bool,
) -> AttachedInterface:
    try:
        undo = entry.undo_as(_RecordedOrigin)
    except JournalDamaged:
        undo = _RecordedOrigin()
    # The parent says where the interface is; the claim only helps where that is gone.
    hca = node.on_netdev(undo.parent) if undo.parent else node.hca(entry.device)
    hca_id = hca.id if hca else claims.get(f"{entry.network}/{entry.ifname}", entry.device)
    matches, verdict = _verdict(node, hca_id, devices, asked=asked)
    return AttachedInterface(
        ifname=entry.ifname,
        network=entry.network,
        plugin=entry.plugin,
        container_id=entry.container_id,
        phase=entry.phase,
        on=undo.parent or undo.device or entry.device,
        pkey=f"0x{undo.pkey:04x}" if undo.pkey is not None else "",
        hca=hca_id,
        rdma=rdma_label(hca) if hca is not None and _has_rdma(hca) else "",
        addresses=entry.addresses,
        matches=matches,
        verdict=verdict,
    )


def _has_rdma(hca: HCA) -> bool:
    return bool(hca.rdma or hca.rdma_names)


def _verdict(
    node: ThisNode, hca: str, devices: tuple[HeldDevice, ...], *, asked: bool
) -> tuple[bool | None, str]:
    given = [one for one in devices if one.hca]
    if not hca:
        return None, "its HCA cannot be told: its parent is gone"
    if not asked:
        return None, "cannot be told: the kubelet was not asked"
    if not given:
        return None, "the pod was given no HCA"
    holders = dict.fromkeys(one.container for one in given if one.hca == hca)
    if holders:
        return True, f"on the HCA that {', '.join(holders)} was given"
    others = dict.fromkeys(one.hca for one in given)
    shown = ", ".join(_shown(node, known) for known in others)
    return False, f"on {_shown(node, hca)}, but the pod was given {shown}"


def _shown(node: ThisNode, known: str) -> str:
    hca = node.hca(known)
    return f"{known} ({rdma_label(hca)})" if hca and _has_rdma(hca) else known


def _ways(
    node: ThisNode, devices: tuple[HeldDevice, ...], hcas: tuple[str, ...], notes: list[str]
) -> Iterator[Way]:
    held = dict.fromkeys(one.gpu for one in devices if one.gpu)
    if not held or not hcas:
        return
    try:
        topology = node.topology
    except HostError as error:
        notes.append(f"{error}: distances are not known")
        return
    for gpu in held:
        for known in hcas:
            hca = node.hca(known)
            distance = topology.distance(gpu.rpartition(" ")[2], hca.address if hca else "")
            rdma = rdma_label(hca) if hca else known
            yield Way(gpu, known, rdma, distance.name, distance <= Distance.PXB)


def _warnings(ways: tuple[Way, ...]) -> Iterator[str]:
    """A sentence for each GPU that no HCA of the pod can reach directly."""
    for gpu in dict.fromkeys(one.gpu for one in ways):
        own = [one for one in ways if one.gpu == gpu]
        if any(one.gpudirect for one in own):
            continue
        near = min(own, key=lambda one: (Distance[one.distance], one.hca))
        yield (
            f"GPUDirect RDMA will not work for {gpu}: no HCA of the pod is at PXB or nearer, the "
            f"nearest is {near.rdma} at {near.distance}; NCCL copies through the host's memory"
        )


def _mismatches(attachments: tuple[AttachedInterface, ...]) -> Iterator[str]:
    for one in attachments:
        if one.matches is False:
            yield (
                f"{one.ifname} is {one.verdict}: verbs and the interface go different ways; "
                'choose the parent by "master": "auto", or see why "match_device" is false'
            )
