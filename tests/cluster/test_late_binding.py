"""GPUs that are chosen when a container starts: the runtime reads what PreStartContainer wrote.

The node's GPUs are made up: files below /proc/driver and device nodes, which lead to other devices.
"""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import PATIENCE, Cluster, Namespace
from tests.cluster.installation import (
    await_agent,
    await_nothing_left,
    configured,
    kill_agent,
    registered,
)
from tests.waiting import until

MEMORY, COMPUTE = "alnair/vgpu-memory", "alnair/vgpu-compute"
CONFIGURATION = {
    "gpus": [{"mode": "units", "memory": "8Gi", "reserve": 0}],
    "gpuLimits": {"require": "none"},  # these nodes have no driver that a shim could lie over
}
# Both are devices that any container may open: null and zero, random and urandom.
NODES = {"nvidia0": "1 3", "nvidia1": "1 5", "nvidiactl": "1 8", "nvidia-uvm": "1 9"}
LOAD = (
    "mount -t tmpfs tmpfs /proc/driver && for n in 0 1; do "
    "d=/proc/driver/nvidia/gpus/0000:f$n:00.0 && mkdir -p $d && "
    'printf "GPU UUID: GPU-00000000-0000-4000-8000-00000000000$n\\nDevice Minor: $n\\n" '
    "> $d/information; done"
)
ROUNDS = (
    # The percents that pods ask for in this order, and the GPU that each gets. The second and the
    # third pod of a round have the slots of those of the round before, on the other GPU.
    ((80, 0), (50, 1), (20, 0)),
    ((20, 0), (80, 0), (50, 1)),
    ((80, 0), (50, 1), (20, 0)),
)


@pytest.fixture
def gpus(cluster: Cluster) -> Iterator[None]:
    """Two GPUs on the node, in a pool of mode units."""
    cluster.node.run(LOAD)
    for name, numbers in NODES.items():
        cluster.node.run(f"mknod -m 666 /dev/{name} c {numbers}")
    try:
        kill_agent(cluster)  # its next container has the node's new mount
        await_agent(cluster)
        with configured(cluster, CONFIGURATION, {MEMORY: 16, COMPUTE: 200}):
            await_agent(cluster)  # the one with the rights for such pools
            until(
                lambda: registered(cluster) >= {MEMORY, COMPUTE},
                PATIENCE,
                "pools of that agent",
                pause=0.5,
            )
            yield
    finally:
        cluster.node.run("umount -l /proc/driver; rm -f /dev/nvidia*")
        kill_agent(cluster)
        await_agent(cluster)


@pytest.mark.long
@pytest.mark.usefixtures("gpus")
def test_container_has_the_gpu_that_was_chosen_at_its_start(
    cluster: Cluster, namespace: Namespace
) -> None:
    slots: list[tuple[str, ...]] = []
    for number, pods in enumerate(ROUNDS):
        names = [f"trainer-{number}-{percent}" for percent, _ in pods]
        for name, (percent, gpu) in zip(names, pods, strict=True):
            namespace.pod(name, devices={MEMORY: 1, COMPUTE: percent})
            namespace.running(name)
            seen = namespace.run(name, "/bin/sh", "-c", "cd /dev && echo nvidia*").split()
            assert seen == sorted({*NODES} - {f"nvidia{1 - gpu}"}), name
            variable = namespace.run(name, "/bin/sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES")
            assert variable.strip() == "void"
        slots.append(tuple(cluster.node.run("ls /var/run/cdi").split()))
        namespace.delete(*names)
        await_nothing_left(cluster, allocations=True)
        assert "podfabric-slot" not in cluster.node.run("ls /var/run/cdi")
    assert len(set(slots)) == 1  # the same names, with other GPUs behind them
