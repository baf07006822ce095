"""Makes the status of this node from sysfs, the checkpoints and the journal."""

import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from base.paths import Paths
from base.pod import Pod
from cni.attachments.journal import Journal, JournalDamaged, JournalEntry
from deviceplugin.allocate import memlock
from deviceplugin.checkpoint import CheckpointDamaged
from deviceplugin.health import GONE
from deviceplugin.pools.pool_config import ConfigError
from host.sysfs import infiniband
from host.sysfs.discovery import HCA
from host.sysfs.gpus import address_of
from host.sysfs.topology import Topology
from node import locked_memory, node_gpus, node_hcas, pods
from node.attachment_faults import AttachmentHealth
from node.fabric_node import (
    AttachmentStatus,
    Counts,
    FabricNodeStatus,
    FaultStatus,
    GpuStatus,
    HcaStatus,
    OfferedPool,
    PortStatus,
    RefusalStatus,
)
from node.state import ThisNode

_MOST_REASONS = 3  # why ids of a pool are withheld
_MOST_FAULTS = 32
_MOST_AFFECTED = 16  # pods of a fault
_MOST_PODS = 256  # of a device
_LONGEST_TEXT = 300  # characters of a reason


def observed(
    node: ThisNode,
    mistakes: Mapping[str, str],
    version: str,
    refusals: Iterable[RefusalStatus] = (),
    attached: AttachmentHealth | None = None,
    known: Mapping[str, HcaStatus] = {},
) -> FabricNodeStatus:
    """The present status of this node. `mistakes` has the errors of config.yaml, by section.

    To read the status repeatedly, pass the same `attached` each time. `known` are HCAs by id that
    were present and in a pool before.
    """
    faults = [
        FaultStatus(about=f"config.yaml: {part}", text=text) for part, text in mistakes.items()
    ]
    hcas: list[HcaStatus] = []
    pools: list[OfferedPool] = []
    gpus: list[GpuStatus] = []
    warnings: list[str] = []
    try:
        listed = node_hcas.listed(node)
        flaps = node.health.counts(time.monotonic())
        hcas = _with_gone([_hca(node, one, flaps) for one in listed], known)
        of_gpus = node_gpus.listed(node).gpus
        pools = [*_pools(node), *_pools_of_gpus(of_gpus)]
        of_others = _gpus_of_others(node)
        gpus = [_gpu(one, node.topology, of_others.get(one.address, ())) for one in of_gpus]
        warnings = list(_warnings(node))
    except (ConfigError, CheckpointDamaged) as error:
        faults.append(FaultStatus(about="devices", text=str(error)))
    attachments, damaged = _attachments(node)
    found = (attached or AttachmentHealth()).look(node)
    faults += [
        *_faults_of_devices(hcas, gpus, attachments),
        *damaged,
        *(FaultStatus(about=about, text=text) for about, text in found),
    ]
    status = FabricNodeStatus(
        version=version,
        kernel=platform.release(),
        hcas=tuple(hcas),
        pools=tuple(pools),
        gpus=tuple(gpus),
        attachments=tuple(attachments),
        faults=tuple(_short(faults[:_MOST_FAULTS])),
        refusals=tuple(refusals),
        warnings=tuple(warnings),
    )
    return replace(status, counts=_counts(status, len(faults)))


def _counts(status: FabricNodeStatus, faults: int) -> Counts:
    ports = [port for hca in status.hcas for port in hca.ports]
    return Counts(
        hcas=sum(hca.present for hca in status.hcas),
        active_ports=sum(port.state == "ACTIVE" for port in ports),
        ports=len(ports),
        gpus=len(status.gpus),
        attachments=len(status.attachments),
        faults=faults,
        refusals=len(status.refusals),
    )


def _with_gone(hcas: Iterable[HcaStatus], known: Mapping[str, HcaStatus]) -> list[HcaStatus]:
    """These HCAs, with `known` HCAs that are gone.

    sysfs no longer shows the ports, NUMA node and switch of an HCA that is gone, so `known` has
    these.
    """
    by_id = {hca.id: hca for hca in hcas}
    for before in known.values():
        now = by_id.get(before.id)
        if now is None or not now.present:
            ports = (replace(port, state="gone", rate="") for port in before.ports)
            by_id[before.id] = replace(
                before,
                present=False,
                ports=tuple(ports),
                pods=now.pods if now else (),
                fault=now.fault if now else GONE,
            )
    return sorted(by_id.values(), key=lambda hca: hca.id)


def _faults_of_devices(
    hcas: Sequence[HcaStatus], gpus: Iterable[GpuStatus], attachments: Sequence[AttachmentStatus]
) -> Iterator[FaultStatus]:
    for hca in hcas:
        if hca.fault:
            yield FaultStatus(about=hca.id, text=hca.fault, pods=_affected(hca, hcas, attachments))
    for gpu in gpus:
        if gpu.fault:
            yield FaultStatus(about=gpu.id, text=gpu.fault, pods=gpu.pods[:_MOST_AFFECTED])


def _affected(
    hca: HcaStatus, hcas: Iterable[HcaStatus], attachments: Iterable[AttachmentStatus]
) -> tuple[str, ...]:
    """The pods that hold the HCA or a VF of the HCA, or have an interface on it."""
    netdevs = {netdev for port in hca.ports for netdev in port.netdevs}
    holders = (pod for one in hcas if hca.id in (one.id, one.pf) for pod in one.pods)
    users = (one.pod for one in attachments if one.hca == hca.id or one.parent in netdevs)
    return _pods((*holders, *users))[:_MOST_AFFECTED]


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


def _hca(node: ThisNode, listed: node_hcas.ListedHCA, flaps: Mapping[str, int]) -> HcaStatus:
    hca = listed.hca
    return HcaStatus(
        id=hca.id,
        rdma=hca.rdma_names,
        driver=hca.driver,
        numa=hca.numa,
        switch=node.topology.switch(hca.address),
        pf=hca.pf,
        vfs=hca.num_vfs,
        flaps=flaps.get(hca.id, 0),
        present=listed.present,
        ports=tuple(_ports(node.paths, hca, idle=bool(hca.pf) and not listed.held)),
        pools=tuple(offer.resource for offer in listed.offered),
        pods=_pods(holder.container.pod for holder in listed.held),
        fault=listed.fault if listed.offered or listed.held else "",  # an unused port may be down
    )


def _pods(names: Iterable[str]) -> tuple[str, ...]:
    """Each pod once, without those that the schema has no room for."""
    return tuple(dict.fromkeys(names))[:_MOST_PODS]


def _ports(paths: Paths, hca: HCA, *, idle: bool) -> Iterator[PortStatus]:
    """The ports. The GIDs of an `idle` VF are not read, because a table has 256 files."""
    for rdma in hca.rdma:
        for port in rdma.ports:
            place, is_infiniband = (rdma.name, port.number), port.link_layer == "InfiniBand"
            yield PortStatus(
                port=f"{rdma.name}/{port.number}",
                state=port.state,
                link_layer=port.link_layer,
                rate=port.rate,
                guid=port.guid,
                subnet=infiniband.subnet(paths, *place)[:32] if is_infiniband else "",
                gids=() if is_infiniband or idle else infiniband.kinds_of_gids(paths, *place),
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
            mode=pool.config.mode,
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


def _warnings(node: ThisNode) -> Iterator[str]:
    """Texts about what makes pods slower. None is a fault."""
    if locked_memory.wanted(node.pools) and (why := memlock.problem(node.paths)):
        yield f"containers keep the runtime's limit of locked memory: {why}"[:_LONGEST_TEXT]


def _gpus_of_others(node: ThisNode) -> Mapping[str, list[str]]:
    """The pods that hold GPUs of another device plugin, by the GPU's address."""
    ours = {entry.key for entry in node.allocations if entry.gpu is not None}
    found: dict[str, list[str]] = {}
    for key, holder in node.holders.by_key.items() if node.gpus else ():
        if key not in ours and (address := address_of(node.gpus, key[1])):
            found.setdefault(address, []).append(holder.pod)
    return found


def _gpu(gpu: node_gpus.ListedGPU, topology: Topology, of_others: Iterable[str]) -> GpuStatus:
    return GpuStatus(
        id=gpu.address,
        uuid=gpu.uuid,
        numa=gpu.numa,
        switch=topology.switch(gpu.address),
        distances=tuple(f"{word} {hca}"[:80] for hca, word in gpu.distances.items())[:64],
        pools=tuple(offer.resource for offer in gpu.offered),
        memory_bytes=gpu.memory_bytes,
        free_bytes=gpu.free_bytes,
        free_percent=None if gpu.free_share is None else round(100 * gpu.free_share),
        pods=_pods((*(part.container.pod for part in gpu.held), *of_others)),
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
                mtu=origin.mtu,
                since=entry.since,
            )
        )
    return sorted(found, key=lambda one: (one.pod, one.interface)), damaged


def _short(faults: Iterable[FaultStatus]) -> Iterator[FaultStatus]:
    for fault in faults:
        yield replace(fault, text=fault.text[:_LONGEST_TEXT])
