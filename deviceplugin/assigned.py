"""Which devices of this node are for pods: a pool offers them, or a pod was given them.

By the device plugin's checkpoint, and by the kubelet's own, which has the ids of every device
plugin of the node. Whoever attaches such a device to a pod that was not given it takes it away
from the pod that was, or from the pool. Nothing here changes anything.
"""

from collections.abc import Mapping

import msgspec

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.checkpoint import AllocatedHCA, Checkpoint, CheckpointDamaged
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable
from deviceplugin.pod_devices import KUBELET_TIMEOUT, GivenToPod, Unknown, hca_of
from host import pci, sysfs

Key = tuple[str, str]
"""A resource and a device id of it, which the kubelet gives to one pod at a time."""

_NONE: Mapping[str, str] = {}


class Assigned(msgspec.Struct, frozen=True):
    """Devices by address; one without, such as a software HCA, by its RDMA device's name."""

    held: Mapping[Key, str]  # the ids whose holder has a device for itself, and which device
    pooled: Mapping[str, str]  # a pool offers the device, or some pod was given it: the resource


class OfOtherPods(msgspec.Struct, frozen=True):
    """Devices that are for other pods than one, each with the resource that it is of."""

    held: Mapping[str, str] = _NONE  # another pod has it for itself
    pooled: Mapping[str, str] = _NONE  # a pool offers it, or another pod was given it


def others(paths: Paths, every: Assigned, given: GivenToPod) -> OfOtherPods:
    """What of the devices that are assigned is for other pods than the one with these."""
    ids = _Ids(paths)
    own = {ids.device(face.device) for face in given.faces} | set(map(ids.meant, given.ids))
    return OfOtherPods(
        held={device: key[0] for key, device in every.held.items() if key not in given.keys},
        pooled={device: of for device, of in every.pooled.items() if device not in own},
    )


def assigned(paths: Paths) -> Assigned:
    """What is assigned now; nothing where there is neither a kubelet nor a checkpoint of ours.

    An id by which no device can be told, as "17", counts only if our checkpoint knows what is
    behind it. Raises Unknown where a record is there, or must be, and cannot be read.
    """
    try:
        ours = checkpoint.read(paths)
    except CheckpointDamaged as damage:
        raise Unknown(str(damage)) from None
    ids = _Ids(paths)
    held: dict[Key, str] = {}
    pooled: dict[str, str] = {}
    for one in ours.allocations:
        devices = [ids.device(device) for device in one.devices]
        pooled |= dict.fromkeys(devices, one.resource)
        if one.exclusive:
            held[one.key] = devices[0]
    for resource, hcas in ours.offered.items():
        pooled = dict.fromkeys(filter(None, map(ids.meant, hcas)), resource) | pooled
    if paths.device_plugins.is_dir():
        allocated, offered = _of_the_kubelet(paths, ours)
        held |= {key: ids.meant(key[1]) for key in allocated if ids.is_whole(key[1])}
        for resource, device_id in (*allocated, *offered):
            if device := ids.meant(device_id):
                pooled.setdefault(device, resource)
    return Assigned(held, pooled)


def _of_the_kubelet(paths: Paths, ours: Checkpoint) -> tuple[list[Key], list[Key]]:
    """What the kubelet has given to pods, and what can be given. Raises Unknown."""
    try:
        content = records.written(paths)
        if content is None:
            _require_none(paths, ours)
            return [], []
    except KubeletUnreadable as error:
        raise Unknown(
            f"cannot tell which devices of this node are for other pods: {error}"
        ) from None
    rows, listed = content
    allocated = [(row.resource, device_id) for row in rows for device_id in row.ids]
    return allocated, [
        (resource, device_id) for resource in listed for device_id in listed[resource]
    ]


def _require_none(paths: Paths, ours: Checkpoint) -> None:
    """Raise Unreadable unless no device plugin has ever sent a list to this node's kubelet.

    With the first one the kubelet writes its checkpoint.
    """
    if not ours.resources and not ours.allocations:
        held = {row.resource for row in records.from_pod_resources(paths, KUBELET_TIMEOUT)}
        if not held:
            return
    raise KubeletUnreadable(
        f"{paths.device_plugins} has no checkpoint of the kubelet, though it has device plugins: "
        "the kubelet writes it with the next list of one: restart the agent, or the device plugin"
    )


class _Ids:
    """Which device an id of a device plugin means by its own words."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._rdma = frozenset(sysfs.names(f"{paths.sys}/class/infiniband"))
        self._holders: dict[str, str] = {}

    def device(self, device: AllocatedHCA) -> str:
        """The name of a device of our checkpoint's in `Assigned`."""
        return device.address or self.meant(device.id) or device.id

    def meant(self, device_id: str) -> str:
        """The same of an id: an address, a slot of one, or an RDMA device; "" if none of them."""
        hca = hca_of(device_id)
        address = pci.canonical(hca) or records.address_in(device_id)
        if address:
            return address
        name = next((one for one in (device_id, hca) if one in self._rdma), "")
        if name and name not in self._holders:
            self._holders[name] = pci.holder_of_rdma(self._paths, name) or name
        return self._holders.get(name, "")

    def is_whole(self, device_id: str) -> bool:
        """Whether an id means all of its device, and no slot of it."""
        named = device_id in self._rdma or records.is_address(device_id)
        return named or pci.canonical(device_id) is not None
