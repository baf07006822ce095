"""The whole device plugin on HCAs of all kinds; it only ever reads their state."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from base.paths import Paths
from deviceplugin import checkpoint, plugin
from deviceplugin.pools.pool_config import DEFAULT, DevicePluginConfig, PoolConfig
from host.sysfs.selectors import Selector
from tests.host.deviceplugin.node import FIRST, HCA, SHARED, Node, config, port
from tests.host.deviceplugin.processes import made_server
from tests.kubelet import Kubelet, PodRejected
from tests.unit.cli.commands import short_path
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree
from tests.waiting import until

Build = Callable[..., Paths]
FAST, SLOW = "400 Gb/sec (4X NDR)", "100 Gb/sec (1X NDR)"


class Served:
    """A simulated server with its kubelet and the plugin."""

    def __init__(self, stack: ExitStack, build: Build, configuration: DevicePluginConfig) -> None:
        root = stack.enter_context(short_path())
        self.paths = made_server(root) if build is servers.dgx else build(root, nodes=True)
        self._boot(self.paths)
        self.tree = Tree(self.paths.sys, self.paths)
        self.kubelet = stack.enter_context(Kubelet(self.paths.kubelet))
        self._stack, self._configuration = stack, configuration

    def start(self) -> Node:
        """Start to serve the server's present hardware."""
        node = Node(self.paths, self._configuration)
        self._stack.callback(lambda: node.plugin.close())
        return node

    def offers(self, counts: dict[str, int]) -> None:
        """Wait until these numbers of ids of each resource are allocatable."""
        self.kubelet.wait(
            lambda: all(self.kubelet.allocatable(name) == count for name, count in counts.items())
        )

    def knows(self, resources: Sequence[str]) -> None:
        """Wait until the kubelet has ids of each resource."""
        self.kubelet.wait(lambda: all(self.kubelet.capacity(name) > 0 for name in resources))

    def give(self, resource: str, count: int = 1, name: str = "worker") -> Any:  # noqa: ANN401
        """The response for a container that requests `count` devices."""
        wanted = {"name": "main", "limits": {resource: count}}
        return self.kubelet.admit(name, [wanted]).containers["main"]

    @staticmethod
    def _boot(paths: Paths) -> None:
        boot_id = paths.proc / "sys/kernel/random/boot_id"
        boot_id.parent.mkdir(parents=True, exist_ok=True)
        boot_id.write_text("9b6b5c1e-0d5a-4a3f-8f0e-6d5b1b1c9d11\n")


Serve = Callable[[Build, DevicePluginConfig], Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda build, configuration: Served(stack, build, configuration)


def nodes_of(given: Any) -> list[str]:  # noqa: ANN401
    """The names of a container's device nodes, without the shared one."""
    return sorted({Path(path).name for path in given.devices} - {"rdma_cm"})


# InfiniBand and RoCE on one node.

INFINIBAND = PoolConfig(
    resource="rdma/ib", slots=1, selectors=(Selector(linkTypes=("infiniband",)),)
)
ROCE = PoolConfig(resource="rdma/roce", slots=4, selectors=(Selector(linkTypes=("ether",)),))


def test_infiniband_and_roce_of_one_node_are_kept_apart(serve: Serve) -> None:
    served = serve(servers.vfs, config(INFINIBAND, ROCE))
    served.start()
    served.offers({"rdma/ib": 5, "rdma/roce": 24})
    infiniband, roce = served.give("rdma/ib", name="a"), served.give("rdma/roce", name="b")
    kinds = {
        allocation.resource: allocation.devices[0].rdma[0].ports[0].link_layer
        for allocation in checkpoint.read(served.paths).allocations
    }
    assert kinds == {"rdma/ib": "InfiniBand", "rdma/roce": "Ethernet"}
    assert not set(nodes_of(infiniband)) & set(nodes_of(roce))
    assert "NCCL_IB_HCA" in infiniband.env  # of the first pool only
    assert "NCCL_IB_HCA" not in roce.env


def test_a_roce_port_that_goes_down_takes_no_infiniband_with_it(serve: Serve) -> None:
    served = serve(servers.vfs, config(INFINIBAND, ROCE))
    served.start()
    served.offers({"rdma/ib": 5, "rdma/roce": 24})
    port(served.paths, 1, up=False)  # the Ethernet PF
    served.offers({"rdma/roce": 20, "rdma/ib": 5})
    port(served.paths, 2, up=False)  # a VF of the InfiniBand PF
    served.offers({"rdma/roce": 20, "rdma/ib": 4})


def test_the_pool_of_a_node_without_configuration_has_both_kinds(serve: Serve) -> None:
    served = serve(servers.vfs, DevicePluginConfig(pools=(DEFAULT,)))
    served.start()
    served.offers({HCA: 11 * 64})


# A link that trains down.


def test_a_degraded_link_is_withdrawn_and_comes_back(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "RATES_EVERY", 0.3)
    served = serve(servers.dgx, SHARED)
    served.start()
    served.offers({HCA: 32})
    rate = "class/infiniband/mlx5_0/ports/1/rate"
    served.tree.write(rate, SLOW)
    served.offers({HCA: 28})
    assert not served.kubelet.devices(HCA)[f"{FIRST}-0"][0]
    for number in range(8):
        served.give(HCA, name=f"worker-{number}")
    held = {each.devices[0].id for each in checkpoint.read(served.paths).allocations}
    assert FIRST not in held
    served.tree.write(rate, FAST)
    served.offers({HCA: 32})


def test_link_that_is_slow_from_the_start_counts_as_healthy(serve: Serve) -> None:
    served = serve(servers.dgx, SHARED)
    served.tree.write("class/infiniband/mlx5_0/ports/1/rate", SLOW)
    served.start()
    served.offers({HCA: 32})


# An HCA of two ports, with mlx5's sibling for subnet management.


def test_an_hca_of_two_ports_is_one_and_its_sibling_none(serve: Serve) -> None:
    served = serve(
        servers.multiport, config(PoolConfig(resource=HCA, slots=4, umad=True, issm=True))
    )
    served.start()
    served.offers({HCA: 4})
    given = served.give(HCA)
    assert nodes_of(given) == ["issm0", "issm1", "umad0", "umad1", "uverbs0"]
    assert given.env["NCCL_IB_HCA"] == "=mlx5_0"
    assert given.env["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_0:2"


def test_one_port_of_two_is_enough(serve: Serve) -> None:
    served = serve(servers.multiport, config(PoolConfig(resource=HCA, slots=64)))
    served.start()
    served.offers({HCA: 64})
    at = "class/infiniband/mlx5_0/ports"
    served.tree.write(f"{at}/1/state", "1: DOWN")
    names = (f"worker-{number}" for number in itertools.count())
    until(
        lambda: served.give(HCA, name=next(names)).env["NCCL_IB_HCA"] == "=mlx5_0:2",
        pause=0.5,  # each look takes one of the 64 ids
    )
    served.tree.write(f"{at}/2/state", "1: DOWN")
    served.offers({HCA: 0})  # the sibling's port is still ACTIVE, and carries no data
    with pytest.raises(PodRejected):
        served.give(HCA)
    served.tree.write(f"{at}/2/state", "4: ACTIVE")
    served.offers({HCA: 64})


# iWARP in software.


def siw(served: Served) -> None:
    """siw0 on eth7, as siw_main.c makes it: on no device, an Ethernet port, a table of one GID."""
    served.tree.netdev("", "eth7", address="02:00:00:00:00:07")
    served.tree.soft_rdma("siw0", "eth7", parent=False)
    served.tree.port("siw0", link_layer="Ethernet", rate="2.5 Gb/sec (1X SDR)", netdev="eth7")
    served.tree.write("class/infiniband/siw0/node_type", "4: RNIC")
    served.tree.character("infiniband_verbs", "uverbs20", "siw0", f"{servers.MAJOR}:212")
    servers.make_nodes(served.paths)


@pytest.mark.parametrize(
    "selector", [Selector(rdmaDevices=("siw0",)), Selector(ifNames=("eth7",))], ids=["rdma", "net"]
)
def test_software_iwarp_is_offered_if_it_is_named(serve: Serve, selector: Selector) -> None:
    named = PoolConfig(resource="rdma/siw", mode="exclusive", selectors=(selector,))
    served = serve(servers.dgx, config(named, PoolConfig(resource=HCA, slots=1)))
    siw(served)
    served.start()
    served.offers({"rdma/siw": 1, HCA: 8})
    assert served.kubelet.devices("rdma/siw") == {"siw0": (True, ())}
    given = served.give("rdma/siw")
    assert nodes_of(given) == ["uverbs20"]
    assert given.env["PCIDEVICE_RDMA_SIW"] == "siw0"
    (held,) = checkpoint.read(served.paths).allocations
    assert held.devices[0].rdma[0].ports[0].netdevs == ("eth7",)


def test_software_iwarp_that_ends_is_withdrawn(serve: Serve) -> None:
    named = PoolConfig(resource="rdma/siw", selectors=(Selector(rdmaDevices=("siw0",)),), slots=2)
    served = serve(servers.dgx, config(named))
    siw(served)
    served.start()
    served.offers({"rdma/siw": 2})
    served.tree.write("class/infiniband/siw0/ports/1/state", "1: DOWN")  # its interface is down
    served.offers({"rdma/siw": 0})
    for entry in ("class/infiniband/siw0", "class/infiniband_verbs/uverbs20"):
        shutil.rmtree((served.paths.sys / entry).resolve())
        (served.paths.sys / entry).unlink()
    served.kubelet.wait(lambda: served.kubelet.capacity("rdma/siw") == 0)


# The plugin must not configure hardware.


def state_of(*roots: Path) -> dict[str, tuple[object, ...]]:
    """The state below these roots: kind, rights, time of change, and content."""
    state: dict[str, tuple[object, ...]] = {}
    for directory, _, files in itertools.chain.from_iterable(map(os.walk, roots)):
        for path in [Path(directory), *(Path(directory) / name for name in files)]:
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            state[str(path)] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return state


ALONE = (PoolConfig(resource="rdma/alone", mode="exclusive", umad=True, issm=True),)
TOGETHER = (
    PoolConfig(resource="rdma/nodes", slots=2, umad=True, issm=True),
    PoolConfig(resource="rdma/names", slots=2, overlap=True, cdi=True),
    PoolConfig(resource="rdma/all", mode="all", overlap=True),
)


@pytest.mark.parametrize("pools", [ALONE, TOGETHER], ids=["alone", "together"])
@pytest.mark.parametrize("build", [servers.dgx, servers.vfs, servers.multiport])
def test_nothing_below_sys_or_dev_is_ever_written(
    serve: Serve, build: Build, pools: tuple[PoolConfig, ...]
) -> None:
    served = serve(build, config(*pools))
    roots = served.paths.sys, served.paths.dev
    before = state_of(*roots)
    node = served.start()
    resources = [pool.resource for pool in pools]
    served.knows(resources)
    for resource in resources:
        served.give(resource, name=resource.rpartition("/")[2])
    node.plugin.compare()
    node.plugin.reconfigure(config(PoolConfig(resource="rdma/other", slots=1)))
    node.restart()
    served.kubelet.restart()
    served.knows(resources)
    node.plugin.close()
    # Only the difference: nobody can read the states of whole servers.
    difference = sorted(before.items() ^ state_of(*roots).items())
    assert difference == []


# Invalid requests.
