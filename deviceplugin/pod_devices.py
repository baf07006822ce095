"""Which HCAs a pod was given: the two halves joined, a verbs device and the interface beside it.

The kubelet knows which device ids a pod's containers hold, the checkpoint which HCA each id is. A
pod has one answer, whichever of its containers holds the devices and in whichever order they
start. The CNI plugins ask; nothing here changes anything but the pod's claims.
"""

from collections.abc import Iterable
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.checkpoint import AllocatedHCA, CheckpointDamaged
from deviceplugin.claims import Pod
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable
from host import pci

KUBELET_TIMEOUT = 2.0  # seconds, of the kubelet's PodResources API
_LONG = 256  # characters, which no id of a device has
NOT_TOLD = (
    "it is not on this node now, or another device plugin gave it: delete the pod, so that it gets "
    "a new one"
)


class Unknown(Exception):
    """It cannot be told what the pod was given. The text says why, and what to do."""


class Stale(Exception):
    """The HCA has other device numbers than the container was given. The text says which."""


class PodDevice(msgspec.Struct, frozen=True):
    """An HCA that a pod holds, by one of the pod's device ids."""

    resource: str
    id: str
    device: AllocatedHCA
    ids: frozenset[str] = frozenset()  # all of the pod's that stand for the HCA

    def __str__(self) -> str:
        verbs = ", ".join(_shown(rdma) for rdma in self.device.rdma) or "no verbs device"
        return f"{self.device.id} ({verbs}) of {self.resource}"


class GivenToPod(msgspec.Struct, frozen=True):
    """What the kubelet gave to a pod."""

    pod: Pod
    faces: tuple[PodDevice, ...] = ()  # the HCAs of our pools, each once, in a lasting order
    ids: frozenset[str] = frozenset()  # every device id, also of other drivers
    keys: frozenset[tuple[str, str]] = frozenset()  # resource and id of those of device plugins

    def face(self, device_id: str) -> PodDevice | None:
        """The first HCA that a device id of the kubelet's, or an HCA's id, means."""
        return next(iter(self.faces_of(device_id)), None)

    def faces_of(self, device_id: str) -> tuple[PodDevice, ...]:
        """The HCAs that a device id means: every one of its pool if that is a token of mode "all".

        An id that the pod does not hold means the HCA that it names.
        """
        own = tuple(face for face in self.faces if device_id in (*face.ids, face.id))
        named = hca_of(device_id)
        return own or tuple(face for face in self.faces if face.device.id in (device_id, named))

    def shown(self) -> str:
        """All HCAs, in words."""
        return ", ".join(str(face) for face in self.faces) or "no HCA"


def given_to(paths: Paths, pod: Pod, *, needed: bool = True) -> GivenToPod:
    """What a pod holds; nothing where this node hands out nothing. Raises Unknown.

    Unless it is `needed` the kubelet is not asked while nobody holds an HCA of ours.
    """
    try:
        known = checkpoint.read(paths)
    except CheckpointDamaged as damage:
        raise Unknown(str(damage)) from None
    ours = known.allocations or (needed and (known.resources or paths.device_plugins.is_dir()))
    if not pod.name or not ours:
        return GivenToPod(pod)
    try:
        rows = records.of_pod(paths, pod.namespace, pod.name, pod.uid, KUBELET_TIMEOUT)
    except KubeletUnreadable as error:
        raise Unknown(f"cannot tell which HCAs pod {pod} was given: {error}") from None
    allocations = {one.key: one for one in known.allocations}
    faces: dict[str, PodDevice] = {}
    ids: dict[str, set[str]] = {}
    for row in rows:
        for device_id in row.ids:
            if row.claimed:  # a DRA driver's, whatever its name
                continue
            allocation = allocations.get((row.resource, device_id))
            if allocation is None and row.resource in known.resources:
                raise Unknown(
                    f"pod {pod} holds {device_id} of {row.resource}, which {paths.checkpoint} does "
                    "not have: the agent takes it over from the kubelet within a minute; try again"
                )
            if allocation is not None and not allocation.devices:
                raise Unknown(
                    f"pod {pod} holds {device_id} of {row.resource}, and nothing tells which HCA "
                    f"that is: {NOT_TOLD}"
                )
            for device in allocation.devices if allocation is not None else ():
                faces.setdefault(device.id, PodDevice(row.resource, device_id, device))
                ids.setdefault(device.id, set()).add(device_id)
    return GivenToPod(
        pod,
        tuple(replace(face, ids=frozenset(ids[known_id])) for known_id, face in faces.items()),
        frozenset(device_id for row in rows for device_id in row.ids),
        frozenset((row.resource, known) for row in rows for known in row.ids if not row.claimed),
    )


def hca_of(device_id: str) -> str:
    """The HCA that a device id of a pool names by itself: "0000:3b:00.0-3" is a slot of it."""
    return _hca_of(device_id) if len(device_id) < _LONG else _hca_of.__wrapped__(device_id)


@lru_cache(8192)  # one ADD asks for every id that the node's device plugins offer
def _hca_of(device_id: str) -> str:
    address = pci.canonical(device_id)
    if address is not None:
        return address
    hca, dash, slot = device_id.rpartition("-")
    if not dash or not slot.isdecimal():
        return device_id
    return pci.canonical(hca) or hca


def require_current(paths: Paths, face: PodDevice, names: Iterable[str]) -> None:
    """Raise Stale if the HCA's verbs devices are not those that the container was given.

    `names` are the RDMA devices of the HCA now, or those that matter. Its uverbs number is another
    one once its driver was loaded anew, and the old number may be another HCA's by then.
    """
    every = pci.uverbs_numbers(paths)
    now = {name: every[name] for name in names if name in every}
    if not now:
        return
    given = [rdma for rdma in face.device.rdma if rdma.uverbs is not None]
    # Also their names may be others by now: then one of the numbers must be right.
    compared = [rdma for rdma in given if rdma.name in now]
    wrong = next((rdma for rdma in compared if _number(rdma) != now[rdma.name]), None)
    if wrong is None and given and not compared:
        wrong = None if {_number(rdma) for rdma in given} & set(now.values()) else given[0]
    if wrong is not None:
        other = ", ".join(f"{name} {major}:{minor}" for name, major, minor in sorted(now.values()))
        raise Stale(
            f"the container was given {_shown(wrong)}, but HCA {face.device.id} has {other} "
            "now: its driver was loaded anew; delete the pod, so that it gets a new one"
        )


def _number(rdma: checkpoint.AllocatedRdmaDevice) -> tuple[str, int, int] | None:
    node = rdma.uverbs
    return None if node is None else (node.path.rpartition("/")[2], node.major, node.minor)


def _shown(rdma: checkpoint.AllocatedRdmaDevice) -> str:
    if rdma.uverbs is None:
        return rdma.name
    name = rdma.uverbs.path.rpartition("/")[2]
    return f"{rdma.name}, {name} {rdma.uverbs.major}:{rdma.uverbs.minor}"
