"""An init container leaves its ids to the containers after it, which may need more room."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from base.paths import Paths
from gpu.pools import pre_start
from tests.host.deviceplugin.gpus.gpu_node import (
    COMPUTE,
    GIB,
    MEMORY,
    GpuNode,
    container,
    edits,
    gpu_node_of,
    units,
)
from tests.kubelet.kubelet import Kubelet
from tests.unit.host.servers import gpu_uuid
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pre_start, "ASK_KUBELET", PATIENCE)


@contextmanager
def filled(paths: Paths, *, listed: bool) -> Iterator[tuple[GpuNode, Kubelet]]:
    """Two GPUs of 8 units; the first has 3 left, and a quarter of its time."""
    with Kubelet(paths.kubelet, init_containers_listed=listed) as kubelet:
        node = GpuNode(paths, [units(8)])
        try:
            kubelet.wait(lambda: kubelet.allocatable(MEMORY) and kubelet.allocatable(COMPUTE))
            kubelet.admit("first", [container(memory=5, compute=75)])
            yield node, kubelet
        finally:
            node.plugin.close()


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(("memory", "compute"), [(4, 10), (2, 50), (4, 50)])
def test_the_second_moves_to_the_gpu_that_has_the_room(
    paths: Paths, listed: bool, memory: int, compute: int
) -> None:
    with filled(paths, listed=listed) as (node, kubelet):
        prepare = container("prepare", init=True, memory=2, compute=10)
        pod = kubelet.admit("trainer", [prepare, container(memory=memory, compute=compute)])
        assert gpu_node_of(edits(node.paths, pod)) == "/dev/nvidia1"
        limits = [limit for limit in node.groups.limits().values() if limit[0] == gpu_uuid(1)]
        assert limits == [(gpu_uuid(1), memory * GIB, compute / 100)]
        kubelet.run(pod)  # with a new sandbox, init containers start again
        assert gpu_node_of(edits(node.paths, pod)) == "/dev/nvidia1"
        assert gpu_node_of(edits(node.paths, pod, "prepare")) == "/dev/nvidia1"
