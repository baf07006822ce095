"""The kubelet's records of which container holds which device ids.

There are two sources. The PodResources API is stable, but it has no pod UIDs, and on older kubelets
it omits init containers. The kubelet's own checkpoint has both, but it is not an official
interface, and it lacks the devices of ResourceClaims.
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

KUBELET_TIMEOUT = 2.0  # seconds, of the PodResources API

# Drivers write "0000:3b:00.0" as "0000-3b-00-0" where only letters, digits and "-" may stand.
_ADDRESS = re.compile(
    r"(?<![0-9a-f])([0-9a-f]{4})[:-]([0-9a-f]{2})[:-]([01][0-9a-f])[.-]([0-7])(?![0-9a-f])", re.I
)

_SETTLED = 1.0  # seconds, far more than between two ticks of the kernel's clock of files
_UVERBS = re.compile(r"/infiniband/uverbs([0-9]{1,9})\Z")


class KubeletUnreadable(Exception):
    """The kubelet's records cannot be read. The text names socket or file, and the remedy."""


class PodDevices(msgspec.Struct, frozen=True, kw_only=True):
    """The device ids of one resource that one container holds."""

    namespace: str = ""  # of the pod; "" from the checkpoint
    name: str = ""  # of the pod; "" from the checkpoint
    uid: str = ""  # of the pod; "" from PodResources
    container: str
    resource: str
    ids: tuple[DeviceId, ...]  # sorted
    claimed: bool = False  # by a ResourceClaim of a DRA driver; never from the checkpoint
    # From the answer of Allocate, if the caller requested it.
    nodes: tuple[str, ...] = ()  # "uverbs3" of the host
    cdi: tuple[str, ...] = ()  # "podfabric.io/rdma-hca=0000:3b:00.0"


class _ContainerEntry(msgspec.Struct):
    PodUID: str
    ContainerName: str
    ResourceName: str
    DeviceIDs: dict[str, list[str] | None] | None = None  # by NUMA node, "-1" for none
    AllocResp: str | None = None  # a ContainerAllocateResponse, in base64


class _Data(msgspec.Struct):
    PodDeviceEntries: list[_ContainerEntry] | None = None
    RegisteredDevices: dict[str, list[str] | None] | None = None


class _KubeletFile(msgspec.Struct):
    Data: _Data


def from_checkpoint(paths: Paths, *, nodes: bool = False) -> list[PodDevices]:
    """The devices of all containers by the kubelet's checkpoint; [] without the file.

    It keeps pods that ended until the kubelet's next allocation, or until a device plugin sends a
    list. With `nodes`, the rows have the uverbs devices or CDI names that the containers got.
    Raises KubeletUnreadable.
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
    """The healthy ids of each resource when the kubelet last wrote its checkpoint, sorted.

    Returns `None` without the file: no device plugin has sent a list yet. Raises KubeletUnreadable.
    """
    content = _checkpoint(paths)
    if content is None:
        return None
    listed = content.RegisteredDevices or {}
    return {name: sorted(ids or ()) for name, ids in sorted(listed.items())}


def from_pod_resources(paths: Paths, *, claimed: bool = False) -> list[PodDevices]:
    """The devices of all containers by PodResources; `claimed` as in `from_answer`.

    Raises KubeletUnreadable within KUBELET_TIMEOUT.
    """
    # Imported here since callers that read only the checkpoint do not need gRPC.
    from deviceplugin.kubelet.pod_resources import PodResourcesClient

    with closing(PodResourcesClient(paths)) as kubelet:
        return from_answer(kubelet.list(KUBELET_TIMEOUT), claimed=claimed)


def from_answer(
    answer: "podresources_pb2.ListPodResourcesResponse", *, claimed: bool = False
) -> list[PodDevices]:
    """The devices in an answer of PodResources' List, in the kubelet's order.

    With `claimed`, also those of ResourceClaims: their resource is "driver/pool", their ids are the
    names of the devices and the PCI addresses in these names and in the CDI names. The kubelet
    lists them since Kubernetes 1.34, earlier only with a feature gate.
    """
    rows = []
    for pod in answer.pod_resources:
        for container in pod.containers:
            ids: dict[tuple[str, bool], list[Iterable[str]]] = {}
            # One entry per device or NUMA node, unordered.
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
    """The devices of one pod's containers, in PodResources' order, then those it omits.

    The checkpoint is searched by the pod's UID; it has all of the pod's devices before the sandbox
    is made. If it has none, PodResources is searched by the pod's name, and ignored if an id
    belongs to another pod, which had that name a moment ago. Devices of ResourceClaims are found by
    the name only. One readable source is enough, but the checkpoint needs a UID. Raises
    KubeletUnreadable.
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
                f"{_checkpoint_path(paths)}: has only pod UIDs, and CNI_ARGS have no K8S_POD_UID"
            )
        if problems and not _checkpoint_path(paths).exists():
            raise KubeletUnreadable(f"{_checkpoint_path(paths)}: does not exist")
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
    """The name of a claimed device, and the PCI addresses in its names."""
    if device.device_name:
        yield device.device_name
    for name in (device.device_name, *(named.name for named in device.cdi_devices)):
        for match in _ADDRESS.finditer(name):
            yield _address(match)


def address_in(device_id: str) -> str | None:
    """The first PCI address in an id such as "gpu-0000-3b-00-0", as sysfs writes it."""
    match = _ADDRESS.search(device_id)
    return _address(match) if match else None


def is_address(device_id: str) -> bool:
    """Whether an id consists of a PCI address only, in either spelling."""
    return _ADDRESS.fullmatch(device_id) is not None


def _address(match: re.Match[str]) -> str:
    domain, bus, slot, function = match.groups()
    return f"{domain}:{bus}:{slot}.{function}".lower()


def _given(response: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The uverbs devices of the host and the CDI names in a ContainerAllocateResponse.

    Both are () if it cannot be decoded.
    """
    # Imported here since CNI plugins need only the ids.
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


def _checkpoint_path(paths: Paths) -> Path:
    return paths.device_plugins / "kubelet_internal_checkpoint"


def _checkpoint(paths: Paths) -> _Data | None:
    path = _checkpoint_path(paths)
    try:
        return _decoded(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise KubeletUnreadable(
            f"{path}: cannot be read: {error.strerror}: only root may, on the host or with the "
            "kubelet's directory mounted"
        ) from None
    except msgspec.MsgspecError as error:
        raise KubeletUnreadable(
            f"{path}: is not a valid checkpoint of the kubelet: {error}: the kubelet writes "
            "a new one when the next pod gets a device"
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
    # A file that has just been written may be written again without a new version.
    if abs(time.time() - version[-1] / 1e9) > _SETTLED:
        _last_read = _Read(path, version, data)
    return data
