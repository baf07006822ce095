"""The whole device plugin on a made-up server: what a kubelet is offered, given, and keeps."""

import shutil
from collections.abc import Iterator

import pytest

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.kubelet.registration import PluginServer
from deviceplugin.pools.config import PoolConfig
from host.selectors import Selector
from tests.host.deviceplugin.node import FIRST, HCA, SHARED, Node, config, container, port, switches
from tests.host.deviceplugin.pool import Pool
from tests.kubelet.devices import PodRejected
from tests.kubelet.kubelet import Kubelet
from tests.unit.host import servers
from tests.unit.host.sysfs import Tree


@pytest.fixture
def kubelet(server: Paths) -> Iterator[Kubelet]:
    with Kubelet(server.kubelet) as own_kubelet:
        yield own_kubelet


@pytest.fixture
def node(server: Paths, kubelet: Kubelet) -> Iterator[Node]:
    new_node = Node(server, SHARED)
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 32)
    yield new_node
    new_node.plugin.close()


def test_every_hca_is_offered_with_its_numa_node(node: Node, kubelet: Kubelet) -> None:
    offered = kubelet.devices(HCA)
    assert len(offered) == 32
    assert offered[f"{FIRST}-0"] == (True, (0,))
    assert offered[f"{servers.DGX_HCAS[7]}-3"] == (True, (1,))


def test_allocation_is_written_down_before_it_is_answered(node: Node, kubelet: Kubelet) -> None:
    pod = kubelet.admit("worker-0", [container()])
    (kept,) = checkpoint.read(node.paths).allocations
    (device,) = kept.devices
    (rdma,) = device.rdma
    given = pod.containers["main"]
    assert rdma.uverbs is not None
    assert rdma.uverbs.path in given.devices
    assert given.env["NCCL_IB_HCA"] == f"={rdma.name}"
    assert given.env["PCIDEVICE_RDMA_HCA"] == device.address
    assert kept.boot_id == node.paths.boot_id()


@pytest.mark.parametrize("seed", range(3))
def test_hcas_at_the_switches_of_the_containers_gpus_are_given(server: Paths, seed: int) -> None:
    """The kubelet allocates in random order: the GPUs are known if they come first."""
    offered = Pool(8, "nvidia.com/gpu")
    offered.devices = [(servers.gpu_uuid(number), True, ()) for number in range(8)]
    plugin_of_gpus = PluginServer(server, offered)
    with Kubelet(server.kubelet, seed=seed) as kubelet:
        node = Node(server, SHARED)
        plugin_of_gpus.start()
        try:
            kubelet.wait(lambda: kubelet.allocatable(HCA) == 32)
            kubelet.wait(lambda: kubelet.allocatable("nvidia.com/gpu") == 8)
            near = 0
            for number in range(4):
                limits = {"name": "main", "limits": {HCA: 2, "nvidia.com/gpu": 2}}
                kubelet.calls.clear()
                given = kubelet.admit(f"worker-{number}", [limits]).containers["main"].ids
                order = [call.resource for call in kubelet.calls if call.method == "Allocate"]
                if order[0] != HCA:
                    near += 1
                    assert switches(server, given[HCA]) == switches(server, given["nvidia.com/gpu"])
        finally:
            plugin_of_gpus.close()
            node.plugin.close()
    assert near


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 9}', b'{"version": 1, "alloc'])
def test_torn_checkpoint_is_set_aside(server: Paths, content: bytes) -> None:
    server.devices.mkdir(parents=True)
    server.checkpoint.write_bytes(content)
    with Kubelet(server.kubelet) as kubelet:
        node = Node(server, SHARED)
        try:
            kubelet.wait(lambda: kubelet.allocatable(HCA) == 32)
            kubelet.admit("worker-0", [container()])
        finally:
            node.plugin.close()
    assert len(checkpoint.read(server).allocations) == 1
    assert server.checkpoint.with_suffix(".damaged").read_bytes() == content


def test_unplugged_hca_stays_listed_only_while_it_is_held(node: Node, kubelet: Kubelet) -> None:
    kubelet.admit("worker-0", [container()])
    held = checkpoint.read(node.paths).allocations[0].devices[0].id
    free = next(hca for hca in servers.DGX_HCAS if hca != held)
    for hca in (held, free):
        Tree(node.paths.sys, node.paths).remove(hca)
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 24 and kubelet.capacity(HCA) == 28)
    offered = kubelet.devices(HCA)
    assert not offered[f"{held}-0"][0]
    assert f"{free}-0" not in offered


def test_unhealthy_device_is_not_given(node: Node, kubelet: Kubelet) -> None:
    for number in range(8):
        port(node.paths, number, up=False)
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 0)
    with pytest.raises(PodRejected):
        kubelet.admit("worker-0", [container()])
    assert checkpoint.read(node.paths).allocations == ()


def test_renumbered_uverbs_are_given_by_their_new_number(node: Node, kubelet: Kubelet) -> None:
    uverbs = node.paths.sys / "class/infiniband_verbs"
    first, second = ((uverbs / f"uverbs{n}/ibdev").read_text() for n in (0, 1))
    (uverbs / "uverbs0/ibdev").write_text(second)
    (uverbs / "uverbs1/ibdev").write_text(first)
    for number in range(8):
        kubelet.admit(f"worker-{number}", [container()])
    for allocation in checkpoint.read(node.paths).allocations:
        (rdma,) = allocation.devices[0].rdma
        assert rdma.uverbs is not None
        name = rdma.uverbs.path.rpartition("/")[2]
        assert (uverbs / name / "ibdev").read_text().strip() == rdma.name


def test_pools_share_no_hca(server: Paths, kubelet: Kubelet) -> None:
    first = Selector(rdmaDevices=("mlx5_0",))
    pools = config(
        PoolConfig(resource="rdma/first", mode="exclusive", selectors=(first,)),
        PoolConfig(resource="rdma/rest", mode="exclusive"),
    )
    node = Node(server, pools)
    try:
        kubelet.wait(lambda: kubelet.allocatable("rdma/rest") == 7)
        kubelet.wait(lambda: list(kubelet.devices("rdma/first")) == [FIRST])
        assert FIRST not in kubelet.devices("rdma/rest")
    finally:
        node.plugin.close()


def test_pod_whose_hca_was_renumbered_is_told_and_gets_no_other(
    node: Node, kubelet: Kubelet
) -> None:
    kubelet.admit("worker-0", [container()])
    (held,) = checkpoint.read(node.paths).allocations
    (rdma,) = held.devices[0].rdma
    assert rdma.uverbs is not None
    name = rdma.uverbs.path.rpartition("/")[2]
    old = node.paths.sys / "class/infiniband_verbs" / name
    shutil.rmtree(old.resolve())
    old.unlink()
    tree = Tree(node.paths.sys, node.paths)
    tree.character("infiniband_verbs", "uverbs40", rdma.name, "231:232")
    node.restart()
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 31)
    assert not kubelet.devices(HCA)[held.id][0]


def test_configuration_that_changes_is_taken_over(node: Node, kubelet: Kubelet) -> None:
    pool = PoolConfig(resource=HCA, mode="shared", slots=2)
    node.plugin.reconfigure(config(pool, PoolConfig(resource="rdma/all", mode="all", overlap=True)))
    kubelet.wait(lambda: kubelet.allocatable(HCA) == 16)
    kubelet.wait(lambda: kubelet.allocatable("rdma/all") == 1)
    assert kubelet.count("Register", HCA) == 1
    node.plugin.reconfigure(config(pool))
    kubelet.wait(lambda: kubelet.allocatable("rdma/all") == 0)


def test_nothing_of_ours_is_left_in_the_kubelets_directory(node: Node, kubelet: Kubelet) -> None:
    node.plugin.close()
    left = [path.name for path in node.paths.device_plugins.iterdir()]
    assert [name for name in left if "podfabric" in name] == []
