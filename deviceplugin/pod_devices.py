"""Finds the HCAs that a pod holds, for the CNI plugins.

The kubelet has the device ids of the pod's containers. The checkpoint has the HCAs of each id.
"""

from collections.abc import Iterable
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from base.paths import Paths
from base.pod import Pod
from deviceplugin import checkpoint, current, rails
from deviceplugin.checkpoint import AllocatedHCA, AllocatedRdmaDevice, Checkpoint, CheckpointDamaged
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable
from host.sysfs import pci

_LONG = 256  # characters; every id of an HCA is shorter
NOT_TOLD = (
    "the HCA is not on this node now, or another device plugin assigned the id: delete the pod, so "
    "that its successor gets another id"
)


class Unknown(Exception):
    """The devices of a pod are unknown. The text gives the reason and the remedy."""


class Stale(Exception):
    """The HCA has other device numbers than the container got. The text names both numbers."""


class PodDevice(msgspec.Struct, frozen=True):
    """An HCA that a pod holds. `id` is one of the pod's device ids for the HCA."""

    resource: str
    id: str
    device: AllocatedHCA
    ids: frozenset[str] = frozenset()  # all device ids of the pod for this HCA

    def __str__(self) -> str:
        verbs = ", ".join(_shown(rdma) for rdma in self.device.rdma) or "no verbs device"
        return f"{self.device.id} ({verbs}) of {self.resource}"


class PodHoldings(msgspec.Struct, frozen=True):
    """The devices that the kubelet gave to a pod."""

    pod: Pod
    hcas: tuple[PodDevice, ...] = ()  # of our pools, each once, in the order of `rails`
    ids: frozenset[str] = frozenset()  # all device ids, including those of other drivers
    keys: frozenset[tuple[str, str]] = frozenset()  # (resource, id) from device plugins only

    def hca(self, device_id: str) -> PodDevice | None:
        """The first HCA of `hcas_of`."""
        return next(iter(self.hcas_of(device_id)), None)

    def hcas_of(self, device_id: str) -> tuple[PodDevice, ...]:
        """The HCAs that the pod got by this id, or otherwise the pod's HCA that the id names."""
        own = tuple(hca for hca in self.hcas if device_id in (*hca.ids, hca.id))
        named = hca_of(device_id)
        return own or tuple(hca for hca in self.hcas if hca.device.id in (device_id, named))

    def shown(self) -> str:
        return ", ".join(map(str, self.hcas)) or "no HCA"


def recorded(paths: Paths) -> Checkpoint:
    """The device plugin's checkpoint. Raises Unknown if it cannot be read."""
    try:
        return checkpoint.read(paths)
    except CheckpointDamaged as damage:
        raise Unknown(str(damage)) from None


def given_to(
    paths: Paths, pod: Pod, *, needed: bool = True, ours: Checkpoint | None = None
) -> PodHoldings:
    """The devices that a pod holds. Raises Unknown.

    If not `needed`, the kubelet is called only if any pod holds an HCA of our pools. A caller that
    has read our checkpoint passes it as `ours`.
    """
    ours = recorded(paths) if ours is None else ours
    asks = any(allocation.gpu is None for allocation in ours.allocations) or (
        needed and (ours.offered or paths.device_plugins.is_dir())
    )
    if not pod.name or not asks:
        return PodHoldings(pod)
    try:
        rows = records.of_pod(paths, pod.namespace, pod.name, pod.uid)
    except KubeletUnreadable as error:
        raise Unknown(f"cannot tell which HCAs pod {pod} has: {error}") from None
    allocations = {allocation.key: allocation for allocation in ours.allocations}
    hcas: dict[str, PodDevice] = {}
    ids: dict[str, set[str]] = {}
    for row in rows:
        for device_id in row.ids:
            if row.claimed:  # by a DRA driver
                continue
            allocation = allocations.get((row.resource, device_id))
            if allocation is None and row.resource in ours.offered:
                raise Unknown(
                    f"pod {pod} holds {device_id} of {row.resource}, but {paths.checkpoint} "
                    "does not list this device yet: try again in a minute"
                )
            if allocation is not None and allocation.gpu is not None:
                continue
            if allocation is not None and not allocation.devices:
                raise Unknown(
                    f"pod {pod} holds {device_id} of {row.resource}, but the HCA of this id is "
                    f"unknown: {NOT_TOLD}"
                )
            for device in allocation.devices if allocation is not None else ():
                hcas.setdefault(device.id, PodDevice(row.resource, device_id, device))
                ids.setdefault(device.id, set()).add(device_id)
    return PodHoldings(
        pod,
        tuple(
            replace(hca, ids=frozenset(ids[hca.device.id]))
            for hca in sorted(hcas.values(), key=_place)
        ),
        frozenset(device_id for row in rows for device_id in row.ids),
        frozenset((row.resource, own) for row in rows for own in row.ids if not row.claimed),
    )


def _place(held: PodDevice) -> rails.Place:
    return rails.place(held.device, held.device.rail)


def hca_of(device_id: str) -> str:
    """The HCA that a device id of a pool names: "0000:3b:00.0-3" is a slot of 0000:3b:00.0."""
    return _hca_of(device_id) if len(device_id) < _LONG else _hca_of.__wrapped__(device_id)


@lru_cache(8192)  # one ADD looks up every id that the node's device plugins offer
def _hca_of(device_id: str) -> str:
    address = pci.canonical(device_id)
    if address is not None:
        return address
    hca, dash, slot = device_id.rpartition("-")
    if not dash or not slot.isdecimal():
        return device_id
    return pci.canonical(hca) or hca


def require_current(paths: Paths, held: PodDevice, names: Iterable[str]) -> None:
    """Raise Stale if the RDMA devices `names` have other device numbers than the container got."""
    every = pci.uverbs_numbers(paths)
    now = {name: every[name] for name in names if name in every}
    outdated = current.outdated(held.device, now, complete=False)
    if outdated is not None:
        other = ", ".join(f"{name} {major}:{minor}" for name, major, minor in sorted(now.values()))
        raise Stale(
            f"the container got RDMA device {_shown(outdated)}, but HCA {held.device.id} has "
            f"{other} now, because the driver was loaded again: delete the pod, so that a new pod "
            "gets the right device"
        )


def _shown(rdma: AllocatedRdmaDevice) -> str:
    uverbs = current.uverbs_of(rdma)
    return rdma.name if uverbs is None else f"{rdma.name}, {uverbs[0]} {uverbs[1]}:{uverbs[2]}"
