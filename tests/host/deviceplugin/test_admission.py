"""The whole device plugin next to a plugin of GPUs: pods of several containers, and their HCAs.

It uses the simulated server of test_plugin.py, whose switches have two GPUs and two HCAs each.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from base.paths import Paths
from deviceplugin import checkpoint
from deviceplugin.kubelet import registration
from deviceplugin.kubelet.registration import PluginServer
from deviceplugin.pools.pool_config import DevicePluginConfig, PoolConfig
from tests.host.deviceplugin.node import HCA, Node, switches
from tests.host.deviceplugin.pool import Pool
from tests.kubelet import Kubelet
from tests.unit.host import servers
from tests.waiting import PATIENCE

GPU = "nvidia.com/gpu"
MANY = DevicePluginConfig(pools=(PoolConfig(resource=HCA, slots=64),))


class Cluster:
    """A kubelet, the plugin of GPUs and ours. `seed` decides which resource comes first."""

    def __init__(self, stack: ExitStack, server: Paths, seed: int, listed: bool) -> None:
        self.paths = server
        self.kubelet = stack.enter_context(
            Kubelet(server.kubelet, seed=seed, init_containers_listed=listed)
        )
        self.node = Node(server, MANY)
        stack.callback(lambda: self.node.plugin.close())
        offered = Pool(8, GPU)
        offered.devices = [(servers.gpu_uuid(number), True, ()) for number in range(8)]
        of_gpus = PluginServer(server, offered)
        stack.callback(of_gpus.close)
        of_gpus.start()
        self.wait()

    def wait(self) -> None:
        self.kubelet.wait(lambda: self.kubelet.allocatable(HCA) == 512)
        self.kubelet.wait(lambda: self.kubelet.allocatable(GPU) == 8)

    def restart(self) -> None:
        """Restart our plugin, and wait until the kubelet has its list."""
        self.node.plugin.close()
        self.kubelet.wait(lambda: not self.kubelet.allocatable(HCA))
        self.node.start()
        self.wait()

    def admit(self, name: str, *containers: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The response for each container, and the resources in the order of their allocation."""
        before = len(self.kubelet.calls)
        pod = self.kubelet.admit(name, containers)
        calls = self.kubelet.calls[before:]
        return {container: given.ids for container, given in pod.containers.items()}, [
            call.resource for call in calls if call.method == "Allocate"
        ]

    def near(self, ids: dict[str, list[str]]) -> bool:
        """Whether the HCAs are at the switches of the GPUs."""
        return switches(self.paths, ids[HCA]) == switches(self.paths, ids[GPU])

    def holders(self) -> Counter[str]:
        """The number of holders of each HCA."""
        found = checkpoint.read(self.paths).allocations
        return Counter(hca.devices[0].rdma[0].name for hca in found)


Make = Callable[..., Cluster]


@pytest.fixture
def cluster(server: Paths) -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda seed=1, listed=False: Cluster(stack, server, seed, listed)


def wants(name: str = "main", *, gpus: int = 0, hcas: int = 0, **other: bool) -> dict[str, Any]:
    asked = {GPU: gpus, HCA: hcas}
    return {
        "name": name,
        "limits": {resource: count for resource, count in asked.items() if count},
        **other,
    }


def test_a_pod_with_gpus_alone_draws_no_others_to_its_switch(cluster: Make) -> None:
    node = cluster()
    node.admit("inference", wants(gpus=1))
    for number in range(16):
        node.admit(f"mpi-{number}", wants(hcas=1))
    assert node.holders() == {f"mlx5_{number}": 2 for number in range(8)}


@pytest.mark.parametrize("seed", range(3))
def test_pods_with_gpus_alone_take_no_others_hint(cluster: Make, seed: int) -> None:
    node = cluster(seed)
    for number in range(2):
        node.admit(f"inference-{number}", wants(gpus=1))
    orders = set()
    for number in range(6):
        given, order = node.admit(f"worker-{number}", wants(gpus=1, hcas=1))
        orders.add(order[0])
        assert order[0] == HCA or node.near(given["main"])
    assert GPU in orders


def test_first_answer_after_a_start_excludes_pods_that_never_request_hcas(cluster: Make) -> None:
    node = cluster()
    node.admit("inference", wants(gpus=1))
    for number in range(8):
        node.restart()
        node.admit(f"mpi-{number}", wants(hcas=1))
    assert node.holders() == {f"mlx5_{number}": 1 for number in range(8)}


def test_a_pod_that_is_made_again_with_its_name_has_its_hint_again(cluster: Make) -> None:
    node = cluster()
    firsts = Counter[str]()
    for _ in range(8):
        given, order = node.admit("worker-0", wants(gpus=2, hcas=2))
        firsts[order[0]] += 1
        assert order[0] == HCA or node.near(given["main"])
        node.kubelet.remove(node.kubelet.pods["uid-of-default-worker-0"])
    assert firsts[GPU] > 1


@pytest.mark.parametrize("readable", [False, True])
def test_a_checkpoint_that_cannot_be_read_leaves_the_guess(cluster: Make, readable: bool) -> None:
    node = cluster()
    node.admit("inference", wants(gpus=1))
    if not readable:
        node.kubelet.checkpoint.write_bytes(b"{")
    given, _ = node.admit("mpi", wants(hcas=1))
    (gpu,) = (held.devices for held in node.kubelet.held() if held.resource == GPU)
    assert node.near({HCA: given["main"][HCA], GPU: list(gpu)}) is not readable


def test_an_init_containers_hcas_are_its_successors(cluster: Make) -> None:
    """The kubelet gives them to the pod's next container, without requesting new ones."""
    node = cluster()
    given, order = node.admit("worker", wants("check", hcas=2, init=True), wants("main", hcas=2))
    assert given["check"] == given["main"]
    assert order == [HCA, HCA]
    assert sum(node.holders().values()) == 2
    assert len(node.kubelet.held()) == 2


def test_a_container_with_more_hcas_keeps_those_of_its_init_container(cluster: Make) -> None:
    node = cluster()
    given, _ = node.admit("worker", wants("check", hcas=1, init=True), wants("main", hcas=3))
    assert set(given["check"][HCA]) < set(given["main"][HCA])
    assert node.holders() == dict.fromkeys(node.holders(), 1)  # three different HCAs
    assert len(node.holders()) == 3


def test_a_sidecar_shares_no_slot_with_the_container_beside_it(cluster: Make) -> None:
    node = cluster()
    sidecar = wants("monitor", hcas=1, init=True, restartable=True)
    given, _ = node.admit("worker", sidecar, wants("main", hcas=1))
    assert not set(given["monitor"][HCA]) & set(given["main"][HCA])
    pod = node.kubelet.pods["uid-of-default-worker"]
    assert pod.containers["monitor"].env["NCCL_IB_HCA"] != pod.containers["main"].env["NCCL_IB_HCA"]


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gpus_that_an_init_container_had_before_are_still_the_containers(
    cluster: Make, seed: int, listed: bool
) -> None:
    """This holds whether or not PodResources lists init containers."""
    node = cluster(seed, listed)
    firsts = set()
    for number in range(4):
        given, order = node.admit(
            f"worker-{number}", wants("copy", gpus=2, init=True), wants(gpus=2, hcas=2)
        )
        assert given["copy"][GPU] == given["main"][GPU]
        firsts.add(order[1])
        assert order[1] == HCA or node.near(given["main"])
    assert GPU in firsts


def test_what_init_containers_hold_is_kept_through_a_restart(cluster: Make) -> None:
    """Older kubelets' PodResources does not list them, but the checkpoint does."""
    node = cluster()
    node.admit("worker", wants("check", hcas=2, init=True), wants("main"))
    kept = checkpoint.read(node.paths)
    node.restart()
    node.node.plugin.compare()
    assert checkpoint.read(node.paths) == kept
    assert len(kept.allocations) == 2


def test_live_allocations_are_back_at_once_with_the_kubelet(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster()
    pods = [
        node.kubelet.admit(f"worker-{number}", [wants("check", hcas=1, init=True), wants(hcas=2)])
        for number in range(4)
    ]
    held = node.kubelet.held()
    kept = checkpoint.read(node.paths)
    monkeypatch.setattr(registration, "LOOK_EVERY", 10 * PATIENCE)  # so that only an event counts
    node.kubelet.restart()
    node.kubelet.wait(lambda: node.kubelet.allocatable(HCA) == 512)
    for pod in pods:
        node.kubelet.readmit(pod)
    assert node.kubelet.held() == held
    assert checkpoint.read(node.paths) == kept
    _, order = node.admit("next", wants(hcas=8))
    assert order == [HCA]
    taken = [(known.resource, known.id) for known in checkpoint.read(node.paths).allocations]
    assert len(set(taken)) == len(kept.allocations) + 8
