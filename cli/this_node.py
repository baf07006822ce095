"""What the commands show of a node: read from sysfs and files, whether or not the agent runs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from base.paths import Paths
from deviceplugin import availability, checkpoint
from deviceplugin.checkpoint import Allocation, CheckpointDamaged
from deviceplugin.health import Health
from deviceplugin.inventory import Inventory
from deviceplugin.pools.config import ConfigError, DevicePluginConfig, load
from deviceplugin.pools.pool import Left, Pool, left_out, pools, used_netdevs
from host.discovery import HCA
from host.gpus import GPU, gpus
from host.topology import Topology


class ThisNode:
    """The node as it is now. Each part is read when it is first asked for, and kept.

    The errors are those of the modules that read: ConfigError, checkpoint.Damaged, HostError. If
    it is `tolerant`, a configuration or checkpoint that cannot be read says nothing.
    """

    def __init__(
        self, paths: Paths, config_file: Path | None = None, *, tolerant: bool = False
    ) -> None:
        self.paths = paths
        self._tolerant = tolerant
        self.config_file = config_file or paths.config
        self._required = config_file is not None

    @cached_property
    def config(self) -> DevicePluginConfig:
        """The device plugin's part of config.yaml."""
        try:
            return load(self.config_file, required=self._required)
        except ConfigError:
            if not self._tolerant:
                raise
            return DevicePluginConfig(pools=())

    @cached_property
    def allocations(self) -> tuple[Allocation, ...]:
        """What containers hold, by the checkpoint."""
        try:
            return checkpoint.read(self.paths).allocations
        except CheckpointDamaged:
            if not self._tolerant:
                raise
            return ()

    @cached_property
    def _inventory(self) -> tuple[list[HCA], Inventory]:
        inventory = Inventory(self.paths)
        return inventory.look(), inventory

    @property
    def hcas(self) -> list[HCA]:
        """What is there, by id."""
        return self._inventory[0]

    @cached_property
    def gone(self) -> list[HCA]:
        """What containers hold and is not there."""
        held = (device for one in self.allocations for device in one.devices)
        return self._inventory[1].missing(held)

    @cached_property
    def pools(self) -> list[Pool]:
        """The pools as a device plugin that starts now would offer them."""
        found, kept, used = self._for_pools()
        return pools(self.config, found, kept, used)

    @cached_property
    def left_out(self) -> list[Left]:
        """What each pool does not offer, and why."""
        found, kept, used = self._for_pools()
        return left_out(self.config, found, kept, used)

    @cached_property
    def reports(self) -> Mapping[str, str | None]:
        """What is wrong with each HCA's ports, by its id; None for healthy ones."""
        health = Health()
        health.observe(self.hcas, [one.id for one in self.gone], 0.0)
        return health.reports()

    @cached_property
    def elsewhere(self) -> Mapping[str, Mapping[str, str]]:
        """By resource, the HCAs that another one's holders keep from it, and the reasons."""
        return {
            pool.config.resource: availability.held_elsewhere(pool, self.allocations)
            for pool in self.pools
        }

    @cached_property
    def unfit(self) -> Mapping[str, Mapping[str, str]]:
        """By resource, the ids that may not be handed out now, and the reasons."""
        found = {}
        for pool in self.pools:
            name = pool.config.resource
            held = {one.id: one for one in self.allocations if one.resource == name}
            found[name] = availability.unavailable(pool, self.reports, held, self.elsewhere[name])
        return found

    @cached_property
    def gpus(self) -> list[GPU]:
        """NVIDIA's GPUs, by address."""
        return gpus(self.paths)

    @cached_property
    def topology(self) -> Topology:
        """The places of all HCAs and GPUs."""
        addresses = [one.address for one in self.hcas]
        addresses += [one.address for one in self.gpus]
        return Topology.read(self.paths, [address for address in addresses if address])

    def hca(self, known: str) -> HCA | None:
        """The HCA with that id, if it is there."""
        return next((one for one in self.hcas if one.id == known), None)

    def on_netdev(self, netdev: str) -> HCA | None:
        """The HCA that an interface of the host is of."""
        for one in self.hcas:
            ports = (port for rdma in one.rdma for port in rdma.ports)
            if netdev in one.netdevs or any(netdev in port.netdevs for port in ports):
                return one
        return None

    def loads(self) -> Counter[str]:
        """How many allocations each HCA has, over all resources."""
        return Counter(device.id for one in self.allocations for device in one.devices)

    def _for_pools(self) -> tuple[list[HCA], dict[str, set[str]], frozenset[str]]:
        kept: dict[str, set[str]] = {}
        for one in self.allocations:
            kept.setdefault(one.resource, set()).update(device.id for device in one.devices)
        return [*self.hcas, *self.gone], kept, used_netdevs(self.paths)


def gpu_label(found: Iterable[GPU], address: str) -> str:
    """What topo calls the GPU at that address, "GPU0": they count by address, as nvidia-smi has it.

    The address itself if it is no GPU's.
    """
    addresses = [gpu.address for gpu in found]
    return f"GPU{addresses.index(address)}" if address in addresses else address


def rdma_label(hca: HCA) -> str:
    """The RDMA devices of an HCA, also those that are in a pod; its id if it has none."""
    names = dict.fromkeys([*(rdma.name for rdma in hca.rdma), *hca.rdma_names])
    return ",".join(names) or hca.id


def numa_text(numa: int | None) -> str:
    """A NUMA node for a table."""
    return "" if numa is None else str(numa)
