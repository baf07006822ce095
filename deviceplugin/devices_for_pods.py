"""Finds the devices that a pool offers or a pod holds, so that no other pod takes them.

Our checkpoint has our ids. The kubelet's checkpoint has the ids of all device plugins.
"""

from collections.abc import Mapping
from functools import cached_property

import msgspec

from base.paths import Paths
from base.types import DeviceId
from deviceplugin.checkpoint import AllocatedHCA, AllocationKey, Checkpoint
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable
from deviceplugin.pod_devices import PodHoldings, Unknown, hca_of, recorded
from host.sysfs import attribute_files, pci

_NONE: Mapping[str, str] = {}


class Assigned(msgspec.Struct, frozen=True):
    """Assigned devices, by address. Software HCAs have the names of their RDMA devices as keys."""

    held: Mapping[AllocationKey, str]  # each device that a container holds exclusively
    pooled: Mapping[str, str]  # the resource of each device that a pool offers or a pod holds


class OfOtherPods(msgspec.Struct, frozen=True):
    """The devices that one pod must not use, each with its resource."""

    held: Mapping[str, str] = _NONE  # another pod holds the device exclusively
    pooled: Mapping[str, str] = _NONE  # a pool offers the device, or another pod holds it


def others(paths: Paths, every: Assigned, holdings: PodHoldings) -> OfOtherPods:
    """The assigned devices, without the devices of the pod that has these `holdings`."""
    ids = _Ids(paths)
    own = {ids.device(hca.device) for hca in holdings.hcas} | set(map(ids.named_by, holdings.ids))
    return OfOtherPods(
        held={device: key[0] for key, device in every.held.items() if key not in holdings.keys},
        pooled={device: resource for device, resource in every.pooled.items() if device not in own},
    )


def assigned(paths: Paths, ours: Checkpoint | None = None) -> Assigned:
    """The devices that are assigned now. Raises Unknown if a record is unreadable.

    A caller that has read our checkpoint passes it as `ours`.
    """
    ours = recorded(paths) if ours is None else ours
    ids = _Ids(paths)
    held: dict[AllocationKey, str] = {}
    pooled: dict[str, str] = {}
    for allocation in ours.allocations:
        devices = [ids.device(device) for device in allocation.devices]
        pooled |= dict.fromkeys(devices, allocation.resource)
        if allocation.exclusive:
            held[allocation.key] = devices[0]
    for resource, hcas in ours.offered.items():
        pooled = dict.fromkeys(filter(None, map(ids.named_by, hcas)), resource) | pooled
    if paths.device_plugins.is_dir():
        allocated, offered = _of_the_kubelet(paths, ours)
        held |= {key: ids.named_by(key[1]) for key in allocated if ids.is_whole(key[1])}
        for resource, device_id in (*allocated, *offered):
            if device := ids.named_by(device_id):
                pooled.setdefault(device, resource)
    return Assigned(held, pooled)


def _of_the_kubelet(
    paths: Paths, ours: Checkpoint
) -> tuple[list[AllocationKey], list[AllocationKey]]:
    """The ids that the kubelet gave to pods, and the ids that it may give. Raises Unknown."""
    try:
        listed = records.registered(paths)
        if listed is None:
            _require_none(paths, ours)
            return [], []
        rows = records.from_checkpoint(paths)
    except KubeletUnreadable as error:
        raise Unknown(
            f"cannot tell which devices of this node are for other pods: {error}"
        ) from None
    allocated = [(row.resource, device_id) for row in rows for device_id in row.ids]
    return allocated, [(name, DeviceId(device_id)) for name in listed for device_id in listed[name]]


def _require_none(paths: Paths, ours: Checkpoint) -> None:
    """Raise KubeletUnreadable if device plugins run although the kubelet has no checkpoint."""
    if not (ours.offered or ours.allocations or records.from_pod_resources(paths)):
        return
    raise KubeletUnreadable(
        f"{paths.device_plugins} has no checkpoint of the kubelet, but device plugins run on "
        "this node: restart the agent or a device plugin, so that the kubelet writes the "
        "checkpoint"
    )


class _Ids:
    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._holders: dict[str, str] = {}

    @cached_property
    def _rdma(self) -> frozenset[str]:
        return frozenset(attribute_files.names(f"{self._paths.sysfs}/class/infiniband"))

    def device(self, device: AllocatedHCA) -> str:
        return device.address or self.named_by(device.id) or device.id

    def named_by(self, device_id: str) -> str:
        """The key of an id's device in `Assigned`; "" if the id names no device."""
        hca = hca_of(device_id)
        address = pci.canonical(hca) or records.address_in(device_id)
        if address:
            return address
        name = next((name for name in (device_id, hca) if name in self._rdma), "")
        if name and name not in self._holders:
            self._holders[name] = pci.holder_of_rdma(self._paths, name) or name
        return self._holders.get(name, "")

    def is_whole(self, device_id: str) -> bool:
        named = device_id in self._rdma or records.is_address(device_id)
        return named or pci.canonical(device_id) is not None
