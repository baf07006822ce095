"""Finds the pods of a job, and the parts of their nodes' FabricNodes that belong to each pod.

Sources of the labels: pkg/apis/batch/types.go of Kubernetes, api/jobset/v1alpha2 of jobset,
pkg/apis/kubeflow/v2beta1/constants.go of mpi-operator, api/leaderworkerset/v1 of lws.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import msgspec
from msgspec.structs import replace

from host.sysfs.infiniband import FULL_MEMBER
from host.sysfs.topology import Distance
from kube.client import ClusterApi
from kube.resources import Meta, Resource
from node.fabric_node import (
    AttachmentStatus,
    FabricNode,
    FabricNodeStatus,
    GpuStatus,
    HcaStatus,
    PortStatus,
)
from node.usage import LockedMemory, Part, RdmaObjects

MOST_PODS = 4000
LABELS = {
    "jobset.sigs.k8s.io/jobset-name": "JobSet",  # first: a JobSet's pods also have a Job's label
    "training.kubeflow.org/job-name": "MPIJob or other Kubeflow job",
    "leaderworkerset.sigs.k8s.io/name": "LeaderWorkerSet",
    "batch.kubernetes.io/job-name": "Job",
    "job-name": "Job",  # before Kubernetes 1.27
}
_OF_STATEFUL_SET = "statefulset.kubernetes.io/pod-name"  # its value is the pod's own name
_ROLE = "training.kubeflow.org/job-role"
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")  # as a label's value
_MOST_PKEYS = 16  # of a port in a FabricNode


class JobPodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""


class JobPodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = ""
    start_time: str = ""


class JobPod(Resource, frozen=True, kw_only=True):
    API = "v1"
    KIND = "Pod"
    PLURAL = "pods"

    metadata: Meta
    spec: JobPodSpec = JobPodSpec()
    status: JobPodStatus = JobPodStatus()


class JobInterface(AttachmentStatus, frozen=True):
    """`member` is the port's membership in the partition: "full", "limited", "missing" or ""."""

    member: str = ""


class JobGpu(Part, frozen=True):
    """`distances` has the distance to each HCA of the pod, such as {"mlx5_0": "PIX"}."""

    id: str  # "0000:1a:00.0"
    distances: dict[str, str]


class FabricOfPod(Part, frozen=True):
    """The parts of a FabricNode that belong to a pod.

    `unknown` says why parts may be missing. A VF in the pod's namespace has the ports of its PF.
    `launches` marks an MPI launcher without an HCA.
    """

    pod: str
    node: str = ""
    unknown: str = ""
    launches: bool = False
    hcas: tuple[str, ...] = ()
    rdma: tuple[str, ...] = ()
    gpus: tuple[JobGpu, ...] = ()
    memlock: str = ""  # the limit of locked memory: "unlimited", or bytes
    memlock_wanted: str = ""  # the limit of the pool, if higher
    ports: tuple[PortStatus, ...] = ()
    interfaces: tuple[JobInterface, ...] = ()
    objects: tuple[RdmaObjects, ...] = ()
    faults: tuple[str, ...] = ()


def of_job(api: ClusterApi, namespace: str, job: str) -> tuple[str, list[JobPod]]:
    """Find the pods of a job: at most MOST_PODS. Returns the job in words, and the pods.

    `job` is the job's name, or a label selector. Raises ApiError.
    """
    if not _NAME.fullmatch(job):
        return f"selector {job}", _listed(api, namespace, job)
    for label, kind in LABELS.items():
        if pods := _listed(api, namespace, f"{label}={job}"):
            return f"{kind} {job}", pods
    owner = ("StatefulSet", job)
    return f"StatefulSet {job}", [
        pod
        for pod in _listed(api, namespace, _OF_STATEFUL_SET)
        if owner in [(it.get("kind"), it.get("name")) for it in pod.metadata.owner_references]
    ]


def searches(job: str) -> str:
    """The searches of `of_job`, for an error."""
    if not _NAME.fullmatch(job):
        return f"labels {job}"
    return f"{', '.join(f'label {label}={job}' for label in LABELS)}, or owner StatefulSet {job}"


def _listed(api: ClusterApi, namespace: str, labels: str) -> list[JobPod]:
    pods: list[JobPod] = []
    for page in api.pages(JobPod, namespace=namespace, labels=labels):
        pods += page.items
        if len(pods) >= MOST_PODS:
            break
    return pods[:MOST_PODS]


def fabric(api: ClusterApi, pods: list[JobPod]) -> list[FabricOfPod]:
    """Read the parts of the FabricNodes that belong to each pod. Raises ApiError."""
    wanted = {pod.spec.node_name for pod in pods}
    nodes: dict[str, FabricNodeStatus | str] = {}
    for page in api.pages(FabricNode):
        nodes |= {it.metadata.name: it.status for it in page.items if it.metadata.name in wanted}
        nodes |= {it.metadata.name: it.why for it in page.unreadable}
    return [_of_pod(pod, nodes) for pod in pods]


def _of_pod(pod: JobPod, nodes: Mapping[str, FabricNodeStatus | str]) -> FabricOfPod:
    name, node = f"{pod.metadata.namespace}/{pod.metadata.name}", pod.spec.node_name
    status = nodes.get(node, "it does not exist: does the agent run there?")
    if not isinstance(status, FabricNodeStatus):
        why = f"no FabricNode of {node} can be read: {status}" if node else "it has no node yet"
        return FabricOfPod(pod=name, node=node, unknown=why)
    by_id = {hca.id: hca for hca in status.hcas}
    names = {name, pod.metadata.uid or name}
    attached = [one for one in status.attachments if one.pod == name]
    on = [by_id[each] for each in dict.fromkeys(one.hca for one in attached) if each in by_id]
    # Another device plugin may have given the pod the HCAs of its interfaces.
    hcas = [hca for hca in status.hcas if names.intersection(hca.pods)] or on
    ids = {hca.id for hca in (*hcas, *on)} | {hca.pf for hca in (*hcas, *on)}
    locked = next(
        (one for one in status.locked_memory if one.pod in names), LockedMemory(pod="", limit="")
    )
    return FabricOfPod(
        pod=name,
        node=node,
        unknown=_unknown(pod, status, seen=bool(hcas or attached)),
        launches=pod.metadata.labels.get(_ROLE) == "launcher" and not hcas,
        hcas=tuple(hca.id for hca in hcas),
        rdma=tuple(chain.from_iterable(hca.rdma for hca in hcas)),
        gpus=tuple(_gpu(gpu, hcas, by_id) for gpu in status.gpus if names.intersection(gpu.pods)),
        memlock=locked.limit,
        memlock_wanted=locked.wanted,
        ports=tuple(chain.from_iterable(_ports(hca, by_id.get(hca.pf)) for hca in hcas)),
        interfaces=tuple(_interface(one, by_id.get(one.hca)) for one in attached),
        objects=tuple(one for one in status.objects if one.pod in names),
        faults=tuple(dict.fromkeys(_faults(name, status, ids))),
    )


def _ports(hca: HcaStatus, pf: HcaStatus | None) -> Iterator[PortStatus]:
    """The ports of the HCA. A PF's GIDs are not those of its VF."""
    yield from hca.ports or (replace(port, gids=()) for port in (pf.ports if pf else ()))


def _gpu(gpu: GpuStatus, hcas: Iterable[HcaStatus], by_id: Mapping[str, HcaStatus]) -> JobGpu:
    """The distance of a GPU to each HCA. A VF has the distance of its PF."""
    parts = [text.partition(" ") for text in gpu.distances]
    known = {hca: word for word, _, hca in parts if word in Distance.__members__}
    found: dict[str, str] = {}
    for hca in hcas:
        labels = [",".join(one.rdma) or one.id for one in (hca, by_id.get(hca.pf, hca))]
        if words := [known[label] for label in labels if label in known]:
            found[labels[0]] = words[0]
    return JobGpu(id=gpu.id, distances=found)


def _unknown(pod: JobPod, status: FabricNodeStatus, *, seen: bool) -> str:
    of = f"the FabricNode of {pod.spec.node_name}"
    if status.left_out and (not seen or re.search("attachments|hcas", status.left_out)):
        return f"{of} is too large and lacks {status.left_out}"
    if pod.status.phase == "Pending":
        name = f"{pod.metadata.namespace}/{pod.metadata.name}"
        failed = [f": ADD of {it.interface}: {it.text}" for it in status.refusals if it.pod == name]
        return "".join(("it has not started", *failed[:1]))
    is_older = not seen and status.written < pod.status.start_time
    return f"{of} is older than the pod" if is_older else ""


def _interface(attached: AttachmentStatus, hca: HcaStatus | None) -> JobInterface:
    found = msgspec.structs.asdict(attached)
    if pkey := _number(attached.pkey):
        member = _membership(pkey, attached.parent, hca.ports if hca is not None else ())
        found |= {"pkey": f"{pkey | FULL_MEMBER:#06x}", "member": member}
    return JobInterface(**found)


def _membership(pkey: int, parent: str, ports: tuple[PortStatus, ...]) -> str:
    """The membership by the port's table, which the subnet manager fills before ACTIVE."""
    on = [port for port in ports if parent in port.netdevs] or ports
    if {(port.link_layer, port.state) for port in on} != {("InfiniBand", "ACTIVE")}:
        return ""
    table = {_number(text) for port in on for text in port.pkeys}
    if pkey | FULL_MEMBER in table:
        return "full"
    if pkey & ~FULL_MEMBER in table:
        return "limited"
    return "" if any(len(port.pkeys) >= _MOST_PKEYS for port in on) else "missing"


def _number(text: str) -> int:
    """The P_Key; 0 for another text."""
    return int(text, 16) if re.fullmatch("0x[0-9a-f]{4}", text) else 0


def _faults(pod: str, status: FabricNodeStatus, ids: set[str]) -> Iterator[str]:
    """The faults of the HCAs and of the pod's interfaces."""
    of_pod = re.compile(rf" of {re.escape(pod)}(?![\w.-])")
    yield from (f"{hca.id}: {hca.fault}" for hca in status.hcas if hca.id in ids and hca.fault)
    for fault in status.faults:
        if fault.about in ids and of_pod.search(fault.text):
            yield f"{fault.about}: {fault.text}"
