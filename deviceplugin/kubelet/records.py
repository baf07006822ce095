"""Reads the kubelet's records of the device ids that each container holds.

The PodResources API has no pod UIDs, and older kubelets omit init containers. The kubelet's
checkpoint lacks ResourceClaims, and is not an official interface.
"""

import base64
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from base import decoding, files
from base.paths import Paths
from base.types import DeviceId

if TYPE_CHECKING:
    from deviceplugin.api import podresources_pb2

KUBELET_TIMEOUT = 2.0  # seconds for a call of the PodResources API

# Drivers write "0000:3b:00.0" as "0000-3b-00-0" if only letters, digits and "-" are permitted.
_ADDRESS = re.compile(
    r"(?<![0-9a-f])([0-9a-f]{4})[:-]([0-9a-f]{2})[:-]([01][0-9a-f])[.-]([0-7])(?![0-9a-f])", re.I
)

_SETTLED = 1.0  # seconds, many ticks of the kernel's clock for files
_UVERBS = re.compile(r"/infiniband/uverbs([0-9]{1,9})\Z")


class KubeletUnreadable(Exception):
    """The kubelet's records are unreadable. The text names the socket or file, and the remedy."""


class PodDevices(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the kubelet's records: the ids of one resource that one container holds."""

    namespace: str = ""  # of the pod; "" from the checkpoint
    name: str = ""  # of the pod; "" from the checkpoint
    uid: str = ""  # of the pod; "" from PodResources
    container: str
    resource: str
    ids: tuple[DeviceId, ...]  # sorted
    claimed: bool = False  # by a ResourceClaim of a DRA driver; never from the checkpoint
    # From the recorded answer of Allocate, if the caller requested nodes.
    nodes: tuple[str, ...] = ()  # "uverbs3" of the host
    cdi: tuple[str, ...] = ()  # "podfabric.io/rdma-hca=0000:3b:00.0"


class _ContainerEntry(msgspec.Struct):
    PodUID: str
    ContainerName: str
    ResourceName: str
    DeviceIDs: dict[str, list[str] | None] | None = None  # by NUMA node; "-1": no node
    AllocResp: str | None = None  # a ContainerAllocateResponse, in base64


class _Data(msgspec.Struct):
    PodDeviceEntries: list[_ContainerEntry] | None = None
    RegisteredDevices: dict[str, list[str] | None] | None = None


class _KubeletFile(msgspec.Struct):
    Data: _Data


def from_checkpoint(paths: Paths, *, nodes: bool = False) -> list[PodDevices]:
    """The rows of the kubelet's checkpoint; [] if it does not exist. Raises KubeletUnreadable.

    Ended pods stay in the file until the kubelet's next allocation, or until a device plugin sends
    a list. With `nodes`, the rows have the uverbs devices or CDI names of the containers.
    """
    content = _checkpoint(paths) or _Data()
    rows = []
    for entry in content.PodDeviceEntries or ():
        given, cdi = _given(entry.AllocResp or "") if nodes else ((), ())
        rows.append(
            PodDevices(
                uid=entry.PodUID,
                container=entry.ContainerName,
                resource=entry.ResourceName,
                # A device of two NUMA nodes is in both lists.
                ids=_sorted(*(ids or () for ids in (entry.DeviceIDs or {}).values())),
                nodes=given,
                cdi=cdi,
            )
        )
    return sorted(rows, key=lambda row: (row.uid, row.container, row.resource))


def registered(paths: Paths) -> dict[str, list[str]] | None:
    """The healthy ids of each resource in the checkpoint, sorted. Raises KubeletUnreadable.

    Returns `None` if the file does not exist, because no device plugin has sent a list yet.
    """
    content = _checkpoint(paths)
    if content is None:
        return None
    listed = content.RegisteredDevices or {}
    return {name: sorted(ids or ()) for name, ids in sorted(listed.items())}


def from_pod_resources(paths: Paths, *, claimed: bool = False) -> list[PodDevices]:
    """The rows of PodResources. Raises KubeletUnreadable within KUBELET_TIMEOUT."""
    # Import here, because callers that read only the checkpoint do not need gRPC.
    from deviceplugin.kubelet.pod_resources import PodResourcesClient

    with closing(PodResourcesClient(paths)) as kubelet:
        return from_answer(kubelet.list(KUBELET_TIMEOUT), claimed=claimed)


def from_answer(
    answer: "podresources_pb2.ListPodResourcesResponse", *, claimed: bool = False
) -> list[PodDevices]:
    """The rows of an answer of PodResources, in the kubelet's order.

    `claimed` adds the devices of ResourceClaims, with the resource "driver/pool". The kubelet lists
    claimed devices since Kubernetes 1.34, and earlier only with a feature gate.
    """
    rows = []
    for pod in answer.pod_resources:
        for container in pod.containers:
            ids: dict[tuple[str, bool], list[Iterable[str]]] = {}
            # The kubelet lists one entry per device or NUMA node, in any order.
            for entry in sorted(container.devices, key=lambda entry: entry.resource_name):
                ids.setdefault((entry.resource_name, False), []).append(entry.device_ids)
            for claim in container.dynamic_resources if claimed else ():
                for device in claim.claim_resources:
                    resource = f"{device.driver_name}/{device.pool_name}"
                    ids.setdefault((resource, True), []).append(_claimed_ids(device))
            rows += [
                PodDevices(
                    namespace=pod.namespace,
                    name=pod.name,
                    container=container.name,
                    resource=resource,
                    ids=_sorted(*lists),
                    claimed=is_claimed,
                )
                for (resource, is_claimed), lists in ids.items()
            ]
    return rows


def of_pod(paths: Paths, namespace: str, name: str, uid: str) -> list[PodDevices]:
    """The rows of one pod. Raises KubeletUnreadable if neither source can be searched.

    The checkpoint is searched by the pod's UID. This file has all devices of a pod before the pod's
    sandbox is made. PodResources is searched by the pod's name, which an earlier pod may have had.
    So if the checkpoint gives an id from PodResources to another UID, the rows from PodResources
    are ignored. Only PodResources has the devices of ResourceClaims.
    """
    by_name: list[PodDevices] = []
    in_checkpoint: list[PodDevices] = []
    problems = []
    try:
        rows = from_pod_resources(paths, claimed=True)
        by_name = [row for row in rows if (row.namespace, row.name) == (namespace, name)]
    except KubeletUnreadable as problem:
        problems.append(str(problem))
    try:
        in_checkpoint = from_checkpoint(paths) if uid else []
        if problems and not uid:
            raise KubeletUnreadable(
                f"{checkpoint_path(paths)}: identifies pods by UID, but CNI_ARGS has no K8S_POD_UID"
            )
        if problems and not checkpoint_path(paths).exists():
            raise KubeletUnreadable(f"{checkpoint_path(paths)}: does not exist")
    except KubeletUnreadable as problem:
        problems.append(str(problem))
    if len(problems) == 2:
        raise KubeletUnreadable("; ".join(problems))
    by_uid = {(row.container, row.resource): row for row in in_checkpoint if row.uid == uid}
    others = _keys(row for row in in_checkpoint if row.uid != uid)
    if _keys(by_name) & (others - _keys(by_uid.values())):
        by_name = []
    rows_by_key = {(row.container, row.resource, row.claimed): row for row in by_name}
    if by_uid:
        of_uid = {(*key, False): row for key, row in by_uid.items()}
        rows_by_key = {
            key: row for key, row in rows_by_key.items() if row.claimed or key in of_uid
        } | of_uid
    return [replace(row, namespace=namespace, name=name, uid=uid) for row in rows_by_key.values()]


def _keys(rows: Iterable[PodDevices]) -> set[tuple[str, str]]:
    return {(row.resource, device_id) for row in rows if not row.claimed for device_id in row.ids}


def _sorted(*lists: Iterable[str]) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(device_id) for device_id in sorted(set().union(*lists)))


def _claimed_ids(device: "podresources_pb2.ClaimResource") -> Iterator[str]:
    """A claimed device's name, and the PCI addresses in this name and in the CDI names."""
    if device.device_name:
        yield device.device_name
    for name in (device.device_name, *(named.name for named in device.cdi_devices)):
        for match in _ADDRESS.finditer(name):
            yield _address(match)


def address_in(device_id: str) -> str | None:
    """The first PCI address in an id, in sysfs form: "gpu-0000-3b-00-0" → "0000:3b:00.0"."""
    match = _ADDRESS.search(device_id)
    return _address(match) if match else None


def is_address(device_id: str) -> bool:
    """Whether an id is only a PCI address: "0000:3b:00.0" or "0000-3b-00-0"."""
    return _ADDRESS.fullmatch(device_id) is not None


def _address(match: re.Match[str]) -> str:
    domain, bus, slot, function = match.groups()
    return f"{domain}:{bus}:{slot}.{function}".lower()


def _given(response: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The host's uverbs devices and the CDI names in a ContainerAllocateResponse; () if invalid."""
    # Import here, because CNI plugins need only the ids.
    from google.protobuf.message import DecodeError

    from deviceplugin.api.v1beta1_pb2 import ContainerAllocateResponse

    try:
        answer = ContainerAllocateResponse.FromString(base64.b64decode(response))
    except (ValueError, DecodeError):
        return (), ()
    numbers = {
        int(match[1]) for node in answer.devices if (match := _UVERBS.search(node.host_path))
    }
    nodes = tuple(f"uverbs{number}" for number in sorted(numbers))
    return nodes, tuple(sorted(device.name for device in answer.cdi_devices))


def checkpoint_path(paths: Paths) -> Path:
    return paths.device_plugins / "kubelet_internal_checkpoint"


def _checkpoint(paths: Paths) -> _Data | None:
    path = checkpoint_path(paths)
    try:
        return _decoded(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise KubeletUnreadable(
            f"{path}: cannot be read: {error.strerror}: run podfabric as root, on the host "
            "or in a container that mounts the kubelet's directory"
        ) from None
    except msgspec.MsgspecError as error:
        raise KubeletUnreadable(
            f"{path}: is not a valid checkpoint of the kubelet: {error}: start another pod "
            "with a device, so that the kubelet writes the file again"
        ) from None


class _Read(NamedTuple):
    path: Path
    version: tuple[int, ...]
    data: _Data


_last_read: _Read | None = None


def _decoded(path: Path) -> _Data:
    """The file's content, decoded again only if the file has changed."""
    global _last_read
    with path.open("rb") as file:
        version = files.version(file.fileno())
        last = _last_read
        if last is not None and last.path == path and last.version == version:
            return last.data
        data = decoding.decode(file.read(), _KubeletFile).Data
    # A second write soon after the first may leave the file's version unchanged.
    if abs(time.time() - version[-1] / 1e9) > _SETTLED:
        _last_read = _Read(path, version, data)
    return data
