"""One pool as the kubelet deals with it: what is free and well, and what a container gets."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import grpc

from base.paths import Paths
from deviceplugin import adoption
from deviceplugin.allocate import allocation, demand, device_info, validate_request
from deviceplugin.allocate.allocation import AllocateRefused, AllocateResult
from deviceplugin.allocate.preferred import preferred
from deviceplugin.api import v1beta1_pb2
from deviceplugin.availability import barred, elsewhere
from deviceplugin.checkpoint import AllocatedHCA
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet import records
from deviceplugin.kubelet.pod_resources import PodResourcesClient
from deviceplugin.kubelet.records import KubeletUnreadable, PodDevices
from deviceplugin.kubelet.server import Listing, Rejected
from deviceplugin.ledger import Ledger
from deviceplugin.pools.pool import Pool
from host.discovery import HCA
from host.errors import HostError
from host.gpus import GPUs
from host.topology import Topology, topology_file

ASK_KUBELET = 0.5  # seconds, for a hint while a pod waits

_log = logging.getLogger(__name__)


class Offer:
    """A pool, with the health of its HCAs. `update` comes before anything else.

    `granted` is called after each grant: to the other pools the HCAs are held now.
    """

    def __init__(
        self,
        paths: Paths,
        ledger: Ledger,
        inventory: Inventory,
        kubelet: PodResourcesClient,
        granted: Callable[[], object] = lambda: None,
    ) -> None:
        self._paths = paths
        self._kubelet = kubelet
        self._ledger = ledger
        self._inventory = inventory
        self._told = granted
        self._pool: Pool | None = None
        self._resources: frozenset[str] = frozenset()
        self._unfit: Mapping[str, str] = {}
        self._listing: Listing = []
        self._gpus = GPUs(paths)
        self._fabric_env = self._contested = False
        self._topology: Topology | None = None
        self._placed: tuple[str, ...] = ()

    def update(
        self,
        pool: Pool,
        unfit: Mapping[str, str],
        ours: frozenset[str],
        *,
        fabric_env: bool,
        contested: bool,
        hoped: Collection[str] = (),
    ) -> bool:
        """Take in how the pool is now; whether the kubelet is to be told.

        `unfit` has the device ids that may not be handed out, and why; those of them that are
        `hoped` for are listed as healthy. `ours` are all resources of this plugin. `contested`:
        some of the HCAs are in other pools, too, or held by their ids.
        """
        listing = [
            (slot.id, slot.id not in unfit or slot.id in hoped, slot.numa) for slot in pool.slots
        ]
        changed = listing != self._listing
        self._pool, self._resources, self._fabric_env = pool, ours, fabric_env
        self._unfit, self._listing, self._contested = unfit, listing, contested
        return changed

    @property
    def pool(self) -> Pool:
        """The pool as it was when last looked at."""
        assert self._pool is not None
        return self._pool

    @property
    def unfit(self) -> Mapping[str, str]:
        """The ids that may not be handed out, and why, as of the last `update`."""
        return self._unfit

    @property
    def name(self) -> str:
        """The resource, as the kubelet has it."""
        return self.pool.config.resource

    def listing(self) -> Listing:
        """Every device id, whether it may be handed out, its NUMA nodes."""
        return self._listing

    def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """The ids that go best together, near the GPUs of the container if they can be told."""
        pool = self.pool
        if problem := validate_request.nonsense(available, must_include, size):
            _log.warning("%s: GetPreferredAllocation is answered though %s", self.name, problem)
        found = self._gpus.read()
        near: list[str] = []
        if found:
            try:
                holdings = records.told(self._kubelet.list(ASK_KUBELET))
                near = demand.waiting_gpus(holdings, self._resources, found, self._written())
            except KubeletUnreadable as error:
                _log.debug("%s: no hint of the container's GPUs: %s", self.name, error)
        gpu_addresses = [gpu.address for gpu in found]
        topology = self._topology_of([hca.address for hca in pool.hcas], gpu_addresses)
        held = self._ledger.loads({(self.name, known) for known in available})
        return preferred(pool, available, must_include, size, held, near, topology)

    def allocate(self, ids: list[str]) -> v1beta1_pb2.ContainerAllocateResponse:
        """What a container with these ids is given; written down before it is answered."""
        with self._ledger.granting:
            granted, current = self._granted(ids)
            try:
                self._ledger.grant(self.name, granted.devices)
            except OSError as error:
                raise Rejected(
                    grpc.StatusCode.INTERNAL,
                    f"{self.name}: cannot write down the allocation in {self._paths.checkpoint}: "
                    f"{error.strerror}: see that there is room",
                ) from None
            self._write_device_information(granted.devices, current)
        self._told()
        for note in granted.notes:
            _log.warning("%s: %s", self.name, note)
        _log.info("%s: %s handed out", self.name, ", ".join(sorted(ids)))
        return _response(granted)

    def pre_start(self, ids: list[str]) -> None:
        """Nothing is left to do: the nodes are given with the allocation."""

    def devices_of(self, row: PodDevices) -> dict[str, tuple[AllocatedHCA, ...]]:
        """What stands behind the ids of a row that only the kubelet knows, () if nothing tells."""
        return adoption.behind(self._paths, self.pool, self._inventory.last(), row)

    def restore_device_information(self) -> None:
        """Write the files of held ids that are missing: their directory does not outlive a boot.

        Not of an HCA that has other device numbers than were given: nobody is to be told of these.
        """
        for device_id, one in self._ledger.held(self.name).items():
            if (
                len(one.devices) != 1
                or device_info.path(self._paths, self.name, device_id).exists()
            ):
                continue
            (device,) = one.devices
            with self._ledger.granting:  # one writer of a file
                current = self._inventory.current([device.id])
                if device.id in current and adoption.is_as_recorded(device, current[device.id]):
                    self._write_device_information({device_id: one.devices}, current)

    def _written(self) -> list[PodDevices]:
        """What the kubelet is done with, by its checkpoint; nothing if that cannot be read."""
        try:
            return records.from_checkpoint(self._paths)
        except KubeletUnreadable as error:
            _log.debug("%s: every container without ours may be waiting: %s", self.name, error)
            return []

    def _granted(self, ids: list[str]) -> tuple[AllocateResult, Mapping[str, HCA]]:
        pool = self.pool
        slots = [slot for known in ids if (slot := pool.slot(known)) is not None]
        wanted = {hca for slot in slots for hca in slot.hcas}
        if pool.config.cdi:  # its file has all of them
            wanted = {hca.id for hca in pool.hcas}
        # Perhaps since the last look.
        taken = elsewhere(pool, self._ledger.allocations()) if self._contested else {}
        unfit = {**self._unfit, **barred(pool, slots, {}, taken)}
        mad = pool.config.umad or pool.config.issm
        current = self._inventory.current(wanted.difference(taken), mad=mad)
        try:
            granted = allocation.allocation(
                self._paths,
                pool,
                ids,
                set(ids).difference(unfit),
                current=current,
                fabric_env=self._fabric_env,
            )
        except AllocateRefused as refused:
            faults = {unfit[one] for one in ids if one in unfit}
            text = "; ".join([str(refused), *sorted(faults)])
            raise Rejected(getattr(grpc.StatusCode, refused.code), text) from None
        return granted, current

    def _write_device_information(
        self, granted: Mapping[str, Sequence[AllocatedHCA]], current: Mapping[str, HCA]
    ) -> None:
        for device_id, devices in granted.items():
            hcas = [current[device.id] for device in devices]
            try:
                device_info.write(self._paths, self.name, device_id, hcas)
            except OSError as error:  # Multus goes without it
                _log.warning("device information of %s: %s", device_id, error)

    def _topology_of(self, hcas: list[str], gpu_addresses: list[str]) -> Topology:
        """The places of all devices; read anew only when there are others, or the file is."""
        addresses = {*hcas, *gpu_addresses} - {""}
        placed = (self._file_of_topology(), *sorted(addresses))
        if self._topology is None or placed != self._placed:
            try:
                self._topology = Topology.read(self._paths, addresses)
            except HostError as error:
                _log.warning("%s: devices are chosen without it", error)
                self._topology = Topology(())
            self._placed = placed
        return self._topology

    def _file_of_topology(self) -> str:
        try:
            found = topology_file(self._paths).stat()
        except OSError:
            return ""
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"


def _response(granted: AllocateResult) -> v1beta1_pb2.ContainerAllocateResponse:
    return v1beta1_pb2.ContainerAllocateResponse(
        envs=granted.envs,
        devices=[
            v1beta1_pb2.DeviceSpec(
                container_path=node.path, host_path=node.host, permissions=node.permissions
            )
            for node in granted.nodes
        ],
        cdi_devices=[v1beta1_pb2.CDIDevice(name=name) for name in granted.cdi],
    )
