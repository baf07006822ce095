"""FabricNode: one object per node, with the node's HCAs, pools, GPUs, attachments and faults.

The agent writes the object (agent.node_report). The CRD in deploy/chart describes the fields.
"""

import msgspec
from msgspec.structs import replace

from cni.attachments.journal import Phase
from kube.resources import Meta, Resource
from node.usage import GpuPartStatus, LockedMemory, Part, RdmaObjects, Usage

MOST_BYTES = 30_000  # of the status as JSON


class PortStatus(Part, frozen=True):
    port: str  # "mlx5_0/1"
    state: str = ""
    link_layer: str = ""
    rate: str = ""
    guid: str = ""
    subnet: str = ""
    gids: tuple[str, ...] = ()
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
    mode: str = ""
    ids: int = 0
    held: int = 0
    withheld: int = 0
    reasons: tuple[str, ...] = ()


class GpuStatus(Part, frozen=True):
    id: str
    uuid: str = ""
    numa: int | None = None
    switch: str = ""
    distances: tuple[
        str, ...
    ] = ()  # "PIX mlx5_0": the distance, and the HCA as in `podfabric topo`
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
    mtu: int = 0  # that the ADD has set; 0 if unknown
    since: str = ""


class FaultStatus(Part, frozen=True):
    about: str  # "0000:3b:00.0", "config.yaml"
    text: str
    since: str = ""  # RFC 3339: when the running agent saw the fault first
    pods: tuple[str, ...] = ()  # that hold the device or have an interface on it


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
    locked_memory: tuple[LockedMemory, ...] = ()
    faults: tuple[FaultStatus, ...] = ()
    refusals: tuple[RefusalStatus, ...] = ()
    warnings: tuple[str, ...] = ()
    left_out: str = ""  # "90 of 410 attachments" do not fit into MOST_BYTES


class FabricNode(Resource, frozen=True, kw_only=True):
    API = "fabric.podfabric.io/v1alpha1"
    KIND = "FabricNode"
    PLURAL = "fabricnodes"

    metadata: Meta
    status: FabricNodeStatus = FabricNodeStatus()


def with_usage(status: FabricNodeStatus, usage: Usage) -> FabricNodeStatus:
    return replace(
        status,
        objects=usage.objects,
        gpu_parts=usage.gpu_parts,
        locked_memory=usage.locked_memory,
    )


def steady(status: FabricNodeStatus) -> FabricNodeStatus:
    """The status without its numbers that change while jobs run."""
    return replace(status, objects=(), gpu_parts=(), left_out="")


def fitted(status: FabricNodeStatus) -> FabricNodeStatus:
    """The status within MOST_BYTES: without idle VFs, then with shorter lists."""
    left = []
    if _is_too_large(status):
        used = tuple(hca for hca in status.hcas if not hca.pf or hca.pods or hca.fault)
        if len(used) < len(status.hcas):
            left.append(f"{len(status.hcas) - len(used)} idle VFs")
        status = replace(status, hcas=used)
    for part in ("objects", "gpu_parts", "locked_memory", "attachments", "hcas", "pools", "gpus"):
        every, kept = getattr(status, part), len(getattr(status, part))
        while kept and _is_too_large(status):
            kept = kept * 3 // 4
            status = replace(status, **{part: every[:kept]})
        if kept < len(every):
            left.append(f"{len(every) - kept} of {len(every)} {part.replace('_', ' ')}")
    return replace(status, left_out=", ".join(left))


def _is_too_large(status: FabricNodeStatus) -> bool:
    return len(msgspec.json.encode(status)) > MOST_BYTES
