"""An init container leaves its ids to the containers after it, which may need more room."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from base.paths import Paths
from deviceplugin.gpus import start
from tests.host.deviceplugin.gpus.gpu_node import (
    COMPUTE,
    GIB,
    MEMORY,
    GpuNode,
    container,
    edits,
    given,
    gpu_node_of,
    units,
)
from tests.kubelet.devices import PodRejected
from tests.kubelet.kubelet import Kubelet, Pod
from tests.unit.host.servers import gpu_uuid
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "ASK_KUBELET", PATIENCE)


@contextmanager
def filled(paths: Paths, binding: str, *, listed: bool) -> Iterator[tuple[GpuNode, Kubelet]]:
    """Two GPUs of 8 units; the first has 3 left, and a quarter of its time."""
    with Kubelet(paths.kubelet, init_containers_listed=listed) as kubelet:
        node = GpuNode(paths, [units(8)], gpu_binding=binding)
        try:
            kubelet.wait(lambda: kubelet.allocatable(MEMORY) and kubelet.allocatable(COMPUTE))
            kubelet.admit("first", [container(memory=5, compute=75)])
            yield node, kubelet
        finally:
            node.plugin.close()


def nodes_of(pod: Pod, name: str) -> list[str]:
    """The nodes of GPUs that a container was given at admission."""
    return [path for path in sorted(pod.containers[name].devices) if path[-1].isdigit()]


@pytest.mark.parametrize("listed", [True, False])
def test_bound_at_admission_all_of_them_have_one_gpu(paths: Paths, listed: bool) -> None:
    with filled(paths, "admission", listed=listed) as (node, kubelet):
        prepare = container("prepare", init=True, memory=2, compute=10)
        pod = kubelet.admit("trainer", [prepare, container(memory=3, compute=20)])
        assert nodes_of(pod, "prepare") == nodes_of(pod, "main") == ["/dev/nvidia0"]
        assert node.groups.limits()
        assert {limit[0] for limit in node.groups.limits().values()} == {gpu_uuid(0)}


@pytest.mark.parametrize("listed", [True, False])
def test_bound_at_admission_a_pod_whose_gpu_has_no_room_for_the_second_is_refused(
    paths: Paths, listed: bool
) -> None:
    """The init container would have the nodes of one GPU, and the limits of another."""
    with filled(paths, "admission", listed=listed) as (node, kubelet):
        before = given(node.paths)
        prepare = container("prepare", init=True, memory=2, compute=10)
        with pytest.raises(PodRejected, match="which its pod's init container was given"):
            kubelet.admit("trainer", [prepare, container(memory=4, compute=20)])
        enough = container("prepare", init=True, memory=4, compute=10)
        pod = kubelet.admit("trainer", [enough, container(memory=4, compute=20)])
        assert nodes_of(pod, "prepare") == nodes_of(pod, "main") == ["/dev/nvidia1"]
        assert before[0] in given(node.paths)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(("memory", "compute"), [(4, 10), (2, 50), (4, 50)])
def test_bound_at_the_start_the_second_moves_to_the_gpu_that_has_the_room(
    paths: Paths, listed: bool, memory: int, compute: int
) -> None:
    with filled(paths, "start", listed=listed) as (node, kubelet):
        prepare = container("prepare", init=True, memory=2, compute=10)
        pod = kubelet.admit("trainer", [prepare, container(memory=memory, compute=compute)])
        assert gpu_node_of(edits(node.paths, pod)) == "/dev/nvidia1"
        limits = [limit for limit in node.groups.limits().values() if limit[0] == gpu_uuid(1)]
        assert limits == [(gpu_uuid(1), memory * GIB, compute / 100)]
        kubelet.run(pod)  # with the sandbox, init containers start again
        assert gpu_node_of(edits(node.paths, pod)) == "/dev/nvidia1"
        assert gpu_node_of(edits(node.paths, pod, "prepare")) == "/dev/nvidia1"
