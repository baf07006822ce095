"""The whole device plugin on a simulated server: its offers, its allocations and its checkpoint."""

from collections.abc import Iterator

import pytest

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.kubelet.registration import PluginServer
from tests.host.deviceplugin.node import HCA, SHARED, Node, container, switches
from tests.host.deviceplugin.pool import Pool
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
