"""A node that podfabric leaves: containers keep their parts of GPUs, and none is newly given."""

import pytest
from msgspec.structs import replace

from base.paths import Paths
from deviceplugin.pools.pool_config import PoolConfig
from gpu.gpu_pool import GpuPoolConfig
from gpu.pools import pre_start
from tests.host.deviceplugin.gpus.gpu_node import (
    COMPUTE,
    MEMORY,
    GpuNode,
    container,
    given,
    units,
)
from tests.kubelet.devices import PodRejected
from tests.kubelet.kubelet import Kubelet
from tests.unit.host.servers import gpu_uuid
from tests.waiting import PATIENCE

SHARED = "example.com/shared-gpu"


def test_held_parts_are_served_and_no_other_part_is_offered(
    paths: Paths, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pre_start, "ASK_KUBELET", PATIENCE)
    whole = GpuPoolConfig(
        mode="replicas", resource=SHARED, replicas=4, devices=(gpu_uuid(1),), placement="spread"
    )
    pool = PoolConfig(resource="rdma/hca", cdi=True)
    node = GpuNode(paths, [whole, units(8)], [pool])
    try:
        for resource, count in ((MEMORY, 8), (COMPUTE, 100), (SHARED, 4)):
            kubelet.wait(lambda: kubelet.allocatable(resource) == count)  # noqa: B023
        pod = kubelet.admit("trainer", [container(memory=2, compute=50)])
        before, limits = given(paths), node.groups.limits()
        node.plugin.close()
        node.config = replace(node.config, leaving=True)
        node.start()
        kubelet.wait(lambda: (kubelet.allocatable(MEMORY), kubelet.allocatable(COMPUTE)) == (2, 50))
        kubelet.wait(lambda: kubelet.allocatable(SHARED) == 0)
        assert sorted(state.resource for state in node.plugin.states()) == [COMPUTE, MEMORY]
        kubelet.run(pod)
        assert (given(paths), node.groups.limits()) == (before, limits)
        with pytest.raises(PodRejected):
            kubelet.admit("late", [container(memory=1)])
        endpoint = kubelet.endpoint(MEMORY)
        assert endpoint is not None
        with pytest.raises(Exception, match="podfabric is leaving this node"):
            endpoint.allocate([f"{gpu_uuid(0)}_7"])
    finally:
        node.plugin.close()
