"""A simulated server with its device plugin, for tests of the whole plugin."""

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.plugin import DevicePlugin
from deviceplugin.pools.pool_config import DevicePluginConfig, PoolConfig
from host.sysfs import gpus
from host.sysfs.topology import Topology
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree

HCA = "rdma/hca"
FIRST = servers.DGX_HCAS[0]


def config(*pools: PoolConfig) -> DevicePluginConfig:
    return DevicePluginConfig(pools=pools)


SHARED = config(PoolConfig(resource=HCA, mode="shared", slots=4, only_working=True))


class Node:
    """A node with its device plugin, which can be restarted."""

    def __init__(self, paths: Paths, configuration: DevicePluginConfig) -> None:
        self.paths = paths
        self.configuration = configuration
        self.plugin = DevicePlugin(paths, configuration)
        self.plugin.start()

    def restart(self) -> None:
        self.plugin.close()
        self.start()

    def start(self) -> None:
        """Start the next plugin, after the present one was closed."""
        self.plugin = DevicePlugin(self.paths, self.configuration)
        self.plugin.start()


def container(resource: str = HCA, count: int = 1) -> dict[str, object]:
    return {"name": "main", "limits": {resource: count}}


def port(paths: Paths, number: int, *, up: bool) -> None:
    tree = Tree(paths.sys, paths)
    at = f"class/infiniband/mlx5_{number}/ports/1"
    tree.write(f"{at}/state", "4: ACTIVE" if up else "1: DOWN")
    tree.write(f"{at}/phys_state", "5: LinkUp" if up else "3: Disabled")


def switches(paths: Paths, ids: list[str]) -> list[str]:
    found = gpus.gpus(paths)
    addresses = [gpus.address_of(found, known) or known.rpartition("-")[0] for known in ids]
    topology = Topology.read(paths, addresses)
    return sorted(topology.switch(address) for address in addresses)


def keep_allocations(paths: Paths, count: int) -> None:
    """Replace the checkpoint by an older one that has only the first `count` allocations."""
    now = checkpoint.read(paths)
    kept = [checkpoint.encode(allocation) for allocation in now.allocations[:count]]
    checkpoint.write(paths, kept, now.offered)
