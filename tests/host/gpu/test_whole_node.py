"""From a pod's admission to its metrics: the agent, the kubelet, the shim in a container."""

import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from tests.host.gpu.pods import MadeContainer, made_container
from tests.host.gpu.whole_node import WholeNode, whole_node
from tests.kubelet.devices import PodRejected
from tests.kubelet.kubelet import Pod
from tests.standin.driver import Driver, Out
from tests.standin.gpus import GIB, MIB, gpus
from tests.waiting import until

MEMORY, COMPUTE = "alnair/vgpu-memory", "alnair/vgpu-compute"
OUT_OF_MEMORY, NOT_SUPPORTED, SYSTEM_NOT_READY = 2, 801, 802
CONTEXT = 300 * MIB
UNITS = {"mode": "units"}
ONE = gpus(1, bytes=16 * GIB, reserved_bytes=600 * MIB, context_bytes=CONTEXT)

Mounts = Mapping[str, tuple[str, bool]]


@pytest.fixture
def node() -> Iterator[WholeNode]:
    """A node with one GPU. Its agent runs, and offers units of 1 GiB."""
    with tempfile.TemporaryDirectory(prefix="pf-") as root, whole_node(Path(root), ONE) as made:
        yield made


def start(node: WholeNode, pool: Mapping[str, str] = UNITS, **limits: object) -> None:
    node.configure(
        gpus=[pool],
        gpuLimits={"driverRoot": str(node.root / "driver"), **limits},
    )
    node.start_agent()
    # 16 GiB, less the driver's 600 MiB and a reserve of 256 MiB, according to NVML.
    wanted = {MEMORY: 15, COMPUTE: 100}
    for name, count in wanted.items():
        node.kubelet.wait(lambda: node.kubelet.allocatable(name) == count)  # noqa: B023


def admitted(node: WholeNode, name: str) -> tuple[Pod, MadeContainer, Mounts]:
    """A pod with 2 GiB and half of the time, its cgroup, and its container's mounts."""
    uid = str(uuid.uuid4())
    container = node.stack.enter_context(made_container(2, uid))
    limits = {MEMORY: 2, COMPUTE: 50}
    pod = node.kubelet.admit(name, [{"name": "main", "limits": limits}], uid=uid)
    return pod, container, mounts_of(node, pod, "main")


def mounts_of(node: WholeNode, pod: Pod, name: str) -> Mounts:
    """The mounts of a container of the pod."""
    (device,) = pod.containers[name].cdi
    file = node.paths.cdi / f"podfabric-slot-{device.partition('=')[2]}.json"
    document = msgspec.json.decode(file.read_bytes())
    mounts = document["devices"][0]["containerEdits"]["mounts"]
    return {each["containerPath"]: (each["hostPath"], "ro" in each["options"]) for each in mounts}


def free(process: Driver) -> int:
    left, total = process.do("cuMemGetInfo_v2", Out(8), Out(8))
    assert total == 2 * GIB
    return left


def launch(process: Driver, times: int) -> None:
    module, _ = process.do("cuModuleLoadData", Out(8), b"\0" * 16)
    [function] = process.do("cuModuleGetFunction", Out(8), module, "busy_1ms")
    for _ in range(times):
        process.do("cuLaunchKernel", function, *(1, 1, 1, 1, 1, 1), 0, None, None, None)


def test_a_container_is_limited_and_in_the_metrics_and_the_agents_end_changes_nothing(
    node: WholeNode,
) -> None:
    start(node)
    _, container, mounts = admitted(node, "trainer")
    first = node.process(container, mounts)
    first.start()
    assert first.result("cuMemAlloc_v2", Out(8), 2 * GIB) == OUT_OF_MEMORY
    first.do("cuMemAlloc_v2", Out(8), GIB)
    launch(first, times=3)
    wanted = {
        ("launches_total", "trainer/main"): 3,
        ("memory_limit_bytes", "trainer/main"): 2 * GIB,
        ("memory_used_bytes", "trainer/main"): GIB + CONTEXT,
        ("memory_device_bytes", "trainer/main"): GIB + CONTEXT,
        ("memory_denied_total", "trainer/main"): 1,
        ("compute_share_ratio", "trainer/main"): 0.5,
        ("processes", "trainer/main"): 1,
        ("withheld", "0"): 0,
        ("nvml_up", ""): 1,
    }
    until(lambda: free(first) == GIB - CONTEXT, what="measured context")
    until(lambda: wanted.items() <= node.values().items(), what="series of the container")
    (region,) = node.mounts_of_groups()

    node.kill_agent()
    first.do("cuMemAlloc_v2", Out(8), 256 * MIB)  # needs no agent
    assert first.result("cuMemAlloc_v2", Out(8), GIB) == OUT_OF_MEMORY
    refused = node.process(container, mounts)
    assert refused.result("cuInit", 0) == SYSTEM_NOT_READY

    node.start_agent()
    node.kubelet.wait(lambda: node.kubelet.count("ListAndWatch", MEMORY) == 2)
    until(lambda: node.values().get(("processes", "trainer/main")) == 1, what="the first again")
    second = node.process(container, mounts)
    until(lambda: second.result("cuInit", 0) == 0, what="registration", pause=0.5)
    second.start()
    assert second.result("cuMemAlloc_v2", Out(8), GIB) == OUT_OF_MEMORY
    key = "processes", "trainer/main"
    until(lambda: node.values().get(key) == 2, what="both processes")
    assert node.mounts_of_groups() == [region]
    first.kill()
    until(lambda: node.values().get(key) == 1, what="end of the first")
    until(lambda: free(second) == 2 * GIB - CONTEXT, what="memory of the first")


def test_processes_share_one_limit_with_separate_pid_namespaces(
    node: WholeNode,
) -> None:
    start(node)
    uid = str(uuid.uuid4())
    asked = [{"name": "main", "limits": {MEMORY: 2, COMPUTE: 50}}]
    pod = node.kubelet.admit("trainer", asked, uid=uid)
    container = node.stack.enter_context(made_container(2, uid))
    mounts = mounts_of(node, pod, "main")
    first, second = (node.process(container, mounts, own_pids=True) for _ in range(2))
    first.start()
    second.start()
    for each in (first, second):
        until(lambda: free(each) == 2 * (GIB - CONTEXT), what="measured contexts")  # noqa: B023
    first.do("cuMemAlloc_v2", Out(8), GIB)
    assert second.result("cuMemAlloc_v2", Out(8), GIB) == OUT_OF_MEMORY
    second.do("cuMemAlloc_v2", Out(8), 256 * MIB)
    wanted = {
        ("memory_limit_bytes", "trainer/main"): 2 * GIB,
        ("compute_share_ratio", "trainer/main"): 0.5,
        ("processes", "trainer/main"): 2,
    }
    until(lambda: wanted.items() <= node.values().items(), what="series of the container")
    first.kill()
    until(lambda: free(second) == 2 * GIB - CONTEXT - 256 * MIB, what="memory of the first")


def test_pods_parts_and_series_end_with_it(node: WholeNode) -> None:
    start(node)
    pod, container, mounts = admitted(node, "trainer")
    process = node.process(container, mounts)
    process.start()
    assert len(node.mounts_of_groups()) == 1
    process.kill()
    node.kubelet.remove(pod)

    def groups() -> list[str]:
        return [path.name for path in (node.paths.run / "gpu").iterdir() if path.is_dir()]

    until(lambda: groups() == [], what="end of the group")
    assert node.mounts_of_groups() == []
    until(lambda: ("memory_limit_bytes", "trainer/main") not in node.values(), what="end of series")


def test_an_agent_that_leaves_keeps_limits_until_the_last_container_has_ended(
    node: WholeNode,
) -> None:
    start(node)
    pod, container, mounts = admitted(node, "trainer")
    node.kill_agent()
    node.start_agent("--until-empty", "0")
    node.kubelet.wait(lambda: node.kubelet.count("ListAndWatch", MEMORY) == 2)
    node.kubelet.wait(lambda: node.kubelet.allocatable(MEMORY) == 2)  # the pod's own
    process = node.process(container, mounts)
    until(lambda: process.result("cuInit", 0) == 0, what="registration", pause=0.5)
    process.start()
    assert process.result("cuMemAlloc_v2", Out(8), 2 * GIB) == OUT_OF_MEMORY
    node.kubelet.run(pod)  # the container starts again
    refused = [{"name": "main", "limits": {MEMORY: 1, COMPUTE: 10}}]
    with pytest.raises(PodRejected):
        node.kubelet.admit("late", refused)
    holds = "container with limits of a GPU left"
    until(lambda: holds in node.state(), what="word of what keeps the agent there")
    process.kill()
    node.kubelet.remove(pod)
    until(lambda: node.state().startswith("the node has no attachment"), what="end of the node")
    assert not node.paths.checkpoint.exists()
    assert node.mounts_of_groups() == []
    node.kubelet.wait(lambda: node.kubelet.allocatable(MEMORY) == 0)
