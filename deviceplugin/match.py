"""Which HCAs a pod was given: the two halves joined, a verbs device and the interface beside it.

The kubelet knows which device ids a pod's containers hold, the checkpoint which HCA each id is. A
pod has one answer, whichever of its containers holds the devices and in whichever order they
start. The CNI plugins ask; nothing here changes anything but the pod's claims.
"""

from collections.abc import Iterable

import msgspec

from deviceplugin import checkpoint, kubelet
from deviceplugin.checkpoint import Damaged, Device
from deviceplugin.claims import Pod
from deviceplugin.kubelet import Unreadable
from host import pci
from host.paths import Paths

KUBELET_TIMEOUT = 2.0  # seconds, of the kubelet's PodResources API


class Unknown(Exception):
    """It cannot be told what the pod was given. The text says why; to try again may help."""


class Stale(Exception):
    """The HCA has other device numbers than the container was given. The text says which."""


class Face(msgspec.Struct, frozen=True):
    """An HCA that a pod holds, by one of the pod's device ids."""

    resource: str
    id: str
    device: Device

    def __str__(self) -> str:
        verbs = ", ".join(_shown(rdma) for rdma in self.device.rdma) or "no verbs device"
        return f"{self.device.id} ({verbs}) of {self.resource}"


class Given(msgspec.Struct, frozen=True):
    """What the kubelet gave to a pod."""

    pod: Pod
    faces: tuple[Face, ...] = ()  # the HCAs of our pools, each once, in a lasting order
    ids: frozenset[str] = frozenset()  # every device id, also of other device plugins

    def face(self, device_id: str) -> Face | None:
        """The HCA that a device id of the kubelet's, or an adapter's id, means."""
        for face in self.faces:
            if device_id in (face.id, face.device.id) or adapter_of(device_id) == face.device.id:
                return face
        return None

    def shown(self) -> str:
        """All HCAs, in words."""
        return ", ".join(str(face) for face in self.faces) or "no HCA"


def given_to(paths: Paths, pod: Pod) -> Given:
    """What a pod holds; nothing where this node hands out nothing. Raises Unknown."""
    try:
        known = checkpoint.read(paths)
    except Damaged as damage:
        raise Unknown(str(damage)) from None
    if not pod.name or not (known.allocations or paths.device_plugins.is_dir()):
        return Given(pod)
    try:
        rows = kubelet.of_pod(paths, pod.namespace, pod.name, pod.uid, KUBELET_TIMEOUT)
    except Unreadable as error:
        if not known.allocations:
            return Given(pod)
        raise Unknown(f"cannot tell which HCAs pod {pod} was given: {error}") from None
    allocations = {one.key: one for one in known.allocations}
    faces: dict[str, Face] = {}
    for row in rows:
        for device_id in row.ids:
            allocation = allocations.get((row.resource, device_id))
            for device in allocation.devices if allocation is not None else ():
                faces.setdefault(device.id, Face(row.resource, device_id, device))
    return Given(pod, tuple(faces.values()), frozenset(i for row in rows for i in row.ids))


def held_by_anybody(paths: Paths) -> frozenset[str]:
    """The adapters that containers of this node hold. Raises Unknown."""
    try:
        allocations = checkpoint.read(paths).allocations
    except Damaged as damage:
        raise Unknown(str(damage)) from None
    return frozenset(device.id for one in allocations for device in one.devices)


def adapter_of(device_id: str) -> str:
    """The adapter that a device id of a pool names by itself: "0000:3b:00.0-3" is a slot of it."""
    address = pci.canonical(device_id)
    if address is not None:
        return address
    adapter, dash, slot = device_id.rpartition("-")
    if not dash or not slot.isdecimal():
        return device_id
    return pci.canonical(adapter) or adapter


def require_current(paths: Paths, face: Face, names: Iterable[str]) -> None:
    """Raise Stale if the HCA's verbs devices are not those that the container was given.

    `names` are the RDMA devices that the HCA has now. Its uverbs number is another one once its
    driver was loaded anew, and the old number may be another HCA's by then.
    """
    numbers = pci.uverbs_numbers(paths)
    now = {numbers[name] for name in names if name in numbers}
    for rdma in face.device.rdma:
        if rdma.uverbs is None or not now:
            continue
        node = rdma.uverbs
        if (node.path.rpartition("/")[2], node.major, node.minor) not in now:
            other = ", ".join(f"{name} {major}:{minor}" for name, major, minor in sorted(now))
            raise Stale(
                f"the container was given {_shown(rdma)}, but HCA {face.device.id} has {other} "
                "now: its driver was loaded anew; delete the pod, so that it gets a new one"
            )


def _shown(rdma: checkpoint.Rdma) -> str:
    if rdma.uverbs is None:
        return rdma.name
    name = rdma.uverbs.path.rpartition("/")[2]
    return f"{rdma.name}, {name} {rdma.uverbs.major}:{rdma.uverbs.minor}"
