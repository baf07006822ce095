"""FabricNode: one object per node, with the node's HCAs, pools, GPUs, attachments and faults.

The agent writes the object (agent.node_report). The CRD in deploy/chart describes the fields.
"""

import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from base.pod import Pod
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry, Phase
from deviceplugin.checkpoint import CheckpointDamaged
from deviceplugin.pools.pool_config import ConfigError
from host.sysfs.discovery import HCA
from host.sysfs.topology import Topology
from kube.resources import Meta, Resource
from node import node_gpus, node_hcas, pods
from node.attachment_faults import AttachmentHealth
from node.state import ThisNode
from node.usage import NO_USAGE, GpuPartStatus, Part, RdmaObjects, Usage

MOST_BYTES = 30_000  # of the status as JSON
_MOST_REASONS = 3  # why ids of a pool are withheld
_MOST_FAULTS = 32
_MOST_PODS = 256  # of a device
_LONGEST_TEXT = 300  # characters of a reason


class PortStatus(Part, frozen=True):
    port: str  # "mlx5_0/1"
    state: str = ""
    link_layer: str = ""
    rate: str = ""
    guid: str = ""
    pkeys: tuple[str, ...] = ()
    netdevs: tuple[str, ...] = ()


class HcaStatus(Part, frozen=True):
    id: str
    rdma: tuple[str, ...] = ()
    driver: str = ""
    numa: int | None = None
    switch: str = ""
    pf: str = ""
    vfs: int = 0
    flaps: int = 0
    present: bool = True
    ports: tuple[PortStatus, ...] = ()
    pools: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    fault: str = ""


class OfferedPool(Part, frozen=True):
    """The device ids of a resource. `reasons` says why no pod gets the `withheld` ids now."""

    resource: str
    ids: int = 0
    held: int = 0
    withheld: int = 0
    reasons: tuple[str, ...] = ()


class GpuStatus(Part, frozen=True):
    id: str
    uuid: str = ""
    numa: int | None = None
    switch: str = ""
    pools: tuple[str, ...] = ()
    memory_bytes: int | None = None
    free_bytes: int | None = None
    free_percent: int | None = None
    pods: tuple[str, ...] = ()
    fault: str = ""


class AttachmentStatus(Part, frozen=True):
    pod: str  # "ml/worker-0"
    interface: str
    network: str = ""
    plugin: str = ""
    phase: str = Phase.ATTACHED
    hca: str = ""
    parent: str = ""
    pkey: str = ""
    addresses: tuple[str, ...] = ()
    since: str = ""


class FaultStatus(Part, frozen=True):
    about: str  # "0000:3b:00.0", "config.yaml"
    text: str


class RefusalStatus(Part, frozen=True):
    """An ADD that failed. The runtime repeats the ADD. `since` is the time of the first failure."""

    pod: str
    interface: str = ""
    network: str = ""
    code: int = 0
    text: str = ""
    since: str = ""


class Counts(Part, frozen=True):
    """The numbers that `kubectl get fabricnodes` shows."""

    hcas: int = 0
    active_ports: int = 0
    ports: int = 0
    gpus: int = 0
    attachments: int = 0
    faults: int = 0
    refusals: int = 0


class FabricNodeStatus(Part, frozen=True):
    version: str = ""
    kernel: str = ""
    written: str = ""  # RFC 3339: the time of the last change
    counts: Counts = Counts()
    hcas: tuple[HcaStatus, ...] = ()
    pools: tuple[OfferedPool, ...] = ()
    gpus: tuple[GpuStatus, ...] = ()
    attachments: tuple[AttachmentStatus, ...] = ()
    objects: tuple[RdmaObjects, ...] = ()
    gpu_parts: tuple[GpuPartStatus, ...] = ()
    faults: tuple[FaultStatus, ...] = ()
    refusals: tuple[RefusalStatus, ...] = ()
    left_out: str = ""  # "90 of 410 attachments" do not fit into MOST_BYTES


class FabricNode(Resource, frozen=True, kw_only=True):
    API = "fabric.podfabric.io/v1alpha1"
    KIND = "FabricNode"
    PLURAL = "fabricnodes"

    metadata: Meta
    status: FabricNodeStatus = FabricNodeStatus()


def observed(
    node: ThisNode,
    mistakes: Mapping[str, str],
    version: str,
    refusals: Iterable[RefusalStatus] = (),
    attached: AttachmentHealth | None = None,
) -> FabricNodeStatus:
    """The present status of this node. `mistakes` has the errors of config.yaml, by section.

    To read the status repeatedly, pass the same `attached` each time.
    """
    faults = [
        FaultStatus(about=f"config.yaml: {part}", text=text) for part, text in mistakes.items()
    ]
    hcas: list[HcaStatus] = []
    pools: list[OfferedPool] = []
    gpus: list[GpuStatus] = []
    try:
        listed = node_hcas.listed(node)
        flaps = node.health.counts(time.monotonic())
        hcas = [_hca(one, node.topology, flaps) for one in listed]
        of_gpus = node_gpus.listed(node).gpus
        pools = [*_pools(node), *_pools_of_gpus(of_gpus)]
        gpus = [_gpu(one, node.topology) for one in of_gpus]
    except (ConfigError, CheckpointDamaged) as error:
        faults.append(FaultStatus(about="devices", text=str(error)))
    broken = [(one.id, one.fault) for one in hcas] + [(one.id, one.fault) for one in gpus]
    faults += [FaultStatus(about=about, text=text) for about, text in broken if text]
    attachments, damaged = _attachments(node)
    faults += damaged
    of_attachments = (attached or AttachmentHealth()).look(node)
    faults += [FaultStatus(about=about, text=text) for about, text in of_attachments]
    status = FabricNodeStatus(
        version=version,
        kernel=platform.release(),
        hcas=tuple(hcas),
        pools=tuple(pools),
        gpus=tuple(gpus),
        attachments=tuple(attachments),
        faults=tuple(_short(faults[:_MOST_FAULTS])),
        refusals=tuple(refusals),
    )
    return msgspec.structs.replace(status, counts=_counts(status, len(faults)))


def with_usage(status: FabricNodeStatus, usage: Usage) -> FabricNodeStatus:
    return msgspec.structs.replace(status, objects=usage.objects, gpu_parts=usage.gpu_parts)


def _counts(status: FabricNodeStatus, faults: int) -> Counts:
    ports = [port for hca in status.hcas for port in hca.ports]
    return Counts(
        hcas=len(status.hcas),
        active_ports=sum(port.state == "ACTIVE" for port in ports),
        ports=len(ports),
        gpus=len(status.gpus),
        attachments=len(status.attachments),
        faults=faults,
        refusals=len(status.refusals),
    )


def pods_with_faults(
    node: ThisNode, status: FabricNodeStatus, attached: AttachmentHealth
) -> Iterator[tuple[Pod, str]]:
    """The pods that hold or use an HCA with a fault or have an attachment with one, with a text.

    A fault of a PF is also a fault of its VFs and SFs.
    """
    faults = {hca.id: hca.fault for hca in status.hcas if hca.fault}
    faults |= {
        hca.id: faults[hca.pf] for hca in status.hcas if hca.pf in faults and hca.id not in faults
    }
    of_attachments = {key: text for key, text in attached.reports().items() if text}
    if not faults and not of_attachments:
        return
    start = "the pod has an HCA with a fault: "
    for listed in node_hcas.listed(node):
        if text := faults.get(listed.hca.id):
            for holder in listed.held:
                namespace, _, name = holder.container.pod.partition("/")
                if name:  # otherwise only the UID is known
                    yield (
                        Pod(namespace, name, holder.container.uid),
                        f"{start}{listed.hca.id}: {text}",
                    )
    for entry in Journal(node.paths).entries():
        if isinstance(entry, JournalEntry):
            hca = pods.origin_of(node, entry).hca
            pod = Pod(entry.pod_namespace, entry.pod_name, entry.pod_uid)
            if hca in faults:
                yield pod, f"{start}{hca}: {faults[hca]}"
            if text := of_attachments.get(entry.attachment.key):
                yield pod, f"an interface of the pod has a fault: {text}"


def steady(status: FabricNodeStatus) -> FabricNodeStatus:
    """The status without its numbers that change while jobs run."""
    return msgspec.structs.replace(with_usage(status, NO_USAGE), left_out="")


def fitted(status: FabricNodeStatus) -> FabricNodeStatus:
    """The status within MOST_BYTES: without idle VFs, then with shorter lists."""
    left = []
    if _is_too_large(status):
        used = tuple(hca for hca in status.hcas if not hca.pf or hca.pods or hca.fault)
        if len(used) < len(status.hcas):
            left.append(f"{len(status.hcas) - len(used)} idle VFs")
        status = msgspec.structs.replace(status, hcas=used)
    for part in ("objects", "gpu_parts", "attachments", "hcas", "pools", "gpus"):
        every, kept = getattr(status, part), len(getattr(status, part))
        while kept and _is_too_large(status):
            kept = kept * 3 // 4
            status = msgspec.structs.replace(status, **{part: every[:kept]})
        if kept < len(every):
            left.append(f"{len(every) - kept} of {len(every)} {part.replace('_', ' ')}")
    return msgspec.structs.replace(status, left_out=", ".join(left))


def _is_too_large(status: FabricNodeStatus) -> bool:
    return len(msgspec.json.encode(status)) > MOST_BYTES


def _hca(listed: node_hcas.ListedHCA, topology: Topology, flaps: Mapping[str, int]) -> HcaStatus:
    hca = listed.hca
    return HcaStatus(
        id=hca.id,
        rdma=hca.rdma_names,
        driver=hca.driver,
        numa=hca.numa,
        switch=topology.switch(hca.address),
        pf=hca.pf,
        vfs=hca.num_vfs,
        flaps=flaps.get(hca.id, 0),
        present=listed.present,
        ports=tuple(_ports(hca)),
        pools=tuple(offer.resource for offer in listed.offered),
        pods=_pods(holder.container.pod for holder in listed.held),
        fault=listed.fault if listed.offered or listed.held else "",  # an unused port may be down
    )


def _pods(names: Iterable[str]) -> tuple[str, ...]:
    """Each pod once, without those that the schema has no room for."""
    return tuple(dict.fromkeys(names))[:_MOST_PODS]


def _ports(hca: HCA) -> Iterator[PortStatus]:
    for rdma in hca.rdma:
        for port in rdma.ports:
            yield PortStatus(
                port=f"{rdma.name}/{port.number}",
                state=port.state,
                link_layer=port.link_layer,
                rate=port.rate,
                guid=port.guid,
                pkeys=tuple(f"0x{pkey:04x}" for pkey in port.pkeys[:16]),
                netdevs=port.netdevs,
            )


def _pools(node: ThisNode) -> Iterator[OfferedPool]:
    held = Counter(allocation.resource for allocation in node.allocations)
    for pool in node.pools:
        resource = pool.config.resource
        reasons = Counter(node.unfit[resource].values())
        texts = [f"{count}: {why}" for why, count in reasons.most_common(_MOST_REASONS)]
        if pool.problem:
            texts.insert(0, pool.problem)
        yield OfferedPool(
            resource=resource,
            ids=len(pool.slots),
            held=held[resource],
            withheld=reasons.total(),
            reasons=tuple(text[:_LONGEST_TEXT] for text in texts),
        )


def _pools_of_gpus(gpus: Iterable[node_gpus.ListedGPU]) -> Iterator[OfferedPool]:
    every = [(gpu, offer) for gpu in gpus for offer in gpu.offered]
    for resource in dict.fromkeys(offer.resource for _, offer in every):
        mine = [(gpu, offer) for gpu, offer in every if offer.resource == resource]
        faulty = [(gpu, offer) for gpu, offer in mine if gpu.fault]
        texts = [f"{gpu.address}: {gpu.fault}"[:_LONGEST_TEXT] for gpu, _ in faulty]
        yield OfferedPool(
            resource=resource,
            ids=sum(offer.ids for _, offer in mine),
            held=sum(offer.held for _, offer in mine),
            withheld=sum(offer.ids - offer.held for _, offer in faulty),
            reasons=tuple(texts[:_MOST_REASONS]),
        )


def _gpu(gpu: node_gpus.ListedGPU, topology: Topology) -> GpuStatus:
    return GpuStatus(
        id=gpu.address,
        uuid=gpu.uuid,
        numa=gpu.numa,
        switch=topology.switch(gpu.address),
        pools=tuple(offer.resource for offer in gpu.offered),
        memory_bytes=gpu.memory_bytes,
        free_bytes=gpu.free_bytes,
        free_percent=None if gpu.free_share is None else round(100 * gpu.free_share),
        pods=_pods(part.container.pod for part in gpu.held),
        fault=gpu.fault if gpu.offered else "",
    )


def _attachments(node: ThisNode) -> tuple[list[AttachmentStatus], list[FaultStatus]]:
    found, damaged = [], []
    for entry in Journal(node.paths).entries():
        if isinstance(entry, JournalDamaged):
            damaged.append(FaultStatus(about="journal", text=str(entry)))
            continue
        origin = pods.origin_of(node, entry)
        found.append(
            AttachmentStatus(
                pod=f"{entry.pod_namespace}/{entry.pod_name}"[:330] if entry.pod_name else "",
                interface=entry.ifname,
                network=entry.network[:253],
                plugin=entry.plugin,
                phase=entry.phase,
                hca=origin.hca,
                parent=origin.on,
                pkey=origin.pkey,
                addresses=entry.addresses[:64],
                since=entry.since,
            )
        )
    return sorted(found, key=lambda one: (one.pod, one.interface)), damaged


def _short(faults: Iterable[FaultStatus]) -> Iterator[FaultStatus]:
    for fault in faults:
        yield msgspec.structs.replace(fault, text=fault.text[:_LONGEST_TEXT])
