"""Answers the kubelet's calls for one pool: lists, preferences, and allocations."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import grpc

from base.paths import Paths
from base.types import DeviceId
from deviceplugin import current
from deviceplugin.allocate import container_devices, device_info
from deviceplugin.allocate.container_devices import AllocateResult
from deviceplugin.allocate.preferred import preferred
from deviceplugin.api import v1beta1_pb2
from deviceplugin.availability import held_elsewhere
from deviceplugin.checkpoint import AllocatedHCA
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet import records
from deviceplugin.kubelet.plugin_server import Rejected, ServedPool
from deviceplugin.kubelet.pod_resources import PodResourcesClient
from deviceplugin.kubelet.records import KubeletUnreadable, PodDevices
from deviceplugin.ledger import Ledger
from deviceplugin.pools.pool import Pool
from host.sysfs.discovery import HCA
from host.sysfs.gpus import GPU, GPUs, address_of
from host.sysfs.topology import Topology

ASK_KUBELET = 0.5  # seconds; a pod waits for this hint

_log = logging.getLogger(__name__)


class PoolService(ServedPool):
    """A pool with the availability of its ids. Call `update` before any other method.

    `allocated` is called after each Allocate. `open_gpus` returns the GPUs with room for a
    container that has no GPU yet.
    """

    def __init__(
        self,
        resource: str,
        paths: Paths,
        ledger: Ledger,
        inventory: Inventory,
        kubelet: PodResourcesClient,
        allocated: Callable[[], object] = lambda: None,
        open_gpus: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        super().__init__(resource)
        self._paths = paths
        self._open_gpus = open_gpus
        self._kubelet = kubelet
        self._ledger = ledger
        self._inventory = inventory
        self._allocated = allocated
        self._pool: Pool | None = None
        self._resources: frozenset[str] = frozenset()
        self.unavailable: Mapping[str, str] = {}  # ids that may not be allocated, with the reason
        self._gpus = GPUs(paths)
        self._fabric_env = False
        self._topology: Topology | None = None
        self._located: set[str] = set()  # the addresses that the topology has

    def update(
        self,
        pool: Pool,
        unavailable: Mapping[str, str],
        ours: frozenset[str],
        *,
        fabric_env: bool,
        expected: Collection[str] = (),
    ) -> bool:
        """Replace the pool and its state. Returns True if the kubelet must get a new list.

        Ids in `expected` are listed as healthy anyway. `ours` are all resources of this plugin.
        """
        self._pool, self._resources, self._fabric_env = pool, ours, fabric_env
        self.unavailable = unavailable
        return self.relist(
            [
                (slot.id, slot.id not in unavailable or slot.id in expected, slot.numa)
                for slot in pool.slots
            ]
        )

    @property
    def pool(self) -> Pool:
        assert self._pool is not None
        return self._pool

    @property
    def hcas(self) -> list[HCA]:
        """All HCAs of the node at the last look."""
        return self._inventory.last()

    def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        pool = self.pool
        gpus = self._gpus.read()
        near: list[str] = []
        if gpus:
            try:
                rows = records.from_answer(self._kubelet.list(ASK_KUBELET))
                known = {
                    (entry.resource, str(entry.id)): "" if entry.gpu.open else entry.gpu.bdf
                    for entry in self._ledger.allocations()
                    if entry.gpu is not None
                }
                near = waiting_gpus(rows, self._resources, gpus, self._in_checkpoint(), known)
            except KubeletUnreadable as error:
                _log.debug("%s: the container's GPUs are unknown: %s", self.name, error)
        addresses = {hca.address for hca in pool.hcas} | {gpu.address for gpu in gpus}
        addresses.discard("")
        if self._topology is None or addresses != self._located:
            self._topology, self._located = Topology.read(self._paths, addresses), addresses
        loads = self._ledger.loads({(self.name, DeviceId(device_id)) for device_id in available})
        return preferred(
            pool, available, must_include, size, loads, near, self._topology, self._open_gpus()
        )

    def allocate(self, ids: list[str]) -> v1beta1_pb2.ContainerAllocateResponse:
        """Record an allocation on disk, then return it. Raises Rejected."""
        with self._ledger.allocating:
            result, hcas = self._allocate(ids)
            try:
                self._ledger.record(self.name, result.devices)
            except OSError as error:
                raise Rejected(
                    grpc.StatusCode.INTERNAL,
                    f"{self.name}: cannot write the allocation to {self._paths.checkpoint}: "
                    f"{error.strerror}: check the disk and its free space",
                ) from None
            self._write_device_information(result.devices, hcas)
        self._allocated()
        for note in result.notes:
            _log.warning("%s: %s", self.name, note)
        _log.info("%s: %s allocated", self.name, ", ".join(sorted(ids)))
        return result.answer

    def restore_device_information(self, device_id: str, device: AllocatedHCA) -> None:
        """Write the id's device-information file, unless the HCA's device numbers have changed."""
        with self._ledger.allocating:  # a file must have one writer at a time
            hcas = self._inventory.current([device.id])
            if device.id in hcas and current.is_as_recorded(device, hcas[device.id]):
                self._write_device_information({device_id: (device,)}, hcas)

    def _in_checkpoint(self) -> list[PodDevices]:
        """The rows of the kubelet's checkpoint; [] if it is unreadable."""
        try:
            return records.from_checkpoint(self._paths)
        except KubeletUnreadable as error:
            _log.debug("%s: cannot tell which containers wait for an HCA: %s", self.name, error)
            return []

    def _allocate(self, ids: list[str]) -> tuple[AllocateResult, Mapping[str, HCA]]:
        pool = self.pool
        slots = [slot for device_id in ids if (slot := pool.slot(device_id)) is not None]
        wanted = {hca_id for slot in slots for hca_id in slot.hcas}
        if pool.config.cdi:  # the CDI file has all HCAs of the pool
            wanted = {hca.id for hca in pool.hcas}
        # Another pool may have allocated since the last look.
        taken = held_elsewhere(pool, self._ledger.allocations())
        unavailable = dict(self.unavailable)
        for slot in slots:
            if all(hca_id in taken for hca_id in slot.hcas):
                unavailable[slot.id] = taken[slot.hcas[0]]
        hcas = self._inventory.current(wanted.difference(taken))
        try:
            result = container_devices.allocation(
                self._paths,
                pool,
                ids,
                set(ids).difference(unavailable),
                hcas,
                fabric_env=self._fabric_env,
            )
        except Rejected as refused:
            reasons = {unavailable[device_id] for device_id in ids if device_id in unavailable}
            text = "; ".join([str(refused), *sorted(reasons)])
            raise Rejected(refused.code, text) from None
        return result, hcas

    def _write_device_information(
        self, allocated: Mapping[str, Sequence[AllocatedHCA]], hcas: Mapping[str, HCA]
    ) -> None:
        for device_id, devices in allocated.items():
            try:
                device_info.write(
                    self._paths, self.name, device_id, [hcas[device.id] for device in devices]
                )
            except OSError as error:  # Multus works without the file
                _log.warning("cannot write the device information of %s: %s", device_id, error)


_Container = tuple[str, str, str, str]  # namespace, name, uid, container
_Devices = frozenset[tuple[str, str]]  # resource, id


def waiting_gpus(
    rows: Iterable[PodDevices],
    ours: Collection[str],
    gpus: Sequence[GPU],
    in_checkpoint: Iterable[PodDevices] = (),
    known: Mapping[tuple[str, str], str] | None = None,
) -> list[str]:
    """The sorted addresses of the container's GPUs.

    The kubelet does not name this container. PodResources lists the container's GPUs, but none of
    our HCAs. A container that requests no HCA looks the same. But the kubelet's checkpoint has a
    container only after all devices of the container are allocated (allocateContainerResources in
    manager.go). So a container in the checkpoint does not wait.

    Returns [] if several containers with different GPUs wait. The two sources identify pods
    differently, so containers are compared by name and devices. An ended container may hide a
    waiting container with the same name and GPUs.

    `rows` come from PodResources. `known` has the address of each id of our own pools of GPUs, or
    "" if the address may change.
    """

    def address(key: tuple[str, str]) -> str | None:
        found = known.get(key) if known else None
        return address_of(gpus, key[1]) if found is None else found

    finished = {(key[3], devices) for key, devices in _without_ours(in_checkpoint, ours).items()}
    held_by_waiting = set()
    for key, devices in _without_ours(rows, ours).items():
        addresses = frozenset(filter(None, map(address, devices)))
        if addresses and (key[3], devices) not in finished:
            held_by_waiting.add(addresses)
    return sorted(next(iter(held_by_waiting))) if len(held_by_waiting) == 1 else []


def _without_ours(rows: Iterable[PodDevices], ours: Collection[str]) -> dict[_Container, _Devices]:
    """The devices of each container that has no device of the resources `ours`."""
    held: dict[_Container, _Devices] = {}
    served: set[_Container] = set()
    for row in rows:
        key = row.namespace, row.name, row.uid, row.container
        devices = {(row.resource, device_id) for device_id in row.ids}
        held[key] = held.get(key, frozenset()) | devices
        if row.resource in ours and row.ids:
            served.add(key)
    return {key: devices for key, devices in held.items() if key not in served}
