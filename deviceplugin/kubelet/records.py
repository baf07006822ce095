"""What the kubelet knows: which container holds which device ids.

From its PodResources API, which is stable but names no pod UID and on older kubelets leaves init
containers out; and from its own checkpoint, which has both but is nobody's interface, and knows
nothing of devices that a pod has by a ResourceClaim.
"""

import base64
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from base.paths import Paths

if TYPE_CHECKING:
    from deviceplugin.api import podresources_pb2

_Key = tuple[str, str, str, str, str]  # namespace, name, uid, container, resource
# Drivers write "0000:3b:00.0" as "0000-3b-00-0" where only letters, digits and "-" may stand.
_ADDRESS = re.compile(
    r"(?<![0-9a-f])([0-9a-f]{4})[:-]([0-9a-f]{2})[:-]([01][0-9a-f])[.-]([0-7])(?![0-9a-f])", re.I
)

_SETTLED = 1.0  # seconds, far more than the kernel's clock of files needs for its next tick
_UVERBS = re.compile(r"/infiniband/uverbs([0-9]{1,9})\Z")


class KubeletUnreadable(Exception):
    """The kubelet cannot be asked. The text names socket or file, and says why and what to do."""


class PodDevices(msgspec.Struct, frozen=True, kw_only=True):
    """What one container holds of one resource."""

    namespace: str  # "" in the checkpoint
    name: str  # of the pod; "" in the checkpoint
    uid: str  # "" in PodResources
    container: str
    resource: str
    ids: tuple[str, ...]  # sorted
    claimed: bool = False  # by a ResourceClaim, of a DRA driver: in no checkpoint
    # As Allocate gave them; if asked for.
    nodes: tuple[str, ...] = ()  # "uverbs3" of the host
    cdi: tuple[str, ...] = ()  # "podfabric.io/rdma-hca=0000:3b:00.0"


class _AllocateAnswer(msgspec.Struct, frozen=True):
    """What Allocate gave a container."""

    nodes: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()


_NOTHING = _AllocateAnswer()
_NONE: Mapping[_Key, _AllocateAnswer] = {}


class _ContainerEntry(msgspec.Struct):
    PodUID: str
    ContainerName: str
    ResourceName: str
    # By NUMA node, "-1" for none; a list before Kubernetes 1.20.
    DeviceIDs: dict[str, list[str] | None] | list[str] | None = None
    AllocResp: str | None = None  # a ContainerAllocateResponse, in base64


class _Data(msgspec.Struct):
    PodDeviceEntries: list[_ContainerEntry] | None = None
    RegisteredDevices: dict[str, list[str] | None] | None = None


class _KubeletFile(msgspec.Struct):
    Data: _Data


def from_checkpoint(paths: Paths, *, nodes: bool = False) -> list[PodDevices]:
    """Every container's devices, pods by UID; nothing where there is no file. Raises Unreadable.

    Pods that ended stay in it until the kubelet's next allocation, or until a device plugin sends
    a list. With `nodes` the rows have the verbs devices that the containers were given, or the
    CDI names that stand for them.
    """
    return _entries(_checkpoint(paths) or _Data(), nodes=nodes)


def registered(paths: Paths) -> dict[str, list[str]]:
    """The ids that each resource had when the kubelet last wrote its checkpoint, sorted.

    Only those that were healthy. Raises Unreadable.
    """
    return _listed(_checkpoint(paths) or _Data())


def written(paths: Paths) -> tuple[list[PodDevices], dict[str, list[str]]] | None:
    """`from_checkpoint` and `registered` of the same file; None if it is not there.

    The kubelet writes it first when a device plugin sends its list. Raises Unreadable.
    """
    content = _checkpoint(paths)
    return None if content is None else (_entries(content), _listed(content))


def _entries(content: _Data, *, nodes: bool = False) -> list[PodDevices]:
    found: dict[_Key, set[str]] = {}
    given: dict[_Key, _AllocateAnswer] = {}
    for entry in content.PodDeviceEntries or ():
        key = "", "", entry.PodUID, entry.ContainerName, entry.ResourceName
        if nodes:
            given[key] = _answer(entry.AllocResp or "")
        listed = entry.DeviceIDs or []
        lists = listed.values() if isinstance(listed, dict) else [listed]
        # A device of two NUMA nodes is below both.
        found.setdefault(key, set()).update(one for ids in lists for one in ids or ())
    return _rows(dict(sorted(found.items())), given=given)


def _listed(content: _Data) -> dict[str, list[str]]:
    listed = content.RegisteredDevices or {}
    return {name: sorted(ids or ()) for name, ids in sorted(listed.items())}


def from_pod_resources(
    paths: Paths, timeout: float = 2.0, *, claimed: bool = False
) -> list[PodDevices]:
    """Every container's devices, pods by namespace and name, as `told` has them.

    Raises Unreadable, after `timeout` seconds at the latest.
    """
    # Not earlier: what asks the checkpoint alone needs no gRPC.
    from deviceplugin.kubelet.pod_resources import PodResourcesClient

    with PodResourcesClient(paths) as kubelet:
        return told(kubelet.list(timeout), claimed=claimed)


def told(
    answer: "podresources_pb2.ListPodResourcesResponse", *, claimed: bool = False
) -> list[PodDevices]:
    """What a List of PodResources says, in the kubelet's order.

    With `claimed` those of ResourceClaims, too: of "driver/pool", by the names of the devices and
    the PCI addresses in them and in their CDI names. The kubelet tells of them since Kubernetes
    1.34, before that by a feature gate.
    """
    found: dict[_Key, set[str]] = {}
    of_claims: dict[_Key, set[str]] = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            # One entry per device or NUMA node, in no order.
            for entry in sorted(container.devices, key=lambda one: one.resource_name):
                key = pod.namespace, pod.name, "", container.name, entry.resource_name
                found.setdefault(key, set()).update(entry.device_ids)
            for claim in container.dynamic_resources:
                for one in claim.claim_resources:
                    resource = f"{one.driver_name}/{one.pool_name}"
                    key = pod.namespace, pod.name, "", container.name, resource
                    cdi = [device.name for device in one.cdi_devices]
                    of_claims.setdefault(key, set()).update(_ids(one.device_name, cdi))
    return _rows(found) + (_rows(of_claims, claimed=True) if claimed else [])


def of_pod(
    paths: Paths, namespace: str, name: str, uid: str, timeout: float = 2.0
) -> list[PodDevices]:
    """What the containers of one pod hold: in PodResources' order, then those it leaves out.

    By the pod's UID from the checkpoint, which has all of it before the sandbox is made, ordered
    by PodResources; if it has nothing of that UID, by the pod's name from PodResources, unless an
    id is another pod's: the name was that one's a moment ago. What a ResourceClaim gave is known
    by the name alone. One of the two is enough, but without a UID the checkpoint is none. Raises
    Unreadable.
    """
    by_name: list[PodDevices] = []
    noted: list[PodDevices] = []
    problems = []
    try:
        rows = from_pod_resources(paths, timeout, claimed=True)
        by_name = [row for row in rows if (row.namespace, row.name) == (namespace, name)]
    except KubeletUnreadable as problem:
        problems.append(str(problem))
    try:
        noted = from_checkpoint(paths) if uid else []
        if problems and not uid:
            raise KubeletUnreadable(
                f"{_checkpoint_path(paths)}: knows pods by their UID alone, and CNI_ARGS have no "
                "K8S_POD_UID"
            )
        if problems and not _checkpoint_path(paths).exists():
            raise KubeletUnreadable(f"{_checkpoint_path(paths)}: is not there")
    except KubeletUnreadable as problem:
        problems.append(str(problem))
    if len(problems) == 2:
        raise KubeletUnreadable("; ".join(problems))
    by_uid = {(row.container, row.resource): row for row in noted if row.uid == uid}
    others = {(row.resource, known) for row in noted if row.uid != uid for known in row.ids}
    if _keys(by_name) & (others - _keys(by_uid.values())):
        by_name = []
    found = {(row.container, row.resource, row.claimed): row for row in by_name}
    if by_uid:
        known_rows = {(*key, False): row for key, row in by_uid.items()}
        kept = {key: row for key, row in found.items() if row.claimed or key in known_rows}
        found = kept | known_rows
    return [replace(row, namespace=namespace, name=name, uid=uid) for row in found.values()]


def _keys(rows: Iterable[PodDevices]) -> set[tuple[str, str]]:
    return {(row.resource, known) for row in rows if not row.claimed for known in row.ids}


def _ids(device: str, cdi: Iterable[str]) -> Iterator[str]:
    """What a claimed device may be called by: its name, and the PCI addresses in its names."""
    if device:
        yield device
    for name in (device, *cdi):
        for match in _ADDRESS.finditer(name):
            yield _address(match)


def address_in(device_id: str) -> str:
    """The first PCI address in an id, as sysfs writes it: "0000-3b-00-0" has one; else ""."""
    match = _ADDRESS.search(device_id)
    return _address(match) if match else ""


def is_address(device_id: str) -> bool:
    """Whether an id is a PCI address and nothing else, in either spelling."""
    return _ADDRESS.fullmatch(device_id) is not None


def _address(match: re.Match[str]) -> str:
    domain, bus, slot, function = match.groups()
    return f"{domain}:{bus}:{slot}.{function}".lower()


def _answer(response: str) -> _AllocateAnswer:
    """The host's uverbs devices and the CDI names in one of Allocate's; none if it is none."""
    # Not earlier: a CNI plugin asks for ids alone.
    from google.protobuf.message import DecodeError

    from deviceplugin.api.v1beta1_pb2 import ContainerAllocateResponse

    try:
        answer = ContainerAllocateResponse.FromString(base64.b64decode(response))
    except (ValueError, DecodeError):
        return _AllocateAnswer()
    numbers = {int(found[1]) for one in answer.devices if (found := _UVERBS.search(one.host_path))}
    return _AllocateAnswer(
        nodes=tuple(f"uverbs{number}" for number in sorted(numbers)),
        cdi=tuple(sorted(one.name for one in answer.cdi_devices)),
    )


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
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise KubeletUnreadable(
            f"{path}: is no checkpoint of the kubelet's: {error}: the kubelet writes it anew with "
            "the next pod that gets a device"
        ) from None


class _Read(NamedTuple):
    """What was read last: of which file, and how that looked."""

    path: Path
    look: tuple[int, ...]
    data: _Data


_last_read: _Read | None = None


def _decoded(path: Path) -> _Data:
    """The file's content, decoded again only if the file is another one or was changed."""
    global _last_read
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        look = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        last = _last_read
        if last is not None and last.path == path and last.look == look:
            return last.data
        data = msgspec.json.decode(file.read(), type=_KubeletFile).Data
    # A file that has just been written may be written again without looking different.
    if abs(time.time() - status.st_ctime) > _SETTLED:
        _last_read = _Read(path, look, data)
    return data


def _rows(
    found: dict[_Key, set[str]],
    *,
    claimed: bool = False,
    given: Mapping[_Key, _AllocateAnswer] = _NONE,
) -> list[PodDevices]:
    return [
        PodDevices(
            namespace=namespace,
            name=name,
            uid=uid,
            container=container,
            resource=resource,
            ids=tuple(sorted(ids)),
            claimed=claimed,
            nodes=given.get(key, _NOTHING).nodes,
            cdi=given.get(key, _NOTHING).cdi,
        )
        for key, ids in found.items()
        for namespace, name, uid, container, resource in (key,)
    ]
