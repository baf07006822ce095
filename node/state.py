"""Reads the state of a node from sysfs and files, for the commands. Works without an agent."""

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec

from base import files
from base.paths import Paths
from deviceplugin import availability, checkpoint
from deviceplugin.checkpoint import Allocation, AllocationKey, CheckpointDamaged
from deviceplugin.health import Health
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet import records
from deviceplugin.kubelet.records import KubeletUnreadable, PodDevices
from deviceplugin.pools.formats import load
from deviceplugin.pools.pool import Pool
from deviceplugin.pools.pool_config import ConfigError, DevicePluginConfig
from gpu.driver import nvml
from gpu.driver.gpu_inventory import GpuMemory
from gpu.driver.nvml import NvmlError
from gpu.limits.shims import Shims
from host.sysfs.discovery import HCA
from host.sysfs.gpus import GPU, gpus
from host.sysfs.topology import Topology


class DeviceHolder(msgspec.Struct, frozen=True):
    """A container, with the names that the kubelet reports."""

    pod: str = ""  # "ml/worker-0", or else the pod's UID, or else ""
    name: str = ""
    uid: str = ""  # of the pod; "" if only PodResources has the pod


class DeviceHolders(NamedTuple):
    """The holder of each device id, and the sources that cannot be read."""

    by_key: Mapping[AllocationKey, DeviceHolder]
    problems: tuple[str, ...]


class ThisNode:
    """The state of the node. Each part is read once, at its first use.

    Reading a part may raise ConfigError, CheckpointDamaged or HostError. If `tolerant`, a
    configuration that cannot be read counts as `former` or empty, and a checkpoint as empty. To
    read the state repeatedly, pass the same `inventory` and `health` to each ThisNode.
    """

    def __init__(
        self,
        paths: Paths,
        config_file: Path | None = None,
        *,
        tolerant: bool = False,
        inventory: Inventory | None = None,
        health: Health | None = None,
        former: DevicePluginConfig | None = None,
    ) -> None:
        self.paths = paths
        self.health = health or Health()
        self._given = inventory or Inventory(paths)
        self._tolerant = tolerant
        self._former = former
        self.config_file = config_file or paths.config
        self._required = config_file is not None

    @cached_property
    def config(self) -> DevicePluginConfig:
        try:
            return load(self.config_file, required=self._required)
        except ConfigError:
            if not self._tolerant:
                raise
            return self._former or DevicePluginConfig(pools=())

    @cached_property
    def allocations(self) -> tuple[Allocation, ...]:
        try:
            return checkpoint.read(self.paths).allocations
        except CheckpointDamaged:
            if not self._tolerant:
                raise
            return ()

    @cached_property
    def kubelet_rows(self) -> tuple[list[PodDevices], list[str]]:
        """The kubelet's records of devices in containers, and the sources that cannot be read."""
        rows: list[PodDevices] = []
        problems = []
        for read in (records.from_checkpoint, records.from_pod_resources):
            try:
                rows += read(self.paths)
            except KubeletUnreadable as error:
                problems.append(str(error))
        return rows, problems

    @cached_property
    def holders(self) -> DeviceHolders:
        rows, problems = self.kubelet_rows
        found: dict[AllocationKey, DeviceHolder] = {}
        for row in rows:  # the rows of PodResources come later and have names instead of UIDs
            pod = f"{row.namespace}/{row.name}" if row.name else row.uid
            for device_id in row.ids:
                before = found.get((row.resource, device_id), DeviceHolder())
                holder = DeviceHolder(pod, row.container, row.uid or before.uid)
                found[row.resource, device_id] = holder
        texts = (f"the holders of devices are not fully known: {problem}" for problem in problems)
        return DeviceHolders(found, tuple(texts))

    @cached_property
    def _inventory(self) -> tuple[list[HCA], Inventory]:
        return self._given.look(), self._given

    @property
    def hcas(self) -> list[HCA]:
        return self._inventory[0]

    @property
    def with_rdma(self) -> bool:
        return any(hca.rdma_names for hca in self.hcas)

    @cached_property
    def gone(self) -> list[HCA]:
        """The HCAs that containers hold and that are missing on the node."""
        return self._inventory[1].missing(self.allocations)

    @cached_property
    def pools(self) -> list[Pool]:
        """The pools that a device plugin would offer if it started now."""
        return self._inventory[1].pools(self.config, self.allocations)

    @cached_property
    def reports(self) -> Mapping[str, str | None]:
        """The fault of each HCA's ports, by HCA id. `None` means no fault."""
        self.health.observe(self.hcas, [hca.id for hca in self.gone], time.monotonic())
        return self.health.reports()

    @cached_property
    def elsewhere(self) -> Mapping[str, Mapping[str, str]]:
        """By resource and HCA: names the resource whose allocation blocks the HCA."""
        return {
            pool.config.resource: availability.held_elsewhere(pool, self.allocations)
            for pool in self.pools
        }

    @cached_property
    def unfit(self) -> Mapping[str, Mapping[str, str]]:
        """The reasons why device ids cannot be allocated now, by resource and device id."""
        reasons = {}
        for pool in self.pools:
            name = pool.config.resource
            held: dict[str, Allocation] = {
                allocation.id: allocation
                for allocation in self.allocations
                if allocation.resource == name
            }
            reasons[name] = availability.unavailable(pool, self.reports, held, self.elsewhere[name])
        return reasons

    @cached_property
    def gpus(self) -> list[GPU]:
        return gpus(self.paths)

    @cached_property
    def driver_root(self) -> Path:
        """The root directory of NVIDIA's driver, as this process sees it."""
        return self.paths.host / self.config.gpu_limits.driver_root.relative_to("/")

    @cached_property
    def shims(self) -> Shims:
        return Shims(self.paths, self.config.gpu_limits, lambda: None)

    @cached_property
    def gpu_memory(self) -> Mapping[str, GpuMemory]:
        """The memory of each GPU, by UUID. Empty if no pool needs it or NVML cannot be used."""
        if all(pool.memory or pool.mode == "replicas" for pool in self.config.gpus):
            return {}
        try:
            with nvml.open_driver(self.driver_root) as driver:
                return {uuid: driver.memory(uuid) for uuid in driver.uuids()}
        except NvmlError:
            return {}

    @cached_property
    def topology(self) -> Topology:
        addresses = [hca.address for hca in self.hcas]
        addresses += [gpu.address for gpu in self.gpus]
        return Topology.read(self.paths, [address for address in addresses if address])

    def hca(self, hca_id: str) -> HCA | None:
        return next((hca for hca in self.hcas if hca.id == hca_id), None)

    def on_netdev(self, netdev: str) -> HCA | None:
        for hca in self.hcas:
            ports = (port for rdma in hca.rdma for port in rdma.ports)
            if netdev in hca.netdevs or any(netdev in port.netdevs for port in ports):
                return hca
        return None


def versions(paths: Paths) -> object:
    """A value that differs after a change of the checkpoints or of the journal."""
    watched = paths.checkpoint, records.checkpoint_path(paths)
    found = {str(path): files.version(path) for path in watched}
    with suppress(OSError), os.scandir(paths.attachments) as entries:
        found |= {entry.name: files.version(entry.path) for entry in entries}
    return found


def gpu_label(gpus: Iterable[GPU], address: str) -> str:
    """A label such as "GPU0", as nvidia-smi numbers it. Returns the address of an unknown GPU."""
    addresses = [gpu.address for gpu in gpus]
    return f"GPU{addresses.index(address)}" if address in addresses else address


def rdma_label(hca: HCA) -> str:
    """The HCA's RDMA devices, also those in a pod. Returns the HCA's id if there are none."""
    return ",".join(hca.rdma_names) or hca.id


def numa_text(numa: int | None) -> str:
    return "" if numa is None else str(numa)
